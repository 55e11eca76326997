"""The data model: identity is compiled once, values flow.

Invariant: everything here is immutable once built. A `Layout` says *which* series a batch reports; a `Batch` adds
one 8-byte slot a series and the times. While nothing appears or goes away, the same layout object comes back tick
after tick, so every step caches its identity work against it and only moves numbers.

Absent, blank and zero are three different things: a slot that the `absent` bitmap names has no reading, and its
bytes mean nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from struct import Struct
from typing import Union

Scalar = str | bool | int | float | bytes


@dataclass(frozen=True, slots=True)
class KeyValues:
    """A nested map as an attribute value (OTLP kvlist); sorted by key."""

    items: tuple[tuple[str, AttributeValue], ...]


AttributeValue = Scalar | KeyValues | tuple["AttributeValue", ...] | None
Attributes = tuple[tuple[str, AttributeValue], ...]


def attributes(pairs: Mapping[str, AttributeValue] | Iterable[tuple[str, AttributeValue]]) -> Attributes:
    """Attributes in the one order that makes equal sets equal: sorted by key, the last of equal keys wins."""
    return tuple(sorted(dict(pairs).items()))


def _exact(pairs: Attributes) -> object:
    """What equal attributes have in common: Python takes True, 1 and 1.0 for the same, and NaN for nothing at all."""
    for _, value in pairs:  # a loop costs a third of `all`, and this runs for each key that is looked up
        if not isinstance(value, str):
            # A StrEnum member is its text, but its repr is another.
            return repr([(key, str.__str__(v) if isinstance(v, str) else v) for key, v in pairs])
    return pairs


class Kind(Enum):
    """What a metric's points are; the OTLP data types that travel as columns."""

    GAUGE = "gauge"
    SUM = "sum"


class Temporality(Enum):
    """Values are OTLP's AggregationTemporality numbers."""

    UNSPECIFIED = 0
    DELTA = 1
    CUMULATIVE = 2


@dataclass(frozen=True, slots=True)
class Metric:
    """What is measured. `is_int` decides how the 8 bytes of a slot are read: int64, else IEEE double."""

    name: str
    unit: str = ""
    description: str = ""
    kind: Kind = Kind.GAUGE
    temporality: Temporality = Temporality.UNSPECIFIED
    monotonic: bool = False
    is_int: bool = False

    @property
    def is_counter(self) -> bool:
        """A cumulative monotonic sum."""
        return self.kind is Kind.SUM and self.monotonic and self.temporality is Temporality.CUMULATIVE


class _Hashed:
    """Content equality with the hash computed once: these objects are dictionary keys on every tick."""

    def _key(self) -> tuple[object, ...]:
        raise AssertionError("each subclass names its content")

    @cached_property
    def _hash(self) -> int:
        return hash(self._key())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or not isinstance(other, _Hashed):
            return NotImplemented
        return self._hash == other._hash and self._key() == other._key()


class _Attributed(_Hashed):
    """Something that attributes describe. They are kept as one tuple: a dictionary beside it would double a series."""

    attributes: Attributes

    @property
    def map(self) -> dict[str, AttributeValue]:
        """The attributes as a dictionary, made anew."""
        return dict(self.attributes)

    def text(self, key: str) -> str:
        """The attribute as text, empty where it is missing or no text."""
        for name, value in self.attributes:
            if name == key:
                return value if isinstance(value, str) else ""
        return ""


class Resource(_Attributed):
    """Who the readings are about: the owner's pod, or the node."""

    def __init__(self, attrs: Mapping[str, AttributeValue] | Attributes = (), schema_url: str = "") -> None:
        self.attributes = attributes(attrs)
        self.schema_url = schema_url

    def _key(self) -> tuple[object, ...]:
        return (_exact(self.attributes), self.schema_url)

    def __repr__(self) -> str:
        return f"Resource({self.map!r})"


class Scope(_Hashed):
    """Which part of gpulens (or of a foreign sender) made the readings."""

    def __init__(
        self,
        name: str = "",
        version: str = "",
        attrs: Mapping[str, AttributeValue] | Attributes = (),
        schema_url: str = "",
    ) -> None:
        self.name = name
        self.version = version
        self.attributes: Attributes = attributes(attrs)
        self.schema_url = schema_url

    def _key(self) -> tuple[object, ...]:
        return (self.name, self.version, _exact(self.attributes), self.schema_url)

    def __repr__(self) -> str:
        return f"Scope({self.name!r})"


class Series(_Attributed):
    """One time series within a block: the metric and its attributes. With the block's resource and scope it is the
    whole identity; keeping those on the block lets one `Series` object serve every owner it moves between."""

    def __init__(self, metric: Metric, attrs: Mapping[str, AttributeValue] | Attributes = ()) -> None:
        self.metric = metric
        self.attributes = attributes(attrs)

    def _key(self) -> tuple[object, ...]:
        return (self.metric, _exact(self.attributes))

    def __repr__(self) -> str:
        return f"Series({self.metric.name}{self.map!r})"


class Block(_Hashed):
    """The series of one resource and one scope, in a fixed order. Compiled forms (OTLP, page sections) hang on
    blocks, because those formats concatenate: a pod that changes recompiles its own block and no other."""

    def __init__(self, resource: Resource, scope: Scope, series: Iterable[Series]) -> None:
        self.resource = resource
        self.scope = scope
        self.series: tuple[Series, ...] = tuple(series)

    def _key(self) -> tuple[object, ...]:
        return (self.resource, self.scope, self.series)

    def __len__(self) -> int:
        return len(self.series)

    def __repr__(self) -> str:
        return f"Block({self.resource!r}, {self.scope.name!r}, {len(self.series)} series)"


Identity = tuple[Resource, Scope, Series]
Value = float | int


class Layout(_Hashed):
    """An ordered tuple of blocks; slot i of a batch's values belongs to the i-th series over all blocks.

    A series stands in a layout once. Two blocks may share resource and scope (OTLP allows it).

    Raises ValueError when a series stands in it twice.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if len(block))
        self.size = sum(len(block) for block in self.blocks)
        if len(set(self.identities())) != self.size:
            raise ValueError("a series stands twice in one layout; merge its readings first")

    def _key(self) -> tuple[object, ...]:
        return self.blocks

    def __len__(self) -> int:
        return self.size

    def identities(self) -> Iterator[Identity]:
        """Every series with its resource and scope, in slot order."""
        for block in self.blocks:
            for series in block.series:
                yield block.resource, block.scope, series

    @cached_property
    def slots(self) -> dict[Identity, int]:
        """Where each series stands."""
        return {identity: slot for slot, identity in enumerate(self.identities())}

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first slot of each block, then the size."""
        starts = [0]
        for block in self.blocks:
            starts.append(starts[-1] + len(block))
        return tuple(starts)

    @cached_property
    def is_int(self) -> tuple[bool, ...]:
        """For each slot: int64 (True) or double (False)."""
        return tuple(series.metric.is_int for block in self.blocks for series in block.series)

    @cached_property
    def codec(self) -> Struct:
        """Packs one number a slot into the values buffer and back (little-endian, 8 bytes each)."""
        runs = ((len(list(group)), "q" if flag else "d") for flag, group in groupby(self.is_int))
        return Struct("<" + "".join(f"{count}{code}" for count, code in runs))

    def pack(self, values: Sequence[Value | None]) -> tuple[bytes, bytes]:
        """The values buffer and the absent bitmap (empty when nothing is absent); None is an absent reading.

        Raises struct.error when the count or an int64's type or range does not fit.
        """
        if None not in values:
            return self.codec.pack(*values), b""
        absent = bitmap(i for i, value in enumerate(values) if value is None)
        return self.codec.pack(*(0 if value is None else value for value in values)), absent

    def select(self, slots: Sequence[int]) -> Layout:
        """The layout of these slots only (ascending), blocks kept apart."""
        wanted = set(slots)
        blocks = []
        for block, start in zip(self.blocks, self.offsets, strict=False):
            series = tuple(s for i, s in enumerate(block.series, start) if i in wanted)
            blocks.append(block if len(series) == len(block) else Block(block.resource, block.scope, series))
        return Layout(blocks)

    def __repr__(self) -> str:
        return f"Layout({len(self.blocks)} blocks, {self.size} series)"


EMPTY_LAYOUT = Layout()


def bitmap(slots: Iterable[int]) -> bytes:
    """Slots as bits, least significant first; trailing zero bytes are left out, so equal sets are equal bytes."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bitmap_slots(bits: bytes) -> list[int]:
    """The slots that a bitmap names, ascending."""
    return [8 * i + bit for i, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


Times = Union[int, "array[int]"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one stream says at one moment.

    - `stream`: receiver id, with `/tier` where a receiver has several; kept through processors.
    - `complete`: True replaces everything earlier of this stream; False adds to it.
    - `values`: 8 bytes a slot, little-endian, int64 or double by the series' metric.
    - `time_ns`, `start_ns`: nanoseconds since 1970, one for all slots or an `array('Q')` with one a slot; a start of
      0 says 'not known or not a counter'.
    - `absent`: bitmap of slots without a reading.
    - `events`: OTLP ResourceLogs messages, encoded; metrics exporters ignore them.
    - `opaque`: OTLP ResourceMetrics messages, encoded, with what does not travel as columns (histograms, summaries).
    """

    layout: Layout
    values: bytes
    time_ns: Times
    stream: str
    complete: bool
    start_ns: Times = 0
    absent: bytes = b""
    events: tuple[bytes, ...] = ()
    opaque: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        size = self.layout.size
        if len(self.values) != 8 * size:
            raise ValueError(f"{size} series need {8 * size} bytes of values, not {len(self.values)}")
        for name in ("time_ns", "start_ns"):
            times = getattr(self, name)
            if not isinstance(times, int) and len(times) != size:
                raise ValueError(f"{name} has {len(times)} entries for {size} series")

    @classmethod
    def of(
        cls,
        layout: Layout,
        values: Sequence[Value | None],
        time_ns: Times,
        stream: str,
        complete: bool = True,
        start_ns: Times = 0,
    ) -> Batch:
        """A batch from one number a slot, None where there is no reading."""
        packed, absent = layout.pack(values)
        return cls(layout, packed, time_ns, stream, complete, start_ns, absent)

    def numbers(self) -> tuple[Value, ...]:
        """One number a slot; what stands in absent slots means nothing (ask `absent`)."""
        return self.layout.codec.unpack(self.values)

    def readings(self) -> list[Value | None]:
        """One number a slot, None where there is no reading."""
        numbers: list[Value | None] = list(self.numbers())
        for slot in bitmap_slots(self.absent):
            numbers[slot] = None
        return numbers

    def times(self) -> Sequence[int]:
        """The time of each slot, in ns."""
        return [self.time_ns] * self.layout.size if isinstance(self.time_ns, int) else self.time_ns

    def starts(self) -> Sequence[int]:
        """The start time of each slot, in ns; 0 where there is none."""
        return [self.start_ns] * self.layout.size if isinstance(self.start_ns, int) else self.start_ns

    def latest_ns(self) -> int:
        """The newest event time in it; 0 when it has no points."""
        if isinstance(self.time_ns, int):
            return self.time_ns
        return max(self.time_ns, default=0)

    def present(self) -> Batch:
        """The same readings on a layout without the absent series; self when nothing is absent."""
        if not self.absent:
            return self
        gone = set(bitmap_slots(self.absent))
        kept = [slot for slot in range(self.layout.size) if slot not in gone]
        return Projection(self.layout.select(kept), kept).apply(self)


class Projection:
    """Moves the readings of some slots to another layout: built once, applied tick after tick.

    Slot i of `layout` gets what stands in slot `slots[i]` of the batch.
    """

    def __init__(self, layout: Layout, slots: Sequence[int]) -> None:
        if layout.size != len(slots):
            raise ValueError(f"{layout.size} series can't be filled from {len(slots)} slots")
        self.layout = layout
        self.slots = tuple(slots)
        # itemgetter with one key gives a bare value, with none it can't be made: both cases go the plain way.
        self._pick: Callable[[Sequence[int]], Sequence[int]] = (
            itemgetter(*self.slots) if len(self.slots) > 1 else lambda column: [column[slot] for slot in self.slots]
        )

    def apply(self, batch: Batch) -> Batch:
        """The batch on the new layout; events and opaque parts go along."""
        absent = b""
        if batch.absent:
            gone = set(bitmap_slots(batch.absent))
            absent = bitmap(i for i, slot in enumerate(self.slots) if slot in gone)
        return replace(
            batch,
            layout=self.layout,
            values=array("q", self._pick(memoryview(batch.values).cast("q"))).tobytes(),
            time_ns=self._times(batch.time_ns),
            start_ns=self._times(batch.start_ns),
            absent=absent,
        )

    def _times(self, times: Times) -> Times:
        return times if isinstance(times, int) else array("Q", self._pick(times))


def build_layout(identities: Iterable[Identity]) -> tuple[Layout, list[int]]:
    """Groups identities into blocks (in order of first sight) and says where each one stands.

    Equal identities share a slot: `slots[i]` is where `identities[i]` went.
    """
    given = list(identities)
    groups: dict[tuple[Resource, Scope], dict[Series, None]] = {}
    for resource, scope, series in given:
        groups.setdefault((resource, scope), {})[series] = None
    layout = Layout(Block(resource, scope, series) for (resource, scope), series in groups.items())
    return layout, [layout.slots[identity] for identity in given]


def concatenate_on(layout: Layout, first: Batch, second: Batch) -> Batch:
    """Two batches of one stream as one, on the layout of both, which was built before: only numbers move. `second`
    decides stream and completeness; events and opaque parts come from both."""
    shift = first.layout.size
    absent = first.absent
    if second.absent:
        absent = bitmap(chain(bitmap_slots(first.absent), (shift + slot for slot in bitmap_slots(second.absent))))
    return replace(
        second,
        layout=layout,
        values=first.values + second.values,
        time_ns=_join_times(first, second, "time_ns"),
        start_ns=_join_times(first, second, "start_ns"),
        absent=absent,
        events=first.events + second.events,
        opaque=first.opaque + second.opaque,
    )


def _join_times(first: Batch, second: Batch, name: str) -> Times:
    a, b = getattr(first, name), getattr(second, name)
    if isinstance(a, int) and a == b:
        return a
    columns = ((batch, getattr(batch, name)) for batch in (first, second))
    joined = array("Q")
    for batch, times in columns:
        joined.extend([times] * batch.layout.size if isinstance(times, int) else times)
    return joined
