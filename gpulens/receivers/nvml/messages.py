"""What the NVML process's messages say, as values.

Invariant: what is of another form than the protocol says raises KeyError, ValueError or TypeError; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from gpulens.nvml.protocol import Json, Message, Tier
from gpulens.nvml.reason import Reason
from gpulens.pipeline.data import AttributeValue, Value

Attrs = Mapping[str, AttributeValue]
Numbers = Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a shape: which entity, which row of the table, what else, and whose (as a process tells it)."""

    entity: int
    key: str
    more: Attrs
    owner: Attrs | None


@dataclass(frozen=True, slots=True)
class Shape:
    """What the numbers of a GPU's readings in a tier are about, in their order."""

    gpu: str
    tier: Tier
    entities: tuple[Attrs, ...]
    lines: tuple[Line, ...]

    def device(self) -> Attrs | None:
        """The attributes of the GPU itself, where the shape has them."""
        return next((entity for entity in self.entities if entity.get("hw.id") == self.gpu), None)


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of one GPU at a tick. `epoch` is (process, epoch): another epoch told by the same process says that
    the GPU's counters began anew. `codes` are NVML's of the calls that failed."""

    shape: Shape
    values: Numbers
    epoch: tuple[int, int]
    codes: frozenset[int]
    since_s: float | None
    """When the reading of activity before this one was asked for (monotonic); None where this process gave none."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a GPU gave no numbers."""

    reason: str
    call: str
    code: int

    @property
    def is_lost(self) -> bool:
        """The GPU fell off the bus."""
        return self.reason == Reason.LOST


@dataclass(slots=True)
class Answer:
    """What came for a tick. `missing` are GPUs that were asked and said nothing in time."""

    tier: Tier
    asked_s: float
    """Monotonic: the clock of the day may be set between two ticks."""
    gpus: tuple[str, ...] = ()
    readings: dict[str, Reading] = field(default_factory=dict)
    silences: dict[str, Silence] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Driver:
    """The state of the driver as the process told it."""

    up: bool
    reason: str = ""
    code: int = 0
    text: str = ""
    version: str = ""
    epoch: int = 0
    pids: bool = False
    unreachable: tuple[tuple[int, str], ...] = ()
    """(index, reason) of the GPUs that the driver counts and does not hand out."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID event; `gi` and `ci` where it is a MIG instance's."""

    gpu: str
    code: int
    gi: int | None
    ci: int | None
    time_ns: int


def driver_of(message: Message) -> Driver:
    """The driver's state."""
    away = map(items, items(message.get("unreachable") or []))
    return Driver(
        up=message["up"] is True,
        reason=text(message.get("reason") or ""),
        code=whole(message.get("code") or 0),
        text=text(message.get("text") or ""),
        version=text(message.get("driver") or ""),
        epoch=whole(message.get("epoch") or 0),
        pids=message.get("pids") is True,
        unreachable=tuple((whole(index), text(why)) for index, why, *_ in away),
    )


def numbers_of(value: Json, size: int) -> Numbers:
    """One number or null for each series of a shape."""
    found = items(value)
    if len(found) != size:
        raise ValueError(f"{len(found)} values on a shape of {size}")
    if not _NUMBERS.issuperset(map(type, found)):
        raise TypeError(f"{found!r} are no numbers")
    return cast(Numbers, found)


_NUMBERS: Final = frozenset({int, float, type(None)})


def xid_of(message: Message, now_ns: int) -> Xid:
    """An XID event."""
    gi, ci = (None if message.get(key) is None else whole(message[key]) for key in ("gi", "ci"))
    return Xid(text(message["gpu"]), whole(message["code"]), gi, ci, now_ns)


def shape_of(message: Message) -> Shape:
    """A shape."""
    entities = tuple(attrs_of(entity) for entity in items(message["entities"]))
    lines = []
    for each in items(message["series"]):
        entity, key, more, owner = items(each)
        if not 0 <= whole(entity) < len(entities):
            raise ValueError(f"no entity {entity!r}")
        lines.append(Line(whole(entity), text(key), attrs_of(more or {}), None if owner is None else attrs_of(owner)))
    return Shape(text(message["gpu"]), Tier(text(message["tier"])), entities, tuple(lines))


def attrs_of(value: Json) -> Attrs:
    """Attributes."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no map")
    found: dict[str, AttributeValue] = {}
    for key, each in value.items():
        if isinstance(each, list | dict) or each is None:
            raise TypeError(f"{each!r} is no attribute")
        found[key] = each
    return found


def items(value: Json) -> list[Json]:
    """A list."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def text(value: Json) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def whole(value: Json) -> int:
    """A whole number."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def number(value: Json) -> float:
    """A number."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
