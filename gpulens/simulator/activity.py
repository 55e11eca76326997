"""What the devices do over time, from the pods that hold them.

Invariant: exact integrals. Means over a window and the energy counter come from closed forms over the
segments in which nothing changes, so they agree with each other at any time scale.

Of several pods on one unit each gets an equal part of it: its ratios count for 1/n of the device's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpulens.simulator.layout import FOREVER, Device, Hold, Owner
from gpulens.simulator.loads import RATES, RATIOS, Load
from gpulens.simulator.models import MIB
from gpulens.simulator.schema import PodSpec

_FIELDS = (*RATIOS, *RATES)


@dataclass(frozen=True, slots=True)
class Activity:
    """Truth about a device: ratios 0..1, bytes per second, bytes, watts.

    `residency` is None for MIG (the device has no such figure then), `power_w` is None for a MIG instance.
    """

    residency: float | None
    engine: float
    sm: float
    occupancy: float
    tensor: float
    dram: float
    fp64: float
    fp32: float
    fp16: float
    pcie_rx: float
    pcie_tx: float
    memory_bytes: int
    power_w: float | None


@dataclass(frozen=True, slots=True)
class Span:
    """One pod doing one thing during [start_s, end_s)."""

    owner: Owner
    load: Load
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of time in which nobody comes, goes or changes what they do."""

    start_s: float
    end_s: float
    spans: tuple[Span, ...]

    @property
    def weight(self) -> float:
        return 1.0 / len(self.spans) if self.spans else 0.0


def spans_of(hold: Hold, pod: PodSpec, horizon_s: float) -> Iterator[Span]:
    """The phases of a pod in turn; a repeating pod goes round until it ends or `horizon_s` is past."""
    start = hold.start_s
    while True:
        for phase in pod.phases:
            end = hold.end_s if phase.for_ is None else min(hold.end_s, start + phase.for_)
            if end > start:
                yield Span(hold.owner, phase.load(), start, end)
            start = end
        if not pod.repeat or start >= min(hold.end_s, horizon_s):
            break
    if start < hold.end_s:
        yield Span(hold.owner, pod.phases[-1].load(), start, hold.end_s)


class UnitTimeline:
    """One GPU without MIG, or one MIG instance."""

    def __init__(self, memory_mib: float, spans: Iterable[Span]) -> None:
        self.memory_mib = memory_mib
        self._segments = list(_segments(spans))
        self._starts = [s.start_s for s in self._segments]

    @property
    def boundaries(self) -> Sequence[float]:
        """Every instant at which something changes."""
        return self._starts

    def holders(self, t_s: float) -> tuple[Span, ...]:
        """What runs at this instant."""
        segment = self._at(t_s)
        return segment.spans if segment else ()

    def now(self, t_s: float) -> dict[str, float]:
        """Ratios and rates at this instant."""
        out = dict.fromkeys(_FIELDS, 0.0)
        segment = self._at(t_s)
        if segment is not None:
            for span in segment.spans:
                if span.load.is_on(t_s - span.start_s):
                    _add(out, span.load, segment.weight)
        return out

    def mean(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean ratios and rates over [start_s, end_s]; of no time at all, those of the instant."""
        if end_s <= start_s:
            return self.now(start_s)
        out = dict.fromkeys(_FIELDS, 0.0)
        for load, seconds in self._work(start_s, end_s):
            _add(out, load, seconds / (end_s - start_s))
        return out

    def power_seconds(self, start_s: float, end_s: float) -> float:
        """Integral of the loads' share of the power range."""
        return sum(load.power * seconds for load, seconds in self._work(start_s, end_s))

    def power_share(self, t_s: float) -> float:
        """The loads' share of the power range at this instant."""
        segment = self._at(t_s)
        if segment is None:
            return 0.0
        on = (s.load.power for s in segment.spans if s.load.is_on(t_s - s.start_s))
        return segment.weight * sum(on)

    def used_mib(self, t_s: float) -> int:
        """Memory held by programs, at most what there is."""
        return min(int(self.memory_mib), sum(self.owner_mib(t_s).values()))

    def owner_mib(self, t_s: float) -> dict[Owner, int]:
        """Memory by owner; a share of the unit is divided among its holders."""
        out: dict[Owner, int] = {}
        segment = self._at(t_s)
        for span in segment.spans if segment else ():
            load, weight = span.load, segment.weight if segment else 0.0
            base = load.memory_share * self.memory_mib * weight if load.memory_share else load.memory_mib
            out[span.owner] = int(base + load.growth_mib_per_h * (t_s - span.start_s) / 3600.0)
        return out

    def _at(self, t_s: float) -> _Segment | None:
        i = bisect_right(self._starts, t_s) - 1
        return self._segments[i] if i >= 0 and t_s < self._segments[i].end_s else None

    def _work(self, start_s: float, end_s: float) -> Iterator[tuple[Load, float]]:
        i = max(0, bisect_right(self._starts, start_s) - 1)
        for segment in self._segments[i:]:
            if segment.start_s >= end_s:
                break
            a, b = max(start_s, segment.start_s), min(end_s, segment.end_s)
            for span in segment.spans if b > a else ():
                yield span.load, segment.weight * span.load.on_time(a - span.start_s, b - span.start_s)


class GpuTimeline:
    """One physical GPU: its units, its power and its energy counter."""

    def __init__(self, device: Device, units: Mapping[int | None, UnitTimeline], loaded_s: float, phase: float) -> None:
        """`units` by GPU-instance id (None without MIG); the driver came up at `loaded_s`."""
        self.device = device
        self.units = units
        self._loaded_s = loaded_s
        self._phase = phase
        self._scales = {None: 1.0} | {i.gi: i.profile.compute / 7.0 for i in device.mig}
        times = {b for unit in units.values() for b in unit.boundaries if loaded_s < b < FOREVER}
        self._times = [loaded_s, *sorted(times)]
        self._energy = [0.0]
        for a, b in pairwise(self._times):
            self._energy.append(self._energy[-1] + self._piece_j(a, b))

    def energy_j(self, t_s: float) -> float:
        """Joules since the driver was loaded; 0 before."""
        if t_s <= self._loaded_s:
            return 0.0
        i = bisect_right(self._times, t_s) - 1
        return (
            self._energy[i] + self._piece_j(self._times[i], t_s) + self._ripple_j(t_s) - self._ripple_j(self._loaded_s)
        )

    def power_w(self, t_s: float) -> float:
        """Watts at this instant: the derivative of the energy counter."""
        base = self._floor_w(t_s) + self._range_w * sum(
            self._scales[gi] * unit.power_share(t_s) for gi, unit in self.units.items()
        )
        return base + self._ripple_w * math.sin(t_s * _RIPPLE_RATE + self._phase)

    def activity(self, t_s: float) -> Activity:
        """The whole board at this instant."""
        return self._combined({gi: u.now(t_s) for gi, u in self.units.items()}, t_s, self.power_w(t_s))

    def mean(self, start_s: float, end_s: float) -> Activity:
        """The whole board over [start_s, end_s]; memory is that of the end."""
        if end_s <= start_s:
            return self.activity(start_s)
        power = (self.energy_j(end_s) - self.energy_j(start_s)) / (end_s - start_s)
        return self._combined({gi: u.mean(start_s, end_s) for gi, u in self.units.items()}, end_s, power)

    def _combined(self, parts: Mapping[int | None, Mapping[str, float]], t_s: float, power_w: float) -> Activity:
        total = {f: sum(self._scales[gi] * part[f] for gi, part in parts.items()) for f in _FIELDS}
        used = sum(unit.used_mib(t_s) for unit in self.units.values())
        return make_activity(total, used, power_w, resident=not self.device.mig)

    @property
    def _range_w(self) -> float:
        return self.device.model.limit_w - self.device.model.context_w

    @property
    def _ripple_w(self) -> float:
        return 0.005 * self.device.model.limit_w

    def _ripple_j(self, t_s: float) -> float:
        return -self._ripple_w / _RIPPLE_RATE * math.cos(t_s * _RIPPLE_RATE + self._phase)

    def _floor_w(self, t_s: float) -> float:
        context = any(s.load.context for unit in self.units.values() for s in unit.holders(t_s))
        return self.device.model.context_w if context else self.device.model.idle_w

    def _piece_j(self, start_s: float, end_s: float) -> float:
        """Without the ripple, over a stretch in which nobody comes or goes."""
        work = sum(self._scales[gi] * unit.power_seconds(start_s, end_s) for gi, unit in self.units.items())
        return self._floor_w(start_s) * (end_s - start_s) + self._range_w * work


# The ripple stands in for noise: its integral is known, so the energy counter stays honest.
_RIPPLE_RATE = 2.0 * math.pi / 47.0


def make_activity(figures: Mapping[str, float], used_mib: int, power_w: float | None, *, resident: bool) -> Activity:
    """An Activity from figures by name; without `resident` the device has no residency to report."""
    return Activity(
        residency=figures["residency"] if resident else None,
        engine=figures["engine"],
        sm=figures["sm"],
        occupancy=figures["occupancy"],
        tensor=figures["tensor"],
        dram=figures["dram"],
        fp64=figures["fp64"],
        fp32=figures["fp32"],
        fp16=figures["fp16"],
        pcie_rx=figures["pcie_rx"],
        pcie_tx=figures["pcie_tx"],
        memory_bytes=used_mib * MIB,
        power_w=power_w,
    )


def _add(out: dict[str, float], load: Load, factor: float) -> None:
    for field in _FIELDS:
        out[field] += factor * getattr(load, field)


def _segments(spans: Iterable[Span]) -> Iterator[_Segment]:
    """Cuts time wherever a span begins or ends; gaps become segments without spans."""
    pending = sorted(spans, key=lambda s: s.start_s)
    times = sorted({t for s in pending for t in (s.start_s, s.end_s)})
    active: list[Span] = []
    position = 0
    for i, start in enumerate(times):
        active = [s for s in active if s.end_s > start]
        while position < len(pending) and pending[position].start_s == start:
            active.append(pending[position])
            position += 1
        end = times[i + 1] if i + 1 < len(times) else FOREVER
        if start < FOREVER:
            yield _Segment(start, end, tuple(active))
