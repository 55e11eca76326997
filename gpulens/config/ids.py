"""Names in a configuration: kinds of components, signals, component ids and pipeline ids.

Invariant: an id that exists is valid; parsing is the only way in from text, and `str(id)` parses back to it.
Source of the rules: the Collector's component/identifiable.go and pipeline ids.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum

_TYPE = re.compile(r"[a-zA-Z][0-9a-zA-Z_]{0,62}")
_MAX_NAME = 1024
_FORBIDDEN_CATEGORIES = "ZCS"
"""Unicode's major categories separator, control and symbol: no name may hold them."""


class Kind(StrEnum):
    """The five sections of a configuration that hold components."""

    RECEIVERS = "receivers"
    PROCESSORS = "processors"
    EXPORTERS = "exporters"
    CONNECTORS = "connectors"
    EXTENSIONS = "extensions"

    @property
    def singular(self) -> str:
        """The word for one of them, as messages use it."""
        return self.value[:-1]


class Signal(StrEnum):
    """What a pipeline carries."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


@dataclass(frozen=True, slots=True, order=True)
class ComponentID:
    """`type` or `type/name`; the type is kept as the user typed it, so an alias stays visible."""

    type: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.type}/{self.name}" if self.name else self.type

    @classmethod
    def parse(cls, text: str) -> ComponentID:
        """Splits at the first slash and trims both halves. Raises ValueError with the Collector's text."""
        head, name = _split(text)
        if not _TYPE.fullmatch(head):
            raise ValueError(f'in "{text}" id: invalid character(s) in type "{head}"')
        return cls(head, name)


@dataclass(frozen=True, slots=True, order=True)
class PipelineID:
    """`signal` or `signal/name`."""

    signal: Signal
    name: str = ""

    def __str__(self) -> str:
        return f"{self.signal}/{self.name}" if self.name else self.signal.value

    @classmethod
    def parse(cls, text: str) -> PipelineID:
        """As `ComponentID.parse`, for the signals that gpulens carries. Raises ValueError."""
        head, name = _split(text)
        try:
            return cls(Signal(head), name)
        except ValueError:
            raise ValueError(f'in "{text}" id: unknown pipeline signal: "{head}"') from None


def _split(text: str) -> tuple[str, str]:
    if not text.strip():
        raise ValueError("id must not be empty")
    before, slash, after = text.partition("/")
    head, name = before.strip(), after.strip()
    if not head:
        raise ValueError(f'in "{text}" id: the part before / should not be empty')
    if slash and not name:
        raise ValueError(f'in "{text}" id: the part after / should not be empty')
    if len(name) > _MAX_NAME or any(unicodedata.category(char)[0] in _FORBIDDEN_CATEGORIES for char in name):
        raise ValueError(f'in "{text}" id: invalid character(s) in name "{name}"')
    return head, name
