"""A whole page of each vendor whose mapping is shipped, with every metric, condition and sentinel that it names."""

from __future__ import annotations

from typing import Final

from tests.receivers.prometheus.vendor_rows import amd, ascend, intel


def page(*lines: tuple[str, str, float | str]) -> str:
    """The text of a page: (metric, labels in braces, value) a line."""
    return "".join(f"{name}{labels} {value}\n" for name, labels, value in lines)


_A0: Final = amd(0, pod="train-0")
_A1: Final = amd(1, pod="amd-device-metrics-exporter")
_A2: Final = amd(2, 0, "dpx", pod="gpu-metrics-exporter-x1")
_A5: Final = amd(5, 1, "cpx")
_A6: Final = amd(6, serial_number="N/A", gpu_uuid="UU-6")
_A7: Final = amd(7, serial_number="0x0000000000000000", gpu_uuid="UU-7", card_series="NA")
_VIOLATION: Final = "gpu_violation_{}_residency_percentage"


def _clock(card: int, kind: str, index: int) -> str:
    pod = "train-0" if card == 0 else "amd-device-metrics-exporter"
    return amd(card, pod=pod, clock_index=str(index), clock_type=kind)


AMD: Final = page(
    ("gpu_gfx_activity", amd(0, pod="train-0", card_series="MI300X", driver_version="6.10.5"), 57),
    ("amd_gpu_gfx_activity", _A1, 9),
    ("gpu_gfx_activity", _A5, 65535),
    ("gpu_gfx_busy_instantaneous", amd(8, xcc_index="0"), 90),
    ("gpu_gfx_busy_instantaneous", amd(2, 0, "dpx", xcc_index="0"), 20),
    ("gpu_gfx_busy_instantaneous", amd(2, 0, "dpx", xcc_index="1"), 60),
    ("gpu_gfx_busy_instantaneous", amd(2, 1, "dpx", xcc_index="0"), 65535),
    (
        "gpu_gfx_busy_instantaneous",
        amd(3, 1, "tpx", exported_namespace="ml", exported_pod="batch-0", exported_container="c", pod="exporter"),
        30,
    ),
    ("gpu_gfx_busy_instantaneous", amd(4, 1, "qpx"), 45),
    ("gpu_gfx_busy_instantaneous", _A5, 50),
    ("gpu_umc_activity", _A0, 12),
    ("gpu_umc_activity", _A1, 65535),
    ("gpu_prof_sm_active", _A0, 15),
    ("gpu_prof_occupancy_percent", _A0, 42),
    ("gpu_prof_tensor_active_percent", _A0, 5),
    ("gpu_used_vram", _A0, 283),
    ("gpu_used_vram", _A1, 4294967295),
    ("gpu_total_vram", _A0, 196592),
    ("gpu_total_vram", _A1, 0),
    ("gpu_free_vram", _A0, 196309),
    ("gpu_package_power", _A0, 255),
    ("gpu_power_usage", _A0, 251),
    ("gpu_package_power", _A1, 65535),
    ("gpu_power_usage", _A1, 251),
    ("gpu_package_power", _A2, 0),
    ("gpu_average_package_power", _A2, 90),
    ("gpu_energy_consumed", _A0, "1.5e+09"),
    ("gpu_energy_consumed", _A1, "1.8446744073709552e+19"),
    ("gpu_junction_temperature", _A0, 61),
    ("gpu_junction_temperature", _A1, 65535),
    ("gpu_edge_temperature", _A1, 40),
    ("gpu_junction_temperature", _A2, 0),
    ("gpu_edge_temperature", _A2, 41),
    ("gpu_memory_temperature", _A0, 55),
    ("gpu_memory_temperature", _A1, 0),
    ("gpu_memory_temperature", _A2, 65535),
    ("gpu_memory_temperature", _A6, -1),
    ("gpu_clock", _clock(0, "system", 0), 2100),
    ("gpu_clock", _clock(0, "system", 1), 1900),
    ("gpu_clock", _clock(0, "memory", 2), 900),
    ("gpu_clock", _clock(0, "memory", 3), 950),
    ("gpu_clock", _clock(0, "video", 4), 2500),
    ("gpu_clock", _clock(1, "GPU_CLOCK_TYPE_SYSTEM", 0), 1700),
    ("gpu_clock", _clock(1, "GPU_CLOCK_TYPE_SYSTEM", 1), 65535),
    ("gpu_clock", _clock(1, "GPU_CLOCK_TYPE_MEMORY", 2), 800),
    ("gpu_clock", _clock(1, "GPU_CLOCK_TYPE_MEMORY", 3), 65535),
    (_VIOLATION.format("ppt"), _A0, 3),
    (_VIOLATION.format("socket_thermal"), _A0, 0),
    (_VIOLATION.format("hbm_thermal"), _A0, 1),
    (_VIOLATION.format("processor_hot"), _A0, 2),
    (_VIOLATION.format("ppt"), _A1, 101),
    (_VIOLATION.format("socket_thermal"), _A1, 2),
    (_VIOLATION.format("processor_hot"), _A1, 101),
    (_VIOLATION.format("ppt"), _A2, 0),
    (_VIOLATION.format("vr_thermal"), _A2, 5),
    (_VIOLATION.format("processor_hot"), _A2, 0),
    (_VIOLATION.format("socket_thermal"), _A6, 101),
    ("gpu_ecc_correct_total", _A0, 4),
    ("gpu_ecc_uncorrect_total", _A0, 1),
    ("gpu_health", _A0, 1),
    ("gpu_health", _A1, 0),
    ("pcie_replay_count", _A0, 2),
    ("pcie_rx", _A0, 4096),
    ("pcie_tx", _A0, 8192),
    ("gpu_ecc_correct_total", _A7, "NaN"),
    ("gpu_xgmi_link_rx", _A0, 1),
    ("gpu_nodes_total", '{hostname="h"}', 2),
)

_N0: Final = ascend(0, pod="train-0")
_N1: Final = ascend(1, model_name="null", serial_number="NA")
_N2: Final = ascend(
    2,
    pod="exporter",
    model_name="310P3",
    serial_number="-",
    exported_namespace="ml",
    exported_pod_name="batch-0",
    exported_container_name="c",
)
_N3: Final = ascend(3, pod="npu-exporter-7kx")
_CHIP: Final = "npu_chip_info_"

ASCEND: Final = page(
    ("machine_npu_nums", "", 5),
    (f"{_CHIP}serial_number", ascend(0, serial_number="S-77"), 1),
    (f"{_CHIP}name", ascend(4), 1),
    (f"{_CHIP}overall_utilization", _N0, 80),
    (f"{_CHIP}utilization", _N0, 70),
    (f"{_CHIP}utilization", _N1, 10),
    (f"{_CHIP}cube_utilization", _N0, 33),
    (f"{_CHIP}vector_utilization", _N0, 21),
    (f"{_CHIP}hbm_bandwidth_utilization", _N0, 44),
    (f"{_CHIP}hbm_used_memory", _N0, 3000),
    (f"{_CHIP}hbm_total_memory", _N0, 65536),
    (f"{_CHIP}used_memory", _N1, 100),
    (f"{_CHIP}total_memory", _N1, 16384),
    (f"{_CHIP}used_memory", _N2, 2500),
    (f"{_CHIP}total_memory", _N2, 24576),
    (f"{_CHIP}power", _N0, 245.5),
    (f"{_CHIP}power", _N3, 70),
    (f"{_CHIP}temperature", _N0, 48),
    (f"{_CHIP}temperature", _N1, -1),
    (f"{_CHIP}hbm_temperature", _N0, 52),
    (f"{_CHIP}hbm_temperature", _N1, -1),
    (f"{_CHIP}aicore_current_freq", _N0, 1800),
    (f"{_CHIP}aicore_current_freq", _N1, 4294967295),
    (f"{_CHIP}hbm_ecc_single_bit_error_cnt", _N0, 3),
    (f"{_CHIP}hbm_ecc_double_bit_error_cnt", _N0, 1),
    (f"{_CHIP}hbm_ecc_total_single_bit_error_cnt", _N0, 30),
    (f"{_CHIP}hbm_ecc_total_double_bit_error_cnt", _N0, 2),
    (f"{_CHIP}hbm_ecc_single_bit_isolated_pages_cnt", _N0, 5),
    (f"{_CHIP}hbm_ecc_double_bit_isolated_pages_cnt", _N0, 4),
    (f"{_CHIP}health_status", _N0, 1),
    (f"{_CHIP}health_status", _N1, 0),
    (f"{_CHIP}process_info_num", _N0, 1),
    (f"{_CHIP}process_info", ascend(0, pod="train-0", process_id="4711", container_name="ml_train-0_main"), 2800),
    (f"{_CHIP}process_info", ascend(1, model_name="null", process_id=""), 0),
    (f"{_CHIP}hccs_statistic_info_crc_err_cnt_1", _N0, 6),
)

GAUDI_DEVICE: Final = "01P0-HL2080A0-15-TNBS71-04-07-00"
_G0: Final = (
    f'{{UUID="{GAUDI_DEVICE}",serial="S-A",model="HL-225",bus_id="0000:19:00.0",'
    'namespace="ml",pod="llm-0",container="c"}'
)
_G1: Final = (
    '{UUID="N/A",uuid="UUID-B",serial="unknown",model="NA",device_name="HL-325L",pci_bus_id="0000:1A:00.0",'
    'exported_namespace="ml",exported_pod="batch-0",exported_container="d",namespace="ml",pod="exporter-1"}'
)
_G2: Final = '{serial="S-C",namespace="ml",pod="habana-metric-exporter-ds-2x"}'

GAUDI: Final = page(
    ("habanalabs_utilization", _G0, 97),
    ("habanalabs_utilization", _G2, 5),
    ("habanalabs_memory_used_bytes", _G0, 1024),
    ("habanalabs_memory_total_bytes", _G0, 98 * 2**30),
    ("habanalabs_memory_free_bytes", _G0, 98 * 2**30 - 1024),
    ("habanalabs_power_mW", _G0, 420500),
    ("habanalabs_power_mW", _G1, 4294967295),
    ("habanalabs_power_default_limit_mW", _G0, 600000),
    ("habanalabs_temperature_onchip", _G0, 66),
    ("habanalabs_temperature_onchip", _G1, -1),
    ("habanalabs_temperature_threshold_slowdown", _G0, 105),
    ("habanalabs_temperature_threshold_shutdown", _G0, 120),
    ("habanalabs_clock_soc_mhz", _G0, 1650),
    ("habanalabs_pending_rows_state", _G0, 0),
    ("habanalabs_pending_rows_state", _G1, 2),
    ("habanalabs_pending_rows_with_single_bit_ecc_errors", _G0, 4),
    ("habanalabs_pending_rows_with_double_bit_ecc_errors", _G0, 1),
    ("habanalabs_pcie_replay_count", _G0, 3),
    ("habanalabs_energy", _G0, 123456),
)


def _util(name: str, task: str, tile: str = "", **more: str) -> str:
    return intel(name, tile, hw_gpu_task=task, **more)


def _module(name: str, where: str = "device", **more: str) -> str:
    return intel(name, hw_memory_location=where, **more)


def _at(where: str, tile: str = "", **more: str) -> str:
    return intel("s", tile, hw_sensor_location=where, **more)


def _limit(where: str, level: str = "sustained", **more: str) -> str:
    return _at(where, com_intel_power_limit_level=level, **more)


def _heat(name: str, where: str, statistic: str = "max", tile: str = "", **more: str) -> str:
    return intel(name, tile, hw_sensor_location=where, statistic=statistic, **more)


def _speed(name: str, domain: str, aggregation: str = "avg", **more: str) -> str:
    return intel(name, hw_frequency_domain=domain, aggregation=aggregation, **more)


def _faults(kind: str, of: str, category: str) -> str:
    return intel("x", hw_type=of, error_type=kind, error_category=category)


def _state(name: str, of: str, state: str) -> str:
    return intel(name, hw_type=of, hw_state=state)


_B: Final = {"hw_id": "1234-1", "pci_bdf": "0000:06:00.0"}
_C: Final = {"hw_id": "1234-2", "pci_bdf": "0000:07:00.0"}
_HEALTHY: Final = ("failed", "warning", "critical", "needs_cleaning", "predicted_failure", "throttled", "unknown")

INTEL: Final = page(
    ("hw_gpu_info", intel("gpu-1", hw_model="Max 1550", hw_serial_number="SN-1"), 1),
    ("hw_gpu_utilization_ratio", _util("e1", "all"), 0.125),
    ("hw_gpu_utilization_ratio", _util("e2", "all"), 0.0625),
    ("hw_gpu_utilization_ratio", _util("e3", "compute-all"), 0.75),
    ("hw_gpu_utilization_ratio", _util("e4", "compute-all"), 0.5),
    ("hw_gpu_utilization_ratio", _util("e5", "copy-all"), 0.875),
    ("hw_gpu_utilization_ratio", _util("e1", "all", "1"), 0.25),
    ("hw_gpu_utilization_ratio", _util("e1", "all", **_B), 1.5),
    ("hw_gpu_utilization_ratio", _util("e3", "compute-all", **_B), 1.5),
    ("hw_memory_usage_bytes", _module("m1"), 1000),
    ("hw_memory_usage_bytes", _module("m2"), 500),
    ("hw_memory_usage_bytes", _module("m3", "system"), 9),
    ("hw_memory_size_bytes", _module("m1"), 4000),
    ("hw_memory_size_bytes", _module("m2"), 2000),
    ("hw_memory_size_bytes", _module("m3", "system"), 7),
    ("hw_memory_free_bytes", _module("m1"), 3000),
    ("hw_memory_free_bytes", _module("m2"), 1500),
    ("hw_memory_free_bytes", _module("m3", "system"), 5),
    ("hw_memory_bandwidth_utilization_ratio", _module("m1"), 0.25),
    ("hw_memory_bandwidth_utilization_ratio", _module("m2"), 0.75),
    ("hw_memory_bandwidth_utilization_ratio", _module("m3", "system"), 1),
    ("hw_memory_bandwidth_utilization_ratio", _module("m1", **_B), 1.5),
    ("hw_power_watts", _at("card"), 350),
    ("hw_power_watts", _at("package"), 310.5),
    ("hw_power_watts", _at("package", **_B), 200.5),
    ("hw_power_watts", _at("gpu", **_C), 55),
    ("hw_power_watts", _at("memory", "1"), 9),
    ("hw_energy_joules_total", _at("card"), 5),
    ("hw_energy_joules_total", _at("package"), 4),
    ("hw_energy_joules_total", _at("package", **_B), 3),
    ("hw_energy_joules_total", _at("gpu", **_C), 7),
    ("hw_energy_joules_total", _at("memory", "1"), 9),
    ("hw_power_limit_watts", _limit("card"), 600),
    ("hw_power_limit_watts", _limit("package"), 500),
    ("hw_power_limit_watts", _limit("card", "peak"), 700),
    ("hw_power_limit_watts", _limit("memory"), 800),
    ("hw_power_limit_watts", _limit("package", **_B), 450),
    ("hw_power_limit_watts", _limit("card", **_C), "3e+08"),
    ("hw_temperature_celsius", _heat("t1", "gpu"), 48),
    ("hw_temperature_celsius", _heat("t2", "gpu"), 47),
    ("hw_temperature_celsius", _heat("t1", "gpu", tile="1"), 51),
    ("hw_temperature_celsius", _heat("t3", "global", **_B), 50),
    ("hw_temperature_celsius", _heat("t4", "global", **_B), 49),
    ("hw_temperature_celsius", _heat("t5", "memory"), 60),
    ("hw_temperature_celsius", _heat("t6", "memory"), 58),
    ("hw_temperature_celsius", _heat("t7", "voltage-regulator", **_C), 70),
    *(("hw_temperature_celsius", _heat("t8", where, "min", "2"), 20) for where in ("gpu", "global", "memory")),
    ("hw_frequency_hertz", _speed("f1", "gpu"), "1.2e+09"),
    ("hw_frequency_hertz", _speed("f2", "gpu"), "1.1e+09"),
    ("hw_frequency_hertz", _speed("f1", "gpu", "max"), "1.5e+09"),
    ("hw_frequency_hertz", _speed("f3", "memory"), "1.3e+09"),
    ("hw_frequency_hertz", _speed("f4", "memory"), "1.25e+09"),
    ("hw_frequency_hertz", _speed("f3", "memory", "max"), "1.6e+09"),
    ("hw_frequency_hertz", _speed("f5", "media", **_B), "9e+08"),
    ("hw_errors_total", _faults("correctable", "gpu", "a"), 5),
    ("hw_errors_total", _faults("correctable", "gpu", "b"), 6),
    ("hw_errors_total", _faults("correctable", "memory", "a"), 7),
    ("hw_errors_total", _faults("correctable", "fan", "a"), 8),
    ("hw_errors_total", _faults("uncorrectable", "gpu", "a"), 2),
    ("hw_errors_total", _faults("uncorrectable", "gpu", "b"), 1),
    ("hw_errors_total", _faults("uncorrectable", "memory", "a"), 4),
    ("hw_errors_total", _faults("uncorrectable", "fan", "a"), 8),
    ("hw_status", _state("gpu-1", "gpu", "ok"), 1),
    ("hw_status", _state("gpu-1", "gpu", "degraded"), 0),
    *(("hw_status", _state("gpu-1", "gpu", state), 0) for state in _HEALTHY),
    ("hw_status", _state("gpu-1", "gpu", "ecc_disabled"), 1),
    ("hw_status", _state("m1", "memory", "ok"), 1),
    ("hw_status", _state("m2", "memory", "ok"), 0),
    ("hw_status", _state("m1", "memory", "degraded"), 0),
    ("hw_status", _state("m2", "memory", "degraded"), 1),
    ("hw_status", _state("fan-1", "fan", "ok"), 1),
    ("hw_status", _state("fan-1", "fan", "degraded"), 1),
    ("hw_gpu_io_bytes_total", intel("io", network_io_direction="receive"), "1e+06"),
    ("hw_gpu_io_bytes_total", intel("io", network_io_direction="transmit"), "2e+06"),
    ("hw_gpu_io_bytes_total", intel("io", network_io_direction="both"), "3e+06"),
)
