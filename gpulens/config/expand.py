"""`${...}` references: found by one scan from left to right, resolved innermost first.

Invariant: each `$` of the text is read once. `$$` is a literal `$`; an odd run of `$` before `{` opens a
reference; a lone `$`, or a `${` that is never closed, is text. So an escaped reference never disturbs a real
one beside it (where the Collector's replace-all does). Keys are never expanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpulens.config.nodes import PATH_DELIMITER, Broken, Entry, ListNode, MapNode, Node, Position, Scalar
from gpulens.config.sources import Retrieved
from gpulens.config.yaml_nodes import MAX_BYTES, at_point, in_file, parse
from gpulens.pipeline.errors import Problem

MAX_EXPANSIONS = 1000
"""References followed for one value (the Collector's limit)."""
_MAX_DEPTH = 50
"""References within references, and levels of maps and lists between them; the interpreter's stack takes more."""
_TOO_MANY = "too many recursive expansions"

Retrieve = Callable[[str], Retrieved]
"""Text behind the inside of a `${...}`. Raises ValueError."""

_PLAIN = re.compile(r"[^$}]+")
_DOLLARS = re.compile(r"\$+")
_MUST_ESCAPE = re.compile(r"\$\$+|\$(?=\{)")


@dataclass(frozen=True, slots=True)
class Reference:
    """The inside of a `${...}`: text and further references."""

    parts: tuple[str | Reference, ...]


def escape(text: str) -> str:
    """Text that expands to `text`."""
    return _MUST_ESCAPE.sub(lambda run: run[0] * 2, text)


def scan(text: str) -> tuple[str | Reference, ...]:
    """Splits text into literal parts (un-escaped) and references."""
    stack: list[list[str | Reference]] = [[]]
    at = 0
    while at < len(text):
        if text[at] == "$":
            run = len(_matched(_DOLLARS, text, at))
            opens = text[at + run : at + run + 1] == "{" and run % 2 == 1
            literal = "$" * (run // 2 if opens else (run + 1) // 2)
            stack[-1].append(literal)
            at += run
            if opens:
                stack.append([])
                at += 1
        elif text[at] == "}":
            if len(stack) > 1:
                inside = stack.pop()
                stack[-1].append(Reference(_tidy(inside)))
            else:
                stack[-1].append("}")
            at += 1
        else:
            literal = _matched(_PLAIN, text, at)
            stack[-1].append(literal)
            at += len(literal)
    while len(stack) > 1:
        unclosed = stack.pop()
        stack[-1] += ["${", *unclosed]
    return _tidy(stack[0])


class Expander:
    """Expands a tree; what fails is a problem at the value's place, and the value becomes Broken."""

    def __init__(self, retrieve: Retrieve) -> None:
        self._retrieve = retrieve
        self._left = MAX_EXPANSIONS
        self._at = Position("")
        self._missing: list[str] = []
        self.problems: list[Problem] = []
        self.unset: dict[str, Position] = {}
        """Environment variables that were referred to and are not set, each with the place of its first sight."""

    def expand(self, node: Node, path: str = "") -> Node:
        """The tree with every reference resolved. Never raises."""
        match node:
            case MapNode():
                entries = {
                    key: Entry(entry.key_at, self.expand(entry.node, _join(path, key)))
                    for key, entry in node.entries.items()
                }
                return replace(node, entries=entries)
            case ListNode():
                items = (self.expand(item, f"{path}[{i}]") for i, item in enumerate(node.items))
                return replace(node, items=tuple(items))
            case Scalar(value=str(text)) if "$" in text:
                self._left = MAX_EXPANSIONS
                try:
                    return self._scalar(text, node.at, 0)
                except ValueError as error:
                    at = node.at
                    self.problems.append(Problem(at.source, at.line, at.column, path, str(error)))
                    return Broken(at)
            case _:
                return node

    def _scalar(self, text: str, at: Position, depth: int) -> Node:
        outer = self._at, self._missing
        self._at, self._missing = at, []
        try:
            node = self._value(text, at, depth)
            if isinstance(node, Scalar) and self._missing:
                node = replace(node, unset=tuple(dict.fromkeys([*self._missing, *node.unset])))
            return node
        finally:
            self._at, self._missing = outer

    def _value(self, text: str, at: Position, depth: int) -> Node:
        parts = scan(text)
        if len(parts) == 1 and isinstance(parts[0], Reference):
            return self._whole(parts[0], at, depth)
        joined = self._join(parts, depth)
        return Scalar(joined, joined, at, textual=True)

    def _whole(self, reference: Reference, at: Position, depth: int) -> Node:
        """The typed value of a scalar that is one reference; the text it came from stays beside it."""
        found = self._follow(reference, depth)
        if found.text is None:
            return Scalar(None, "", at)
        if found.literal:
            return Scalar(found.text, found.text, at, textual=True)
        node, problems = parse(found.text, in_file(found.source) if found.source else at_point(at))
        if node is None or problems or (isinstance(node, Scalar) and isinstance(node.value, str)):
            # A string keeps its raw text: quotes, comment signs and blanks included.
            if "$" in found.text:
                return self._scalar(found.text, at, depth + 1)
            return Scalar(found.text, found.text, at, textual=True)
        return self._inner(node, found.text, at, depth + 1)

    def _inner(self, node: Node, text: str, at: Position, depth: int) -> Node:
        if isinstance(node, Scalar):
            return Scalar(node.value, text, at, textual=True)
        # The tree first: a variable that is not set is named where it stands in there.
        expanded = self._tree(node, depth)
        assert isinstance(expanded, MapNode | ListNode)
        return replace(expanded, original=self._text(text, depth))

    def _tree(self, node: Node, depth: int) -> Node:
        match node:
            case MapNode():
                entries = {key: Entry(e.key_at, self._tree(e.node, depth + 1)) for key, e in node.entries.items()}
                return replace(node, entries=entries)
            case ListNode():
                return replace(node, items=tuple(self._tree(item, depth + 1) for item in node.items))
            case Scalar(value=str(text)) if "$" in text:
                return self._scalar(text, node.at, depth)
            case _:
                return node

    def _text(self, text: str, depth: int) -> str:
        return self._join(scan(text), depth) if "$" in text else text

    def _join(self, parts: tuple[str | Reference, ...], depth: int) -> str:
        pieces = []
        size = 0
        for part in parts:
            piece = part if isinstance(part, str) else self._text(self._follow(part, depth).text or "", depth + 1)
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise ValueError(f"expands to more than {MAX_BYTES // 1024} KiB")
        return "".join(pieces)

    def _follow(self, reference: Reference, depth: int) -> Retrieved:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError(_TOO_MANY)
        if any(isinstance(part, str) and "$" in part for part in reference.parts):
            shown = "".join(part if isinstance(part, str) else "${...}" for part in reference.parts)
            raise ValueError(f"the uri \"{shown}\" contains unsupported characters ('$')")
        found = self._retrieve(self._join(reference.parts, depth + 1))
        if found.unset:
            self._missing.append(found.unset)
            self.unset.setdefault(found.unset, self._at)
        return found


def _matched(pattern: re.Pattern[str], text: str, at: int) -> str:
    match = pattern.match(text, at)
    return match[0] if match else ""


def _tidy(parts: list[str | Reference]) -> tuple[str | Reference, ...]:
    """Neighbouring literals as one, empty ones gone."""
    result: list[str | Reference] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        elif part:
            result.append(part)
    return tuple(result)


def _join(path: str, key: str) -> str:
    return f"{path}{PATH_DELIMITER}{key}" if path else key
