"""What NVML says while a known load runs, beside what the load must give."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bench.device.gateway import WINDOW_S, Gpu, told
from bench.device.load import Load, LoadError, loaded
from bench.device.markdown import table
from gpulens.nvml import processes
from gpulens.nvml.devices import Instance
from gpulens.nvml.gateway import Line
from gpulens.nvml.gpm import Windows
from gpulens.nvml.processes import BusyWindow
from gpulens.nvml.reason import Failure
from gpulens.nvml.samples import SampleWindow
from gpulens.nvml.sight import Board, Sight

SETTLE_S: Final = 1.0
"""At most; a third of the window where that is less."""
LOADS: Final = (("fma", 1.0), ("fma", 0.5), ("fma", 0.0), ("tensor", 1.0), ("stream", 1.0))
"""(kind, share of the SMs); a share of 0 is one SM."""

SHOWN: Final = {1: "engine", 2: "SM active", 3: "occupancy", 5: "tensor", 12: "FP32", 10: "DRAM"}
_CLOSE: Final = {2: 5.0, 3: 5.0, 5: 10.0, 12: 12.0, 10: 12.0}
"""Percent of the whole by which a measured figure may differ from the reckoned one."""

Percents = dict[int, float]


@dataclass(slots=True)
class Phase:
    """One load, or none: what was measured, what was reckoned. Percent, watts, MHz."""

    name: str
    residency: str = ""
    measured: dict[int, float | str] = field(default_factory=dict)
    reckoned: Percents = field(default_factory=dict)
    watts: float | None = None
    clock_mhz: float | None = None
    trouble: str = ""
    notes: list[str] = field(default_factory=list)


class Observer:
    """Watches one device over windows. What it keeps of the GPU is its own, so that no other window is disturbed."""

    def __init__(self, line: Line, gpu: Gpu, instance: Instance | None) -> None:
        self._line = line
        self.gpu = gpu
        self.instance = instance
        old = gpu.board
        self._board = Board(
            old.here, old.identity, Windows(WINDOW_S), old.containers, old.pids_visible, layout=old.layout
        )

    @property
    def uuid(self) -> str:
        """Of the device: what CUDA_VISIBLE_DEVICES takes."""
        return self.sight().on.uuid

    def sight(self) -> Sight:
        """The device now."""
        return Sight(self._line, self._board, self.instance)

    def watch(self, phase: Phase, seconds: float) -> None:
        """Fills in what was measured over a window of this length."""
        self._board.windows.clear(self._line)
        self._board.samples = SampleWindow()
        first = self.sight()
        first.gpm(2)
        first.spread()
        clocks: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))
            clock = self.sight().number("nvmlDeviceGetClockInfo", 1)
            if not isinstance(clock, Failure):
                clocks.append(clock)
        now = self.sight()
        for metric in SHOWN:
            value = now.gpm(metric)
            phase.measured[metric] = value.reason.value if isinstance(value, Failure) else value
        phase.residency = self._residency(now)
        power = now.number("nvmlDeviceGetPowerUsage")
        phase.watts = None if isinstance(power, Failure) else power / 1000
        phase.clock_mhz = sum(clocks) / len(clocks) if clocks else None

    def _residency(self, now: Sight) -> str:
        spread, rates = now.spread(), now.rates()
        if not isinstance(spread, Failure):
            return f"{spread.mean:.0f}"
        return rates.reason.value if isinstance(rates, Failure) else f"{rates[0]} (last period)"

    def close(self) -> None:
        """Frees its GPM samples."""
        self._board.windows.clear(self._line)

    def peak_bytes_per_s(self) -> float | None:
        """Of the device memory: two transfers a clock of the whole bus. None for an instance, which has a part."""
        now = self.sight()
        clock = now.number("nvmlDeviceGetMaxClockInfo", 2)
        bits = now.number("nvmlDeviceGetMemoryBusWidth")
        if self.instance is not None or isinstance(clock, Failure) or isinstance(bits, Failure):
            return None
        return 2 * clock * 1e6 * bits / 8 or None

    def lanes(self) -> int | None:
        """FP32 multiply-adds a clock."""
        cores = self.sight().number("nvmlDeviceGetNumGpuCores")
        return None if self.instance is not None or isinstance(cores, Failure) else int(cores) or None


def run(observer: Observer, seconds: float, extra: Callable[[Load], None]) -> tuple[list[Phase], list[str]]:
    """The phases one after the other; `extra` is called once, under full load. Second: why loads are missing."""
    idle = Phase("nothing")
    observer.watch(idle, seconds)
    idle.reckoned = {2: 0.0, 3: 0.0, 5: 0.0, 12: 0.0, 10: 0.0}
    phases, lacking = [idle], list[str]()
    for kind, share in LOADS:
        phase = Phase(kind)
        try:
            with _settled(kind, share, observer.uuid, seconds) as load:
                observer.watch(phase, seconds)
                if (kind, share) == LOADS[0]:
                    extra(load)
        except LoadError as error:
            lacking.append(f"{kind}: {error}")
            if "libcuda" in str(error):
                break  # it will not be there for the next one
            continue
        _reckon(phase, kind, load, observer)
        phases.append(phase)
    return phases, lacking


@contextmanager
def _settled(kind: str, share: float, uuid: str, seconds: float) -> Iterator[Load]:
    with loaded(kind, share, uuid, seconds + 12) as load:
        time.sleep(min(SETTLE_S, seconds / 3))
        yield load


def _reckon(phase: Phase, kind: str, load: Load, observer: Observer) -> None:
    facts, done = load.facts, load.done
    multiprocessors, blocks = facts["multiprocessors"], facts["blocks"]
    if not done:
        phase.notes.append("the load did not end in order")
    if kind == "stream":
        phase.name = "reads of a buffer in device memory"
        peak = observer.peak_bytes_per_s()
        phase.reckoned = {2: 100.0, 5: 0.0}
        if done and peak:
            rate = done["bytes"] / done["seconds"]
            phase.reckoned[10] = 100 * rate / peak
            phase.notes.append(f"{rate / 1e9:.0f} GB/s of {peak / 1e9:.0f} GB/s")
        return
    phase.name = (
        f"{'FP32' if kind == 'fma' else 'FP16 matrix'} multiply-adds on {blocks:.0f} of {multiprocessors:.0f} SMs"
    )
    share = 100 * blocks / multiprocessors
    phase.reckoned = {2: share, 3: share * facts["threads"] / facts["threads_per_multiprocessor"], 10: 0.0}
    rate = done["operations"] / done["seconds"] if done else 0.0
    phase.notes.append(f"{rate / 1e12:.1f} TFLOP/s")
    lanes = observer.lanes()
    if kind == "fma":
        phase.reckoned[5] = 0.0
        if lanes and phase.clock_mhz:
            phase.reckoned[12] = 100 * rate / 2 / (lanes * phase.clock_mhz * 1e6)


def tables(phases: list[Phase], lacking: list[str], with_gpm: bool) -> str:
    """What was measured, with what was reckoned in brackets."""
    head = (
        "load",
        "kernel resident %",
        *(f"{name} %" for name in SHOWN.values()),
        "W",
        "SM MHz",
        "as reckoned",
        "notes",
    )
    lines = []
    for phase in phases:
        cells = [_cell(phase, metric) for metric in SHOWN]
        watts = "" if phase.watts is None else f"{phase.watts:.0f}"
        clock = "" if phase.clock_mhz is None else f"{phase.clock_mhz:.0f}"
        verdict = _verdict(phase) if with_gpm else "no GPM"
        lines.append((phase.name, phase.residency, *cells, watts, clock, verdict, "; ".join(phase.notes)))
    parts = [
        "Means over a window; in brackets what the load must give, by what it did. A resident kernel is all that "
        "'utilisation' tells; the other columns are GPM.",
        table(head, lines),
    ]
    parts += [f"No load of this kind: {text}" for text in lacking]
    return "\n\n".join(parts)


def _cell(phase: Phase, metric: int) -> str:
    value = phase.measured.get(metric, "")
    shown = f"{value:.1f}" if isinstance(value, float | int) else value
    return f"{shown} ({phase.reckoned[metric]:.1f})" if metric in phase.reckoned else shown


def _verdict(phase: Phase) -> str:
    off = [
        SHOWN[metric]
        for metric, reckoned in phase.reckoned.items()
        if not isinstance(value := phase.measured.get(metric), float) or abs(value - reckoned) > _CLOSE[metric]
    ]
    return f"NO: {', '.join(off)}" if off else "yes"


def processes_seen(line: Line, observer: Observer, load: Load | None) -> str:
    """The lists and the utilisation samples of a device, and whether the load's process is in them."""
    on = observer.sight().on
    own = None if load is None else int(load.facts["pid"])
    lines, alive = [], set[int]()
    for kind in processes.LISTS:
        got = processes.listed(line, on, kind)
        if isinstance(got, Failure):
            lines.append((kind, told(got), "", ""))
            continue
        alive |= {one.pid for one in got}
        ours = next((one for one in got if one.pid == own), None)
        memory = "" if ours is None else "not told" if ours.memory is None else f"{ours.memory / 2**20:.0f} MiB"
        lines.append((kind, str(len(got)), "" if own is None else "yes" if ours else "no", memory))
    busy = BusyWindow().read(line, on, alive)
    share = told(busy) if isinstance(busy, Failure) else f"{len(busy)} processes ran"
    if not isinstance(busy, Failure) and own is not None:
        share += f", the load's {100 * busy[own]:.0f} % of the time" if own in busy else ", the load's not among them"
    text = table(("list", "processes", "the load's among them", "its memory"), lines)
    return f"{text}\n\nUtilisation samples: {share}. This script is {os.getpid()}, the load {own or 'did not run'}."
