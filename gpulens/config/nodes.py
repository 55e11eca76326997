"""The tree a configuration is held in between text and typed values: each key and value knows where it
stands.

Invariant: nodes are never changed once made, so anchors, merges and expansions share them freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ScalarValue = str | int | float | bool | None

PATH_DELIMITER = "::"
"""Joins keys to a path, in messages and in keys (the Collector's confmap.KeyDelimiter)."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where something stands; line and column count from 1 and are 0 where the source has no lines."""

    source: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value and the text it was written as.

    `textual` says that a string field takes the text even though the value is no string: it came from a whole
    `${...}`, or is a number with leading zeros (012), which no reader takes for twelve. `unset` names the environment
    variables in it that are not set.
    """

    value: ScalarValue
    text: str
    at: Position
    textual: bool = False
    unset: tuple[str, ...] = ()

    @property
    def original(self) -> str | None:
        """What a string field takes instead of the value; None = the value must be a string itself."""
        return self.text if self.textual or isinstance(self.value, str) else None


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list; `original` is the text it came from when a whole `${...}` gave it."""

    items: tuple[Node, ...]
    at: Position
    original: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a map and the place of its key."""

    key_at: Position
    node: Node

    @property
    def at(self) -> Position:
        """The place to name when the value is wrong: its own, but the key's for a block and for a value that is not
        there."""
        match self.node:
            case MapNode() | Scalar(value=None, text="", unset=()):
                return self.key_at
            case node:
                return node.at


@dataclass(frozen=True, slots=True)
class MapNode:
    """A map with text keys, in the order written; `original` as on ListNode."""

    entries: Mapping[str, Entry]
    at: Position
    original: str | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A value that could not be had; its problem is on record, so nothing more is said about it."""

    at: Position


Node = Scalar | ListNode | MapNode | Broken


def is_null(node: Node) -> bool:
    """True for an explicit or implied null."""
    return isinstance(node, Scalar) and node.value is None


def because(node: Node) -> str:
    """What a problem with this value adds: the variables in it that are not set; empty when there are none."""
    names = [f"${{env:{name}}}" for name in node.unset] if isinstance(node, Scalar) else []
    if not names:
        return ""
    return f"; {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set"


def type_name(node: Node) -> str:
    """The type's name as the Collector's messages have it (Go's)."""
    match node:
        case MapNode():
            return "map[string]interface {}"
        case ListNode():
            return "[]interface {}"
        case Scalar(value=bool()):
            return "bool"
        case Scalar(value=int()):
            return "int"
        case Scalar(value=float()):
            return "float64"
        case Scalar(value=None) | Broken():
            return "nil"
        case Scalar():
            return "string"
