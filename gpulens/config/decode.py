"""From nodes to a component's typed configuration, with each error at the key or value that caused it.

Invariant: the model decides what is valid, and this module only says where; nothing is reported twice.

The model sees plain values first. Where it wanted a text and got a number that came from a whole `${...}` (or
is written with leading zeros), the original text is put in its place and the model is asked again; likewise
an integral float where it wanted an integer. That is the Collector's behaviour without knowing the model's
types beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpulens.config.nodes import (
    PATH_DELIMITER,
    Broken,
    Entry,
    ListNode,
    MapNode,
    Node,
    Position,
    Scalar,
    because,
    is_null,
    type_name,
)
from gpulens.config.suggest import closest
from gpulens.config.types import OPTIONAL, SWITCH, Block
from gpulens.pipeline.errors import Problem

M = TypeVar("M", bound=BaseModel)
Location = tuple[str | int, ...]

_EXPECTED: Final = {
    "string_type": "string",
    "int_type": "int64",
    "int_from_float": "int64",
    "float_type": "float64",
    "bool_type": "bool",
    "list_type": "[]interface {}",
    "tuple_type": "[]interface {}",
    "set_type": "[]interface {}",
    "frozen_set_type": "[]interface {}",
    "dict_type": "map[string]interface {}",
    "mapping_type": "map[string]interface {}",
    "model_type": "map[string]interface {}",
}
_TEXT_WANTED: Final = ("string_type", "literal_error", "enum", "tuple_type", "list_type")
_INTEGER_WANTED: Final = ("int_type", "int_from_float")
_QUOTED = re.compile(r"'([^']*)'")
_KEY = re.compile(r"(?<!\w)(?P<quote>[`'])(?P<key>[^`':]+)(: [^`']*)?(?P=quote)")
"""A key in a message: `key`, 'key', or with its value, 'key: value'."""
_KEY_OF_MAP: Final = "[key]"
"""The end of pydantic's location when a free key itself is wrong."""


class Report:
    """Collects problems and warnings; given back in document order: by source, then by line and column."""

    def __init__(
        self, sources: Sequence[str], problems: Sequence[Problem] = (), warnings: Sequence[Problem] = ()
    ) -> None:
        self._order = {source: index for index, source in enumerate(sources)}
        self._problems = list(problems)
        self._warnings = list(warnings)

    def add(self, at: Position, path: str, message: str, suggestion: str = "") -> None:
        """Records one problem."""
        self._problems.append(Problem(at.source, at.line, at.column, path, message, suggestion))

    def warn(self, at: Position, path: str, message: str) -> None:
        """Records something that is valid and probably not meant."""
        self._warnings.append(Problem(at.source, at.line, at.column, path, message))

    def unknown_keys(self, block: MapNode, path: str, allowed: Sequence[str]) -> None:
        """Records every key that is not allowed."""
        for key, entry in block.entries.items():
            if key not in allowed:
                self.add(entry.key_at, path, f"has invalid keys: {key}", closest(key, allowed))

    def problems(self) -> tuple[Problem, ...]:
        """All of them, in document order, without repetitions."""
        return self._sorted(self._problems)

    def warnings(self) -> tuple[Problem, ...]:
        """All of them, in the same order."""
        return self._sorted(self._warnings)

    def _sorted(self, found: Sequence[Problem]) -> tuple[Problem, ...]:
        last = len(self._order)
        unique = dict.fromkeys(found)
        return tuple(sorted(unique, key=lambda p: (self._order.get(p.source, last), p.source, p.line, p.column)))


def join_path(*parts: str) -> str:
    """Keys as one path; empty parts are left out."""
    return PATH_DELIMITER.join(part for part in parts if part)


def expected_map(report: Report, entry: Entry, path: str) -> MapNode | None:
    """The block behind an entry, empty for null; None, and a problem, for anything else."""
    if isinstance(entry.node, MapNode):
        return entry.node
    if is_null(entry.node):
        return MapNode({}, entry.key_at)
    if not isinstance(entry.node, Broken):
        report.add(entry.at, path, _wrong_type("map[string]interface {}", entry.node) + because(entry.node))
    return None


def decode(entry: Entry, path: str, model: type[M], report: Report) -> M | None:
    """The typed configuration of one block; None when it has problems, which are then in `report`.

    Unknown keys are taken out before the model decides on the rest, so that they hide no rule that relates two keys.
    """
    block = expected_map(report, entry, path)
    if block is None:
        return None
    root = Entry(entry.key_at, block)
    data = _plain(block)
    repaired: set[Location] = set()
    complete = True
    config: M | None = None
    while config is None:
        try:
            config = model.model_validate(data)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            unknown = [details for details in errors if details["type"] == "extra_forbidden"]
            if not unknown and _repair(errors, root, data, repaired):
                continue
            for details in unknown or errors:
                _describe(details, root, path, model, report)
            if not unknown:
                return None
            complete = False
            for details in unknown:
                _remove(data, _locate(root, details["loc"]).steps)
    for at, where, doubt in _doubts(config, root, path):
        report.warn(at, where, doubt)
    return config if complete else None


def _doubts(config: BaseModel, entry: Entry, path: str) -> Iterator[tuple[Position, str, str]]:
    """What a block and the blocks written in it say about themselves, with place and path."""
    if not isinstance(config, Block) or not isinstance(entry.node, MapNode):
        return
    for doubt in config.doubts():
        yield _blamed(entry, doubt).at, path, doubt
    for name, field in type(config).model_fields.items():
        key = field.alias or name
        if key in entry.node.entries:
            yield from _doubts(getattr(config, name), entry.node.entries[key], join_path(path, key))


@dataclass(frozen=True, slots=True)
class _Place:
    """How far an error's location leads: the entry there, and the keys and indices that lead to it."""

    entry: Entry
    steps: Location

    def split(self) -> tuple[str, str]:
        """The path of the block around it and its own name there (`windows[1]`); no name at the root."""
        names = [""]
        for step in self.steps:
            if isinstance(step, int):
                names[-1] += f"[{step}]"
            else:
                names.append(step)
        return join_path(*names[:-1]), names[-1]


def _locate(root: Entry, location: Location) -> _Place:
    """Follows what exists; names of union branches and of missing keys lead nowhere and are passed over."""
    entry, steps = root, []
    for part in location:
        node = entry.node
        if isinstance(node, MapNode) and isinstance(part, str) and part in node.entries:
            entry = node.entries[part]
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            entry = Entry(node.items[part].at, node.items[part])
        else:
            continue
        steps.append(part)
    return _Place(entry, tuple(steps))


def _plain(node: Node) -> object:
    match node:
        case MapNode():
            return {key: _plain(entry.node) for key, entry in node.entries.items()}
        case ListNode():
            return [_plain(item) for item in node.items]
        case Scalar():
            return node.value
        case Broken():
            return node


def _repair(errors: Sequence[ErrorDetails], root: Entry, data: object, repaired: set[Location]) -> bool:
    """Puts right in `data` what the model's answer allows to be read differently; False when nothing is
    left."""
    changed = False
    for details in errors:
        place = _locate(root, details["loc"])
        if not place.steps or place.steps in repaired:
            continue
        replacement = _other_reading(details["type"], place.entry.node)
        if replacement is not None:
            repaired.add(place.steps)
            _put(data, place.steps, replacement)
            changed = True
    return changed


def _other_reading(error_type: str, node: Node) -> str | int | None:
    if error_type in _INTEGER_WANTED:
        integral = isinstance(node, Scalar) and isinstance(node.value, float) and node.value.is_integer()
        return int(node.value) if integral and isinstance(node, Scalar) and node.value is not None else None
    if error_type not in _TEXT_WANTED or isinstance(node, Broken):
        return None
    if is_null(node) and error_type == "string_type" and not (isinstance(node, Scalar) and node.textual):
        # Null among free keys (headers) is the empty text in the Collector; a field's null never gets here.
        return ""
    return node.original


def _put(data: object, steps: Location, value: str | int) -> None:
    *way, last = steps
    for step in way:
        data = _inside(data, step)
    if isinstance(data, dict):
        data[last] = value
        return
    if isinstance(data, list) and isinstance(last, int):
        data[last] = value


def _remove(data: object, steps: Location) -> None:
    *way, last = steps
    for step in way:
        data = _inside(data, step)
    if isinstance(data, dict):
        del data[last]


def _inside(data: object, step: str | int) -> object:
    if isinstance(data, dict):
        return data[step]
    return data[step] if isinstance(data, list) and isinstance(step, int) else None


def _describe(details: ErrorDetails, root: Entry, path: str, model: type[BaseModel], report: Report) -> None:
    place = _locate(root, details["loc"])
    entry, node = place.entry, place.entry.node
    if isinstance(node, Broken):
        return
    around, name = place.split()
    where = join_path(path, around)
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        key = str(details["loc"][-1])
        # A null counts as absent: then the place found is the key's own, not that of the block around it.
        null = isinstance(node, Scalar) and name == key
        report.add(entry.at, where if null else join_path(where, name), f"'{key}' is required{because(node)}")
    elif kind == "extra_forbidden":
        known = _fields_at(model, place.steps[:-1])
        report.add(entry.key_at, where, f"has invalid keys: {name}", closest(name, known))
    elif isinstance(node, MapNode) and kind in ("value_error", "assertion_error"):
        reason = _reason(details, context)
        blamed = _blamed(entry, reason)
        if blamed is entry and place.steps:  # a relation with a key beside this block
            blamed = _blamed(_locate(root, place.steps[:-1]).entry, reason, entry)
        report.add(blamed.at, join_path(where, name), reason + because(blamed.node))
    elif kind in _EXPECTED:
        report.add(entry.at, where, f"'{name}' {_wrong_type(_EXPECTED[kind], node)}{because(node)}")
    else:
        reason = _reason(details, context)
        named = reason[:1] == "`" or (name and re.search(rf"['`\"]{re.escape(name)}(: [^'`]*)?['`\"]", reason))
        expected = _QUOTED.findall(str(context.get("expected", "")))
        hint = closest(node.text, expected) if isinstance(node, Scalar) else ""
        at = entry.key_at if details["loc"][-1:] == (_KEY_OF_MAP,) else entry.at
        report.add(at, where, (reason if named else f"'{name}' {reason}") + because(node), hint)


def _blamed(block: Entry, reason: str, otherwise: Entry | None = None) -> Entry:
    """The key that a text about a block is about: the first that it quotes and that is written there, or in a block in
    it; where it quotes none, one whose variable is not set; else `otherwise`, which is the block unless given."""
    otherwise = otherwise or block
    if not isinstance(block.node, MapNode):
        return otherwise
    entries = block.node.entries
    quoted = [match["key"] for match in _KEY.finditer(reason)]
    nested = [entry.node.entries for entry in entries.values() if isinstance(entry.node, MapNode)]
    for here in (entries, *nested):
        for key in quoted:
            if key in here:
                return here[key]
    return next((entry for entry in entries.values() if not quoted and because(entry.node)), otherwise)


def _reason(details: ErrorDetails, context: Mapping[str, object]) -> str:
    error = context.get("error")
    return str(error) if error is not None else details["msg"].removeprefix("Input ")


def _wrong_type(expected: str, node: Node) -> str:
    return f"expected type '{expected}', got unconvertible type '{type_name(node)}'"


def _fields_at(model: type[BaseModel], steps: Location) -> list[str]:
    """The keys that the block at these steps may have."""
    extra: list[str] = []
    for step in steps:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if isinstance(step, str) and step in fields:
            model = _model_in(fields[step].annotation) or model
            extra = [SWITCH] if OPTIONAL in fields[step].metadata else []
    return [*(field.alias or name for name, field in model.model_fields.items()), *extra]


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
