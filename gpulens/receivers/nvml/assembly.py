"""Turns the shapes of a tier into a layout, and the readings of a tick into the numbers on it.

Invariant: the layout object stays while no shape changes; a tick only moves numbers. A series enters with its first
number; one without a number is absent and keeps its place for `PATIENCE_TICKS` ticks; one that is no longer in its
GPU's shape leaves at once, since a MIG instance that was destroyed must not be taken for a quiet one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Final, Protocol

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.counters import CounterStarts
from gpulens.pipeline.data import EMPTY_LAYOUT, Attributes, Batch, Block, Layout, Resource, Scope, Series, Value
from gpulens.pipeline.streams import PATIENCE_TICKS
from gpulens.receivers.nvml.messages import Attrs, Numbers, Reading, Shape

WINDOWED: Final = frozenset(
    {
        "hw.gpu.utilization",
        "hw.gpu.utilization.max",
        "hw.gpu.utilization.p95",
        "gpu.engine.active",
        "gpu.sm.active",
        "gpu.sm.occupancy",
        "gpu.pipe.active",
        "gpu.memory.bandwidth.utilization",
    }
)
"""Metrics that cover the time since the GPU's previous reading."""


class Row(Protocol):
    """What is needed of a row of the table."""

    @property
    def metric(self) -> str:
        """The metric's name in the catalogue."""

    @property
    def attributes(self) -> Iterable[tuple[str, str]]:
        """The attributes that all series of the row have."""

    @property
    def lasting(self) -> bool:
        """A counter that neither a reset nor another driver starts anew."""


@dataclass(frozen=True, slots=True)
class Extra:
    """A series that is made here and not read from the driver, with its number now (None: absent)."""

    series: Series
    value: Value | None
    start_ns: int = 0


class Extras:
    """The extra series of a GPU, column by column. The same object says the same."""

    __slots__ = ("series", "starts", "values")

    def __init__(self, extras: Iterable[Extra] = ()) -> None:
        rows = tuple(extras)
        self.series = tuple(extra.series for extra in rows)
        self.values: list[Value | None] = [extra.value for extra in rows]
        self.starts = [extra.start_ns for extra in rows]


NO_EXTRAS: Final = Extras()


class Part:
    """One GPU's share of a tier: its series by position in the readings, and which of them are in the layout."""

    def __init__(self, shape: Shape, rows: Mapping[str, Row], node: Resource, before: Part | None) -> None:
        self.shape = shape
        self.gap = True
        self._epoch: tuple[int, int] | None = None if before is None else before._epoch
        self.restarted_ns: int | None = None if before is None else before.restarted_ns
        self.identities: list[tuple[Resource, Series] | None] = _identities(shape, rows, node)
        size = len(self.identities)
        known = {} if before is None else {i: m for i, m in zip(before.identities, before.missed, strict=True) if i}
        self.missed: list[int] = [
            known.get(each, PATIENCE_TICKS) if each else PATIENCE_TICKS for each in self.identities
        ]
        series = [None if each is None else each[1] for each in self.identities]
        self.counters = [(i, each) for i, each in enumerate(series) if each is not None and each.metric.is_counter]
        self.lasting = {
            i for i, _ in self.counters if (row := rows.get(shape.lines[i].key)) is not None and row.lasting
        }
        self.windowed = [i for i, each in enumerate(series) if each is not None and each.metric.name in WINDOWED]
        self.starts = [0] * size
        self.nothing: list[Value | None] = [None] * size
        self._node = node
        self._own: list[int] = []
        self._owned: list[int] = []
        self._gaps = True
        self._blocks: tuple[Block, ...] = ()
        self._shown()

    def _shown(self) -> None:
        """Works out which positions are in the layout: those of the node's resource, then those of owners."""
        shown = [i for i, each in enumerate(self.identities) if each and self.missed[i] < PATIENCE_TICKS]
        own = [i for i in shown if self._resource(i) is self._node]
        order: dict[Resource, list[int]] = {}
        for i in shown:
            if self._resource(i) is not self._node:
                order.setdefault(self._resource(i), []).append(i)
        self._own, self._owned = own, [i for positions in order.values() for i in positions]
        self._order = order

    def _resource(self, position: int) -> Resource:
        identity = self.identities[position]
        assert identity is not None
        return identity[0]

    def _series(self, position: int) -> Series:
        identity = self.identities[position]
        assert identity is not None
        return identity[1]

    def settle(self, values: Numbers) -> bool:
        """Takes note of which series have a number now; whether others than before are in the layout."""
        if not self._gaps and None not in values:
            return False
        moved, gaps, missed = False, False, self.missed
        for position, value in enumerate(values):
            if value is not None and missed[position]:
                moved = moved or missed[position] >= PATIENCE_TICKS
                missed[position] = 0
            elif value is None:
                gaps = True
                if missed[position] < PATIENCE_TICKS:
                    missed[position] += 1
                    moved = moved or missed[position] == PATIENCE_TICKS
        self._gaps = gaps
        if moved:
            self._shown()
        return moved

    def blocks(self, scope: Scope, extras: Extras) -> tuple[Block, ...]:
        """The blocks of this GPU; those whose series are as before are the same objects."""
        own = (*(self._series(i) for i in self._own), *extras.series)
        wanted = [(self._node, own), *((r, tuple(self._series(i) for i in at)) for r, at in self._order.items())]
        known = {(block.resource, block.series): block for block in self._blocks}
        self._blocks = tuple(known.get(each) or Block(each[0], scope, each[1]) for each in wanted)
        return self._blocks

    def adopt(self, before: Part) -> None:
        """Takes over the blocks of the part that this one replaces."""
        self._blocks = before._blocks

    def learn_epoch(self, epoch: tuple[int, int], now_ns: int) -> None:
        """Counters of another epoch began anew between the last reading and this one. Another process counts epochs
        for itself: there a fall of the totals tells."""
        if self._epoch is not None and self._epoch[0] == epoch[0] and self._epoch[1] != epoch[1]:
            self.restarted_ns = now_ns
        self._epoch = epoch

    def fill(self, numbers: Numbers, extras: Extras, values: list[Value | None], starts: list[int]) -> None:
        """Appends this GPU's numbers and start times in the layout's order."""
        values += [numbers[i] for i in self._own]
        values += extras.values
        values += [numbers[i] for i in self._owned]
        starts += [self.starts[i] for i in self._own]
        starts += extras.starts
        starts += [self.starts[i] for i in self._owned]


def _identities(shape: Shape, rows: Mapping[str, Row], node: Resource) -> list[tuple[Resource, Series] | None]:
    """Who each number is about; None for what is not in the table or stands there twice."""
    found: list[tuple[Resource, Series] | None] = []
    seen: set[tuple[Resource, Series]] = set()
    owners: dict[Attributes, Resource] = {}
    for line in shape.lines:
        row = rows.get(line.key)
        if row is None:
            found.append(None)
            continue
        series = Series(metric(row.metric), {**shape.entities[line.entity], **dict(row.attributes), **line.more})
        owner = Resource({**node.map, **(line.owner or {})})
        resource = owners.setdefault(owner.attributes, owner) if line.owner else node
        found.append(None if (resource, series) in seen else (resource, series))
        seen.add((resource, series))
    return found


class Assembly:
    """The stream of one tier."""

    def __init__(self, rows: Mapping[str, Row], node: Resource, scope: Scope, stream: str) -> None:
        self._rows = rows
        self._node = node
        self._scope = scope
        self._stream = stream
        self._parts: dict[str, Part] = {}
        self._extras: dict[str, tuple[Series, ...]] = {}
        self._layout: Layout = EMPTY_LAYOUT
        self._counters: CounterStarts[Series] = CounterStarts()
        self._dirty = False
        self._head: tuple[Series, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that have series here."""
        return tuple(self._parts)

    def device(self, gpu: str) -> Attrs | None:
        """The attributes of a GPU on its points, where they are known."""
        part = self._parts.get(gpu)
        return None if part is None else part.shape.device()

    def forget(self, gpu: str) -> None:
        """The GPU is gone, and its counters with it."""
        part = self._parts.pop(gpu, None)
        self._extras.pop(gpu, None)
        if part is not None:
            self._dirty = True
            for _, series in part.counters:
                self._counters.forget(series)

    def take(self, gpu: str, reading: Reading) -> None:
        """Takes up the shape of a GPU's reading, where it is another one than before."""
        before = self._parts.get(gpu)
        if before is not None and before.shape is reading.shape:
            return
        part = Part(reading.shape, self._rows, self._node, before)
        if before is not None:
            part.adopt(before)
            kept = {series for _, series in part.counters}
            for _, series in before.counters:
                if series not in kept:
                    self._counters.forget(series)
        self._parts[gpu] = part
        self._dirty = True

    def batch(
        self,
        readings: Mapping[str, Reading],
        extras: Mapping[str, Extras],
        now_ns: int,
        *,
        head: Extras = NO_EXTRAS,
        gaps: frozenset[str] = frozenset(),
    ) -> Batch:
        """The stream as it is now. GPUs without a reading are absent; `gaps` are those whose previous reading is older
        than the previous tick: what covers the time since then says nothing about this tick. `head` is the node's.
        """
        values, starts = list(head.values), list(head.starts)
        for gpu, part in self._parts.items():
            own = extras.get(gpu, NO_EXTRAS)
            numbers = self._numbers(part, readings.get(gpu), now_ns, gpu in gaps)
            if part.settle(numbers):
                self._dirty = True
            if own.series is not self._extras.get(gpu, NO_EXTRAS.series):
                self._extras[gpu] = own.series
                self._dirty = True
            part.fill(numbers, own, values, starts)
        if self._dirty or head.series != self._head:
            self._build(head.series, extras)
        return self._pack(values, starts, now_ns)

    def _numbers(self, part: Part, reading: Reading | None, now_ns: int, gap: bool) -> Numbers:
        if reading is None:
            return part.nothing
        part.learn_epoch(reading.epoch, now_ns)
        numbers = list(reading.values)
        if gap:
            for position in part.windowed:
                numbers[position] = None
        for position, series in part.counters:
            raw = numbers[position]
            if raw is None:
                continue
            known = None if position in part.lasting else part.restarted_ns
            point = self._counters.observe(series, raw, now_ns, known)
            if point is None:
                numbers[position] = None
            else:
                numbers[position], part.starts[position] = point.value, point.start_ns
        return numbers

    def _build(self, heading: tuple[Series, ...], extras: Mapping[str, Extras]) -> None:
        blocks = [Block(self._node, self._scope, heading)] if heading else []
        for gpu, part in self._parts.items():
            blocks += part.blocks(self._scope, extras.get(gpu, NO_EXTRAS))
        layout = Layout(blocks)
        self._layout = self._layout if layout == self._layout else layout
        self._head, self._dirty = heading, False

    def _pack(self, values: list[Value | None], starts: list[int], now_ns: int) -> Batch:
        try:
            packed, absent = self._layout.pack(values)
        except (StructError, OverflowError):
            packed, absent = self._layout.pack(_fitting(values, self._layout.is_int))
        column: int | array[int] = array("Q", starts) if any(starts) else 0
        return Batch(self._layout, packed, now_ns, self._stream, True, column, absent)


def _fitting(values: Sequence[Value | None], is_int: Sequence[bool]) -> list[Value | None]:
    """Numbers as their metrics declare them; what can't be one is absent."""
    fitting: list[Value | None] = []
    for value, whole in zip(values, is_int, strict=True):
        if isinstance(value, float) and whole:
            value = int(value) if value.is_integer() else None
        if not isinstance(value, int | float) or (whole and not -(2**63) <= value < 2**63):
            value = None
        fitting.append(value)
    return fitting
