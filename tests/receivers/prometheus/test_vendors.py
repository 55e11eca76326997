"""The shipped mappings on pages written by their exporters' documentation: names, units, sentinels, parts, owners."""

from __future__ import annotations

import pytest

from gpulens.pipeline.errors import ScrapeError
from gpulens.processors.attribution.devices import DeviceFact, DeviceMap
from gpulens.receivers.pod_resources.device_ids import parse_device_id
from gpulens.receivers.prometheus.mapping import parse_mapping
from gpulens.receivers.prometheus.vendor import MOST_DEVICES
from tests.receivers.prometheus.kit import START_NS, Page, S, infos, owners, points


def amd(card: int, part: int = 0, mode: str = "spx", pod: str = "", **more: str) -> str:
    """The labels of a row of AMD's page."""
    labels = {
        "gpu_id": str(8 * card + part),
        "serial_number": f"SN{card}",
        "card_model": "102-G30211-0C",
        "hostname": "h",
        "gpu_partition_id": str(part),
        "gpu_compute_partition_type": mode,
        "gpu_memory_partition_type": "nps1",
        "deployment_mode": "baremetal",
        "namespace": "ml" if pod else "",
        "pod": pod,
        "container": "main" if pod else "",
        "job_id": "",
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def test_amd_readings_are_canonical() -> None:
    """Percent, MiB, microjoules and MHz become ratios, bytes, joules and hertz; the fastest of several dies' clocks
    counts; MI2xx' names stand in where MI3xx' are missing."""
    a, b = amd(0, pod="train-0"), amd(1)
    clock = [amd(0, pod="train-0", clock_index=str(i), clock_type="system") for i in range(2)]
    page = f"""\
gpu_gfx_activity{a} 57
gpu_umc_activity{a} 12
gpu_used_vram{a} 283
gpu_total_vram{a} 196592
gpu_package_power{a} 255
gpu_power_usage{a} 251
gpu_average_package_power{b} 90
gpu_energy_consumed{a} 1.5e+09
gpu_junction_temperature{a} 61
gpu_edge_temperature{b} 40
gpu_memory_temperature{a} 55
gpu_clock{clock[0]} 2100
gpu_clock{clock[1]} 1900
gpu_ecc_correct_total{a} 4
gpu_ecc_uncorrect_total{a} 0
gpu_health{a} 1
gpu_health{b} 0
gpu_violation_ppt_residency_percentage{a} 3
gpu_violation_socket_thermal_residency_percentage{a} 0
gpu_violation_hbm_thermal_residency_percentage{a} 1
pcie_replay_count{a} 2
gpu_prof_sm_active{a} 15
gpu_prof_tensor_active_percent{a} 5
gpu_xgmi_link_rx{a} 1
gpu_nodes_total{{hostname="h"}} 2
"""
    fed = Page(mapping="amd")
    scraped = fed.read(page)
    assert points(scraped) == {
        ("SN0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.57,
        ("SN0", "gpu.memory.copy.utilization"): 0.12,
        ("SN0", "hw.gpu.memory.usage"): 283 * 2**20,
        ("SN0", "hw.gpu.memory.limit"): 196592 * 2**20,
        ("SN0", "hw.power", "hw.type=gpu"): 255.0,
        ("SN1", "hw.power", "hw.type=gpu"): 90.0,
        ("SN0", "hw.energy", "hw.type=gpu"): 1500.0,
        ("SN0", "hw.temperature", "hw.sensor_location=gpu"): 61.0,
        ("SN1", "hw.temperature", "hw.sensor_location=gpu"): 40.0,
        ("SN0", "hw.temperature", "hw.sensor_location=memory"): 55.0,
        ("SN0", "gpu.clock.frequency", "gpu.clock=sm"): 2.1e9,
        ("SN0", "hw.errors", "error.type=corrected", "gpu.error.source=ecc", "hw.type=gpu"): 4,
        ("SN0", "hw.errors", "error.type=uncorrected", "gpu.error.source=ecc", "hw.type=gpu"): 0,
        ("SN0", "hw.status", "hw.state=ok", "hw.type=gpu"): 1,
        ("SN0", "hw.status", "hw.state=failed", "hw.type=gpu"): 0,
        ("SN1", "hw.status", "hw.state=ok", "hw.type=gpu"): 0,
        ("SN1", "hw.status", "hw.state=failed", "hw.type=gpu"): 1,
        ("SN0", "gpu.clock.throttle.reason", "gpu.clock.reason=sw_power_cap"): 1,
        ("SN0", "gpu.clock.throttle.reason", "gpu.clock.reason=hw_thermal"): 1,
        ("SN0", "gpu.pcie.replays"): 2,
        ("SN0", "gpu.sm.active"): 0.15,
        ("SN0", "gpu.pipe.active", "gpu.pipe=tensor"): 0.05,
    }
    assert scraped.rejected == {}
    assert fed.unmapped == 2
    assert owners(scraped) == {("SN0", "ml", "train-0", "main")}
    assert infos(scraped)["SN0"] == {"hw.model": "102-G30211-0C", "gpu.serial": "SN0"}
    assert all("k8s.pod.name" not in series.map for _, _, series in scraped.batch.layout.identities())


def test_amds_not_available_is_no_number() -> None:
    """The greatest value of a field's width is struck out, and the next best metric takes its place; 255 W is real."""
    a = amd(0)
    page = f"gpu_package_power{a} 65535\ngpu_power_usage{a} 255\ngpu_gfx_activity{a} 65535\n"
    page += f"gpu_used_vram{a} 1.8446744073709552e+19\ngpu_umc_activity{a} 4294967295\ngpu_total_vram{a} 64\n"
    scraped = Page(mapping="amd").read(page)
    assert points(scraped) == {
        ("SN0", "hw.power", "hw.type=gpu"): 255.0,
        ("SN0", "hw.gpu.memory.limit"): 64 * 2**20,
    }
    assert scraped.rejected == {"blank": 4}


def test_the_first_amd_exporters_write_zero_for_not_available() -> None:
    """They have every metric on every generation: on an MI2xx the MI3xx' power and temperature are 0, and the type of a
    clock is spelled as in their agent."""
    a = amd(0)
    clock = amd(0, clock_index="0", clock_type="GPU_CLOCK_TYPE_SYSTEM")
    page = f"gpu_package_power{a} 0\ngpu_power_usage{a} 0\ngpu_average_package_power{a} 90\n"
    page += f"gpu_junction_temperature{a} 0\ngpu_edge_temperature{a} 40\ngpu_memory_temperature{a} 0\n"
    page += f"gpu_total_vram{a} 0\ngpu_used_vram{a} 0\ngpu_gfx_activity{a} 0\ngpu_clock{clock} 1700\n"
    scraped = Page(mapping="amd").read(page)
    assert points(scraped) == {
        ("SN0", "hw.power", "hw.type=gpu"): 90.0,
        ("SN0", "hw.temperature", "hw.sensor_location=gpu"): 40.0,
        ("SN0", "hw.gpu.memory.usage"): 0,
        ("SN0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.0,
        ("SN0", "gpu.clock.frequency", "gpu.clock=sm"): 1.7e9,
    }
    assert scraped.rejected == {"blank": 5}


def test_a_part_without_an_average_has_its_dies_busy_share() -> None:
    """The average activity is the unpartitioned GPU's; the dies of a whole GPU do not replace it."""
    parts = [amd(0, 0, "dpx", xcc_index=str(i)) for i in range(2)]
    page = "".join(f"gpu_gfx_busy_instantaneous{row} {20 + 40 * i}\n" for i, row in enumerate(parts))
    page += f"gpu_gfx_busy_instantaneous{amd(1, xcc_index='0')} 90\ngpu_gfx_busy_instantaneous{parts[0]} 65535\n"
    scraped = Page(mapping="amd").read(page)
    assert points(scraped) == {("SN0/partition0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.4}


def test_amds_prefix_is_optional() -> None:
    """AMD's own examples prefix every name with `amd_`."""
    scraped = Page(mapping="amd").read(f"amd_gpu_gfx_activity{amd(0)} 50\n")
    assert points(scraped) == {("SN0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.5}


def test_amds_partitions_are_devices_with_a_parent() -> None:
    """Work is the part's and goes to its own pod; power and temperature are the card's, and stand on the first part."""
    rows = [amd(0, part, "cpx", pod=f"p-{part}") for part in range(2)]
    page = "".join(f"gpu_gfx_activity{row} {10 * i}\n" for i, row in enumerate(rows))
    page += f"gpu_package_power{rows[0]} 300\ngpu_package_power{rows[1]} 0\n"
    scraped = Page(mapping="amd").read(page)
    assert points(scraped) == {
        ("SN0/partition0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.0,
        ("SN0/partition1", "hw.gpu.utilization", "hw.gpu.task=general"): 0.1,
        ("SN0", "hw.power", "hw.type=gpu"): 300.0,
    }
    assert owners(scraped) == {("SN0/partition0", "ml", "p-0", "main"), ("SN0/partition1", "ml", "p-1", "main")}
    assert infos(scraped)["SN0/partition1"]["hw.parent"] == "SN0"
    assert "hw.parent" not in infos(scraped)["SN0"]


def test_copies_under_several_owners_become_one_reading() -> None:
    """One value of the device and two allocations; copies that contradict each other are no value."""
    a, b = amd(0, pod="p-a"), amd(0, pod="p-b")
    page = Page(mapping="amd")
    scraped = page.read(f"gpu_gfx_activity{a} 40\ngpu_gfx_activity{b} 40\n")
    assert points(scraped) == {("SN0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.4}
    assert owners(scraped) == {("SN0", "ml", "p-a", "main"), ("SN0", "ml", "p-b", "main")}
    torn = page.read(f"gpu_gfx_activity{a} 40\ngpu_gfx_activity{b} 41\n")
    assert points(torn) == {("SN0", "hw.gpu.utilization", "hw.gpu.task=general"): None}
    assert torn.rejected == {"contradictory": 1}


def test_exported_labels_win_and_the_exporter_owns_nothing() -> None:
    """On a page that comes through Prometheus the pod labels may be the exporter's own."""
    moved = amd(0, pod="exporter-x", exported_namespace="ml", exported_pod="train-0", exported_container="c")
    free = amd(1, pod="device-metrics-exporter-7kx")
    scraped = Page(mapping="amd").read(f"gpu_gfx_activity{moved} 1\ngpu_gfx_activity{free} 0\n")
    assert owners(scraped) == {("SN0", "ml", "train-0", "c")}


def ascend(chip: int, pod: str = "", **more: str) -> str:
    """The labels of a row of the npu-exporter's page."""
    labels = {
        "id": str(chip),
        "model_name": "910B3",
        "vdie_id": f"VDIE-{chip}",
        "pcie_bus_info": f"0000:C{chip}:00.0",
        "namespace": "ml" if pod else "",
        "pod_name": pod,
        "container_name": "main" if pod else "",
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def test_ascend_readings_keep_their_own_times() -> None:
    """Every sample carries the time of its collection; -1 is a call that failed and never a number."""
    a, b = ascend(0, pod="train-0"), ascend(1)
    at = START_NS // 10**6 + 12_345
    info = ascend(0, pod="train-0", process_id="4711", container_id="c0", container_name="ml_train-0_main")
    none = ascend(1, process_id="", container_id="")
    page = f"""\
machine_npu_nums 2
npu_chip_info_overall_utilization{a} 80 {at}
npu_chip_info_utilization{a} 70 {at}
npu_chip_info_utilization{b} 0 {at + 1}
npu_chip_info_cube_utilization{a} 33 {at}
npu_chip_info_hbm_used_memory{a} 3000 {at}
npu_chip_info_hbm_total_memory{a} 65536 {at}
npu_chip_info_power{a} 245.5 {at}
npu_chip_info_power{b} -1 {at + 1}
npu_chip_info_temperature{a} 48 {at}
npu_chip_info_temperature{b} -1 {at + 1}
npu_chip_info_aicore_current_freq{a} 1800 {at}
npu_chip_info_aicore_current_freq{b} 4294967295 {at + 1}
npu_chip_info_health_status{a} 1 {at}
npu_chip_info_health_status{b} -1 {at + 1}
npu_chip_info_hbm_ecc_single_bit_error_cnt{a} 3 {at}
npu_chip_info_hbm_ecc_double_bit_isolated_pages_cnt{a} 1 {at}
npu_chip_info_process_info_num{a} 1 {at}
npu_chip_info_process_info{info} 2800 {at}
npu_chip_info_process_info{none} 0 {at + 1}
npu_chip_info_serial_number{ascend(0, serial_number="S-77")} 1 {at}
"""
    scraped = Page(mapping="ascend").read(page)
    found = points(scraped)
    assert found == {
        ("VDIE-0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.8,
        ("VDIE-1", "hw.gpu.utilization", "hw.gpu.task=general"): 0.0,
        ("VDIE-0", "gpu.pipe.active", "gpu.pipe=tensor"): 0.33,
        ("VDIE-0", "hw.gpu.memory.usage"): 3000 * 2**20,
        ("VDIE-0", "hw.gpu.memory.limit"): 64 * 2**30,
        ("VDIE-0", "hw.power", "hw.type=gpu"): 245.5,
        ("VDIE-0", "hw.temperature", "hw.sensor_location=gpu"): 48.0,
        ("VDIE-0", "gpu.clock.frequency", "gpu.clock=sm"): 1.8e9,
        ("VDIE-0", "hw.status", "hw.state=ok", "hw.type=gpu"): 1,
        ("VDIE-0", "hw.status", "hw.state=failed", "hw.type=gpu"): 0,
        ("VDIE-0", "hw.errors", "error.type=corrected", "gpu.error.source=ecc", "hw.type=gpu"): 3,
        ("VDIE-0", "gpu.pages.retired", "error.type=uncorrected"): 1,
        ("VDIE-0", "gpu.process.count"): 1,
        ("VDIE-0", "gpu.process.memory.usage", "process.pid=4711"): 2800 * 2**20,
    }
    assert scraped.rejected == {"blank": 5}
    assert scraped.window_s == 5
    times = {
        (series.text("hw.id"), series.metric.name): time
        for (_, _, series), time in zip(scraped.batch.layout.identities(), scraped.batch.times(), strict=True)
    }
    assert times["VDIE-0", "hw.power"] == at * 10**6
    assert times["VDIE-1", "hw.gpu.utilization"] == (at + 1) * 10**6
    assert times["VDIE-0", "gpu.device.info"] == START_NS + 15 * S
    assert owners(scraped) == {("VDIE-0", "ml", "train-0", "main")}, "the process's container is no container's name"


def test_ddr_is_the_memory_of_chips_without_hbm_only() -> None:
    """The first 910 has HBM and DDR: when the call for one fails, the other's numbers are not the chip's memory."""
    both, card = ascend(0, model_name="910A-Ascend-V1"), ascend(1, model_name="310P3-Ascend-V1")
    hbm = f"npu_chip_info_hbm_used_memory{both} 100\nnpu_chip_info_hbm_total_memory{both} 32768\n"
    ddr = "".join(
        f"npu_chip_info_used_memory{row} 3000\nnpu_chip_info_total_memory{row} 24576\n" for row in (both, card)
    )
    of_card = {
        ("VDIE-1", "hw.gpu.memory.usage"): 3000 * 2**20,
        ("VDIE-1", "hw.gpu.memory.limit"): 24576 * 2**20,
    }
    page = Page(mapping="ascend")
    assert points(page.read(ddr)) == of_card
    assert points(page.read(hbm + ddr)) == of_card | {
        ("VDIE-0", "hw.gpu.memory.usage"): 100 * 2**20,
        ("VDIE-0", "hw.gpu.memory.limit"): 32768 * 2**20,
    }


def test_ascends_kubelet_ids_find_no_device() -> None:
    """The kubelet's pick may be another chip than the one that is mounted: nothing that is said joins by it."""
    scraped = Page(mapping="ascend").read(f"npu_chip_info_power{ascend(0, serial_number='S')} 100\n")
    said = infos(scraped)["VDIE-0"]
    assert said == {"hw.model": "910B3", "hw.name": "davinci0", "gpu.pci.address": "0000:c0:00.0", "gpu.serial": "S"}
    devices = DeviceMap()
    devices.learn("prometheus", [DeviceFact.of({"hw.id": "VDIE-0", **{k: str(v) for k, v in said.items()}})], True)
    for text in ("Ascend910-0", "Ascend310P-0-99"):
        (key,) = devices.resolve(parse_device_id(text).hw_id)
        assert not devices.is_resolved(key)


def test_a_placeholder_for_several_pods_is_no_owner() -> None:
    """Names that no pod can have are labels' noise."""
    rows = [ascend(0, pod="Several pods"), ascend(1, pod="-"), ascend(2, pod="ok-0")]
    scraped = Page(mapping="ascend").read("".join(f"npu_chip_info_power{row} 9\n" for row in rows))
    assert owners(scraped) == {("VDIE-2", "ml", "ok-0", "main")}


def intel(name: str, tile: str = "", **more: str) -> str:
    """The labels of a row of xpumd's page."""
    labels = {"hw_id": "1234-0", "pci_bdf": "0000:05:00.0", "com_intel_subdevice_id": tile, "hw_name": name, **more}
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def test_intel_readings_are_taken_by_where_they_are_measured() -> None:
    """Modules of memory add up, the card's power goes before the package's, tiles are devices of their own."""
    page = f"""\
hw_gpu_info{intel("gpu-1", hw_model="Max 1550", hw_serial_number="SN-1")} 1
hw_gpu_utilization_ratio{intel("e1", hw_gpu_task="all")} 0.125
hw_gpu_utilization_ratio{intel("e2", hw_gpu_task="compute-all")} 1
hw_gpu_utilization_ratio{intel("e3", hw_gpu_task="copy-all")} 0.5
hw_gpu_utilization_ratio{intel("e1", "1", hw_gpu_task="all")} 0.25
hw_memory_usage_bytes{intel("m1", hw_memory_location="device", hw_memory_type="hbm")} 1000
hw_memory_usage_bytes{intel("m2", hw_memory_location="device", hw_memory_type="hbm")} 500
hw_memory_usage_bytes{intel("m3", hw_memory_location="system", hw_memory_type="ddr")} 9
hw_power_watts{intel("p1", hw_sensor_location="package")} 310.5
hw_power_watts{intel("p2", hw_sensor_location="card")} 350
hw_energy_joules_total{intel("p1", hw_sensor_location="package")} 5
hw_temperature_celsius{intel("t1", hw_sensor_location="gpu", statistic="max")} 48
hw_temperature_celsius{intel("t1", hw_sensor_location="gpu", statistic="min")} 30
hw_temperature_celsius{intel("t3", "1", hw_sensor_location="gpu", statistic="max")} 51
hw_frequency_hertz{intel("f1", hw_frequency_domain="gpu", aggregation="avg")} 1.2e+09
hw_frequency_hertz{intel("f1", hw_frequency_domain="gpu", aggregation="max")} 1.5e+09
hw_errors_total{intel("x", hw_type="gpu", error_type="uncorrectable", error_category="a")} 2
hw_errors_total{intel("x", hw_type="gpu", error_type="uncorrectable", error_category="b")} 1
hw_status{intel("gpu-1", hw_type="gpu", hw_state="ok")} 1
hw_status{intel("m1", hw_type="memory", hw_state="degraded")} 0
hw_gpu_io_bytes_total{intel("io", network_io_direction="receive")} 1e+06
"""
    scraped = Page(mapping="intel").read(page)
    assert points(scraped) == {
        ("1234-0", "hw.gpu.utilization", "hw.gpu.task=general"): 0.125,
        ("1234-0", "gpu.engine.active"): 1.0,
        ("1234-0/tile1", "hw.gpu.utilization", "hw.gpu.task=general"): 0.25,
        ("1234-0", "hw.gpu.memory.usage"): 1500,
        ("1234-0", "hw.power", "hw.type=gpu"): 350.0,
        ("1234-0", "hw.energy", "hw.type=gpu"): 5.0,
        ("1234-0", "hw.temperature", "hw.sensor_location=gpu"): 48.0,
        ("1234-0/tile1", "hw.temperature", "hw.sensor_location=gpu"): 51.0,
        ("1234-0", "gpu.clock.frequency", "gpu.clock=sm"): 1.2e9,
        ("1234-0", "hw.errors", "error.type=uncorrected", "hw.type=gpu"): 3,
        ("1234-0", "hw.status", "hw.state=ok", "hw.type=gpu"): 1,
        ("1234-0", "hw.status", "hw.state=degraded", "hw.type=memory"): 0,
        ("1234-0", "hw.gpu.io", "network.io.direction=receive"): 1_000_000,
    }
    assert owners(scraped) == set()
    assert infos(scraped)["1234-0"] == {
        "hw.model": "Max 1550",
        "gpu.pci.address": "0000:05:00.0",
        "gpu.serial": "SN-1",
    }


def test_a_memory_is_well_only_where_each_module_is() -> None:
    """One degraded module among well ones; whether ECC is on is no health."""
    rows = {name: intel(name, hw_type="memory", hw_state="ok") for name in ("m1", "m2")}
    page = f"hw_status{rows['m1']} 1\nhw_status{rows['m2']} 0\n"
    page += f"hw_status{intel('m2', hw_type='memory', hw_state='degraded')} 1\n"
    page += f"hw_status{intel('gpu-1', hw_type='gpu', hw_state='ecc_disabled')} 1\n"
    assert points(Page(mapping="intel").read(page)) == {
        ("1234-0", "hw.status", "hw.state=ok", "hw.type=memory"): 0,
        ("1234-0", "hw.status", "hw.state=degraded", "hw.type=memory"): 1,
    }


def test_intels_power_where_the_driver_tells_no_place_and_its_false_limits() -> None:
    """The place is then `gpu`; a limit of 300 MW is a unit gone wrong and not a limit."""
    limit = intel("p", hw_sensor_location="card", com_intel_power_limit_level="sustained")
    power = intel("p", hw_sensor_location="gpu")
    page = f"hw_power_limit_watts{limit} 3e+08\nhw_power_watts{power} 55\nhw_energy_joules_total{power} 7\n"
    scraped = Page(mapping="intel").read(page)
    assert points(scraped) == {
        ("1234-0", "hw.power", "hw.type=gpu"): 55.0,
        ("1234-0", "hw.energy", "hw.type=gpu"): 7.0,
    }
    assert scraped.rejected == {"out_of_range": 1}


def test_a_module_without_a_number_leaves_no_sum() -> None:
    """Half of a device's memory is not its memory."""
    rows = [intel(f"m{i}", hw_memory_location="device") for i in range(2)]
    scraped = Page(mapping="intel").read(f"hw_memory_size_bytes{rows[0]} 10\nhw_memory_size_bytes{rows[1]} NaN\n")
    assert points(scraped) == {}
    assert scraped.rejected == {"blank": 1}


def test_copies_under_several_owners_stand_once_in_a_sum() -> None:
    """Two banks of memory, each under both pods of a shared board: what is added up are the banks."""
    mapping = parse_mapping(
        'device: {id: "{u}"}\nowners: [{namespace: ns, pod: pod}]\n'
        "metrics:\n  - {from: mem, to: hw.gpu.memory.usage, unit: By, combine: sum}\n",
        "m.yaml",
    )
    rows = [f'mem{{u="a",bank="{bank}",ns="ml",pod="{pod}"}}' for bank in (0, 1) for pod in ("p", "q")]
    page = Page(mapping)
    whole = page.read("".join(f"{row} {number}\n" for row, number in zip(rows, (10, 10, 5, 5), strict=True)))
    assert points(whole) == {("a", "hw.gpu.memory.usage"): 15}
    torn = page.read("".join(f"{row} {number}\n" for row, number in zip(rows, (10, 10, 5, 6), strict=True)))
    assert points(torn) == {("a", "hw.gpu.memory.usage"): None}
    assert torn.rejected == {"contradictory": 1}


def test_what_a_page_said_of_a_device_is_remembered() -> None:
    """The model stands on one metric of Intel's page; while that is away no series changes its name."""
    page = Page(mapping="intel")
    reading = f"hw_gpu_utilization_ratio{intel('e1', hw_gpu_task='all')} 0.5\n"
    first = page.read(f"hw_gpu_info{intel('gpu-1', hw_model='Max 1550')} 1\n{reading}").batch.layout
    assert page.read(reading).batch.layout is first


def test_gaudi_readings_are_canonical() -> None:
    """Milliwatts become watts; what has no certain unit is left."""
    g = '{UUID="01P0-HL2080A0-15-TNBS71-04-07-00",namespace="ml",pod="llm-0",container="c"}'
    page = f"""\
habanalabs_utilization{g} 97
habanalabs_memory_used_bytes{g} 1024
habanalabs_power_mW{g} 420500
habanalabs_power_default_limit_mW{g} 600000
habanalabs_temperature_onchip{g} 66
habanalabs_temperature_threshold_shutdown{g} 120
habanalabs_pending_rows_state{g} 0
habanalabs_pcie_replay_count{g} 3
habanalabs_energy{g} 123456
"""
    fed = Page(mapping="gaudi")
    scraped = fed.read(page)
    device = "01P0-HL2080A0-15-TNBS71-04-07-00"
    assert points(scraped) == {
        (device, "hw.gpu.utilization", "hw.gpu.task=general"): 0.97,
        (device, "hw.gpu.memory.usage"): 1024,
        (device, "hw.power", "hw.type=gpu"): 420.5,
        (device, "gpu.power.limit", "gpu.power.limit.type=management"): 600.0,
        (device, "hw.temperature", "hw.sensor_location=gpu"): 66.0,
        (device, "hw.temperature.limit", "hw.limit_type=critical"): 120.0,
        (device, "gpu.rows.remap.pending"): 0,
        (device, "gpu.pcie.replays"): 3,
    }
    assert fed.unmapped == 1
    assert owners(scraped) == {(device, "ml", "llm-0", "c")}


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("", "sees no device"),
        ("go_threads 5\n", "is it the right exporter's page"),
        ('gpu_gfx_activity{gpu_id="0"} 5\n', "knows a device by"),
        ("<html>Sign in</html>\n", "no page of metrics: it starts with '<html>Sign in"),
    ],
)
def test_a_page_that_gives_nothing_is_a_failed_scrape(page: str, says: str) -> None:
    """The message says which of these it is."""
    with pytest.raises(ScrapeError, match=says):
        Page(mapping="amd").read(page)


def test_a_counters_source_may_change_and_its_total_goes_on() -> None:
    """The card's energy disappears and the package's takes over: the series grows by increments under one start."""
    page = Page(mapping="intel")
    card, package = (intel("p", hw_sensor_location=place) for place in ("card", "package"))
    batches = [
        page.read(f"hw_energy_joules_total{card} {one}\nhw_energy_joules_total{package} {other}\n").batch
        for one, other in ((100, 40), (110, 44), ("NaN", 48), ("NaN", 50))
    ]
    slot = next(i for i, (_, _, s) in enumerate(batches[0].layout.identities()) if s.metric.name == "hw.energy")
    assert [batch.readings()[slot] for batch in batches] == [100.0, 110.0, 110.0, 112.0]
    assert len({batch.starts()[slot] for batch in batches}) == 1


def test_pages_say_for_how_long_they_have_stood_still() -> None:
    """What is read counts, not the exporter's own counters beside it."""
    page = Page(mapping="amd")
    row = f"gpu_gfx_activity{amd(0)} 5\n"
    ages = [page.read(f"{row}go_threads {i}\n").unchanged_s for i in range(3)]
    assert ages == [0.0, 15.0, 30.0]
    assert page.read(f"gpu_gfx_activity{amd(0)} 6\ngo_threads 9\n").unchanged_s == 0.0


def test_a_page_with_too_many_devices_is_read_in_part_and_says_so() -> None:
    """A hostile page costs its own readings; the batch is partial, so that what is missing is not taken for gone."""
    rows = "".join(f'gpu_gfx_activity{{serial_number="S{i}"}} 1\n' for i in range(MOST_DEVICES + 5))
    scraped = Page(mapping="amd").read(rows)
    assert len(infos(scraped)) == MOST_DEVICES
    assert scraped.rejected == {"too_many_devices": 5}
    assert scraped.problem == "5 series over the limit were left out"
