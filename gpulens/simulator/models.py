"""GPU models that a world can hold, and how MIG cuts them.

Invariant: tables only; what a model can't report is left out of `profiling`, never given as zero.

Memory sizes are MiB as the driver reports them (L4: 24152899584 bytes on GKE's page). Power figures are the
vendor's limits and commonly seen idle values; `context_w` is what the board draws once a process holds a CUDA
context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1024 * 1024

_HOPPER = frozenset({"engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16", "pcie"})
_TURING = frozenset({"engine", "sm", "occupancy", "tensor", "dram", "fp32", "fp16", "pcie"})


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One way to cut an instance: `compute` of 7 slices, `memory` of 8."""

    name: str
    compute: int
    memory: int


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What is constant for a model. Memory in MiB, power in W, clocks in MHz.

    `profiling` names the profiling figures that the model has at all; `mig` is empty where MIG does not
    exist.
    """

    name: str
    memory_mib: int
    reserved_mib: int
    idle_w: float
    context_w: float
    limit_w: float
    idle_mhz: int
    sm_mhz: int
    memory_mhz: int
    memory_temperature: bool
    nvlink: bool
    profiling: frozenset[str]
    mig: Mapping[str, MigProfile]


def _profiles(*rows: tuple[str, int, int]) -> dict[str, MigProfile]:
    return {name: MigProfile(name, compute, memory) for name, compute, memory in rows}


_MIG_40 = _profiles(
    ("1g.5gb", 1, 1),
    ("1g.10gb", 1, 2),
    ("2g.10gb", 2, 2),
    ("3g.20gb", 3, 4),
    ("4g.20gb", 4, 4),
    ("7g.40gb", 7, 8),
)
_MIG_80 = _profiles(
    ("1g.10gb", 1, 1),
    ("1g.20gb", 1, 2),
    ("2g.20gb", 2, 2),
    ("3g.40gb", 3, 4),
    ("4g.40gb", 4, 4),
    ("7g.80gb", 7, 8),
)
_MIG_141 = _profiles(
    ("1g.18gb", 1, 1),
    ("1g.35gb", 1, 2),
    ("2g.35gb", 2, 2),
    ("3g.71gb", 3, 4),
    ("4g.71gb", 4, 4),
    ("7g.141gb", 7, 8),
)
_MIG_180 = _profiles(
    ("1g.23gb", 1, 1),
    ("1g.45gb", 1, 2),
    ("2g.45gb", 2, 2),
    ("3g.90gb", 3, 4),
    ("4g.90gb", 4, 4),
    ("7g.180gb", 7, 8),
)

MODELS: Mapping[str, GpuModel] = {
    "T4": GpuModel(
        "Tesla T4", 15360, 444, 9.5, 27.0, 70.0, 300, 1590, 5001, False, False, _TURING, {}
    ),
    "L4": GpuModel(
        "NVIDIA L4", 23034, 537, 13.0, 30.0, 72.0, 210, 2040, 6251, False, False, _TURING, {}
    ),
    "A100": GpuModel(
        "NVIDIA A100-SXM4-40GB", 40960, 624, 54.0, 72.0, 400.0, 210, 1410, 1215, True, True, _HOPPER, _MIG_40
    ),
    "A100-80": GpuModel(
        "NVIDIA A100-SXM4-80GB", 81920, 869, 62.0, 76.0, 400.0, 210, 1410, 1593, True, True, _HOPPER, _MIG_80
    ),
    "H100": GpuModel(
        "NVIDIA H100 80GB HBM3", 81559, 551, 69.0, 120.0, 700.0, 345, 1980, 2619, True, True, _HOPPER, _MIG_80
    ),
    "V100": GpuModel(
        "Tesla V100-SXM2-16GB", 16384, 267, 40.0, 58.0, 300.0, 135, 1530, 877, True, True, _HOPPER, {}
    ),
    "H200": GpuModel(
        "NVIDIA H200", 143771, 614, 71.0, 118.0, 700.0, 345, 1980, 3201, True, True, _HOPPER, _MIG_141
    ),
    "B200": GpuModel(
        "NVIDIA B200", 183359, 721, 140.0, 190.0, 1000.0, 120, 1965, 3996, True, True, _HOPPER, _MIG_180
    ),
    "RTX4080": GpuModel(
        "NVIDIA GeForce RTX 4080 SUPER", 16376, 392, 9.0, 32.0, 320.0, 210, 3105, 11501, False, False, _TURING, {}
    ),
}  # fmt: skip

# The driver numbers GPU instances by the size of the slice that they start on (A100: 1g gets 7..13, 2g 3..6).
_FIRST_GI: Mapping[int, int] = {7: 0, 4: 1, 3: 1, 2: 3, 1: 7}


def number_instances(profiles: list[MigProfile]) -> list[int]:
    """GPU-instance ids for the profiles, in their order: unique, and sparse as the driver's own are."""
    taken: set[int] = set()
    ids: list[int] = []
    for profile in profiles:
        gi = _FIRST_GI[profile.compute]
        while gi in taken:
            gi += 1
        taken.add(gi)
        ids.append(gi)
    return ids
