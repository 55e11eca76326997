"""Rows: which device a row is about and who holds it, whatever the exporter's version and the scraper's labels."""

from __future__ import annotations

import pytest

from gpulens.pipeline.exposition_line import SampleKey
from gpulens.receivers.dcgm.rows import Devices, Entity, Owner, Owners, is_new_exporter, normal_pci, row_labels

TARGET = {
    "job": "monitoring/dcgm-exporter",
    "instance": "10.0.0.5:9400",
    "service": "dcgm-exporter",
    "endpoint": "metrics",
}


def owner_of(row: dict[str, str], *others: dict[str, str]) -> Owner | None:
    """The owner of the first row of a page."""
    return Owners([row, *others]).owner(row)


@pytest.mark.parametrize(
    "row",
    [
        {"namespace": "ml", "pod": "bert-0", "container": "train"},
        {"pod_namespace": "ml", "pod_name": "bert-0", "container_name": "train"},
        {
            **TARGET,
            "namespace": "monitoring",
            "pod": "dcgm-exporter-x7",
            "container": "exporter",
            "exported_namespace": "ml",
            "exported_pod": "bert-0",
            "exported_container": "train",
        },
    ],
)
def test_finds_the_workload(row: dict[str, str]) -> None:
    """Old and new label names, a direct scrape, and a Prometheus with honor_labels off: the same owner."""
    assert owner_of(row) == Owner("ml", "bert-0", "train")


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"namespace": "ml"},
        {"pod": "bert-0"},
        {"namespace": "gpu-operator", "pod": "nvidia-dcgm-exporter-aaaa1", "container": "nvidia-dcgm-exporter"},
        {"namespace": "obs", "pod": "gpu-agent-7", "container": "dcgm-exporter"},
        {"namespace": "obs", "pod": "gpu-agent-7", "hostname": "gpu-agent-7"},
        {**TARGET, "job": "gpu-metrics", "service": "gpu-metrics", "namespace": "obs", "pod": "gpu-metrics-k2x9"},
        {**TARGET, "job": "x", "service": "y", "namespace": "obs", "pod": "z-1", "container": "y"},
    ],
)
def test_the_exporter_is_never_an_owner(row: dict[str, str]) -> None:
    """No label, half a label, and every way in which a page names the exporter's own pod: no owner."""
    assert owner_of(row) is None


def test_with_honor_labels_off_a_row_without_exported_labels_is_free() -> None:
    """Once a page renames the workloads' labels, a plain `pod` is the target's, whatever it is called."""
    free = {**TARGET, "job": "j", "service": "s", "namespace": "obs", "pod": "agent-1"}
    busy = {**free, "exported_namespace": "ml", "exported_pod": "bert-0"}
    assert owner_of(free, busy) is None
    assert owner_of(busy, free) == Owner("ml", "bert-0")


def test_with_honor_labels_on_owners_count_once_the_exporter_is_recognised() -> None:
    """A row that shows the exporter's own pod makes the other rows' pods true holders."""
    busy = {**TARGET, "namespace": "ml", "pod": "bert-0", "container": "train"}
    free = {**TARGET, "namespace": "monitoring", "pod": "dcgm-exporter-x7", "container": "exporter"}
    assert owner_of(busy, free) == Owner("ml", "bert-0", "train")
    assert owner_of(free, busy) is None


def test_an_exporter_under_a_name_of_its_own_behind_prometheus_is_no_owner() -> None:
    """With target labels and no row that shows who the exporter is, every pod may be it: no owner."""
    target = {"job": "kubernetes-pods", "instance": "10.0.0.1:9400"}
    row = {**target, "namespace": "mon", "pod": "gpu-telemetry-x7k2p", "container": "exporter"}
    assert owner_of(row) is None
    assert owner_of(row, {**target, "namespace": "ml", "pod": "bert-0", "container": "train"}) is None
    assert owner_of({name: text for name, text in row.items() if name != "job"}) is not None


def test_pod_labels_that_look_like_target_labels_do_not_hide_a_workload() -> None:
    """With pod labels as metric labels, a workload may carry a `service` of its own name."""
    row = {"namespace": "ml", "pod": "bert-0", "container": "bert", "service": "bert"}
    assert owner_of(row) == Owner("ml", "bert-0", "bert")


def test_an_empty_label_is_an_absent_one_and_case_does_not_matter() -> None:
    """`pod_uid=""` is no UID, and Hostname and hostname are one label."""
    labels = row_labels(SampleKey("m", (("Hostname", "n"), ("UUID", "GPU-a"), ("pod_uid", ""))))
    assert labels == {"hostname": "n", "uuid": "GPU-a"}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((("gpu", "0"), ("UUID", "GPU-a"), ("pod", "p"), ("GPU", "h100"), ("uuid", "build-77")), "GPU-a"),
        ((("nvlink", "3"), ("gpu", "0"), ("gpu_uuid", "GPU-a"), ("pod", "p"), ("uuid", "build-77")), "GPU-a"),
        ((("gpu", "0"), ("UUID", "GPU-a"), ("pod", "p"), ("gpu_uuid", "build-77")), "GPU-a"),
        ((("gpu", "0"), ("UUID", ""), ("uuid", "build-77")), None),
    ],
)
def test_a_pods_own_labels_never_replace_the_exporters(
    labels: tuple[tuple[str, str], ...], expected: str | None
) -> None:
    """Of keys that are equal but for case the first counts, and so does the first of the two that name a UUID."""
    row = row_labels(SampleKey("m", labels))
    devices = Devices([row])
    assert devices.entity(row) == (Entity(expected) if expected else None)
    assert {facts.index for facts in devices.facts.values()} <= {"0"}


def test_a_pod_uid_is_kept() -> None:
    """Where the exporter knows the UID, the owner has it."""
    assert owner_of({"namespace": "ml", "pod": "a", "pod_uid": "u-1"}) == Owner("ml", "a", "", "u-1")


def test_mig_rows_are_instances_of_their_parent() -> None:
    """A row with a GPU instance id is about the instance; the parent is known too, without a profile."""
    row = {"uuid": "GPU-a", "gpu": "0", "device": "nvidia3", "gpu_i_id": "7", "gpu_i_profile": "1g.10gb"}
    devices = Devices([row])
    entity = devices.entity(row)
    assert entity == Entity("GPU-a", "7")
    assert entity is not None
    assert entity.hw_id == "GPU-a/gi7"
    assert devices.facts[entity].profile == "1g.10gb"
    assert devices.facts[entity.parent].profile == ""
    assert devices.facts[entity.parent].minor == "3"


def test_nothing_is_joined_by_index() -> None:
    """A row without a UUID is no GPU's, whatever its `gpu=` and whoever else has that index."""
    link = {"gpu": "0", "nvlink": "3"}
    assert Devices([{"uuid": "GPU-a", "gpu": "0"}]).entity(link) is None
    assert Devices([{"gpu_uuid": "GPU-c", "nvlink": "1"}]).entity({"gpu_uuid": "GPU-c"}) == Entity("GPU-c")


@pytest.mark.parametrize(
    ("address", "normal"),
    [
        ("00000000:53:00.0", "0000:53:00.0"),
        ("0000:53:00.0", "0000:53:00.0"),
        ("00000000:CA:00.0", "0000:ca:00.0"),
        ("00010000:00:04.0", "10000:00:04.0"),
        ("", ""),
    ],
)
def test_pci_addresses_take_the_kernels_form(address: str, normal: str) -> None:
    """NVML's eight-digit domain and upper case become the form that sysfs and DRA use."""
    assert normal_pci(address) == normal


def test_the_version_label_tells_the_generation() -> None:
    """The driver's label was renamed with exporter 4.9."""
    assert is_new_exporter([{"dcgm_fi_system_driver_version": "590"}]) is True
    assert is_new_exporter([{"dcgm_fi_driver_version": "580"}]) is False
    assert is_new_exporter([{}]) is None
