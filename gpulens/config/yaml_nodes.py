"""Reads YAML text into nodes: positions kept, duplicate keys refused, scalars by the YAML 1.2 core schema.

Invariant: whatever the text, the outcome is a tree or problems with positions, never another exception; depth
and size (aliases followed) are bounded.

Scalars: `on`, `yes`, `1:30` and dates are strings; `012` is the decimal 12, and "012" in a string field;
`0o14` and `0xc` are octal and hexadecimal. Merge keys (`<<`) are kept, since the Collector's parser has them:
a key written out wins over a merged one, and of several merged maps the first wins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import yaml

from gpulens.config.nodes import PATH_DELIMITER, Entry, ListNode, MapNode, Node, Position, Scalar, ScalarValue
from gpulens.pipeline.errors import Problem

MAX_BYTES: Final = 1024 * 1024
"""The largest source that is read: a Kubernetes ConfigMap can't be larger."""
MAX_DEPTH: Final = 64
MAX_NODES: Final = 50_000
_MAX_DIGITS: Final = 400

_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"(?P<sign>[-+]?)\.(inf|Inf|INF)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_WORDS: Final[dict[str, ScalarValue]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_TAG = "tag:yaml.org,2002:"
_SURROGATE = re.compile("[\ud800-\udfff]")

Locate = Callable[[int, int], Position]
"""Makes a position of a line and a column (both counted from 1)."""


def in_file(source: str) -> Locate:
    """Positions by line and column in a named source."""
    return lambda line, column: Position(source, line, column)


def at_point(position: Position) -> Locate:
    """The same position for everything: text that was not written in a file of its own."""
    return lambda _line, _column: position


def parse(text: str, locate: Locate) -> tuple[Node | None, list[Problem]]:
    """The tree of one YAML document and what is wrong with it; no tree when the text can't be read to its
    end.

    Text without a document is a null. Never raises.
    """
    builder = _Builder(locate)
    if len(text) > MAX_BYTES:
        return None, [builder.problem(1, 1, f"is larger than {MAX_BYTES // 1024} KiB")]
    try:
        complete = builder.read(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.reader.ReaderError as error:
        line, column = _line_column(text, error.position)
        message = f"not YAML: the character U+{_code(error.character):04X} is not allowed"
        return None, [*builder.problems, builder.problem(line, column, message)]
    except yaml.MarkedYAMLError as error:
        line, column, message = _syntax_error(error)
        return None, [*builder.problems, builder.problem(line, column, message)]
    except (ValueError, OverflowError):
        # PyYAML turns "\U..." escapes into characters without checking their range.
        message = "not YAML: an escape sequence names no character"
        return None, [*builder.problems, builder.problem(*builder.last, message)]
    if not complete:
        return None, builder.problems
    return builder.root or Scalar(None, "", locate(1, 1)), builder.problems


def resolve_plain(text: str) -> ScalarValue:
    """The value of an unquoted scalar by the YAML 1.2 core schema; numbers of absurd length stay text."""
    if text in _WORDS:
        return _WORDS[text]
    if not (text[0].isdigit() or text[0] in "+-.") or len(text) > _MAX_DIGITS or not text.isascii():
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if infinite := _INFINITE.fullmatch(text):
        return -math.inf if infinite["sign"] == "-" else math.inf
    return text


@dataclass(slots=True)
class _Frame:
    """A map or list whose end has not come yet."""

    is_map: bool
    at: Position
    anchor: str | None
    count_before: int
    height: int = 1
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    merges: list[Node] = field(default_factory=list)
    key: Scalar | None = None
    bad_key: bool = False
    merge_key: bool = False

    def close(self) -> Node:
        if not self.is_map:
            return ListNode(tuple(self.items), self.at)
        entries = dict(self.entries)
        for merged in self.merges:
            if isinstance(merged, MapNode):
                entries = {**merged.entries, **entries}
        return MapNode(entries, self.at)


@dataclass(frozen=True, slots=True)
class _Anchored:
    node: Node
    count: int
    height: int


class _Builder:
    """Builds the tree from parser events with a stack of its own: nesting in the text is not nesting of
    calls."""

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._stack: list[_Frame] = []
        self._anchors: dict[str, _Anchored] = {}
        self._count = 0
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self.last = (1, 1)

    def problem(self, line: int, column: int, message: str) -> Problem:
        at = self._locate(line, column)
        path = PATH_DELIMITER.join(frame.key.text for frame in self._stack if frame.key is not None)
        return Problem(at.source, at.line, at.column, path, message)

    def read(self, events: Iterable[yaml.Event]) -> bool:
        """True when the document was read to its end."""
        documents = 0
        for event in events:
            if event.start_mark is not None:
                self.last = (event.start_mark.line + 1, event.start_mark.column + 1)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._report("holds a second YAML document; one file is one document")
                    return False
            elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                self._event(event)
            if len(self._stack) > MAX_DEPTH:
                self._report(f"is nested more than {MAX_DEPTH} levels deep")
                return False
            if self._count > MAX_NODES:
                self._report(f"holds more than {MAX_NODES} values (aliases followed)")
                return False
        return True

    def _report(self, message: str) -> None:
        self.problems.append(self.problem(*self.last, message))

    def _event(self, event: yaml.Event) -> None:
        at = self._locate(*self.last)
        if isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor or "", at)
        elif isinstance(event, yaml.ScalarEvent):
            self._count += 1
            plain_merge = event.value == "<<" and event.style is None
            self._add(self._scalar(event, at), 1, event.anchor, 1, plain_merge)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._count += 1
            is_map = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!", f"{_TAG}{'map' if is_map else 'seq'}"):
                self._report(f"the YAML tag {event.tag} is not supported")
            self._stack.append(_Frame(is_map, at, event.anchor, self._count - 1))
        else:
            frame = self._stack.pop()
            self._add(frame.close(), frame.height, frame.anchor, self._count - frame.count_before, False)

    def _alias(self, anchor: str, at: Position) -> None:
        target = self._anchors.get(anchor)
        if target is None:
            self._report(f'the anchor "{anchor}" is not defined before this alias')
            target = _Anchored(Scalar(None, "", at), 1, 1)
        elif len(self._stack) + target.height > MAX_DEPTH:
            self._report(f"is nested more than {MAX_DEPTH} levels deep")
            target = _Anchored(Scalar(None, "", at), 1, 1)
        self._count += target.count
        self._add(target.node, target.height, None, target.count, False)

    def _scalar(self, event: yaml.ScalarEvent, at: Position) -> Scalar:
        text = _join_surrogates(event.value)
        if text is None:
            self._report("an escape sequence names half a character (a surrogate)")
            return Scalar(None, "", at)
        tag = event.tag
        plain = event.style is None
        if tag in ("!", f"{_TAG}str") or (tag is None and not plain):
            return Scalar(text, text, at)
        value = resolve_plain(text)
        if tag is None or _tag_fits(tag, value):
            return Scalar(value, text, at, textual=bool(_LEADING_ZERO.fullmatch(text)))
        if tag == f"{_TAG}float" and type(value) is int:
            return Scalar(float(value), text, at)
        self._report(f"the YAML tag {tag} is not supported or does not fit the value")
        return Scalar(None, "", at)

    def _add(self, node: Node, height: int, anchor: str | None, count: int, plain_merge: bool) -> None:
        if anchor is not None:
            self._anchors[anchor] = _Anchored(node, count, height)
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        frame.height = max(frame.height, height + 1)
        if not frame.is_map:
            frame.items.append(node)
        elif frame.key is None and not frame.bad_key:
            self._key(frame, node, plain_merge)
        else:
            self._value(frame, node)

    def _key(self, frame: _Frame, node: Node, plain_merge: bool) -> None:
        if isinstance(node, Scalar) and node.text:
            frame.key, frame.merge_key = node, plain_merge
            return
        message = "a map key must be a name, not a map, a list or nothing"
        self.problems.append(self.problem(node.at.line, node.at.column, message))
        frame.bad_key = True

    def _value(self, frame: _Frame, node: Node) -> None:
        key, frame.key = frame.key, None
        if frame.bad_key or key is None:
            frame.bad_key = False
        elif frame.merge_key:
            self._merge(frame, node)
        elif (first := frame.entries.get(key.text)) is not None:
            where = f" at line {first.key_at.line}" if first.key_at.line else ""
            message = f'mapping key "{key.text}" already defined{where}'
            self.problems.append(self.problem(key.at.line, key.at.column, message))
        else:
            frame.entries[key.text] = Entry(key.at, node)

    def _merge(self, frame: _Frame, node: Node) -> None:
        merged = node.items if isinstance(node, ListNode) else (node,)
        if not all(isinstance(each, MapNode) for each in merged):
            self._report("map merge requires map or sequence of maps as the value")
        elif frame.merges:
            self._report('mapping key "<<" already defined')
        else:
            frame.merges.extend(merged)


def _join_surrogates(text: str) -> str | None:
    """JSON writes characters beyond U+FFFF as two escapes, which PyYAML leaves apart; None for a half alone."""
    if not _SURROGATE.search(text):
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        return None


def _tag_fits(tag: str, value: ScalarValue) -> bool:
    types: dict[str, type] = {"int": int, "float": float, "bool": bool, "null": type(None)}
    return type(value) is types.get(tag.removeprefix(_TAG))


def _syntax_error(error: yaml.MarkedYAMLError) -> tuple[int, int, str]:
    problem = error.problem or "can't be read"
    mark = error.problem_mark or error.context_mark
    if "end of stream" in problem and error.context_mark is not None:
        # Where an open quote or bracket began says more than where the file ends.
        mark = error.context_mark
    if "'\\t'" in problem:
        problem = "a tab can't indent YAML; use spaces"
    context = f"{error.context}, " if error.context else ""
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    return line, column, f"not YAML: {context}{problem}"


def _line_column(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1


def _code(character: object) -> int:
    if isinstance(character, str):
        return ord(character[:1] or "\0")
    return character if isinstance(character, int) else 0
