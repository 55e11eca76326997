"""Every metric that gpulens emits under its own name: unit, kind, scope and how it is reduced over a window.

Invariant: components emit catalogued metrics only, and a metric's meaning (scope, unit) is decided here and nowhere
else. Names follow the OpenTelemetry semantic conventions where one exists (`hw.*`), else they start with `gpu.`.
docs/metrics.md is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from gpulens.pipeline.data import Kind, Metric, Temporality


class MetricScope(Enum):
    """On whose resource a metric's points stand once owners are known."""

    DEVICE = "device"  # the node's, once per physical GPU, never an owner's: an XID must not move to the next pod
    WORK = "work"  # the owner's when the device has exactly one, else the node's
    OWNER = "owner"  # each owner's
    FACT = "fact"  # wherever the receiver put it: identity, allocation and signs of life that processors learn from


class Reduce(Enum):
    """How a window of readings becomes one point."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the catalogue. `binary` metrics are 0/1 and get a final 0 before their series ends. An attribute that
    ends with `.*` stands for all that begin so."""

    metric: Metric
    scope: MetricScope
    reduce: Reduce
    attributes: tuple[str, ...]
    binary: bool


DEVICE_KEYS: Final = ("hw.id", "hw.parent", "hw.name", "hw.model", "gpu.mig.profile")
"""Point attributes that say which device; every metric of a device may carry them."""

_D, _W, _O, _F = MetricScope.DEVICE, MetricScope.WORK, MetricScope.OWNER, MetricScope.FACT
_MEAN, _MIN, _MAX, _LAST = Reduce.MEAN, Reduce.MIN, Reduce.MAX, Reduce.LAST


def _gauge(
    name: str, unit: str, scope: MetricScope, reduce: Reduce, text: str, *keys: str, is_int: bool = False
) -> Entry:
    return Entry(Metric(name, unit, text, is_int=is_int), scope, reduce, keys, binary=False)


def _flag(name: str, scope: MetricScope, text: str, *keys: str) -> Entry:
    """A 0/1 gauge: unit "" because unit "1" would become a `_ratio` on the Prometheus side."""
    return Entry(Metric(name, "", text, is_int=True), scope, Reduce.LAST, keys, binary=True)


def _sum(name: str, unit: str, scope: MetricScope, text: str, *keys: str, is_int: bool, monotonic: bool) -> Entry:
    metric = Metric(name, unit, text, Kind.SUM, Temporality.CUMULATIVE, monotonic, is_int)
    return Entry(metric, scope, Reduce.LAST, keys, binary=False)


def _count(name: str, unit: str, scope: MetricScope, text: str, *keys: str, is_int: bool = True) -> Entry:
    return _sum(name, unit, scope, text, *keys, is_int=is_int, monotonic=True)


def _level(name: str, unit: str, scope: MetricScope, reduce: Reduce, text: str, *keys: str) -> Entry:
    """An up-down sum, as the semantic conventions type memory."""
    entry = _sum(name, unit, scope, text, *keys, is_int=True, monotonic=False)
    return Entry(entry.metric, scope, reduce, keys, binary=False)


_ROWS: Final[tuple[Entry, ...]] = (
    # --- work: what the owner does with the device
    _gauge("hw.gpu.utilization", "1", _W, _MEAN,
           "Share of time in which at least one kernel (or codec job) was resident; not a measure of work.",
           "hw.gpu.task"),
    _gauge("hw.gpu.utilization.max", "1", _W, _MAX,
           "Highest kernel residency among the driver's own samples since the last reading.", "hw.gpu.task"),
    _gauge("hw.gpu.utilization.p95", "1", _W, _MAX,
           "95th percentile of the driver's own residency samples since the last reading.", "hw.gpu.task"),
    _gauge("gpu.duty_cycle", "1", _W, _MEAN,
           "Kernel residency over the last 10 s as GKE's collector reports it."),
    _gauge("gpu.engine.active", "1", _W, _MEAN, "Share of time in which the graphics or compute engine was busy."),
    _gauge("gpu.sm.active", "1", _W, _MEAN, "Share of SM-time with at least one warp resident."),
    _gauge("gpu.sm.occupancy", "1", _W, _MEAN, "Resident warps relative to the SMs' maximum."),
    _gauge("gpu.pipe.active", "1", _W, _MEAN, "Share of cycles in which the pipe was busy.", "gpu.pipe"),
    _gauge("gpu.memory.bandwidth.utilization", "1", _W, _MEAN,
           "Share of time in which device memory was moving data."),
    _gauge("gpu.memory.copy.utilization", "1", _W, _MEAN,
           "Share of time in which the memory controller was busy (the driver's coarse figure)."),
    _level("hw.gpu.memory.usage", "By", _W, _MAX, "Device memory in use."),
    _level("hw.gpu.memory.limit", "By", _W, _LAST, "Device memory in total."),
    _gauge("hw.gpu.memory.utilization", "1", _W, _MAX, "Used share of the device memory that can be allocated."),
    _level("gpu.memory.free", "By", _W, _LAST, "Device memory that is free."),
    _level("gpu.memory.reserved", "By", _W, _LAST, "Device memory that the driver keeps for itself."),
    # --- device: facts of the physical GPU, never charged to an owner
    _gauge("hw.power", "W", _D, _MEAN, "Power drawn by the board.", "hw.type"),
    _gauge("gpu.power.limit", "W", _D, _LAST, "Power limit in force.", "gpu.power.limit.type"),
    _count("hw.energy", "J", _D, "Energy drawn since the driver was loaded.", "hw.type", is_int=False),
    _gauge("hw.temperature", "Cel", _D, _MAX, "Temperature.", "hw.sensor_location"),
    _gauge("hw.temperature.limit", "Cel", _D, _LAST, "Temperature at which the device acts.", "hw.limit_type"),
    _gauge("gpu.temperature.margin", "Cel", _D, _MIN, "Degrees left until the device slows down."),
    _gauge("gpu.clock.frequency", "Hz", _D, _MEAN, "Clock frequency.", "gpu.clock"),
    _count("gpu.clock.throttle.time", "s", _D, "Time spent with clocks held back.", "gpu.clock.violation",
           is_int=False),
    _flag("gpu.clock.throttle.reason", _D, "1 while clocks are held back for this reason.", "gpu.clock.reason"),
    _gauge("gpu.clock.events", "{sample}", _D, _MAX,
           "Samples with this clock event in the exporter's sliding window; not a counter.",
           "gpu.clock.event", "gpu.window"),
    _gauge("gpu.performance.state", "{state}", _D, _LAST, "Performance state; 0 is the fastest.", is_int=True),
    _count("hw.errors", "{error}", _D, "Errors.", "hw.type", "error.type", "gpu.error.source"),
    _flag("hw.status", _D, "1 for the state that the device is in.", "hw.type", "hw.state"),
    _flag("gpu.recovery.action", _D, "1 for what the driver says must be done to recover the device.",
          "gpu.recovery.action"),
    _count("gpu.xid.errors", "{error}", _D, "XID events by code.", "gpu.xid", "gpu.xid.class"),
    _gauge("gpu.xid.last", "{xid}", _D, _LAST,
           "Code of the last XID that the exporter saw since its start; a latch, not an event.", is_int=True),
    _gauge("gpu.xid.recent", "{error}", _D, _MAX,
           "XID events in the exporter's sliding window; not a counter.", "gpu.xid", "gpu.window", is_int=True),
    _count("gpu.rows.remapped", "{row}", _D, "Memory rows remapped.", "error.type"),
    _flag("gpu.rows.remap.failed", _D, "1 when a row could not be remapped."),
    _flag("gpu.rows.remap.pending", _D, "1 when a remapping waits for a reset."),
    _count("gpu.pages.retired", "{page}", _D, "Memory pages retired.", "error.type"),
    _flag("gpu.pages.retire.pending", _D, "1 when a page retirement waits for a reboot."),
    _count("gpu.nvlink.errors", "{error}", _D, "NVLink errors.", "gpu.nvlink.error", "gpu.nvlink"),
    _count("gpu.nvlink.io", "By", _D, "Bytes over NVLink.", "network.io.direction", "gpu.nvlink"),
    _gauge("gpu.nvlink.throughput", "By/s", _D, _MEAN, "Rate over NVLink.", "network.io.direction", "gpu.nvlink"),
    _count("hw.gpu.io", "By", _D, "Bytes over PCIe.", "network.io.direction"),
    _gauge("gpu.pcie.throughput", "By/s", _D, _MEAN, "Rate over PCIe.", "network.io.direction"),
    _count("gpu.pcie.replays", "{error}", _D, "PCIe packets sent again."),
    _gauge("gpu.health", "{level}", _D, _MAX, "Health watch result: 0 pass, 10 warning, 20 failure.",
           "gpu.health.watch", "gpu.health.error", is_int=True),
    _flag("gpu.vgpu.licensed", _D, "1 when the vGPU licence is active."),
    _flag("gpu.info", _D, "Facts of the GPU as attributes.", "gpu.pci.address", "gpu.serial", "gpu.driver.version",
          "gpu.index", "gpu.minor"),
    _gauge("gpu.process.count", "{process}", _D, _LAST, "Processes with a context on the device.",
           "gpu.process.type", is_int=True),
    # --- owner: stands on each owner's resource
    _gauge("gpu.process.memory.usage", "By", _O, _MAX, "Device memory held by the owner's processes.",
           "process.pid", is_int=True),
    _gauge("gpu.process.utilization", "1", _O, _MEAN, "Kernel residency of the owner's processes.", "process.pid"),
    # --- facts that processors learn from
    _flag("gpu.process.visible", _F,
          "1 when every process of the node can be seen; with 0 an empty list says nothing.", "gpu.source"),
    _flag("k8s.pod.info", _F, "Facts of a pod as attributes, on the pod's resource.", "k8s.pod.start_time",
          "gpu.owner.kind", "gpu.owner.name", "k8s.pod.label.*", "k8s.pod.annotation.*"),
    _flag("k8s.pod.phase", _F, "1 for the phase that the pod is in.", "k8s.pod.phase"),
    _flag("k8s.pod.ready", _F, "1 when the pod is ready."),
    _gauge("k8s.container.start_time", "s", _F, _LAST, "When the container was started, in seconds since 1970.",
           "container.id"),
    _flag("gpu.device.info", _F, "Join keys of a device.", "gpu.mig.gi", "gpu.mig.ci", "gpu.minor",
          "gpu.pci.address", "gpu.driver.version", "gpu.serial", "gpu.dra.driver", "gpu.dra.pool", "gpu.dra.device",
          "gpu.device.plugin.id"),
    _flag("gpu.allocated", _F,
          "1 on each owner's resource; on the node's 0 when nobody holds the device, 1 for processes of no pod.",
          "gpu.allocation.source"),
    _gauge("gpu.allocation.replicas", "{replica}", _F, _LAST, "Ways a device is shared; 1 is exclusive.",
           is_int=True),
    _flag("gpu.sharing", _F, "How a device is shared.", "gpu.sharing.mode"),
    _flag("gpu.attribution", _F, "How a device's owner was found, or why it has none.",
          "gpu.attribution.method", "gpu.attribution.reason"),
    _flag("gpu.source.up", _F, "1 when the source answered at this tick.", "gpu.source"),
    _gauge("gpu.source.interval", "s", _F, _LAST, "Time between two ticks of the source.", "gpu.source"),
    _gauge("gpu.source.window", "s", _F, _LAST,
           "Time before its own that a reading of the source covers.", "gpu.source"),
    _gauge("gpu.source.unchanged", "s", _F, _LAST, "Time for which the source's page has been byte-identical.",
           "gpu.source"),
    _count("gpu.telemetry.rejected", "{point}", _F, "Points struck out, by reason.", "gpu.source", "reason"),
    _flag("gpu.telemetry.suspect", _F, "1 while readings of the source are struck out.", "gpu.source", "reason"),
)  # fmt: skip

CATALOGUE: Final = MappingProxyType({row.metric.name: row for row in _ROWS})
"""Every row by metric name."""


def metric(name: str) -> Metric:
    """The catalogued metric of this name. Raises KeyError for a name that the catalogue does not have."""
    return CATALOGUE[name].metric


def scope_of(name: str) -> MetricScope | None:
    """The scope of a metric; None for a name that is not ours (foreign data passes untouched)."""
    entry = CATALOGUE.get(name)
    return None if entry is None else entry.scope
