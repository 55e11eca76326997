"""Whom and what a page names over time: late pod UIDs, custom exporter names, NVSwitch rows, changes of release."""

from __future__ import annotations

import pytest

from gpulens.pipeline.errors import ScrapeError
from tests.receivers.dcgm.reading import Node, Row, find, owners, value
from tests.receivers.dcgm.test_scraper import GPU, NEW, OLD, line


def held(uid: str = "", pod: str = "p", gpu: str = "GPU-a", extra: str = "") -> str:
    """The labels of a row that a pod holds."""
    row = GPU.replace("GPU-a", gpu)
    return f'{row},container="c",namespace="ml",pod="{pod}",pod_uid="{uid}"{extra}'


def uids(found: list[Row]) -> list[tuple[object, object, object]]:
    """(device, pod, UID) of every allocation."""
    return sorted(
        (row.attributes["hw.id"], row.resource["k8s.pod.name"], row.resource.get("k8s.pod.uid", ""))
        for row in find(found, "gpu.allocated")
        if row.value is not None  # a series that has just ended keeps its slot for a while
    )


def test_a_uid_that_is_learned_late_does_not_rename_the_owner() -> None:
    """First seen without a UID, a container stays without one for as long as the page names it."""
    node = Node()
    for uid in ("", "u-1", "", "u-1"):
        assert uids(node.read(line("DEV_FB_USED", 5, held(uid)))) == [("GPU-a", "p", "")]
    more = line("DEV_FB_USED", 5, held("u-1")) + line("DEV_FB_USED", 5, held("u-1", gpu="GPU-b"))
    assert uids(node.read(more)) == [("GPU-a", "p", ""), ("GPU-b", "p", "")]


def test_a_uid_is_kept_when_a_row_lacks_it() -> None:
    """First seen with a UID, a container keeps it on pages that have lost it."""
    node = Node()
    for uid in ("u-1", "", "u-1", ""):
        assert uids(node.read(line("DEV_FB_USED", 5, held(uid)))) == [("GPU-a", "p", "u-1")]


def test_another_uid_is_another_pod() -> None:
    """A pod of the same name that follows is not the one before, and rows without a UID are then its."""
    node = Node()
    found = [uids(node.read(line("DEV_FB_USED", 5, held(uid)))) for uid in ("u-1", "u-2", "")]
    assert found == [[("GPU-a", "p", "u-1")], [("GPU-a", "p", "u-2")], [("GPU-a", "p", "u-2")]]


def test_a_container_that_the_page_no_longer_names_is_forgotten() -> None:
    """After a page without it, a container's UID is taken from the first sight anew, on known layouts too."""
    node = Node()
    without, with_uid, free = (line("DEV_FB_USED", 5, each) for each in (held(), held("u-1"), GPU))
    found = [uids(node.read(page)) for page in (without, with_uid, free, with_uid, without, free, without, with_uid)]
    kept, none = [("GPU-a", "p", "u-1")], [("GPU-a", "p", "")]
    assert found == [none, none, [], kept, kept, [], none, none]


def test_an_empty_page_does_not_forget_the_pods() -> None:
    """An exporter that is just starting says nothing about who lives."""
    node = Node()
    node.read(line("DEV_FB_USED", 5, held()))
    with pytest.raises(ScrapeError):
        node.read("")
    assert uids(node.read(line("DEV_FB_USED", 5, held("u-1")))) == [("GPU-a", "p", "")]


@pytest.mark.parametrize("rows", [("u-1", ""), ("", "u-1")])
def test_rows_with_and_without_a_uid_name_one_owner(rows: tuple[str, str]) -> None:
    """Two families of one GPU, one of them without the UID: one allocation."""
    first, second = rows
    found = Node().read(line("DEV_FB_USED", 5, held(first)) + line("DEV_GPU_UTIL", 50, held(second)))
    assert uids(found) == [("GPU-a", "p", "u-1")]


TARGET = ',instance="10.0.0.1:9400",job="kubernetes-pods"'
TELEMETRY = f'{GPU},pod="gpu-telemetry-x7k2p",container="exporter",namespace="mon"{TARGET}'


def test_an_exporter_under_a_name_of_its_own_never_holds_a_gpu() -> None:
    """Behind a Prometheus with honor_labels its pod stands on free GPUs' rows: readings, and no owner."""
    node = Node()
    found = node.read(line("DEV_FB_USED", 5, TELEMETRY) + line("DEV_GPU_UTIL", 50, TELEMETRY))
    assert owners(found) == set()
    assert value(found, "hw.gpu.utilization") == 0.5
    assert node.rejected == {}


def test_shares_whose_owners_can_not_be_believed_are_no_copies_of_the_device() -> None:
    """Time-slicing rows behind such a Prometheus leave the device's own reading alone."""
    shares = "".join(
        line("DEV_GPU_UTIL", number, held(pod=f"p{number}", extra=f',vgpu="{number}"{TARGET}')) for number in (60, 31)
    )
    node = Node()
    found = node.read(line("DEV_GPU_UTIL", 91, TELEMETRY) + shares)
    assert value(found, "hw.gpu.utilization") == 0.91
    assert find(found, "gpu.process.utilization") == []
    assert owners(found) == set()
    assert node.rejected == {}


def test_rows_of_an_nvswitch_are_no_gpus() -> None:
    """A switch's link errors are charged to no GPU, whether or not another row has an index."""
    node = Node()
    found = node.read(
        line("DEV_NVLINK_BANDWIDTH_TOTAL", 5, 'nvlink="0",gpu_uuid="U"')
        + line("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 9, 'nvlink="3",nvswitch="0",Hostname="h"')
    )
    assert find(found, "gpu.nvlink.errors") == []
    assert value(found, "gpu.nvlink.throughput", hw_id="U") == 5e6
    assert node.rejected == {"no_device": 1}


def test_pod_labels_never_name_a_device() -> None:
    """A pod labelled `uuid` and `GPU` leaves the device and its index as they are."""
    found = Node().read(line("DEV_FB_USED", 5, held(extra=',GPU="h100",uuid="build-77"')))
    (info,) = find(found, "gpu.info")
    assert (info.attributes["hw.id"], info.attributes["gpu.index"]) == ("GPU-a", "0")


@pytest.mark.parametrize("before", [f"{GPU},{OLD}", GPU])
def test_an_exporters_upgrade_ends_what_its_values_had_proven(before: str) -> None:
    """55 proved percent; under the new release's label 0.55 is 55 %."""
    node = Node()
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", 55, before)), "hw.gpu.utilization") == 0.55
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", "0.55", f"{GPU},{NEW}")), "hw.gpu.utilization") == 0.55


def test_a_proof_does_not_outlive_the_page() -> None:
    """Without a version label, what comes back after an empty page has to prove its unit again."""
    node = Node()
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", 55)), "hw.gpu.utilization") == 0.55
    with pytest.raises(ScrapeError):
        node.read("")
    assert value(node.read(line("DEV_GPU_UTIL_RATIO", "0.55")), "hw.gpu.utilization") is None
    assert node.rejected == {"ambiguous_unit": 1}


@pytest.mark.parametrize("name", ["PROF_SM_UTIL_RATIO", "PROF_SM_OCCUPANCY_RATIO", "PROF_SM_ACTIVE"])
def test_a_profiling_ratio_is_never_percent(name: str) -> None:
    """A ratio clearly above 1 is out of range, and proves nothing about the next."""
    node = Node()
    metric = "gpu.sm.occupancy" if "OCCUPANCY" in name else "gpu.sm.active"
    node.read(line(name, 44))
    assert node.rejected == {"out_of_range": 1}
    assert value(node.read(line(name, "0.44")), metric) == 0.44


def test_a_pods_label_in_another_case_names_no_owner() -> None:
    """Pod labels stand before the exporter's own attributes: `Pod` is the pod's label, `pod` the exporter's word."""
    labels = GPU + ',Namespace="x",Pod="label",container="c",namespace="ml",pod="train-0"'
    found = Node().read(line("DEV_GPU_UTIL", 5, labels))
    assert owners(found) == {("GPU-a", "ml", "train-0", "c")}
