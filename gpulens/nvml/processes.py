"""Processes with a context on a device, what they hold and how busy they kept it.

Invariant: a process is told only while the driver lists it. Utilisation samples of processes that are not listed, of
more than 100 % or without a time are the driver's junk and dropped (nvtop 110, go-nvml 51).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.reason import Failure, Reason

UTILIZATION: Final = "nvmlDeviceGetProcessUtilization"
_FIRST_WINDOW_US: Final = 1_000_000
_CLOCK_SET_US: Final = 120_000_000
"""So far ahead of what the driver says of its clock no sample of before can be."""

LISTS: Final = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}

_LONG_STRUCT: Final = "nvmlDeviceGetConfComputeMemSizeInfo"
_LATER: Final = "nvmlDeviceGetRunningProcessDetailList"


@dataclass(frozen=True, slots=True)
class Process:
    """A process with a context; `memory` in bytes, None where the driver can't tell."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class Busy:
    """A utilisation sample: percent of time in which the process's kernels ran."""

    pid: int
    stamp_us: int
    percent: int


def listed(line: Line, on: Target, kind: str) -> list[Process] | Failure:
    """The processes of one list ("compute", "graphics", "mps")."""
    call = LISTS[kind]
    if has_long_struct(line):
        return Failure(Reason.UNSUPPORTED, 0, call)

    def take(found: Iterable[Any]) -> list[Process]:
        return [Process(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found]

    return line.ask(take, call, on.handle, on=on)


def has_long_struct(line: Line) -> bool:
    """Whether this is one of the early R535 drivers whose process entries are longer than they say.

    They returned an extra member under the v3 symbol (nvitop, 535.98 and 535.104.05): read with the documented length,
    every second entry would be another process's memory under a wrong pid.
    """
    return line.gateway.exports(_LONG_STRUCT) and not line.gateway.exports(_LATER)


def merged(lists: Iterable[Iterable[Process]]) -> dict[int, int | None]:
    """pid -> bytes, over several lists. One that stands in two of them holds its memory once: the largest counts."""
    found: dict[int, int | None] = {}
    for processes in lists:
        for one in processes:
            known = found.get(one.pid)
            held = [bytes_ for bytes_ in (known, one.memory) if bytes_ is not None]
            found[one.pid] = max(held, default=None)
    return found


def newest(samples: Iterable[Busy]) -> dict[int, float]:
    """pid -> share of time (0..1) by its newest sample; of equally new ones the highest, since the processes of an
    MPS server each tell the server's."""
    best: dict[int, Busy] = {}
    for one in samples:
        if one.pid not in best or _rank(one) > _rank(best[one.pid]):
            best[one.pid] = one
    return {pid: one.percent / 100 for pid, one in best.items()}


def _rank(one: Busy) -> tuple[int, int]:
    return one.stamp_us, one.percent


def good(samples: Iterable[Busy], alive: Iterable[int]) -> list[Busy]:
    """The samples that can be believed: of a listed process, of 0 to 100 %, with a time."""
    here = set(alive)
    return [one for one in samples if one.pid in here and 0 <= one.percent <= 100 and one.stamp_us > 0]


class BusyWindow:
    """The utilisation samples of one GPU's processes since they were last asked for."""

    def __init__(self) -> None:
        self._last_us = 0

    def read(self, line: Line, on: Target, alive: Iterable[int], newest_us: int = 0) -> dict[int, float] | Failure:
        """pid -> share of time (0..1) of those that ran since the last reading; nothing about the others.

        `newest_us` is a late moment by the driver's clock; 0 where none is known.
        """
        if newest_us and self._last_us > newest_us + _CLOCK_SET_US:
            self._last_us = 0  # the clock that stamps the samples was set back, or a stamp was junk

        def take(found: Iterable[Any]) -> list[Busy]:
            return [Busy(int(s.pid), int(s.timeStamp), int(s.smUtil)) for s in found]

        found = line.ask(take, UTILIZATION, on.handle, self._last_us, on=on, what=UTILIZATION)
        if isinstance(found, Failure):
            return found
        samples = good(found, alive)
        last = max((s.stamp_us for s in samples), default=0)
        # at first the driver's whole buffer comes: only what is of the last second belongs to now, and the buffer may
        # have stood still for long
        since = self._last_us or max(0, last - _FIRST_WINDOW_US, newest_us - _FIRST_WINDOW_US)
        self._last_us = max(self._last_us, last)
        return newest(s for s in samples if s.stamp_us > since)
