"""The dcgm scraper over time: steady layouts, counters, copies, MIG, ambiguous units, empty pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from gpulens.pipeline.errors import ScrapeError
from tests.receivers.dcgm.reading import START_NS, Node, find, owners, value

GPU = 'gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100"'
OLD = 'DCGM_FI_DRIVER_VERSION="580.1"'
NEW = 'DCGM_FI_SYSTEM_DRIVER_VERSION="590.1"'


def line(name: str, number: object, labels: str = GPU) -> str:
    """One sample line."""
    return f"DCGM_FI_{name}{{{labels}}} {number}\n"


def mig(instance: int, extra: str = "") -> str:
    """The labels of a MIG row."""
    return f'{GPU},GPU_I_PROFILE="1g.10gb",GPU_I_ID="{instance}"{extra}'


def test_the_layout_object_stays_while_only_values_change() -> None:
    """Ticks of one page shape share one layout and one array of start times."""
    node = Node()
    batches = []
    for tick in range(3):
        node.read(line("DEV_POWER_USAGE", 70 + tick) + line("DEV_TOTAL_ENERGY_CONSUMPTION", 1000 * tick))
        batches.append(node.batch)
    assert batches[0] is not None
    assert all(batch is not None and batch.layout is batches[0].layout for batch in batches)
    assert all(batch is not None and batch.start_ns is batches[1].start_ns for batch in batches[1:] if batches[1])


def test_an_owner_that_comes_changes_no_reading() -> None:
    """A pod label appears: the readings' series stay as they are, one allocation is added."""
    node = Node()
    before = node.read(line("DEV_POWER_USAGE", 70))
    after = node.read(line("DEV_POWER_USAGE", 71, GPU + ',container="c",namespace="ml",pod="p"'))
    (old,), (new,) = find(before, "hw.power"), find(after, "hw.power")
    assert (old.resource, old.attributes) == (new.resource, new.attributes)
    assert owners(after) == {("GPU-a", "ml", "p", "c")}


def test_counters_have_a_start_and_start_anew_when_they_fall() -> None:
    """Energy is a counter from first sight; a driver reload is a reset 1 ms after the last point."""
    node = Node()
    energy = [2_000, 3_000, 500]
    rows = [find(node.read(line("DEV_TOTAL_ENERGY_CONSUMPTION", each)), "hw.energy")[0] for each in energy]
    assert [row.value for row in rows] == [2.0, 3.0, 0.5]
    second = START_NS + 15 * 10**9
    assert [row.start_ns for row in rows] == [START_NS, START_NS, second + 1_000_000]


def test_gauges_have_no_start() -> None:
    """Only counters carry a start time."""
    found = Node().read(line("DEV_POWER_USAGE", 70) + line("DEV_ECC_DBE_VOL_TOTAL", 3))
    assert find(found, "hw.power")[0].start_ns == 0
    assert find(found, "hw.errors")[0].start_ns == START_NS


def test_a_value_that_goes_blank_is_absent_and_the_layout_stays() -> None:
    """Blank is not zero: the slot is absent at that tick and back at the next."""
    node = Node()
    numbers: list[object] = ["70.5", "140737488355330.000000", "0.000000"]
    layouts, powers = [], []
    for number in numbers:
        powers.append(value(node.read(line("DEV_POWER_USAGE", number)), "hw.power"))
        layouts.append(node.batch and node.batch.layout)
    assert powers == [70.5, None, 0.0]
    assert layouts[0] is layouts[1] is layouts[2]


def test_device_fields_on_mig_rows_are_read_once_for_the_gpu() -> None:
    """Power, temperature and energy are repeated on every instance's row: one reading each, on the GPU."""
    page = "".join(
        line("DEV_POWER_USAGE", "300.5", mig(n)) + line("DEV_TOTAL_ENERGY_CONSUMPTION", 5000, mig(n)) for n in (1, 2, 3)
    )
    node = Node()
    found = node.read(page)
    (power,) = find(found, "hw.power")
    assert (power.value, power.attributes["hw.id"]) == (300.5, "GPU-a")
    assert "gpu.mig.profile" not in power.attributes
    assert value(found, "hw.energy") == 5.0
    assert node.rejected == {}


def test_utilisation_is_not_defined_on_mig_rows() -> None:
    """GPU_UTIL and its kin on an instance's row are struck out and counted; the instance's own activity is read."""
    page = "".join(
        line(f"DEV_{name}", 0, mig(n)) for name in ("GPU_UTIL", "MEM_COPY_UTIL", "ENC_UTIL", "DEC_UTIL") for n in (1, 2)
    )
    node = Node()
    found = node.read(page + line("PROF_SM_ACTIVE", 0.25, mig(1)))
    assert find(found, "hw.gpu.utilization") == []
    assert value(found, "gpu.sm.active", hw_id="GPU-a/gi1") == 0.25
    assert node.rejected == {"mig_undefined": 8}


def test_owners_of_mig_rows_hold_the_instance() -> None:
    """The owner on an instance's row holds the instance, also when the field is the whole GPU's."""
    owner = ',container="c",namespace="ml",pod="p"'
    found = Node().read(line("DEV_POWER_USAGE", 300, mig(1, owner)) + line("DEV_POWER_USAGE", 300, mig(2)))
    assert owners(found) == {("GPU-a/gi1", "ml", "p", "c")}
    assert find(found, "gpu.allocated")[0].attributes["hw.parent"] == "GPU-a"


def test_copies_that_disagree_are_no_reading() -> None:
    """Per-process rows without a device row must not pass for the device's value."""
    page = "".join(
        line("DEV_GPU_UTIL", number, f'{GPU},container="c",namespace="ml",pod="p{number}",vgpu="{number}"')
        for number in (60, 31)
    )
    node = Node()
    found = node.read(page)
    assert value(found, "hw.gpu.utilization") is None
    assert node.rejected == {"contradictory_copies": 1}
    assert len(owners(found)) == 2


def test_a_blank_copy_is_passed_over() -> None:
    """Of several lines for one series, the valid one counts."""
    node = Node()
    found = node.read(line("DEV_FB_USED", 9223372036854775794) + line("DEV_FB_USED", 448))
    assert value(found, "hw.gpu.memory.usage") == 448 * 2**20
    assert node.rejected == {"blank": 1}


def test_per_process_memory_stands_on_its_owner() -> None:
    """With the device's own row there, per-pod FB_USED is the owner's process memory."""
    row = GPU + ',container="c",namespace="ml",pod="p",vgpu="0"'
    found = Node().read(line("DEV_FB_USED", 1000) + line("DEV_FB_USED", 600, row))
    assert value(found, "hw.gpu.memory.usage") == 1000 * 2**20
    (process,) = find(found, "gpu.process.memory.usage")
    assert process.value == 600 * 2**20
    assert process.resource["k8s.pod.name"] == "p"


def test_both_names_of_a_field_feed_one_series() -> None:
    """A page with the old and the new name has one reading, whichever of them is valid."""
    both = line("DEV_SM_CLOCK", 1980) + line("DEV_SM_CLOCK_HERTZ", "1.98e+09")
    assert value(Node().read(both), "gpu.clock.frequency") == 1.98e9
    blank = line("DEV_SM_CLOCK", 2147483632) + line("DEV_SM_CLOCK_HERTZ", "1.98e+09")
    assert value(Node().read(blank), "gpu.clock.frequency") == 1.98e9


@pytest.mark.parametrize(
    ("labels", "number", "setting", "expected"),
    [
        (f"{GPU},{NEW}", "0.44", "auto", 0.44),
        (f"{GPU},{NEW}", "1", "auto", 1.0),
        (f"{GPU},{OLD}", "1", "auto", 0.01),
        (f"{GPU},{NEW}", "44", "auto", 0.44),
        (GPU, "44", "auto", 0.44),
        (GPU, "0", "auto", 0.0),
        (GPU, "1", "auto", None),
        (GPU, "1", "new", 1.0),
        (GPU, "1", "old", 0.01),
        (GPU, "2147483632", "auto", None),
    ],
)
def test_gpu_util_ratio_is_read_in_its_true_unit_or_not_at_all(
    labels: str, number: str, setting: str, expected: float | None
) -> None:
    """The value above 1.5 decides, then the version label, then the setting; else only zero is known."""
    node = Node(renamed_units=setting)
    found = node.read(line("DEV_GPU_UTIL_RATIO", number, labels))
    assert value(found, "hw.gpu.utilization") == expected


def test_one_value_above_the_ratio_proves_percent_while_the_exporter_stays() -> None:
    """Once a source has shown percent under a ratio's name, its 1 is 1 %."""
    node = Node()
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", "1")), "hw.gpu.utilization") is None
    assert node.rejected == {"ambiguous_unit": 1}
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", "63")), "hw.gpu.utilization") == 0.63
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", "1")), "hw.gpu.utilization") == 0.01


def test_nvlink_throughput_changes_its_unit_with_the_version() -> None:
    """MB/s up to DCGM 4.6, bytes per second from exporter 4.9 on, under one name."""
    name = "DEV_NVLINK_THROUGHPUT_TOTAL"
    assert value(Node().read(line(name, 5, f"{GPU},{OLD}")), "gpu.nvlink.throughput") == 5e6
    assert value(Node().read(line(name, "5e6", f"{GPU},{NEW}")), "gpu.nvlink.throughput") == 5e6


def test_nvlink_rows_have_their_own_keys() -> None:
    """Link rows name the GPU by gpu_uuid and the link by nvlink."""
    labels = 'nvlink="3",gpu="0",gpu_uuid="GPU-a",device="nvidia0",model_name="NVIDIA H100"'
    found = Node().read(line("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 7, labels))
    (row,) = find(found, "gpu.nvlink.errors")
    assert (row.value, row.attributes["gpu.nvlink"], row.attributes["gpu.nvlink.error"]) == (7, "3", "replay")
    assert row.attributes["hw.model"] == "NVIDIA H100"


def test_unknown_families_are_counted_once_and_never_emitted() -> None:
    """A name that claims to be DCGM's and is not known counts at its first sight; foreign names do not."""
    node = Node()
    page = line("DEV_POWER_USAGE", 70) + line("DEV_SOMETHING_NEW", 5) + "go_goroutines 12\n"
    node.read(page)
    assert node.rejected == {"unknown_family": 1}
    found = node.read(page)
    assert node.rejected == {}
    assert {row.metric for row in found} & {"go_goroutines", "DCGM_FI_DEV_SOMETHING_NEW"} == set()


def test_a_row_without_a_device_is_counted() -> None:
    """A reading that names no GPU can't be placed."""
    node = Node()
    node.read(line("DEV_POWER_USAGE", 70) + line("DEV_GPU_TEMP", 40, 'gpu="7"'))
    assert node.rejected == {"no_device": 1}


@pytest.mark.parametrize("page", ["", "# nothing\n", "go_goroutines 12\n"])
def test_a_page_without_gpus_is_a_failure_that_says_what_to_look_at(page: str) -> None:
    """An exporter that runs and serves nothing is reported, with where to look."""
    with pytest.raises(ScrapeError, match=r"no DCGM series.*library.*permission") as caught:
        Node().read(page)
    assert caught.value.reason == "empty_page"


def windows(node: Node, numbers: Iterable[int], step_s: float) -> list[float]:
    """The window after each of these readings of the memory."""
    found = []
    for number in numbers:
        node.read(line("DEV_FB_USED", number), step_s=step_s)
        found.append(node.window_s)
    return found


def test_the_refresh_is_learned_from_five_changes() -> None:
    """An exporter that renews its values every 40 s, scraped every 10 s: 30 s until that is known."""
    found = windows(Node(collection_interval="10s"), (tick // 4 for tick in range(30)), 10)
    assert found[:24] == [30.0] * 24
    assert found[24:] == [40.0] * 6


def test_a_quick_exporter_is_known_to_be_as_quick_as_the_ticks() -> None:
    """Values that change at every scrape are no older than one interval."""
    assert windows(Node(), range(10), 15)[-1] == 15


def test_a_quiet_node_does_not_stretch_the_window_for_ever() -> None:
    """Values that hardly ever change are no sign of a slow exporter: the window stays below two minutes."""
    assert windows(Node(), (tick // 100 for tick in range(800)), 15)[-1] == 120


def test_missed_scrapes_teach_nothing() -> None:
    """The gap over a failed scrape or a new layout is not a gap between two changes."""
    node = Node(collection_interval="10s")
    for tick in range(40):
        extra = line("DEV_GPU_TEMP", 40) if tick % 2 else ""
        node.read(line("DEV_FB_USED", tick) + extra, step_s=10)
    assert node.window_s == 30


def test_a_configured_refresh_is_taken_as_it_is() -> None:
    """`refresh` ends the guessing."""
    assert set(windows(Node(refresh="5s"), range(12), 15)) == {5.0}


def test_how_long_a_page_stood_still_is_passed_on() -> None:
    """A frozen exporter can be told later."""
    node = Node()
    node.read(line("DEV_POWER_USAGE", 70), unchanged_s=45)
    assert node.unchanged_s == 45


def test_series_over_the_limit_make_the_batch_partial() -> None:
    """What was left out must not look as if it had gone."""
    node = Node()
    node.parser._max_series = 1
    node.read(line("DEV_POWER_USAGE", 70) + line("DEV_GPU_TEMP", 40))
    assert "1 series over the limit" in node.problem


def test_a_series_that_is_blank_for_good_leaves_the_layout_once() -> None:
    """A field that is never readable does not make the layout change for ever."""
    node = Node()
    page = line("DEV_POWER_USAGE", 70) + line("DEV_MEMORY_TEMP", 2147483632)
    layouts = []
    for _ in range(40):
        node.read(page)
        assert node.batch is not None
        layouts.append(node.batch.layout)
    changes = sum(before is not after for before, after in pairwise(layouts))
    assert changes <= 1
