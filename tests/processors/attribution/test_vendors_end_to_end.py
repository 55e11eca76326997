"""The shipped mappings from the exporter's page to the pod, beside a kubelet whose ids the page does not carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.data import Batch, Resource
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.scrape_client import Body, PageReader
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.receivers.pod_resources.device_ids import parse_device_id
from gpulens.receivers.prometheus.config import PrometheusConfig
from gpulens.receivers.prometheus.credentials import LazyTls
from gpulens.receivers.prometheus.mapping import load_mapping
from gpulens.receivers.prometheus.scraper import PrometheusScraper, keeps
from gpulens.receivers.prometheus.vendor import SOURCE, VendorPlanner
from tests.processors.attribution.kit import NS, T0, Sink, at, described, feed, holders, pod, processor
from tests.receivers.page_server import Bench
from tests.receivers.prometheus.kit import NODE, SCOPE
from tests.receivers.prometheus.vendor_rows import amd, ascend, intel

BUSY = "hw.gpu.utilization"


class Exporter:
    """A source of one page that a test rewrites."""

    def __init__(self) -> None:
        self.text = ""

    async def fetch(self) -> Body:
        """The page now."""
        return Body(self.text.encode())

    async def close(self) -> None:
        """Nothing to let go of."""


class World:
    """A node: a vendor's exporter behind its receiver, a kubelet, and attribution. A tick is 10 s."""

    def __init__(self, mapping: str, free: Sequence[str]) -> None:
        self.sink = Sink()
        self.join = processor(self.sink)
        self.exporter = Exporter()
        self._free = free
        self._clock = VirtualClock(T0 * NS)
        vendor = load_mapping(mapping)
        config = PrometheusConfig.model_validate({"endpoint": "http://h", "mapping": mapping})
        bench = Bench("prometheus", self._clock)
        planner = VendorPlanner(NODE, SCOPE, keeps(config), vendor)
        reader = PageReader(self.exporter, PageParser())
        scraper = PrometheusScraper(bench.settings, reader, planner, LazyTls(None), mapping, vendor.window_s)
        self.receiver = ScrapeReceiver(bench.settings, config, SOURCE, scraper, self.join)
        self.second = 0

    def ticks(self, count: int, page: str, held: Mapping[str, str] | None = None) -> None:
        """So many ticks with this page, and what the kubelet says by its own ids: pods that hold, all others free."""
        self.exporter.text = page
        told: dict[str, list[Resource]] = {parse_device_id(text).hw_id: [] for text in self._free}
        told |= {parse_device_id(text).hw_id: [pod(name)] for text, name in (held or {}).items()}

        async def run() -> None:
            for _ in range(count):
                feed(self.join, holders(at(self.second), told))
                await self.receiver.tick()
                self.second += 10
                await self._clock.advance(10)

        asyncio.run(run())

    def owner(self, device: str, back: int = 2) -> str:
        """The pod of a reading of a device, some ticks before the newest that came out."""
        return [owner for owner, each, _, _ in self.sink.points(BUSY) if each == device][-back]

    def allocated(self) -> set[tuple[str, str]]:
        """(pod, device) of the newest allocations of each stream."""
        newest: dict[str, Batch] = {}
        for batch in self.sink.batches:
            if batch.stream != "attribution":
                newest[batch.stream] = batch
        return {
            (resource.text("k8s.pod.name"), series.text("hw.id"))
            for batch in newest.values()
            for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
            if series.metric.name == "gpu.allocated" and value == 1
        }


def gaudi(owner: str) -> str:
    """The labels of a row of Habana's page."""
    return f'{{UUID="HL-0",namespace="{"ml" if owner else ""}",pod="{owner}",container="main"}}'


Case = tuple[str, str, str, str, str]
"""A mapping, a row of its page, the device, the kubelet's id for it, and the join key that would name that."""

AMD: Case = ("amd", "gpu_gfx_activity{a} 50\n", "SN0", "0000:c1:00.0", "gpu.pci.address")
ASCEND: Case = ("ascend", "npu_chip_info_utilization{a} 50\n", "VDIE-0", "Ascend910-0", "gpu.device.plugin.id")
GAUDI: Case = ("gaudi", "habanalabs_utilization{a} 50\n", "HL-0", "gaudi-0", "gpu.device.plugin.id")
LABELS: Mapping[str, Callable[[str], str]] = {
    "amd": lambda owner: amd(0, pod=owner),
    "ascend": lambda owner: ascend(0, pod=owner),
    "gaudi": gaudi,
}


@pytest.mark.parametrize("case", [AMD, ASCEND, GAUDI], ids=lambda case: case[0])
def test_the_pages_pods_own_what_the_kubelet_calls_otherwise(case: Case) -> None:
    """The pod on the labels, its successor after a period without owner, nobody once the labels are gone."""
    name, row, device, kubelet, _ = case
    world = World(name, [kubelet])
    said = LABELS[name]
    world.ticks(10, row.format(a=said("train-0")), {kubelet: "train-0"})
    assert world.owner(device) == "train-0"
    assert world.sink.reasons()["train-0", device] == ("prometheus", "")
    assert ("train-0", device) in world.allocated()
    world.ticks(15, row.format(a=said("train-1")), {kubelet: "train-1"})
    pods_seen = [owner for owner, each, _, _ in world.sink.points(BUSY) if each == device]
    assert pods_seen[-1] == "train-1"
    assert pods_seen[pods_seen.index("train-1") - 1] == ""
    world.ticks(15, row.format(a=said("")))
    assert world.owner(device, 1) == ""
    assert {pair for pair in world.allocated() if pair[1] == device} == set()
    assert world.sink.reasons()["", device] == ("none", "unnamed")


@pytest.mark.parametrize("case", [AMD, ASCEND, GAUDI], ids=lambda case: case[0])
def test_a_map_of_the_kubelets_id_hands_the_device_over_to_the_kubelet(case: Case) -> None:
    """From then on its pod counts whatever the page says, and each device has one owner."""
    name, row, device, kubelet, key = case
    world = World(name, [kubelet])
    page = row.format(a=LABELS[name]("on-the-page"))
    world.ticks(10, page, {kubelet: "by-the-kubelet"})
    assert world.owner(device) == "on-the-page"
    feed(world.join, described(at(world.second), {"hw.id": device, key: kubelet}))
    world.ticks(10, page, {kubelet: "by-the-kubelet"})
    assert world.owner(device) == "by-the-kubelet"
    assert {pair for pair in world.allocated() if pair[1] == device} == {("by-the-kubelet", device)}
    assert world.sink.reasons()["by-the-kubelet", device] == ("pod_resources", "")


def test_amds_partitions_go_to_the_pods_on_their_own_rows() -> None:
    """The kubelet names the first by the card's address and the others by ids that no page carries."""
    world = World("amd", ["0000:c1:00.0", "amdgpu_xcp_1", "amdgpu_xcp_2"])
    rows = [amd(0, part, "cpx", pod=owner) for part, owner in enumerate(["p-0", "p-1", ""])]
    page = "".join(f"gpu_gfx_activity{row} 10\n" for row in rows)
    world.ticks(12, page, {"0000:c1:00.0": "p-0", "amdgpu_xcp_1": "p-1"})
    found = [world.owner(f"SN0/partition{part}") for part in range(3)]
    assert found == ["p-0", "p-1", ""]
    feed(world.join, described(at(world.second), {"hw.id": "SN0", "gpu.pci.address": "0000:c1:00.0"}))
    world.ticks(12, page, {"0000:c1:00.0": "p-0", "amdgpu_xcp_1": "p-1"})
    assert [world.owner(f"SN0/partition{part}") for part in range(3)] == ["p-0", "p-1", ""]


def test_intels_tiles_go_with_the_card_once_its_kubelet_id_is_mapped() -> None:
    """The page has no labels of pods, so nothing has an owner until somebody maps the card."""
    world = World("intel", ["card0-0", "card1-0"])
    rows = "".join(f"hw_gpu_utilization_ratio{intel('e1', tile, hw_gpu_task='all')} 0.5\n" for tile in ("", "0", "1"))
    world.ticks(10, rows, {"card0-0": "a"})
    devices = ("1234-0", "1234-0/tile0", "1234-0/tile1")
    assert [world.owner(device) for device in devices] == ["", "", ""]
    assert world.sink.reasons()["", "1234-0/tile0"] == ("none", "unnamed")
    feed(world.join, described(at(world.second), {"hw.id": "1234-0", "gpu.device.plugin.id": "card0"}))
    world.ticks(10, rows, {"card0-0": "a"})
    assert [world.owner(device) for device in devices] == ["a", "a", "a"]
    assert {pair for pair in world.allocated() if pair[0] == "a"} == {("a", "1234-0")}
