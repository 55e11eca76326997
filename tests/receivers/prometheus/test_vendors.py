"""The shipped mappings on pages written by their exporters' documentation: names, units, sentinels, parts, owners."""

from __future__ import annotations

import pytest

from gpulens.pipeline.errors import ScrapeError
from gpulens.processors.attribution.devices import DeviceFact, DeviceMap
from gpulens.receivers.pod_resources.device_ids import parse_device_id
from gpulens.receivers.prometheus.mapping import parse_mapping
from gpulens.receivers.prometheus.vendor import MOST_DEVICES
from tests.receivers.prometheus.kit import START_NS, Page, S, infos, owners, points
from tests.receivers.prometheus.vendor_rows import amd, ascend, intel


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
