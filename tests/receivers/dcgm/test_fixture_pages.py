"""Every captured and hand-made dcgm-exporter page: its series, their units, and what was struck out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gpulens.pipeline.scraping import node_resource
from tests.receivers.dcgm.reading import Node, Row, find, owners, readings, value

MIB = 2**20


@pytest.fixture
def pages(shared_dir: Path) -> Path:
    """The folder with the pages."""
    return shared_dir / "fixtures" / "dcgm_exporter"


def read(pages: Path, name: str) -> tuple[Node, list[Row]]:
    """A fresh node that has read one page."""
    node = Node()
    return node, node.read((pages / name).read_bytes())


def metrics(found: list[Row]) -> Counter[str]:
    """How many readings of each metric there are."""
    return Counter(row.metric for row in readings(found))


def test_01_t4_driver_460(pages: Path) -> None:
    """A T4 in docker: MHz, mJ, percent and MiB become Hz, J, ratios and bytes; DEV_COUNT is passed over in silence."""
    node, found = read(pages, "01_t4_docker_driver460_process_name_label.prom")
    assert len(readings(found)) == 15
    assert value(found, "gpu.clock.frequency", gpu_clock="sm") == 300e6
    assert value(found, "gpu.clock.frequency", gpu_clock="memory") == 405e6
    assert value(found, "hw.energy") == 128996.013
    assert value(found, "hw.power") == 8.969
    assert value(found, "hw.temperature", hw_sensor_location="gpu") == 25
    assert value(found, "gpu.memory.free") == 15109 * MIB
    assert value(found, "hw.gpu.memory.usage") == 0
    assert value(found, "hw.gpu.utilization", hw_gpu_task="general") == 0
    assert value(found, "gpu.xid.last") == 0
    (info,) = find(found, "gpu.info")
    assert info.attributes["gpu.driver.version"] == "460.106.00"
    assert info.attributes["hw.model"] == "Tesla T4"
    assert owners(found) == set()
    assert node.rejected == {}


def test_02_t4_many_label_fields(pages: Path) -> None:
    """Label fields give serial and minor; FB_USED_PERCENT is a ratio; the throttle bits become flags."""
    node, found = read(pages, "02_t4_docker_driver470_many_label_fields_empty_help.prom")
    assert metrics(found) == {
        "hw.temperature.limit": 1,
        "gpu.power.limit": 1,
        "gpu.performance.state": 1,
        "hw.gpu.memory.limit": 1,
        "gpu.memory.reserved": 1,
        "hw.gpu.memory.utilization": 1,
        "gpu.clock.throttle.reason": 9,
    }
    assert value(found, "hw.gpu.memory.utilization") == 0.000008
    assert value(found, "hw.temperature.limit", hw_limit_type="throttled") == 93
    assert value(found, "gpu.power.limit") == 70
    assert value(found, "gpu.clock.throttle.reason", gpu_clock_reason="gpu_idle") == 1
    assert value(found, "gpu.clock.throttle.reason", gpu_clock_reason="sw_thermal") == 0
    (device,) = find(found, "gpu.device.info")
    assert device.attributes["gpu.serial"] == "1500000000042"
    assert device.attributes["gpu.minor"] == "0"
    assert node.rejected == {}


def test_04_h100_one_pod(pages: Path) -> None:
    """Eight H100, one of them held; an empty pod_uid is none, and no owner label stays on a reading."""
    node, found = read(pages, "04_h100x8_gpu-operator_one_pod_empty_pod_uid.prom")
    assert metrics(found) == {
        "hw.temperature": 8,
        "hw.power": 8,
        "hw.gpu.utilization": 8,
        "gpu.memory.copy.utilization": 6,
    }
    gpu = "GPU-df29186e-bf0e-14e3-d784-5c53155cd182"
    assert owners(found) == {(gpu, "inference-demo", "llm-agg-0-decodeworker-k7x2q", "main")}
    (allocated,) = find(found, "gpu.allocated")
    assert "k8s.pod.uid" not in allocated.resource
    assert allocated.attributes["gpu.allocation.source"] == "dcgm"
    assert value(found, "hw.power", hw_id=gpu) == 113.611
    assert all(row.resource == node_resource("node-1").map for row in readings(found))
    assert {row.attributes["gpu.pci.address"] for row in find(found, "gpu.info")} >= {"0000:53:00.0", "0000:ca:00.0"}
    assert node.rejected == {}


def test_05_gb200_unallocated(pages: Path) -> None:
    """Four GB200 that nobody holds: readings, and no allocation claimed either way."""
    node, found = read(pages, "05_gb200x4_unallocated_no_pod_labels.prom")
    assert len(readings(found)) == 24
    assert {row.value for row in find(found, "gpu.memory.free")} == {188729 * MIB}
    assert {row.value for row in find(found, "hw.gpu.memory.usage")} == {0}
    assert find(found, "gpu.allocated") == []
    assert node.rejected == {}


def test_06_rtx6000_full_memory(pages: Path) -> None:
    """A custom counter file: total memory, the management limit, 1 % busy with the memory full."""
    node, found = read(pages, "06_rtx6000ada_docker_custom_csv_full_memory_1pct_util.prom")
    assert len(readings(found)) == 8
    assert value(found, "hw.gpu.memory.limit") == 49140 * MIB
    assert value(found, "hw.gpu.memory.usage") == 46614 * MIB
    assert value(found, "hw.gpu.utilization") == 0.01
    assert value(found, "gpu.power.limit", gpu_power_limit_type="management") == 300
    assert node.rejected == {}


def test_08_v100_without_model_and_hostname(pages: Path) -> None:
    """Exporter 2.0: no model, owner labels on the profiling rows only; PCIe bytes are a rate, never a counter."""
    node, found = read(pages, "08_v100_2.0_no_modelname_no_hostname.prom")
    assert len(readings(found)) == 13
    assert value(found, "gpu.pcie.throughput", network_io_direction="transmit") == 421894
    assert value(found, "gpu.memory.bandwidth.utilization") == 0.000001
    assert value(found, "hw.temperature", hw_sensor_location="memory") == 54
    assert owners(found) == {("GPU-861cd95a-680c-b430-3914-3a2f99986d73", "default", "proftester", "proftester11")}
    assert all("hw.model" not in row.attributes for row in found)
    assert node.rejected == {}


def test_09_exporter_1_names(pages: Path) -> None:
    """The lower-case names of exporter 1.x, with the exporter's own pod as Hostname."""
    node, found = read(pages, "09_1.x_compat_metric_names.prom")
    assert len(readings(found)) == 7
    assert value(found, "hw.energy") == 55491669.881
    assert value(found, "gpu.clock.frequency", gpu_clock="memory") == 5e9
    assert owners(found) == set()
    assert node.rejected == {}


def test_10_old_namespace_mig(pages: Path) -> None:
    """The old namespace's `uuid` and empty owner labels: two instances of two GPUs, each with its parent."""
    node, found = read(pages, "10_a100_80gb_mig_old_namespace_unattributed.prom")
    parent = "GPU-252c0982-cfa7-d084-f981-56084ed96b4b"
    assert metrics(found) == {"gpu.engine.active": 2}
    assert value(found, "gpu.engine.active", hw_id=f"{parent}/gi1", hw_parent=parent) == 0.008246
    assert {row.attributes.get("gpu.mig.gi") for row in find(found, "gpu.device.info")} == {None, "1"}
    assert owners(found) == set()
    assert node.rejected == {}


def test_11_a30_mig(pages: Path) -> None:
    """Four instances: SM activity each, and the one XID latch of the GPU once."""
    node, found = read(pages, "11_a30_mig_1g.6gb_x4.prom")
    assert metrics(found) == {"gpu.sm.active": 4, "gpu.xid.last": 1}
    gpu = "GPU-01cbdbd2-86bc-288b-c8dd-89cd5408d058"
    (xid,) = find(found, "gpu.xid.last")
    assert xid.attributes["hw.id"] == gpu
    assert "hw.parent" not in xid.attributes
    assert {row.attributes["hw.id"] for row in find(found, "gpu.sm.active")} == {f"{gpu}/gi{n}" for n in (3, 4, 5, 6)}
    assert {row.attributes["gpu.mig.profile"] for row in find(found, "gpu.sm.active")} == {"1g.6gb"}
    assert node.rejected == {}


def test_12_h100_nvl_mig_profile(pages: Path) -> None:
    """The profile is passed on as the exporter spells it; nothing joins on it."""
    node, found = read(pages, "12_h100_nvl_mig_profile_string_differs_from_resource_name.prom")
    assert metrics(found) == {"hw.gpu.memory.usage": 2}
    assert {row.value for row in readings(found)} == {12 * MIB}
    assert {row.attributes["gpu.mig.profile"] for row in readings(found)} == {"1g.11gb"}
    assert node.rejected == {}


def test_13_t4_helm_2026(pages: Path) -> None:
    """Lower-case hostname, short floats, no XID series: absent is absent, not 0."""
    node, found = read(pages, "13_t4_helm_2026-09_lowercase_hostname_short_floats_no_xid.prom")
    assert len(readings(found)) == 6
    assert value(found, "hw.power") == 15.507
    assert find(found, "gpu.xid.last") == []
    assert owners(found) == {("GPU-ecf9bb30-f0d5-e924-517b-941d31c1a071", "default", "gpu-test", "gpu-test")}
    assert node.rejected == {}


def test_15_slurm_fork(pages: Path) -> None:
    """A fork's job labels are no owner in Kubernetes and do not disturb."""
    node, found = read(pages, "15_fork_slurm_jobid_userid_labels_a100_mig.prom")
    gpu = "GPU-f3e5da5c-ac75-3a15-b541-c9f62296d10f"
    assert value(found, "hw.gpu.memory.usage", hw_id=f"{gpu}/gi7") == 8543 * MIB
    assert owners(found) == set()
    assert node.rejected == {}


def test_17_prometheus_with_honor_labels(pages: Path) -> None:
    """A federated view: one pod holds one GPU, and the fifteen that seem to be the exporter's are free."""
    name = "17_prometheus_view_honorlabels_true_idle_gpus_claim_exporter_pod.json"
    document = json.loads((pages / name).read_text())
    lines = []
    for sample in document["data"]["result"]:
        labels = dict(sample["metric"])
        metric = labels.pop("__name__")
        block = ",".join(f'{key}="{text}"' for key, text in labels.items())
        seconds, number = sample["value"]
        lines.append(f"{metric}{{{block}}} {number} {int(seconds * 1000)}\n")
    node = Node()
    found = node.read("".join(lines))
    devices = {row.attributes["hw.id"] for row in readings(found)}
    assert len(devices) == 16
    assert owners(found) == {
        ("GPU-df29186e-bf0e-14e3-d784-5c53155cd182", "inference-demo", "llm-agg-0-decodeworker-k7x2q", "main")
    }
    used = "hw.gpu.memory.usage"
    assert value(found, used, hw_id="GPU-df29186e-bf0e-14e3-d784-5c53155cd182") == 74166 * MIB
    assert node.rejected == {}


def test_hand_made_4_9_renames(pages: Path) -> None:
    """Exporter 4.9's names in base units; its version label makes GPU_UTIL_RATIO a ratio."""
    node, found = read(pages, "hand_made/exporter_4.9_renamed_base_units_guess.prom")
    assert len(readings(found)) == 7
    assert value(found, "gpu.clock.frequency", gpu_clock="sm") == 1.98e9
    assert value(found, "hw.energy") == 319159.391
    assert value(found, "hw.gpu.utilization") == 0.44
    assert value(found, "hw.gpu.memory.limit") == 85520809984
    assert value(found, "gpu.sm.active") == 0.15
    assert value(found, "hw.power") == 113.611
    assert value(found, "hw.temperature", hw_sensor_location="gpu") == 41
    assert node.rejected == {}


def test_hand_made_hostile_page(pages: Path) -> None:
    """Text, blanks, NaN, a bare quote, a time and a cut line: each struck out by reason, all else is read."""
    node, found = read(pages, "hand_made/hostile_page.prom")
    assert node.rejected == {"text_value": 1, "blank": 2, "nan": 1, "bad_labels": 1}
    assert value(found, "hw.temperature", hw_sensor_location="gpu") is None
    assert value(found, "hw.temperature", hw_sensor_location="memory") is None
    assert value(found, "hw.power") == 71
    assert value(found, "hw.gpu.utilization") == 0.03
    assert value(found, "gpu.sm.active") is None
    assert value(found, "gpu.engine.active") == 1.0
    assert value(found, "hw.gpu.memory.usage") == 1024 * MIB
    assert find(found, "gpu.memory.free") == []


def test_hand_made_prometheus_without_honor_labels(pages: Path) -> None:
    """exported_* names the holder, whatever the target's labels say."""
    node, found = read(pages, "hand_made/prometheus_view_honorlabels_false_exported_pod.prom")
    assert owners(found) == {("GPU-6c1edbb9-4386-142c-8764-c269d2e9955e", "ml", "bert-0", "train")}
    assert value(found, "hw.gpu.utilization") == 0.97
    assert node.rejected == {}


def test_hand_made_time_slicing(pages: Path) -> None:
    """Copies fold into one reading of the device; per-process rows stand on their owners; nothing is summed."""
    node, found = read(pages, "hand_made/time_slicing_virtual_gpus_copies_plus_device_series.prom")
    gpu = "GPU-464ee486-afd8-be6a-ad61-36a054988841"
    assert owners(found) == {(gpu, f"team-{x}", f"job-{x}-0", "c") for x in "abc"}
    assert value(found, "gpu.engine.active") == 0.714
    assert value(found, "hw.power") == 66
    assert value(found, "hw.gpu.utilization") == 0.91
    shares = {row.resource["k8s.pod.name"]: row.value for row in find(found, "gpu.process.utilization")}
    assert shares == {"job-a-0": 0.60, "job-b-0": 0.31, "job-c-0": 0.0}
    assert metrics(found) == {
        "gpu.engine.active": 1,
        "hw.power": 1,
        "hw.gpu.utilization": 1,
        "gpu.process.utilization": 3,
    }
    assert node.rejected == {}


def test_hand_made_xid_latch_and_window(pages: Path) -> None:
    """The latch stays and the window empties: both are gauges, and neither is ever a count of events."""
    node = Node()
    first = node.read((pages / "hand_made/xid_latched_gauge_and_windowed_counter_scrape1.prom").read_bytes())
    layout = node.batch.layout if node.batch else None
    second = node.read(
        (pages / "hand_made/xid_latched_gauge_and_windowed_counter_scrape2_window_emptied.prom").read_bytes()
    )
    assert value(first, "gpu.xid.last") == value(second, "gpu.xid.last") == 31
    (before,), (after,) = find(first, "gpu.xid.recent"), find(second, "gpu.xid.recent")
    assert (before.value, after.value) == (2, 0)
    assert before.attributes["gpu.xid"] == "31"
    assert before.attributes["gpu.window"] == "300s"
    assert before.start_ns == 0
    assert find(second, "gpu.xid.errors") == []
    assert node.batch is not None
    assert node.batch.layout is layout
    assert node.rejected == {}


def test_no_page_is_left_out(pages: Path) -> None:
    """Each page beside the checkout has its test here."""
    tested = Path(__file__).read_text()
    left_out = [
        path.name for path in sorted([*pages.rglob("*.prom"), *pages.rglob("*.json")]) if path.name not in tested
    ]
    assert left_out == []
