"""What a program does to a GPU: named loads, each a few constants and perhaps a square wave.

Invariant: the integral of a load over time has a closed form, so means over a window and the energy counter
are exact at any time scale and need no stepping.

Ratios are 0..1 of the unit that the program holds (a GPU or a MIG instance). The figures follow the labelled
scenarios of the idle catalogue: training 98/70/35 %, a spin loop that is resident all the time on 15 % of the
SMs, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Wave:
    """On for the first `on_s` seconds of every `period_s`."""

    period_s: float
    on_s: float

    def on_time(self, start_s: float, end_s: float) -> float:
        """Seconds of [start_s, end_s] that are on, both counted from the wave's origin."""
        return self._until(end_s) - self._until(start_s)

    def is_on(self, since_s: float) -> bool:
        """Whether the wave is on at this many seconds after its origin."""
        return math.fmod(since_s, self.period_s) < self.on_s

    def _until(self, x: float) -> float:
        whole, rest = divmod(x, self.period_s)
        return whole * self.on_s + min(rest, self.on_s)


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of work. Rates are bytes per second; `power` is a share of the range from context to limit.

    Memory is `memory_mib`, or `memory_share` of the unit where that is set; it is held also while the wave is
    off.
    """

    residency: float = 0.0
    engine: float = 0.0
    sm: float = 0.0
    occupancy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    fp64: float = 0.0
    fp32: float = 0.0
    fp16: float = 0.0
    power: float = 0.0
    pcie_rx: float = 0.0
    pcie_tx: float = 0.0
    memory_mib: float = 0.0
    memory_share: float = 0.0
    growth_mib_per_h: float = 0.0
    context: bool = True
    wave: Wave | None = None

    def on_time(self, start_s: float, end_s: float) -> float:
        """Seconds of work in [start_s, end_s], counted from the beginning of the load."""
        return end_s - start_s if self.wave is None else self.wave.on_time(start_s, end_s)

    def is_on(self, since_s: float) -> bool:
        """Whether it works at this moment."""
        return self.wave is None or self.wave.is_on(since_s)


RATIOS = ("residency", "engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16")
RATES = ("pcie_rx", "pcie_tx")

PROFILES: Mapping[str, Load] = {
    # Allocated and never opened: no CUDA context, no memory.
    "empty": Load(context=False),
    # A development workspace that nobody looks at.
    "parked": Load(memory_mib=448),
    "parked_model": Load(memory_share=0.70),
    "training": Load(.98, .97, .70, .45, .35, .45, 0, .12, .18, .86, 300e6, 90e6, memory_share=.62),
    "checkpoint": Load(pcie_tx=800e6, power=.10, memory_share=.62),
    # One busy-waiting kernel: resident without a pause, hardly any work.
    "spin": Load(1.0, 1.0, .15, .03, 0, .002, 0, .02, 0, .12, memory_mib=1024),
    "spin_one_block": Load(1.0, 1.0, .008, .001, 0, 0, 0, .001, 0, .035, memory_mib=620),
    # Ranks that wait in a collective for one that never comes.
    "hang": Load(1.0, 1.0, .18, .06, 0, .003, 0, .01, 0, .052, memory_share=.62),
    "inference_bursty": Load(
        .60, .55, .40, .25, .15, .30, 0, .08, .10, .45, 40e6, 10e6, memory_share=.70, wave=Wave(60, 5)
    ),
    "decode": Load(.97, .95, .35, .20, .03, .65, 0, .05, .06, .48, 15e6, 8e6, memory_share=.85),
    "prefill": Load(.95, .93, .60, .35, .30, .40, 0, .08, .16, .75, 60e6, 12e6, memory_share=.90),
    "embedding_tiny": Load(.04, .04, .01, .006, .002, .01, 0, .004, .004, .02, 2e6, 1e6, memory_mib=2300),
    # Waits for its input two thirds of the time.
    "data_loading": Load(
        1.0, .95, .57, .30, .23, .30, 0, .10, .12, .50, 5.8e9, 40e6, memory_share=.40, wave=Wave(3, 1.05)
    ),
    "rendering": Load(.60, .60, .10, .08, 0, .20, 0, .07, 0, .25, 20e6, 60e6, memory_mib=3100),
    "hpc_fp64": Load(.99, .98, .82, .50, 0, .55, .48, .05, 0, .90, 120e6, 60e6, memory_share=.35),
    "leak": Load(.85, .80, .45, .25, .12, .30, 0, .1, .1, .5, memory_mib=6144, growth_mib_per_h=819),
}  # fmt: skip


def adjusted(load: Load, changes: Mapping[str, float]) -> Load:
    """The load with some figures replaced: a plain memory size displaces a share, and the other way round."""
    out = replace(load, **dict(changes))  # type: ignore[arg-type]
    if "memory_mib" in changes and "memory_share" not in changes:
        out = replace(out, memory_share=0.0)
    return out
