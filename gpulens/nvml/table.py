"""Every series that the receiver can give of a GPU: what it is called, when it is read, and from what.

Invariant: this table is the whole list. A row that is added here is read, carried and emitted; nothing else names a
metric. `key` is a row's name on the wire and stays what it is.

Metric names and attributes are those of the catalogue. Units: base units; NVML's percent, mW, mJ, MHz, ns and KiB are
converted in the row. Field ids and calls are those of NVML's header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, TypeAlias

from gpulens.nvml import memory_errors
from gpulens.nvml.containers import NOWHERE, Container
from gpulens.nvml.fields import ALL_LINKS, MEMORY_TEMPERATURE, RECOVERY_ACTION, SLOWDOWN_LIMIT
from gpulens.nvml.protocol import Tier
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.sight import Level, Sight

Number: TypeAlias = "int | float | Failure"


@dataclass(frozen=True, slots=True)
class Point:
    """One of several series of a row: its own attributes, and whose it is (as Containers tells it)."""

    value: Number
    more: tuple[tuple[str, str | int], ...] = ()
    owner: Container | None = None


Reading: TypeAlias = "int | float | Failure | list[Point]"


class Presence(Enum):
    """When a device has a row at all."""

    ALWAYS = auto()  # whenever the device can tell
    COUNTED = auto()  # a counter: once it has been other than zero, and from then on
    RECENT = auto()  # a flag or gauge: while it is other than zero, and at zero for some minutes after


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    `read` gives the value of a device now, in the metric's unit; of a row that is `many`, a list of points. A
    `lasting` counter is kept on the card: neither a reset nor another driver starts it anew.
    """

    key: str
    metric: str
    attributes: tuple[tuple[str, str], ...]
    tier: Tier
    level: Level
    read: Callable[[Sight], Reading]
    presence: Presence = Presence.ALWAYS
    many: bool = False
    lasting: bool = False

    @property
    def sparse(self) -> bool:
        """A row that is not there from the start."""
        return self.presence is not Presence.ALWAYS


def _scaled(value: Number, factor: float) -> Number:
    return value if isinstance(value, Failure) else value * factor


def _percent(value: Number, call: str) -> Number:
    """A share of time by NVML's percent; more than all of it is the driver's junk."""
    if isinstance(value, Failure):
        return value
    return value / 100 if 0 <= value <= 100 else Failure(Reason.ERROR, 0, call)


def _divided(value: Number, by: int) -> Number:
    return value if isinstance(value, Failure) else value / by


def _either(first: Number, other: Callable[[], Number]) -> Number:
    """The other way to ask where the first is not supported."""
    return other() if isinstance(first, Failure) and first.reason is Reason.UNSUPPORTED else first


# ---- activity


def _residency(s: Sight) -> Number:
    spread = s.spread()
    if not isinstance(spread, Failure):
        return spread.mean / 100
    if spread.reason not in {Reason.UNSUPPORTED, Reason.EMPTY, Reason.PERMISSION}:
        return spread
    return _rate(s, 0)


def _rate(s: Sight, place: int) -> Number:
    rates = s.rates()
    return rates if isinstance(rates, Failure) else _percent(rates[place], "nvmlDeviceGetUtilizationRates")


def _residency_max(s: Sight) -> Number:
    spread = s.spread()
    return spread if isinstance(spread, Failure) else spread.highest / 100


def _residency_p95(s: Sight) -> Number:
    spread = s.spread()
    return spread if isinstance(spread, Failure) else spread.p95 / 100


def _copy(s: Sight) -> Number:
    return _rate(s, 1)


def _unit(call: str) -> Callable[[Sight], Reading]:
    return lambda s: _percent(s.first_of_pair(call), call)


def _gpm(metric: int) -> Callable[[Sight], Reading]:
    return lambda s: _divided(s.gpm(metric), 100)


# ---- memory


def _memory_used(s: Sight) -> Number:
    found = s.memory()
    return found if isinstance(found, Failure) else found.used


def _memory_total(s: Sight) -> Number:
    found = s.memory()
    return found if isinstance(found, Failure) else found.total


def _memory_reserved(s: Sight) -> Number:
    found = s.memory()
    if isinstance(found, Failure):
        return found
    return _NO_RESERVED if found.reserved is None else found.reserved


def _memory_share(s: Sight) -> Number:
    """Used share of what can be allocated. An older driver's `used` holds its own share: then it can't be told."""
    found = s.memory()
    if isinstance(found, Failure):
        return found
    if found.reserved is None or found.total <= found.reserved:
        return _NO_RESERVED
    share = found.used / (found.total - found.reserved)
    return min(share, 1.0) if share <= _MOST_SHARE else Failure(Reason.ERROR, 0, "nvmlDeviceGetMemoryInfo")


_MOST_SHARE: Final = 1.1
"""A ratio may read a little above 1 and then is 1; what is further off is no reading."""
_NO_RESERVED: Final = Failure(Reason.UNSUPPORTED, 0, "nvmlDeviceGetMemoryInfo")


# ---- temperature, power, clocks


def _temperature(s: Sight) -> Number:
    new = s.number("nvmlDeviceGetTemperatureV", 0)
    return _either(new, lambda: s.number("nvmlDeviceGetTemperature", 0))


def _threshold(which: int) -> Callable[[Sight], Reading]:
    """A temperature at which the GPU acts, where NVML tells it in degrees. Ada's datacentre cards and everything from
    Hopper on have limits relative to another one that is not told."""

    def read(s: Sight) -> Number:
        architecture = s.board.identity.architecture
        if architecture is None or architecture > _ADA:
            return _RELATIVE
        if architecture == _ADA and not isinstance(s.field("limit", SLOWDOWN_LIMIT), Failure):
            return _RELATIVE
        return s.number("nvmlDeviceGetTemperatureThreshold", which)

    return read


_ADA: Final = 8
_RELATIVE: Final = Failure(Reason.UNSUPPORTED, 0, "nvmlDeviceGetTemperatureThreshold")


def _clock(which: int) -> Callable[[Sight], Reading]:
    return lambda s: _scaled(s.number("nvmlDeviceGetClockInfo", which), 1_000_000)


def _violation(number: int, policy: int) -> Callable[[Sight], Reading]:
    return lambda s: _divided(s.violation_ns(number, policy), 1_000_000_000)


def _clock_reason(bit: int) -> Callable[[Sight], Reading]:
    def read(s: Sight) -> Number:
        new = s.number("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = _either(new, lambda: s.number("nvmlDeviceGetCurrentClocksThrottleReasons"))
        return reasons if isinstance(reasons, Failure) else int(bool(int(reasons) & bit))

    return read


# ---- errors and links


def _ecc(kind: int, counter: int) -> Callable[[Sight], Reading]:
    return lambda s: s.number("nvmlDeviceGetTotalEccErrors", kind, counter)


def _remapped(place: int) -> Callable[[Sight], Reading]:
    def read(s: Sight) -> Number:
        found = s.remapped_rows()
        return found if isinstance(found, Failure) else found[place]

    return read


def _flag(value: Number) -> Number:
    return value if isinstance(value, Failure) else int(bool(value))


def _recovery(action: int) -> Callable[[Sight], Reading]:
    def read(s: Sight) -> Number:
        found = s.field("health", RECOVERY_ACTION)
        return found if isinstance(found, Failure) else int(found == action)

    return read


def _link_errors(number: int) -> Callable[[Sight], Reading]:
    return lambda s: s.field("nvlink_errors", number)


def _link_recovery(s: Sight) -> Reading:
    return _either(s.field("nvlink_errors", 59), lambda: s.link_sum(215))


def _link_bytes(kib: int, on_nvlink5: int) -> Callable[[Sight], Reading]:
    def read(s: Sight) -> Number:
        old = _scaled(s.field("nvlink_io", kib, ALL_LINKS), 1024)
        return _either(old, lambda: s.link_sum(on_nvlink5))

    return read


# ---- processes


def _count(kind: str) -> Callable[[Sight], Reading]:
    """A list that shows only our own pid namespace counts nothing."""

    def read(s: Sight) -> Number:
        found = s.listed(kind)
        if isinstance(found, Failure):
            return found
        return len(found) if s.board.pids_visible else _HIDDEN

    return read


_HIDDEN: Final = Failure(Reason.UNSUPPORTED, 0, "pid namespace")


def _process_memory(s: Sight) -> Reading:
    found = s.holders()
    if isinstance(found, Failure):
        return found
    untold = Failure(Reason.UNSUPPORTED, 0, "nvmlDeviceGetComputeRunningProcesses")
    return [
        Point(untold if held is None else held, (("process.pid", pid),), s.container(pid))
        for pid, held in sorted(found.items())
    ]


def _process_busy(s: Sight) -> Reading:
    found = s.busy()
    if isinstance(found, Failure):
        return found
    return [Point(share, (("process.pid", pid),), s.container(pid)) for pid, share in found.items()]


def _allocated(s: Sight) -> Reading:
    """Each container that has a process here, once; and once, as nobody's, all processes that are of none or can't be
    looked up: somebody is there, although neither their memory nor their utilisation may be told."""
    found = s.holders()
    if isinstance(found, Failure):
        return found
    containers = {s.container(pid) or NOWHERE for pid in found}
    ordered = sorted(containers, key=lambda one: (one.pod_uid, one.id))
    return [Point(1, (), None if one == NOWHERE else one) for one in ordered]


# ---- who is there


def _facts(pairs: Iterable[tuple[str, str | int | None]]) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(value)) for key, value in pairs if value not in {None, ""})


def _info(s: Sight) -> Reading:
    who = s.board.identity
    facts = (
        ("gpu.pci.address", who.pci),
        ("gpu.serial", who.serial),
        ("gpu.driver.version", s.board.driver),
        ("gpu.minor", who.minor),
        ("gpu.index", who.index),
    )
    return [Point(1, _facts(facts))]


def _device_info(s: Sight) -> Reading:
    who, one = s.board.identity, s.instance
    facts: tuple[tuple[str, str | int | None], ...]
    if one is None:
        facts = (
            ("gpu.minor", who.minor),
            ("gpu.pci.address", who.pci),
            ("gpu.serial", who.serial),
            ("gpu.driver.version", s.board.driver),
        )
    else:
        facts = (("gpu.mig.gi", one.gi), ("gpu.mig.ci", one.ci), ("gpu.minor", who.minor))
    return [Point(1, _facts(facts))]


# ---- the table

_FAST, _PROC, _ERR, _INV = Tier.FAST, Tier.PROCESSES, Tier.ERRORS, Tier.INVENTORY
_WHOLE, _GPU, _WORKER, _ANY = Level.WHOLE, Level.GPU, Level.WORKER, Level.ANY
_GENERAL: Final = ("hw.gpu.task", "general")
_OF_GPU: Final = ("hw.type", "gpu")
_ALWAYS, _COUNTED, _RECENT = Presence.ALWAYS, Presence.COUNTED, Presence.RECENT
_CORRECTED: Final = ("error.type", "corrected")
_UNCORRECTED: Final = ("error.type", "uncorrected")
_SENT: Final = ("network.io.direction", "transmit")
_RECEIVED: Final = ("network.io.direction", "receive")


def _reasons() -> Iterable[Row]:
    """Bit 1 is 'idle', which is no throttling."""
    for bit, name in (
        (0x002, "application_clocks"),
        (0x004, "sw_power_cap"),
        (0x008, "hw_slowdown"),
        (0x010, "sync_boost"),
        (0x020, "sw_thermal"),
        (0x040, "hw_thermal"),
        (0x080, "hw_power_brake"),
        (0x100, "display_clock"),
    ):
        pair = (("gpu.clock.reason", name),)
        yield Row(f"clock.reason.{name}", "gpu.clock.throttle.reason", pair, _FAST, _GPU, _clock_reason(bit), _RECENT)


def _violations() -> Iterable[Row]:
    for number, policy, name in (
        (74, 0, "power"),
        (75, 1, "thermal"),
        (76, 2, "sync_boost"),
        (77, 3, "board_limit"),
        (78, 4, "low_util"),
        (79, 5, "reliability"),
    ):
        pair = (("gpu.clock.violation", name),)
        read, presence = _violation(number, policy), _COUNTED if policy > 1 else _ALWAYS
        yield Row(f"clock.violation.{name}", "gpu.clock.throttle.time", pair, _FAST, _GPU, read, presence)


def _recoveries() -> Iterable[Row]:
    for action, name in (
        (1, "gpu_reset"),
        (2, "node_reboot"),
        (3, "drain_p2p"),
        (4, "drain_and_reset"),
        (5, "imex_restart"),
        (6, "bus_reset"),
        (7, "system_reboot"),
    ):
        pair = (("gpu.recovery.action", name),)
        yield Row(f"recovery.{name}", "gpu.recovery.action", pair, _ERR, _GPU, _recovery(action), _RECENT)


def _pipes() -> Iterable[Row]:
    for metric, pipe, presence in ((5, "tensor", _ALWAYS), (11, "fp64", _RECENT), (12, "fp32", _ALWAYS),
                                   (13, "fp16", _ALWAYS)):  # fmt: skip
        pair = (("gpu.pipe", pipe),)
        yield Row(f"pipe.{pipe}", "gpu.pipe.active", pair, _FAST, _WORKER, _gpm(metric), presence)


def _units() -> Iterable[Row]:
    for call, task, presence in (
        ("nvmlDeviceGetEncoderUtilization", "encoder", _ALWAYS),
        ("nvmlDeviceGetDecoderUtilization", "decoder", _ALWAYS),
        ("nvmlDeviceGetJpgUtilization", "jpeg", _RECENT),
        ("nvmlDeviceGetOfaUtilization", "ofa", _RECENT),
    ):
        pair = (("hw.gpu.task", task),)
        yield Row(f"utilization.{task}", "hw.gpu.utilization", pair, _FAST, _WHOLE, _unit(call), presence)


def _ecc_rows() -> Iterable[Row]:
    volatile, aggregate = ("gpu.error.source", "ecc"), ("gpu.error.source", "ecc_aggregate")
    yield Row("errors.ecc.corrected", "hw.errors", (_OF_GPU, _CORRECTED, volatile), _ERR, _GPU, _ecc(0, 0))
    yield Row(
        "errors.ecc.uncorrected", "hw.errors", (_OF_GPU, _UNCORRECTED, volatile), _ERR, _ANY, memory_errors.uncorrected
    )
    for kind, error in ((0, _CORRECTED), (1, _UNCORRECTED)):
        pairs, read = (_OF_GPU, error, aggregate), _ecc(kind, 1)
        yield Row(f"errors.ecc_aggregate.{error[1]}", "hw.errors", pairs, _ERR, _GPU, read, _COUNTED, lasting=True)


def _link_rows() -> Iterable[Row]:
    for number, name in ((38, "crc_flit"), (45, "crc_data"), (52, "replay")):
        pair = (("gpu.nvlink.error", name),)
        yield Row(f"nvlink.{name}", "gpu.nvlink.errors", pair, _ERR, _WHOLE, _link_errors(number))
    pair = (("gpu.nvlink.error", "recovery"),)
    yield Row("nvlink.recovery", "gpu.nvlink.errors", pair, _ERR, _WHOLE, _link_recovery)
    pair = (("gpu.nvlink.error", "symbol"),)
    yield Row("nvlink.symbol", "gpu.nvlink.errors", pair, _ERR, _WHOLE, lambda s: s.link_sum(221))
    yield Row("nvlink.transmit", "gpu.nvlink.io", (_SENT,), _ERR, _WHOLE, _link_bytes(138, 202))
    yield Row("nvlink.receive", "gpu.nvlink.io", (_RECEIVED,), _ERR, _WHOLE, _link_bytes(139, 204))


def _process_counts() -> Iterable[Row]:
    for kind, presence in (("compute", _ALWAYS), ("graphics", _RECENT), ("mps", _RECENT)):
        pair = (("gpu.process.type", kind),)
        yield Row(f"process.count.{kind}", "gpu.process.count", pair, _PROC, _WORKER, _count(kind), presence)


ROWS: Final[tuple[Row, ...]] = (
    Row("utilization", "hw.gpu.utilization", (_GENERAL,), _FAST, _WHOLE, _residency),
    Row("utilization.max", "hw.gpu.utilization.max", (_GENERAL,), _FAST, _WHOLE, _residency_max),
    Row("utilization.p95", "hw.gpu.utilization.p95", (_GENERAL,), _FAST, _WHOLE, _residency_p95),
    *_units(),
    Row("memory.copy", "gpu.memory.copy.utilization", (), _FAST, _WHOLE, _copy),
    Row("memory.used", "hw.gpu.memory.usage", (), _FAST, _ANY, _memory_used),
    Row("memory.total", "hw.gpu.memory.limit", (), _FAST, _ANY, _memory_total),
    Row("memory.share", "hw.gpu.memory.utilization", (), _FAST, _ANY, _memory_share),
    Row("memory.reserved", "gpu.memory.reserved", (), _FAST, _ANY, _memory_reserved),
    Row("engine", "gpu.engine.active", (), _FAST, _WORKER, _gpm(1)),
    Row("sm", "gpu.sm.active", (), _FAST, _WORKER, _gpm(2)),
    Row("occupancy", "gpu.sm.occupancy", (), _FAST, _WORKER, _gpm(3)),
    *_pipes(),
    Row("memory.bandwidth", "gpu.memory.bandwidth.utilization", (), _FAST, _WORKER, _gpm(10)),
    Row("power", "hw.power", (_OF_GPU,), _FAST, _GPU, lambda s: _divided(s.number("nvmlDeviceGetPowerUsage"), 1000)),
    Row("power.limit.enforced", "gpu.power.limit", (("gpu.power.limit.type", "enforced"),), _FAST, _GPU,
        lambda s: _divided(s.number("nvmlDeviceGetEnforcedPowerLimit"), 1000)),
    Row("energy", "hw.energy", (_OF_GPU,), _FAST, _GPU,
        lambda s: _divided(s.number("nvmlDeviceGetTotalEnergyConsumption"), 1000)),
    Row("temperature.gpu", "hw.temperature", (("hw.sensor_location", "gpu"),), _FAST, _GPU, _temperature),
    Row("temperature.memory", "hw.temperature", (("hw.sensor_location", "memory"),), _FAST, _GPU,
        lambda s: s.field("temperature", MEMORY_TEMPERATURE)),
    Row("temperature.margin", "gpu.temperature.margin", (), _FAST, _GPU,
        lambda s: s.number("nvmlDeviceGetMarginTemperature")),
    Row("temperature.limit.throttled", "hw.temperature.limit", (("hw.limit_type", "throttled"),), _FAST, _GPU,
        _threshold(1)),
    Row("temperature.limit.critical", "hw.temperature.limit", (("hw.limit_type", "critical"),), _FAST, _GPU,
        _threshold(0)),
    Row("clock.sm", "gpu.clock.frequency", (("gpu.clock", "sm"),), _FAST, _GPU, _clock(1)),
    Row("clock.memory", "gpu.clock.frequency", (("gpu.clock", "memory"),), _FAST, _GPU, _clock(2)),
    *_violations(),
    *_reasons(),
    *_ecc_rows(),
    Row("rows.corrected", "gpu.rows.remapped", (_CORRECTED,), _ERR, _GPU, _remapped(0), lasting=True),
    Row("rows.uncorrected", "gpu.rows.remapped", (_UNCORRECTED,), _ERR, _GPU, _remapped(1), lasting=True),
    Row("rows.pending", "gpu.rows.remap.pending", (), _ERR, _GPU, _remapped(2), _RECENT),
    Row("rows.failed", "gpu.rows.remap.failed", (), _ERR, _GPU, _remapped(3), _RECENT),
    Row("pages.corrected", "gpu.pages.retired", (_CORRECTED,), _ERR, _GPU, lambda s: s.retired_pages(0), lasting=True),
    Row("pages.uncorrected", "gpu.pages.retired", (_UNCORRECTED,), _ERR, _GPU, lambda s: s.retired_pages(1),
        lasting=True),
    Row("pages.pending", "gpu.pages.retire.pending", (), _ERR, _GPU,
        lambda s: _flag(s.number("nvmlDeviceGetRetiredPagesPendingStatus"))),
    *_link_rows(),
    Row("pcie.transmit", "hw.gpu.io", (_SENT,), _ERR, _GPU, lambda s: s.field("pcie", 197)),
    Row("pcie.receive", "hw.gpu.io", (_RECEIVED,), _ERR, _GPU, lambda s: s.field("pcie", 198)),
    Row("pcie.replays", "gpu.pcie.replays", (), _ERR, _GPU, lambda s: s.number("nvmlDeviceGetPcieReplayCounter")),
    *_recoveries(),
    *_process_counts(),
    Row("process.memory", "gpu.process.memory.usage", (), _PROC, _WORKER, _process_memory, many=True),
    Row("process.utilization", "gpu.process.utilization", (), _PROC, _WORKER, _process_busy, many=True),
    Row("allocated", "gpu.allocated", (("gpu.allocation.source", "process"),), _PROC, _WORKER, _allocated, many=True),
    Row("info", "gpu.info", (), _INV, _GPU, _info, many=True),
    Row("device.info", "gpu.device.info", (), _INV, _ANY, _device_info, many=True),
)  # fmt: skip
"""In the order of emission."""

BY_KEY: Final[Mapping[str, Row]] = MappingProxyType({row.key: row for row in ROWS})
BY_TIER: Final[Mapping[Tier, tuple[Row, ...]]] = MappingProxyType(
    {tier: tuple(row for row in ROWS if row.tier is tier) for tier in Tier}
)
