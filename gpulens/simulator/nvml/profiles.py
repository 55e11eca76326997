"""What each card tells of itself through NVML, and which calls each older driver does not have.

Invariant: tables only. A figure that a card does not have is left out, and the fake then says 'not supported'; none is
zero for want of a figure. Everything is that of an idle card.

Which card has what follows the availability matrix of published captures and of NVML's header (T.Limit and margin on
Ada datacentre and newer, absolute thresholds before and on consumer cards, averaged power on Ampere and newer except
GA100, GPM on Hopper and newer, row remapping on Ampere and newer with ECC, page retirement before). Captured: L4-class
T.Limit -5/-2/0, H100 T.Limit -8/-2/0, margin 45, idle 69 W, 345 MHz, reserved memory of H100 and H200; GeForce
thresholds 101/96/90. T4, V100, A100, B200 and the unified-memory card are from documentation and not confirmed on
hardware; PCI ids and serial numbers are invented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulens.simulator.models import MIB, MODELS, MigProfile

Figures = Mapping[str, int | float | str]

_EVENTS_PLAIN = 0x4 | 0x8 | 0x10
_EVENTS_ECC = _EVENTS_PLAIN | 0x1 | 0x2
_EVENT_MIG = 0x100

GPM_RATIOS = {"engine": 1, "sm": 2, "occupancy": 3, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12, "fp16": 13}
"""GPM metric ids of the simulator's ratios; in percent."""
_GPM_IDS = (*range(1, 14), 20, 21, 60, 61)
_GPM_MIG_IDS = tuple(range(1, 14))


@dataclass(frozen=True, slots=True)
class NvmlProfile:
    """One card. `figures` are keys of the state file under its device; `gpm` are the metric ids it measures.

    `multiprocessors` is the number of SMs of one MIG compute slice; `links` the number of NVLinks.
    """

    name: str
    figures: Figures
    gpm: tuple[int, ...] = ()
    mig: Mapping[str, MigProfile] = field(default_factory=dict)
    multiprocessors: int = 0
    memory_mib: int = 0
    reserved_mib: int = 0
    links: int = 0


def _memory(model: str) -> Figures:
    card = MODELS[model]
    return {
        "memory.total": card.memory_mib * MIB,
        "memory.reserved": card.reserved_mib * MIB,
        "memory.used": 0,
        "bar1.used": 2 * MIB,
    }


def _power(idle_w: float, limit_w: float, *, averaged: bool) -> Figures:
    figures: dict[str, int | float | str] = {
        "power.usage_mw": round(idle_w * 1000),
        "power.instant_mw": round(idle_w * 1000),
        "power.enforced_mw": round(limit_w * 1000),
        "power.management_mw": round(limit_w * 1000),
        "power.default_mw": round(limit_w * 1000),
        "energy_mj": 0,
    }
    return figures | ({"power.average_mw": round(idle_w * 1000)} if averaged else {})


def _clocks(idle_mhz: int, sm_mhz: int, memory_mhz: int, video_mhz: int) -> Figures:
    return {
        "clock.0": idle_mhz,
        "clock.1": idle_mhz,
        "clock.2": memory_mhz,
        "clock.3": video_mhz,
        "clock.max.0": sm_mhz,
        "clock.max.1": sm_mhz,
        "clock.max.2": memory_mhz,
        "clock.max.3": video_mhz,
        "clock.reasons": 1,
        "performance_state": 0,
    }


_VIOLATIONS: Figures = {f"violation.{n}": 0 for n in (0, 1, 2, 3, 4, 5, 10, 11)}
_UNITS: Figures = {"utilization.encoder": 0, "utilization.decoder": 0}
_UNITS_NEW: Figures = {**_UNITS, "utilization.jpeg": 0, "utilization.ofa": 0}
_ACTIVITY: Figures = {"utilization.gpu": 0, "utilization.memory": 0, "process.sample.count": 0}
_PROCESSES: Figures = {f"process.{kind}.count": 0 for kind in ("compute", "graphics", "mps")}
_ECC_PLACES = (0, 1, 2, 3, 4, 5, 6, 7)
_ECC: Figures = {
    "ecc.mode": 1,
    "events": _EVENTS_ECC,
    **{f"ecc.{kind}.{counter}": 0 for kind in (0, 1) for counter in (0, 1)},
    **{f"ecc.{kind}.{counter}.{place}": 0 for kind in (0, 1) for counter in (0, 1) for place in _ECC_PLACES},
}
_RETIRED: Figures = {"retired.0": 0, "retired.1": 0, "retired.pending": 0}
_REMAP: Figures = {
    "remap.corrected": 0,
    "remap.uncorrected": 0,
    "remap.pending": 0,
    "remap.failure": 0,
    "remap.histogram.max": 640,
    "remap.histogram.high": 0,
    "remap.histogram.partial": 0,
    "remap.histogram.low": 0,
    "remap.histogram.none": 0,
}
_RECOVERY: Figures = {"field.230": 0}


def _thresholds(shutdown: int, slowdown: int, gpu: int, memory: int | None = None) -> Figures:
    figures: dict[str, int | float | str] = {
        "temperature.threshold.0": shutdown,
        "temperature.threshold.1": slowdown,
        "temperature.threshold.3": gpu,
    }
    return figures if memory is None else figures | {"temperature.threshold.2": memory}


def _limits(shutdown: int, slowdown: int, margin: int) -> Figures:
    """Relative limits; here the absolute thresholds are not supported."""
    return {"field.193": shutdown, "field.194": slowdown, "field.195": 0, "field.196": 0, "temperature.margin": margin}


def _pcie(generation: int, *, width: int = 16) -> Figures:
    return {
        "pcie.replay": 0,
        "pcie.generation": generation,
        "pcie.generation.max": generation,
        "pcie.width": width,
        "pcie.width.max": width,
        "pcie.throughput.0": 0,
        "pcie.throughput.1": 0,
        "field.197": 0,
        "field.198": 0,
    }


_FLIT, _DATA, _REPLAY, _RECOVER = (32, 96, 38), (39, 102, 45), (46, 108, 52), (53, 114, 59)


def links(count: int, *, traffic: bool) -> Figures:
    """NVLinks up to Hopper: error fields by link 0-5, 6-11 and in total, by scope for any link; traffic in KiB."""
    figures: dict[str, int | float | str] = {"nvlink.count": count}
    for link in range(count):
        figures |= {f"nvlink.{link}.state": 1, f"nvlink.{link}.version": 3}
        figures |= {f"nvlink.{link}.error.{counter}": 0 for counter in range(5)}
        figures |= {f"field.{number}.{link}": 0 for number in (161, 162, 163)}
        if traffic:
            figures |= {f"field.{number}.{link}": 0 for number in range(138, 142)}
    for low, high, total in (_FLIT, _DATA, _REPLAY, _RECOVER):
        figures |= {f"field.{low + link}": 0 for link in range(min(count, 6))}
        figures |= {f"field.{high + link}": 0 for link in range(min(max(count - 6, 0), 6))}
        figures[f"field.{total}"] = 0
    if traffic:
        figures |= {f"field.{number}.all": 0 for number in range(138, 142)}
    return figures


def _links_blackwell(count: int) -> Figures:
    """NVLink 5 has fields of its own; those of before are not supported."""
    figures: dict[str, int | float | str] = {"nvlink.count": count}
    numbers = (201, 202, 203, 204, *range(206, 216), 219, 220, 221, 222)
    for link in range(count):
        figures |= {f"nvlink.{link}.state": 1, f"nvlink.{link}.version": 5}
        figures |= {f"field.{number}.{link}": 0 for number in numbers}
    return figures


def _identity(architecture: int, capability: str, cores: int, brand: int, *, serial: bool = True) -> Figures:
    figures: dict[str, int | float | str] = {
        "architecture": architecture,
        "compute_capability": capability,
        "cores": cores,
        "brand": brand,
        "persistence": 1,
        "lost": 0,
        "mig.max": 0,
        "pci.device_id": "590352606",
        "pci.subsystem_id": "372379870",
    }
    return figures | ({"serial": "1320000000000"} if serial else {})


def _mig(*, gpm: bool) -> Figures:
    return {"mig.mode": 0, "mig.pending": 0, "mig.max": 7, "events": _EVENTS_ECC | _EVENT_MIG} | (
        {"gpm.supported": 1} if gpm else {}
    )


def _card(model: str, *parts: Figures, averaged: bool, video_mhz: int) -> Figures:
    card = MODELS[model]
    figures: dict[str, int | float | str] = {"events": _EVENTS_PLAIN, "temperature.gpu": 31}
    common = (
        _memory(model),
        _power(card.idle_w, card.limit_w, averaged=averaged),
        _clocks(card.idle_mhz, card.sm_mhz, card.memory_mhz, video_mhz),
        _VIOLATIONS,
        _ACTIVITY,
        _PROCESSES,
        _UNITS,
    )
    for part in (*common, *parts):
        figures |= dict(part)
    return figures | ({"temperature.memory": 39} if card.memory_temperature else {})


def _profile(
    model: str, figures: Figures, *, gpm: bool = False, multiprocessors: int = 0, links: int = 0
) -> NvmlProfile:
    card = MODELS[model]
    ids = _GPM_IDS if gpm else ()
    return NvmlProfile(card.name, figures, ids, card.mig, multiprocessors, card.memory_mib, card.reserved_mib, links)


def _bar1(mib: int) -> Figures:
    return {"bar1.total": mib * MIB}


def _a100(model: str, mib: int) -> NvmlProfile:
    figures = _card(
        model, _identity(7, "8.0", 6912, 14), _ECC, _mig(gpm=False), _REMAP, _RECOVERY, _thresholds(92, 89, 85, 95),
        _pcie(4), links(12, traffic=True), _UNITS_NEW, _bar1(mib), averaged=False, video_mhz=1275,
    )  # fmt: skip
    return _profile(model, figures, multiprocessors=14, links=12)


def _hopper(model: str, mib: int) -> NvmlProfile:
    figures = _card(
        model, _identity(9, "9.0", 16896, 14), _ECC, _mig(gpm=True), _REMAP, _RECOVERY, _limits(-8, -2, 45),
        _pcie(5), links(18, traffic=True), _UNITS_NEW, _bar1(mib), averaged=True, video_mhz=1545,
    )  # fmt: skip
    return _profile(model, figures, gpm=True, multiprocessors=16, links=18)


_T4 = _card(
    "T4", _identity(6, "7.5", 2560, 2), _ECC, _RETIRED, _RECOVERY, _thresholds(96, 93, 85), _pcie(3), _bar1(256),
    averaged=False, video_mhz=540,
)  # fmt: skip
_V100 = _card(
    "V100", _identity(5, "7.0", 5120, 2), _ECC, _RETIRED, _RECOVERY, _thresholds(90, 87, 83, 85), _pcie(3),
    links(6, traffic=False), _bar1(16384), averaged=False, video_mhz=1372,
)  # fmt: skip
_L4 = _card(
    "L4", _identity(8, "8.9", 7424, 14), _ECC, _REMAP, _RECOVERY, _limits(-5, -2, 40), _pcie(4), _UNITS_NEW,
    _bar1(32768), averaged=True, video_mhz=1770,
)  # fmt: skip
_B200 = _card(
    "B200", _identity(10, "10.0", 18944, 14), _ECC, _mig(gpm=True), _REMAP, _RECOVERY, _limits(-8, -2, 48), _pcie(6),
    _links_blackwell(18), _UNITS_NEW, {"remap.inactive.corrected": 0, "remap.inactive.uncorrected": 0},
    _bar1(262144), averaged=True, video_mhz=1500,
)  # fmt: skip
_GEFORCE = _card(
    "RTX4080", _identity(8, "8.9", 10240, 5, serial=False), _RECOVERY, _thresholds(101, 96, 90), _pcie(4), _UNITS_NEW,
    _bar1(16384), averaged=True, video_mhz=2205,
)  # fmt: skip
# Memory is the host's: the card says of its own that it is not supported, and tells that of processes.
_UNIFIED: Figures = (
    dict(_identity(10, "12.1", 6144, 14, serial=False))
    | dict(_ACTIVITY)
    | dict(_PROCESSES)
    | dict(_UNITS)
    | dict(_VIOLATIONS)
    | dict(_RECOVERY)
    | {k: v for k, v in _clocks(208, 3003, 0, 1800).items() if k not in {"clock.2", "clock.max.2"}}
    | {"power.usage_mw": 4000, "power.instant_mw": 4000, "power.average_mw": 4000, "energy_mj": 0}
    | {"temperature.gpu": 38, "events": _EVENTS_PLAIN}
)

PROFILES: Mapping[str, NvmlProfile] = {
    "T4": _profile("T4", _T4),
    "V100": _profile("V100", _V100, links=6),
    "A100": _a100("A100", 65536),
    "A100-80": _a100("A100-80", 131072),
    "L4": _profile("L4", _L4),
    "H100": _hopper("H100", 131072),
    "H200": _hopper("H200", 262144),
    "B200": _profile("B200", _B200, gpm=True, multiprocessors=18, links=18),
    "RTX4080": _profile("RTX4080", _GEFORCE),
    "GB10": NvmlProfile("NVIDIA GB10", _UNIFIED),
}

_R470_LACKS = frozenset(
    {
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleFree",
        "nvmlGpmSampleGet",
        "nvmlGpmMigSampleGet",
        "nvmlGpmMetricsGet",
    }
)
_R535_LACKS = frozenset(
    {
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
        "nvmlSystemGetDriverBranch",
        "nvmlDeviceGetJpgUtilization",
        "nvmlDeviceGetOfaUtilization",
    }
)
_R550_LACKS = frozenset({"nvmlDeviceGetTemperatureV", "nvmlDeviceGetMarginTemperature", "nvmlSystemGetDriverBranch"})
_NEWEST = frozenset({"nvmlDeviceGetRemappedRows_v2"})

_CONFIDENTIAL = frozenset({"nvmlDeviceGetConfComputeMemSizeInfo", "nvmlDeviceGetRunningProcessDetailList"})

DRIVERS: Mapping[str, tuple[str, frozenset[str]]] = {
    "R470": (
        "470.256.02",
        _R470_LACKS | _R535_LACKS | _CONFIDENTIAL | _NEWEST | {"nvmlDeviceGetCurrentClocksEventReasons"},
    ),
    "R535-early": ("535.98", _R535_LACKS | _NEWEST | {"nvmlDeviceGetRunningProcessDetailList"}),
    "R535": ("535.183.06", _R535_LACKS | _NEWEST),
    "R550": ("550.127.08", _R550_LACKS | _NEWEST),
    "R570": ("570.148.08", _NEWEST),
    "R580": ("580.105.08", _NEWEST),
    "R590": ("590.48.01", _NEWEST),
}
"""Version and missing calls of a driver branch. That 590.48 lacks RemappedRows_v2 was seen; the rest follows the
releases in which NVML's header first had each call, and field 230 is only answered from R570 on (see `FakeNvml`)."""
