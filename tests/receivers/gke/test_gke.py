"""The gke receiver: seven families, owners as allocations, shared containers, frozen pages, silent MIG nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.data import Value
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.scrape_client import Body, PageReader, Reading
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.pipeline.status import Status
from gpulens.receivers.gke import FACTORY
from gpulens.receivers.gke.config import GkeConfig
from gpulens.receivers.gke.scraper import GkeScraper
from tests.receivers.page_server import Bench, Sink, serving

A = 'accelerator_id="GPU-a",make="nvidia",model="NVIDIA L4"'
B = 'accelerator_id="GPU-b",make="nvidia",model="NVIDIA L4"'
OWNER = 'container="train",namespace="ml",pod="bert-0"'


class NoPages:
    """A source that is never asked."""

    async def fetch(self) -> Body:
        """Must not be called."""
        raise AssertionError("this test hands pages in")

    async def close(self) -> None:
        """Nothing to let go of."""


class Node:
    """A gke scraper that is fed page texts."""

    def __init__(self) -> None:
        self._parser = PageParser()
        self._scraper = GkeScraper(PageReader(NoPages(), self._parser), "node-1", "gke")
        self._now_ns = 10**18

    def read(self, text: str | bytes, unchanged_s: float = 0.0) -> Scraped:
        """What the scraper makes of this page, 30 s after the last one."""
        data = text.encode() if isinstance(text, str) else text
        self._now_ns += 30 * 10**9
        return self._scraper.convert(Reading(self._parser.parse(data), unchanged_s, ""), self._now_ns)


def values(scraped: Scraped, metric: str) -> dict[object, Value | None]:
    """A metric's readings by device."""
    return {
        series.map.get("hw.id"): value
        for (_, _, series), value in zip(scraped.batch.layout.identities(), scraped.batch.readings(), strict=True)
        if series.metric.name == metric
    }


def owners(scraped: Scraped) -> set[tuple[object, ...]]:
    """(device, namespace, pod, container, source) of every allocation."""
    return {
        (
            series.map["hw.id"],
            *(resource.map[f"k8s.{key}.name"] for key in ("namespace", "pod", "container")),
            series.map["gpu.allocation.source"],
        )
        for resource, _, series in scraped.batch.layout.identities()
        if series.metric.name == "gpu.allocated"
    }


def test_the_captured_page(shared_dir: Path) -> None:
    """Two L4 with an owner each; percent and bytes become a ratio and bytes; readings stand on the node."""
    page = (shared_dir / "fixtures" / "gke" / "nvidia_metrics_collector.prom").read_bytes()
    scraped = Node().read(page)
    busy, parked = "GPU-8f6d4b1e-52a7-4c0d-9b0e-0d1f2a3b4c5d", "GPU-c2a1e0f4-7b3d-4f58-8a11-5e6f708192a3"
    assert values(scraped, "gpu.duty_cycle") == {busy: 0.97, parked: 0.0}
    assert values(scraped, "hw.gpu.memory.limit") == {busy: 24152899584, parked: 24152899584}
    assert values(scraped, "hw.gpu.memory.usage") == {busy: 21474836480, parked: 448 * 2**20}
    assert owners(scraped) == {
        (busy, "ml-team", "train-0", "trainer", "gke"),
        (parked, "research", "jupyter-1", "notebook", "gke"),
    }
    readings = {"gpu.duty_cycle", "hw.gpu.memory.limit", "hw.gpu.memory.usage"}
    for resource, scope, series in scraped.batch.layout.identities():
        assert scope.name == "gpulens/gke"
        if series.metric.name in readings:
            assert resource.map == node_resource("node-1").map
            assert series.map["hw.model"] == "NVIDIA L4"
    assert scraped.rejected == {}
    # both devices are held whole, so the container with 0 devices shares none of them
    assert values(scraped, "gpu.sharing") == {}


def test_a_container_that_requests_nothing_marks_the_unheld_gpus_as_shared() -> None:
    """Time-slicing and MPS show as request 0 and no owner: the device is shared, its owners unknown."""
    page = (
        f"duty_cycle_gpu_node{{{A}}} 50\nduty_cycle_gpu_node{{{B}}} 3\nduty_cycle{{{B},{OWNER}}} 3\n"
        'request{container="s",namespace="r",pod="t",resource_name="nvidia.com/gpu"} %d\n'
    )
    node = Node()
    shared = node.read(page % 0)
    assert values(shared, "gpu.sharing") == {"GPU-a": 1}
    assert {owner[0] for owner in owners(shared)} == {"GPU-b"}
    assert values(node.read(page % 1), "gpu.sharing") == {"GPU-a": 0}


def test_the_nodes_series_carry_the_reading_and_the_containers_step_in() -> None:
    """Where both are there the node's counts; a build without node series still has readings."""
    both = Node().read(f"duty_cycle{{{A},{OWNER}}} 40\nduty_cycle_gpu_node{{{A}}} 50\n")
    assert values(both, "gpu.duty_cycle") == {"GPU-a": 0.5}
    alone = Node().read(f"duty_cycle{{{A},{OWNER}}} 40\n")
    assert values(alone, "gpu.duty_cycle") == {"GPU-a": 0.4}


@pytest.mark.parametrize("number", ["101", "-1", "NaN", "oops"])
def test_impossible_values_are_struck_out(number: str) -> None:
    """Builds before 2025 could report more than 100 %."""
    node = Node()
    node.read(f"duty_cycle_gpu_node{{{A}}} 5\nmemory_used_gpu_node{{{A}}} 1e9\n")
    scraped = node.read(f"duty_cycle_gpu_node{{{A}}} {number}\nmemory_used_gpu_node{{{A}}} 1e9\n")
    assert values(scraped, "gpu.duty_cycle") == {"GPU-a": None}
    assert values(scraped, "hw.gpu.memory.usage") == {"GPU-a": 10**9}
    assert scraped.rejected["out_of_range"] == 1


def test_series_that_name_only_an_index_are_counted() -> None:
    """A build of 2022 has accelerator_index: no identity, no reading."""
    scraped = Node().read('duty_cycle_gpu_node{node_name="n",make="nvidia",accelerator_index="0",model="T4"} 5\n')
    assert values(scraped, "gpu.duty_cycle") == {}
    assert scraped.rejected == {"no_device": 1}


def test_a_page_without_gpu_families_is_no_failure() -> None:
    """The collector's first 30 s: signs of life only."""
    scraped = Node().read("go_goroutines 12\nprocess_cpu_seconds_total 0.1\n")
    assert scraped.problem == ""
    assert {series.metric.name for _, _, series in scraped.batch.layout.identities()} == set()


def test_a_pod_that_ends_leaves_at_once_and_the_reading_stays() -> None:
    """The owner goes, the device's series are the same as before."""
    node = Node()
    before = node.read(f"duty_cycle_gpu_node{{{A}}} 5\nduty_cycle{{{A},{OWNER}}} 5\n")
    after = node.read(f"duty_cycle_gpu_node{{{A}}} 0\n")
    assert owners(before) == {("GPU-a", "ml", "bert-0", "train", "gke")}
    gone = [
        value
        for (_, _, series), value in zip(after.batch.layout.identities(), after.batch.readings(), strict=True)
        if series.metric.name == "gpu.allocated"
    ]
    assert gone in ([], [None])
    assert values(after, "gpu.duty_cycle") == {"GPU-a": 0.0}


def make(url: str, bench: Bench, sink: Sink) -> ScrapeReceiver:
    """A receiver as the graph would make it."""
    assert FACTORY.metrics is not None
    receiver = FACTORY.metrics(bench.settings, GkeConfig(endpoint=url), sink)
    assert isinstance(receiver, ScrapeReceiver)
    return receiver


async def test_a_mig_node_is_one_status_and_no_loop_of_errors(free_port: Callable[[], int]) -> None:
    """The plugin serves nothing there: up 0 at each tick, one change of state, which names the likely cause."""
    clock = VirtualClock()
    bench, sink = Bench("gke", clock), Sink()
    receiver = make(f"http://127.0.0.1:{free_port()}/metrics", bench, sink)
    for _ in range(5):
        await receiver.tick()
        await clock.advance(30)
    await receiver.shutdown()
    assert [batch.numbers()[0] for batch in sink.batches] == [0] * 5
    assert bench.changes == 1
    assert bench.status[0] is Status.RECOVERABLE
    assert "no metrics on MIG nodes" in bench.status[1]


async def test_an_unchanged_page_is_timed_over_real_http() -> None:
    """The same bytes served for a minute: unchanged for a minute."""
    clock = VirtualClock()
    bench, sink = Bench("gke", clock), Sink()
    async with serving(f"duty_cycle_gpu_node{{{A}}} 5\n") as url:
        receiver = make(url, bench, sink)
        for _ in range(3):
            await receiver.tick()
            await clock.advance(30)
        await receiver.shutdown()
    assert sink.last()["gpu.source.unchanged"] == [60.0]
    assert sink.last()["gpu.duty_cycle"] == [0.05]
    assert sink.last()["gpu.source.interval"] == [30.0]


def test_exported_labels_are_the_owner_and_the_collectors_own_are_nobodys() -> None:
    """A page as Prometheus holds it: target labels name the collector, the page's own were moved aside."""
    moved = (
        f'duty_cycle{{{A},exported_namespace="ml",exported_pod="train-0",exported_container="main",'
        'namespace="kube-system",pod="nvidia-gpu-device-plugin-x",container="nvidia-gpu-device-plugin"} 97\n'
    )
    own = (
        f'duty_cycle{{{A},namespace="kube-system",pod="nvidia-gpu-device-plugin-x",'
        'container="nvidia-gpu-device-plugin"} 97\n'
    )
    assert {owner[2] for owner in owners(Node().read(moved))} == {"train-0"}
    assert owners(Node().read(own)) == set()


def test_a_frozen_page_can_be_told_although_the_collectors_own_metrics_move() -> None:
    """The page also holds go_* and process_*: only the GPU families say how long it has stood still."""
    node = Node()
    still = [node.read(f"duty_cycle_gpu_node{{{A}}} 5\nprocess_cpu_seconds_total {tick}\n") for tick in range(4)]
    assert still[0].window_s == 60.0
    assert [scraped.unchanged_s for scraped in still] == [0.0, 30.0, 60.0, 90.0]
    assert node.read(f"duty_cycle_gpu_node{{{A}}} 6\nprocess_cpu_seconds_total 9\n").unchanged_s == 0.0
