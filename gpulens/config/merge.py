"""Joins several sources into one tree.

Invariant: maps merge deeply and the later source wins; everything else (lists, scalars, an explicit null)
replaces what stood there. So `processors:` with nothing after it in a later file removes all processors of an
earlier one, as it does in the Collector.
"""

from __future__ import annotations

from gpulens.config.nodes import PATH_DELIMITER, Entry, MapNode, Node
from gpulens.pipeline.errors import Problem


def merge(base: MapNode, overlay: MapNode) -> MapNode:
    """`overlay` over `base`; positions come from whichever gave the value."""
    entries = dict(base.entries)
    for key, entry in overlay.entries.items():
        below = entries.get(key)
        if below is not None and isinstance(below.node, MapNode) and isinstance(entry.node, MapNode):
            entries[key] = Entry(entry.key_at, merge(below.node, entry.node))
        else:
            entries[key] = entry
    return MapNode(entries, base.at if base.entries else overlay.at)


def unflatten(node: MapNode, path: str = "") -> tuple[MapNode, list[Problem]]:
    """Keys such as `a::b::c` become nested maps, at every level but inside lists.

    A key with an empty part (`::1`) is no path and stays. A value given twice, once by each spelling, is a
    problem.
    """
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for key, entry in node.entries.items():
        value: Node = entry.node
        if isinstance(value, MapNode):
            value, found = unflatten(value, _join(path, key))
            problems += found
        first, *rest = parts if all(parts := key.split(PATH_DELIMITER)) else [key]
        given = _nest(rest, Entry(entry.key_at, value))
        below = entries.get(first)
        if below is None:
            entries[first] = given
        elif clash := _clash(below.node, given.node, first):
            at = entry.key_at
            problems.append(Problem(at.source, at.line, at.column, path, f'mapping key "{clash}" already defined'))
        elif isinstance(below.node, MapNode) and isinstance(given.node, MapNode):
            entries[first] = Entry(below.key_at, merge(below.node, given.node))
    return MapNode(entries, node.at, node.original), problems


def _nest(keys: list[str], entry: Entry) -> Entry:
    for key in reversed(keys):
        entry = Entry(entry.key_at, MapNode({key: entry}, entry.key_at))
    return entry


def _clash(left: Node, right: Node, path: str) -> str:
    """The first path that both give a value which is not a map on both sides; empty when there is none."""
    if not (isinstance(left, MapNode) and isinstance(right, MapNode)):
        return path
    shared = (key for key in right.entries if key in left.entries)
    clashes = (_clash(left.entries[key].node, right.entries[key].node, _join(path, key)) for key in shared)
    return next(filter(None, clashes), "")


def _join(path: str, key: str) -> str:
    return f"{path}{PATH_DELIMITER}{key}" if path else key
