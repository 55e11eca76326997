"""Every field that a dcgm-exporter page can carry: what it is called, in which unit, and what it becomes.

Invariant: the unit is decided by the exact name, never by the field; a name that is not in the table is never
guessed at.

Sources: field numbers and names are DCGM's (dcgm_fields.h, with the aliases of 4.6) and go-dcgm's table of
legacy names; units are those of the exporter's counter tables; the renames of exporter 4.9 are those of its
release notes (the names of bytes fields and of the encoder's and decoder's ratio follow its rule and were
not seen on a page).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from gpulens.receivers.dcgm import units as u
from gpulens.receivers.dcgm.field import Field, Level, Named, Reading, Table, full_name

_NVLINK_LABEL: Final = (("nvlink", "gpu.nvlink"),)
_WINDOW: Final = ("window_size_in_ms", "gpu.window")
_CLOCK_REASONS: Final = (
    (0x001, "gpu_idle"),
    (0x002, "application_clocks"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal"),
    (0x040, "hw_thermal"),
    (0x080, "hw_power_brake"),
    (0x100, "display_clock"),
)


def _build() -> Table:
    table = Table()
    _add_work(table)
    _add_memory(table)
    _add_device(table)
    _add_errors(table)
    _add_links(table)
    return table


def _add_work(t: Table) -> None:
    only, instance = Level.WHOLE_GPU_ONLY, Level.INSTANCE
    t.add(
        203,
        "hw.gpu.utilization",
        ("hw.gpu.task", "general"),
        old={"DEV_GPU_UTIL": u.PERCENT},
        new={"DEV_GPU_UTIL_RATIO": u.UTIL_RATIO},
        legacy="dcgm_gpu_utilization",
        level=only,
        process="gpu.process.utilization",
    )
    t.add(
        204,
        "gpu.memory.copy.utilization",
        old={"DEV_MEM_COPY_UTIL": u.PERCENT},
        new={"DEV_MEM_COPY_UTIL_RATIO": u.UTIL_RATIO},
        legacy="dcgm_mem_copy_utilization",
        level=only,
    )
    t.add(
        206,
        "hw.gpu.utilization",
        ("hw.gpu.task", "encoder"),
        old={"DEV_ENC_UTIL": u.PERCENT},
        new={"DEV_ENC_UTIL_RATIO": u.UTIL_RATIO},
        legacy="dcgm_enc_utilization",
        level=only,
    )
    t.add(
        207,
        "hw.gpu.utilization",
        ("hw.gpu.task", "decoder"),
        old={"DEV_DEC_UTIL": u.PERCENT},
        new={"DEV_DEC_UTIL_RATIO": u.UTIL_RATIO},
        legacy="dcgm_dec_utilization",
        level=only,
    )
    # profiling fields are ratios by definition, under the old names and the new
    for number, metric, old, new in (
        (1001, "gpu.engine.active", "PROF_GR_ENGINE_ACTIVE", "PROF_GR_ENGINE_UTIL_RATIO"),
        (1002, "gpu.sm.active", "PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO"),
        (1003, "gpu.sm.occupancy", "PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO"),
        (1005, "gpu.memory.bandwidth.utilization", "PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO"),
    ):
        t.add(number, metric, old={old: u.RATIO}, new={new: u.RATIO}, level=instance)
    for number, pipe, old, new in (
        (1004, "tensor", "PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO"),
        (1006, "fp64", "PROF_PIPE_FP64_ACTIVE", "PROF_FP64_UTIL_RATIO"),
        (1007, "fp32", "PROF_PIPE_FP32_ACTIVE", "PROF_FP32_UTIL_RATIO"),
        (1008, "fp16", "PROF_PIPE_FP16_ACTIVE", "PROF_FP16_UTIL_RATIO"),
        (1013, "tensor_imma", "PROF_PIPE_TENSOR_IMMA_ACTIVE", "PROF_IMMA_UTIL_RATIO"),
        (1014, "tensor_hmma", "PROF_PIPE_TENSOR_HMMA_ACTIVE", "PROF_HMMA_UTIL_RATIO"),
        (1015, "tensor_dfma", "PROF_PIPE_TENSOR_DFMA_ACTIVE", "PROF_DFMA_UTIL_RATIO"),
        (1016, "int", "PROF_PIPE_INT_ACTIVE", "PROF_INT_UTIL_RATIO"),
    ):
        t.add(number, "gpu.pipe.active", ("gpu.pipe", pipe), old={old: u.RATIO}, new={new: u.RATIO}, level=instance)


def _add_memory(t: Table) -> None:
    instance = Level.INSTANCE
    t.add(
        250,
        "hw.gpu.memory.limit",
        old={"DEV_FB_TOTAL": u.MEBIBYTES},
        new={"DEV_FB_CAPACITY_BYTES": u.BYTES, "DEV_FB_TOTAL_BYTES": u.BYTES},
        level=instance,
    )
    t.add(
        251,
        "gpu.memory.free",
        old={"DEV_FB_FREE": u.MEBIBYTES},
        new={"DEV_FB_FREE_BYTES": u.BYTES},
        legacy="dcgm_fb_free",
        level=instance,
    )
    t.add(
        252,
        "hw.gpu.memory.usage",
        old={"DEV_FB_USED": u.MEBIBYTES},
        new={"DEV_FB_USED_BYTES": u.BYTES},
        legacy="dcgm_fb_used",
        level=instance,
        process="gpu.process.memory.usage",
    )
    t.add(
        253,
        "gpu.memory.reserved",
        old={"DEV_FB_RESERVED": u.MEBIBYTES},
        new={"DEV_FB_RESERVED_BYTES": u.BYTES},
        level=instance,
    )
    # used / (total - reserved), 0..1 in spite of its name
    t.add(
        254,
        "hw.gpu.memory.utilization",
        old={"DEV_FB_USED_PERCENT": u.RATIO},
        new={"DEV_FB_USED_RATIO": u.RATIO},
        level=instance,
    )


def _add_device(t: Table) -> None:
    gpu = ("hw.type", "gpu")
    t.add(
        155,
        "hw.power",
        gpu,
        old={"DEV_POWER_USAGE": u.WATTS},
        new={"DEV_BOARD_POWER_WATTS": u.WATTS},
        legacy="dcgm_power_usage",
    )
    t.add(
        156,
        "hw.energy",
        gpu,
        old={"DEV_TOTAL_ENERGY_CONSUMPTION": u.MILLIJOULES},
        legacy="dcgm_total_energy_consumption",
    )
    t.add(1611, "hw.energy", gpu, old={}, new={"DEV_GPU_ENERGY_JOULES_TOTAL": u.JOULES})
    t.add(
        160,
        "gpu.power.limit",
        ("gpu.power.limit.type", "management"),
        old={"DEV_POWER_MGMT_LIMIT": u.WATTS},
        new={"DEV_BOARD_POWER_LIMIT_WATTS": u.WATTS},
    )
    t.add(
        164,
        "gpu.power.limit",
        ("gpu.power.limit.type", "enforced"),
        old={"DEV_ENFORCED_POWER_LIMIT": u.WATTS},
        new={"DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS": u.WATTS},
    )
    t.add(
        140,
        "hw.temperature",
        ("hw.sensor_location", "memory"),
        old={"DEV_MEMORY_TEMP": u.CELSIUS},
        new={"DEV_MEMORY_TEMP_CELSIUS": u.CELSIUS},
        legacy="dcgm_memory_temp",
    )
    t.add(
        150,
        "hw.temperature",
        ("hw.sensor_location", "gpu"),
        old={"DEV_GPU_TEMP": u.CELSIUS},
        new={"DEV_GPU_TEMP_CELSIUS": u.CELSIUS},
        legacy="dcgm_gpu_temp",
    )
    t.add(
        158,
        "hw.temperature.limit",
        ("hw.limit_type", "throttled"),
        old={"DEV_SLOWDOWN_TEMP": u.CELSIUS},
        new={"DEV_SLOWDOWN_TEMP_CELSIUS": u.CELSIUS},
    )
    t.add(
        159,
        "hw.temperature.limit",
        ("hw.limit_type", "critical"),
        old={"DEV_SHUTDOWN_TEMP": u.CELSIUS},
        new={"DEV_SHUTDOWN_TEMP_CELSIUS": u.CELSIUS},
    )
    t.add(100, "gpu.clock.frequency", ("gpu.clock", "sm"), old={"DEV_SM_CLOCK": u.MEGAHERTZ}, legacy="dcgm_sm_clock")
    t.add(1603, "gpu.clock.frequency", ("gpu.clock", "sm"), old={}, new={"DEV_SM_CLOCK_HERTZ": u.HERTZ})
    t.add(
        101,
        "gpu.clock.frequency",
        ("gpu.clock", "memory"),
        old={"DEV_MEM_CLOCK": u.MEGAHERTZ},
        legacy="dcgm_memory_clock",
    )
    t.add(
        1604,
        "gpu.clock.frequency",
        ("gpu.clock", "memory"),
        old={},
        new={"DEV_MEMORY_CLOCK_HERTZ": u.HERTZ, "DEV_MEM_CLOCK_HERTZ": u.HERTZ},
    )
    t.add(190, "gpu.performance.state", old={"DEV_PSTATE": u.NUMBER})
    t.add(526, "gpu.vgpu.licensed", old={"DEV_VGPU_LICENSE_STATUS": u.FLAG})
    reasons = tuple(
        Reading("gpu.clock.throttle.reason", (("gpu.clock.reason", name),), u.bit(mask))
        for mask, name in _CLOCK_REASONS
    )
    names = {"DEV_CLOCK_THROTTLE_REASONS": u.COUNT, "DEV_CLOCKS_EVENT_REASONS": u.COUNT}
    t.put(Field(112, reasons, Level.GPU), names, {})
    _add_violations(t)


def _add_violations(t: Table) -> None:
    # nanoseconds; the exporter's help text said microseconds until December 2025
    for number, violation, name, legacy in (
        (240, "power", "POWER", "dcgm_power_violation"),
        (241, "thermal", "THERMAL", "dcgm_thermal_violation"),
        (242, "sync_boost", "SYNC_BOOST", "dcgm_sync_boost_violation"),
        (243, "board_limit", "BOARD_LIMIT", "dcgm_board_limit_violation"),
        (244, "low_util", "LOW_UTIL", "dcgm_low_util_violation"),
        (245, "reliability", "RELIABILITY", "dcgm_reliability_violation"),
        (246, "app_clock", "TOTAL_APP_CLOCKS", ""),
        (247, "base_clock", "TOTAL_BASE_CLOCKS", ""),
    ):
        t.add(
            number,
            "gpu.clock.throttle.time",
            ("gpu.clock.violation", violation),
            old={f"DEV_{name}_VIOLATION": u.NANOSECONDS},
            legacy=legacy,
        )


def _add_errors(t: Table) -> None:
    t.add(
        230, "gpu.xid.last", old={"DEV_XID_ERRORS": u.NUMBER}, new={"DEV_XID_ERROR": u.NUMBER}, legacy="dcgm_xid_errors"
    )
    # sliding windows, typed counter by the exporter and falling all the same
    t.add(0, "gpu.xid.recent", old={"DCGM_EXP_XID_ERRORS_COUNT": u.COUNT}, labels=(("xid", "gpu.xid"), _WINDOW))
    t.add(
        0,
        "gpu.clock.events",
        old={"DCGM_EXP_CLOCK_EVENTS_COUNT": u.SAMPLES},
        labels=(("clock_event", "gpu.clock.event"), _WINDOW),
    )
    t.add(
        0,
        "gpu.health",
        old={"DCGM_EXP_GPU_HEALTH_STATUS": u.NUMBER},
        labels=(("health_watch", "gpu.health.watch"), ("health_error_code", "gpu.health.error")),
    )
    corrected, uncorrected = ("error.type", "corrected"), ("error.type", "uncorrected")
    for number, kind, source, name, legacy in (
        (310, corrected, "ecc", "SBE_VOL", "dcgm_ecc_sbe_volatile_total"),
        (311, uncorrected, "ecc", "DBE_VOL", "dcgm_ecc_dbe_volatile_total"),
        (312, corrected, "ecc_aggregate", "SBE_AGG", "dcgm_ecc_sbe_aggregate_total"),
        (313, uncorrected, "ecc_aggregate", "DBE_AGG", "dcgm_ecc_dbe_aggregate_total"),
    ):
        t.add(
            number,
            "hw.errors",
            ("hw.type", "gpu"),
            kind,
            ("gpu.error.source", source),
            old={f"DEV_ECC_{name}_TOTAL": u.COUNT},
            legacy=legacy,
        )
    t.add(
        390,
        "gpu.pages.retired",
        corrected,
        old={"DEV_RETIRED_SBE": u.COUNT},
        new={"DEV_PAGE_RETIRED_SBE_TOTAL": u.COUNT},
        legacy="dcgm_retired_pages_sbe",
    )
    t.add(
        391,
        "gpu.pages.retired",
        uncorrected,
        old={"DEV_RETIRED_DBE": u.COUNT},
        new={"DEV_PAGE_RETIRED_DBE_TOTAL": u.COUNT},
        legacy="dcgm_retired_pages_dbe",
    )
    t.add(
        392,
        "gpu.pages.retire.pending",
        old={"DEV_RETIRED_PENDING": u.FLAG},
        new={"DEV_PAGE_RETIRED_PENDING_TOTAL": u.FLAG},
        legacy="dcgm_retired_pages_pending",
    )
    t.add(
        393,
        "gpu.rows.remapped",
        uncorrected,
        old={"DEV_UNCORRECTABLE_REMAPPED_ROWS": u.COUNT},
        new={"DEV_ROW_REMAP_UNCORRECTABLE_TOTAL": u.COUNT},
    )
    t.add(
        394,
        "gpu.rows.remapped",
        corrected,
        old={"DEV_CORRECTABLE_REMAPPED_ROWS": u.COUNT},
        new={"DEV_ROW_REMAP_CORRECTABLE_TOTAL": u.COUNT},
    )
    t.add(395, "gpu.rows.remap.failed", old={"DEV_ROW_REMAP_FAILURE": u.FLAG}, new={"DEV_ROW_REMAP_FAILED": u.FLAG})
    t.add(396, "gpu.rows.remap.pending", old={"DEV_ROW_REMAP_PENDING": u.FLAG})
    t.add(
        202,
        "gpu.pcie.replays",
        old={"DEV_PCIE_REPLAY_COUNTER": u.COUNT},
        new={"DEV_PCIE_REPLAY_TOTAL": u.COUNT},
        legacy="dcgm_pcie_replay_counter",
    )


def _add_links(t: Table) -> None:
    sent, received = ("network.io.direction", "transmit"), ("network.io.direction", "receive")
    # rates disguised as byte counts; the fields whose names end in _TOTAL are the true counters
    t.add(1009, "gpu.pcie.throughput", sent, old={"PROF_PCIE_TX_BYTES": u.BYTES_PER_SECOND})
    t.add(1010, "gpu.pcie.throughput", received, old={"PROF_PCIE_RX_BYTES": u.BYTES_PER_SECOND})
    t.add(
        200,
        "gpu.pcie.throughput",
        sent,
        old={"DEV_PCIE_TX_THROUGHPUT": u.KILOBYTES_PER_SECOND},
        legacy="dcgm_pcie_tx_throughput",
    )
    t.add(
        201,
        "gpu.pcie.throughput",
        received,
        old={"DEV_PCIE_RX_THROUGHPUT": u.KILOBYTES_PER_SECOND},
        legacy="dcgm_pcie_rx_throughput",
    )
    t.add(1091, "hw.gpu.io", sent, old={}, new={"PROF_PCIE_TX_BYTES_TOTAL": u.BYTE_COUNT})
    t.add(1092, "hw.gpu.io", received, old={}, new={"PROF_PCIE_RX_BYTES_TOTAL": u.BYTE_COUNT})
    t.add(1011, "gpu.nvlink.throughput", sent, old={"PROF_NVLINK_TX_BYTES": u.BYTES_PER_SECOND}, labels=_NVLINK_LABEL)
    t.add(
        1012, "gpu.nvlink.throughput", received, old={"PROF_NVLINK_RX_BYTES": u.BYTES_PER_SECOND}, labels=_NVLINK_LABEL
    )
    t.add(1201, "gpu.nvlink.io", sent, old={}, new={"DEV_NVLINK_TX_BYTES_TOTAL": u.BYTE_COUNT}, labels=_NVLINK_LABEL)
    t.add(
        1203, "gpu.nvlink.io", received, old={}, new={"DEV_NVLINK_RX_BYTES_TOTAL": u.BYTE_COUNT}, labels=_NVLINK_LABEL
    )
    t.add(
        449,
        "gpu.nvlink.throughput",
        old={"DEV_NVLINK_BANDWIDTH_TOTAL": u.MEGABYTES_PER_SECOND},
        new={"DEV_NVLINK_THROUGHPUT_TOTAL": u.NVLINK_RATE},
        legacy="dcgm_nvlink_bandwidth_total",
        labels=_NVLINK_LABEL,
    )
    for link in range(6):
        t.add(
            440 + link,
            "gpu.nvlink.throughput",
            ("gpu.nvlink", str(link)),
            old={f"DEV_NVLINK_BANDWIDTH_L{link}": u.MEGABYTES_PER_SECOND},
        )
    for number, error, name, legacy in (
        (409, "crc_flit", "CRC_FLIT", "flit_crc"),
        (419, "crc_data", "CRC_DATA", "data_crc"),
        (429, "replay", "REPLAY", "replay"),
        (439, "recovery", "RECOVERY", "recovery"),
    ):
        t.add(
            number,
            "gpu.nvlink.errors",
            ("gpu.nvlink.error", error),
            labels=_NVLINK_LABEL,
            old={f"DEV_NVLINK_{name}_ERROR_COUNT_TOTAL": u.COUNT},
            new={f"DEV_NVLINK_{name}_ERROR_TOTAL": u.COUNT},
            legacy=f"dcgm_nvlink_{legacy}_error_count_total",
        )
    # the fields that newer GPUs fill instead of the four above
    for number, error, old in ((497, "crc", "CRC"), (498, "recovery", "RECOVERY"), (499, "replay", "REPLAY")):
        new = {"DEV_NVLINK_CRC_ERROR_TOTAL": u.COUNT} if number == 497 else None
        t.add(
            number,
            "gpu.nvlink.errors",
            ("gpu.nvlink.error", error),
            labels=_NVLINK_LABEL,
            old={f"DEV_NVLINK_ERROR_DL_{old}": u.COUNT},
            new=new,
        )
    t.add(
        1214,
        "gpu.nvlink.errors",
        ("gpu.nvlink.error", "symbol"),
        labels=_NVLINK_LABEL,
        old={"DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS": u.COUNT, "DEV_NVLINK_RX_SYMBOL_ERRORS": u.COUNT},
    )


_TABLE: Final = _build()

NAMES: Final[Mapping[str, Named]] = MappingProxyType(_TABLE.exact)
"""By the name that exporters from 2.0 on print."""

LOWER_NAMES: Final[Mapping[str, Named]] = MappingProxyType(_TABLE.lower)
"""By the names of exporter 1.x (`dcgm_gpu_temp`) and of the old namespace (`dcgm_fi_dev_gpu_temp`)."""

_SILENT_NAMES: Final = (
    "DEV_COUNT", "DEV_GPU_TEMP_LIMIT", "DEV_GPU_TEMP_MARGIN_CELSIUS", "DEV_POWER_USAGE_INSTANT",
    "DEV_BOARD_POWER_RAW_WATTS", "DEV_FAN_SPEED", "DEV_FAN_SPEED_RATIO", "DCGM_EXP_P2P_STATUS",
)  # fmt: skip
SILENT: Final = frozenset(full_name(name) for name in _SILENT_NAMES)
"""Names that are known and say nothing that gpulens has a metric for."""


def find(name: str) -> Named | None:
    """The field and unit of a name on the page; None when the name is not known.

    Takes the exporter's own spelling, the lower-case ones of old exporters, and either with the `_total` that
    conversion to OpenMetrics adds to counters.
    """
    named = NAMES.get(name) or LOWER_NAMES.get(name)
    if named is None and name.endswith("_total"):
        bare = name.removesuffix("_total")
        named = NAMES.get(bare) or LOWER_NAMES.get(bare)
    return named


def is_dcgm_name(name: str) -> bool:
    """Whether a name claims to be DCGM's, so that not knowing it is worth a count."""
    return name[:5].lower() == "dcgm_" and name not in SILENT


def all_fields() -> Iterable[Field]:
    """Every field once."""
    return {id(named.field): named.field for named in (*NAMES.values(), *LOWER_NAMES.values())}.values()
