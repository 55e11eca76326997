"""The fields that the simulated dcgm-exporter prints, in every naming that a real one has used.

Invariant: a table. The old names carry MHz, mJ, percent and MiB, those of 4.9 carry Hz, J, ratios and bytes;
`scale` leads from the first to the second. A field without a name in a naming is not on that page.

The names of the byte fields and of what 4.9 did with the other utilisations are not documented anywhere that
could be read; the byte fields follow the pattern of DCGM_FI_DEV_FB_CAPACITY_BYTES, the others are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpulens.simulator.activity import Activity
from gpulens.simulator.layout import Device
from gpulens.simulator.models import MIB

# What DCGM's blanks look like on a page: int32, int64 (not supported) and double.
BLANK_INT32 = 0x7FFFFFF0
BLANK_INT64 = 0x7FFFFFFFFFFFFFF2
BLANK_DOUBLE = 140737488355330.0


@dataclass(frozen=True, slots=True)
class Reading:
    """All that one row of the page is made of; `unit` is the instance's activity, `board` the whole GPU's."""

    device: Device
    is_mig: bool
    unit: Activity
    unit_mean: Activity
    board: Activity
    board_mean: Activity
    memory_total: int
    energy_j: float
    xid: int | None


Value = Callable[[Reading], "float | None"]


@dataclass(frozen=True, slots=True)
class Field:
    """One family. `profiling` names what the model must have; `honest` ones are off in the shipped list."""

    id: int
    old: str
    new: str | None
    legacy: str | None
    help: str
    value: Value
    integer: bool = True
    counter: bool = False
    scale: float = 1.0
    profiling: str = ""
    honest: bool = False
    blank: int | float | None = None


def _percent(pick: Callable[[Activity], float | None]) -> Value:
    """A board-wide utilisation: not available in MIG mode."""

    def value(r: Reading) -> float | None:
        ratio = pick(r.board)
        return None if r.is_mig or ratio is None else round(100 * ratio)

    return value


def _never(_: Activity) -> float:
    return 0.0


def _zero(_: Reading) -> float:
    return 0


def _clock(r: Reading) -> float:
    model = r.device.model
    return model.sm_mhz if r.board.engine > 0 or _draws_more(r) else model.idle_mhz


def _draws_more(r: Reading) -> bool:
    return (r.board.power_w or 0.0) > r.device.model.context_w * 1.2


def _heat(r: Reading) -> float:
    return (r.board.power_w or 0.0) / r.device.model.limit_w


def _memory_heat(r: Reading) -> float | None:
    return round(32 + 48 * _heat(r)) if r.device.model.memory_temperature else None


def _rows(r: Reading) -> float | None:
    return 0 if r.device.model.memory_temperature else None


def _free(r: Reading) -> float:
    return (r.memory_total - r.unit.memory_bytes) // MIB


def _nvlink(r: Reading) -> float | None:
    return round(r.board_mean.pcie_rx / 1e6) if r.device.model.nvlink else None


FIELDS: tuple[Field, ...] = (
    Field(100, "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_SM_CLOCK_HERTZ", "dcgm_sm_clock",
          "SM clock frequency", _clock, scale=1e6),
    Field(101, "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", "dcgm_memory_clock",
          "Memory clock frequency", lambda r: r.device.model.memory_mhz, scale=1e6),
    Field(140, "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", "dcgm_memory_temp",
          "Memory temperature",
          _memory_heat, blank=BLANK_INT64),
    Field(150, "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "dcgm_gpu_temp",
          "GPU temperature", lambda r: round(27 + 46 * _heat(r))),
    Field(155, "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS", "dcgm_power_usage",
          "Power draw", lambda r: r.board.power_w, integer=False, blank=BLANK_DOUBLE),
    Field(156, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",
          "dcgm_total_energy_consumption", "Energy used since the driver came up",
          lambda r: int(r.energy_j * 1000), counter=True, scale=1e-3),
    Field(164, "DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", None,
          "Power limit in force", lambda r: r.device.model.limit_w, integer=False, honest=True),
    Field(202, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL", "dcgm_pcie_replay_counter",
          "PCIe retries", _zero, counter=True),
    Field(203, "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "dcgm_gpu_utilization",
          "GPU utilization", _percent(lambda a: a.residency), scale=0.01, blank=BLANK_INT32),
    Field(204, "DCGM_FI_DEV_MEM_COPY_UTIL", None, "dcgm_mem_copy_utilization",
          "Memory utilization", _percent(lambda a: a.dram)),
    Field(206, "DCGM_FI_DEV_ENC_UTIL", None, "dcgm_enc_utilization", "Encoder utilization", _percent(_never)),
    Field(207, "DCGM_FI_DEV_DEC_UTIL", None, "dcgm_dec_utilization", "Decoder utilization", _percent(_never)),
    Field(230, "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", "dcgm_xid_errors",
          "Last XID seen", lambda r: r.xid),
    Field(250, "DCGM_FI_DEV_FB_TOTAL", "DCGM_FI_DEV_FB_CAPACITY_BYTES", None,
          "Framebuffer memory", lambda r: r.memory_total // MIB, scale=MIB, honest=True),
    Field(251, "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_FREE_BYTES", "dcgm_fb_free",
          "Framebuffer memory free", _free, scale=MIB, blank=BLANK_INT64),
    Field(252, "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES", "dcgm_fb_used",
          "Framebuffer memory used", lambda r: r.unit.memory_bytes // MIB, scale=MIB, blank=BLANK_INT64),
    Field(253, "DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DEV_FB_RESERVED_BYTES", None,
          "Framebuffer memory kept by the driver",
          lambda r: None if r.is_mig else r.device.model.reserved_mib, scale=MIB),
    Field(393, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL",
          "dcgm_uncorrectable_remapped_rows", "Rows remapped, uncorrectable", _rows, counter=True),
    Field(394, "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL",
          "dcgm_correctable_remapped_rows", "Rows remapped, correctable", _rows, counter=True),
    Field(395, "DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED", "dcgm_row_remap_failure",
          "Whether remapping of rows has failed", _rows),
    Field(449, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL",
          "dcgm_nvlink_bandwidth_total", "NVLink traffic over all lanes", _nvlink, counter=True, scale=1e6),
    Field(526, "DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_DEV_VGPU_LICENSE_STATUS", None,
          "vGPU licence status", _zero),
    Field(1001, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
          "dcgm_fi_prof_gr_engine_active", "Share of time in which the engine was active",
          lambda r: r.unit_mean.engine, integer=False, profiling="engine", blank=BLANK_DOUBLE),
    Field(1002, "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", "dcgm_fi_prof_sm_active",
          "Share of the SMs with a warp", lambda r: r.unit_mean.sm,
          integer=False, profiling="sm", honest=True, blank=BLANK_DOUBLE),
    Field(1003, "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO", "dcgm_fi_prof_sm_occupancy",
          "Share of warps resident", lambda r: r.unit_mean.occupancy,
          integer=False, profiling="occupancy", honest=True),
    Field(1004, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
          "dcgm_fi_prof_pipe_tensor_active", "Cycles of the tensor pipe", lambda r: r.unit_mean.tensor,
          integer=False, profiling="tensor"),
    Field(1005, "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO", "dcgm_fi_prof_dram_active",
          "Cycles of the memory interface", lambda r: r.unit_mean.dram, integer=False, profiling="dram"),
    Field(1006, "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_FP64_UTIL_RATIO",
          "dcgm_fi_prof_pipe_fp64_active", "Cycles of the fp64 pipe", lambda r: r.unit_mean.fp64,
          integer=False, profiling="fp64", honest=True),
    Field(1007, "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_FP32_UTIL_RATIO",
          "dcgm_fi_prof_pipe_fp32_active", "Cycles of the fp32 pipe", lambda r: r.unit_mean.fp32,
          integer=False, profiling="fp32", honest=True),
    Field(1008, "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "DCGM_FI_PROF_FP16_UTIL_RATIO",
          "dcgm_fi_prof_pipe_fp16_active", "Cycles of the fp16 pipe", lambda r: r.unit_mean.fp16,
          integer=False, profiling="fp16", honest=True),
    Field(1009, "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_TX_BYTES", "dcgm_fi_prof_pcie_tx_bytes",
          "Bytes per second sent over PCIe", lambda r: int(r.board_mean.pcie_tx), profiling="pcie"),
    Field(1010, "DCGM_FI_PROF_PCIE_RX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES", "dcgm_fi_prof_pcie_rx_bytes",
          "Bytes per second received over PCIe", lambda r: int(r.board_mean.pcie_rx), profiling="pcie"),
)  # fmt: skip

UTILISATION_IDS = frozenset({203, 252})
XID_TEXT = {13: "Graphics Engine Exception", 31: "GPU memory page fault", 43: "GPU stopped processing",
            48: "Double Bit ECC Error", 74: "NVLink Error", 79: "GPU has fallen off the bus",
            94: "Contained memory error", 95: "Uncontained memory error"}  # fmt: skip
