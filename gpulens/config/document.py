"""Loads a configuration: every `--config` and `--set`, merged, then expanded, with all positions kept.

Invariant: the order is the Collector's: sources in the order given, all `--set` after all `--config`, raw
trees merged first and `${...}` expanded after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpulens.config.expand import Expander
from gpulens.config.merge import merge, unflatten
from gpulens.config.nodes import PATH_DELIMITER, Entry, MapNode, Node, Position, is_null, type_name
from gpulens.config.sources import SourceError, retrieve, source_name
from gpulens.config.yaml_nodes import at_point, in_file, parse
from gpulens.pipeline.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration before it is typed.

    `problems` are those that left a tree to go on with (a duplicate key, a reference that failed); `resolve`
    raises them together with its own, so that a user sees all in one go. `warnings` are what is valid and probably
    not meant. `sources` are the names in both, in the order given.
    """

    root: MapNode
    sources: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()


def load(configs: Sequence[str], sets: Sequence[str], environ: Mapping[str, str]) -> Document:
    """Reads the sources. Raises ConfigError, with every problem of every source, when one of them can't be
    read."""
    if not configs:
        raise ConfigError([Problem("", 0, 0, "", "at least one config flag must be provided")])
    loader = _Loader(environ)
    for uri in configs:
        loader.add_config(uri)
    for assignment in sets:
        loader.add_set(assignment)
    return loader.document()


class _Loader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._root: MapNode | None = None
        self._sources: list[str] = []
        self._unset: dict[str, Position] = {}
        self._problems: list[Problem] = []
        self._unreadable = False

    def add_config(self, uri: str) -> None:
        name = source_name(uri)
        self._sources.append(name)
        try:
            found = retrieve(uri, self._environ, "file")
        except SourceError as error:
            self._fail(Problem(name, error.line, error.column, "", str(error), error.suggestion))
            return
        if found.unset:
            self._unset.setdefault(found.unset, Position(name))
        node, problems = parse(found.text or "", in_file(name))
        self._problems += problems
        self._add(node, Position(name, 1, 1))

    def add_set(self, assignment: str) -> None:
        keys, equals, text = assignment.partition("=")
        # The value stays out of the name: it may be a secret.
        name = f"--set {keys}"
        self._sources.append(name)
        at = Position(name)
        if not equals:
            self._fail(Problem(name, 0, 0, "", "missing equal sign"))
            return
        parts = keys.replace(".", PATH_DELIMITER).split(PATH_DELIMITER)
        if not all(part.strip() for part in parts):
            self._fail(Problem(name, 0, 0, "", f'empty key in "{keys}"'))
            return
        node, problems = parse(text, at_point(at))
        self._problems += problems
        if node is None:
            self._unreadable = True
            return
        for part in reversed(parts):
            node = MapNode({part.strip(): Entry(at, node)}, at)
        self._add(node, at)

    def document(self) -> Document:
        if self._unreadable:
            raise ConfigError(self._problems)
        root = self._root or MapNode({}, Position(self._sources[0], 1, 1))
        expander = Expander(lambda uri: retrieve(uri, self._environ, "env"))
        expanded = expander.expand(root)
        assert isinstance(expanded, MapNode)
        warnings = (
            Problem(at.source, at.line, at.column, "", f'Configuration references unset environment variable "{name}"')
            for name, at in {**expander.unset, **self._unset}.items()
        )
        return Document(expanded, tuple(self._sources), tuple(warnings), (*self._problems, *expander.problems))

    def _add(self, node: Node | None, start: Position) -> None:
        if node is None:
            self._unreadable = True
        elif isinstance(node, MapNode):
            tree, problems = unflatten(node)
            self._problems += problems
            self._root = tree if self._root is None else merge(self._root, tree)
        elif not is_null(node):
            message = f"a configuration must be a map, not {type_name(node)}"
            self._fail(Problem(start.source, start.line, start.column, "", message))

    def _fail(self, problem: Problem) -> None:
        self._problems.append(problem)
        self._unreadable = True
