"""What the driver's ring of samples says about the time since the last reading.

Invariant: only samples newer than the last one seen count, so no moment is told twice; where there is none the answer
is 'empty', not the last one again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.reason import Failure, Reason

GPU_UTILIZATION: Final = 1
"""NVML's sampling type; values in percent."""

_CALL: Final = "nvmlDeviceGetSamples"
_MOST_EMPTY: Final = 5


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples reduced, in the samples' unit. `p95` is the smallest value that 95 % of the samples do not exceed."""

    mean: float
    highest: float
    p95: float


def spread(values: Sequence[float]) -> Spread | None:
    """The reduction of samples; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    at = max(0, -(-len(ordered) * 95 // 100) - 1)
    mean = min(max(sum(ordered) / len(ordered), ordered[0]), ordered[-1])  # rounding must not leave the range
    return Spread(mean, ordered[-1], ordered[at])


class SampleWindow:
    """The samples of one GPU since they were last asked for."""

    def __init__(self) -> None:
        self._last_us = 0
        self._empty = 0

    @property
    def newest_us(self) -> int:
        """The newest moment seen, by the driver's clock; 0 where none was."""
        return self._last_us

    def seed(self, line: Line, on: Target) -> None:
        """Forgets what is in the ring by now."""
        self._fetch(line, on)

    def read(self, line: Line, on: Target) -> Spread | Failure:
        """The share of time with a kernel resident, in percent, over the samples since the last reading."""
        first = self._last_us == 0
        found = self._fetch(line, on)
        if isinstance(found, Failure):
            return found
        reduced = None if first else spread(found)
        return Failure(Reason.EMPTY, 0, _CALL) if reduced is None else reduced

    def _fetch(self, line: Line, on: Target) -> list[float] | Failure:
        def take(result: tuple[int, Iterable[Any]]) -> list[tuple[int, float]]:
            return list(_percents(*result))

        found = line.ask(take, _CALL, on.handle, GPU_UTILIZATION, self._last_us, on=on, what=_CALL)
        if isinstance(found, Failure):
            self._empty += found.reason is Reason.EMPTY
            # The ring always moves: where it stays empty, the clock that stamps it was set back. After any other
            # failure what is in it reaches back behind the reading that failed.
            if self._empty > _MOST_EMPTY or found.reason is not Reason.EMPTY:
                self._last_us = self._empty = 0
            return found
        self._empty = 0
        newer = [(at, value) for at, value in found if at > self._last_us]
        if newer:
            self._last_us = max(at for at, _ in newer)
        return [value for _, value in newer if 0 <= value <= 100]


def _percents(value_type: int, samples: Iterable[Any]) -> Iterable[tuple[int, float]]:
    for sample in samples:
        value = number_of(value_type, sample.sampleValue)
        if value is not None and sample.timeStamp:
            yield int(sample.timeStamp), value


_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def number_of(value_type: int, value: object) -> float | int | None:
    """A value of NVML's union by its type word; None for a type of a newer driver, or no number."""
    if not 0 <= value_type < len(_MEMBERS):
        return None
    found = getattr(value, _MEMBERS[value_type], None)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return found
