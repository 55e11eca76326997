"""Scrapes the kubelet and turns allocations into series.

Invariant: every good scrape says everything: 1 on each owner for each device it holds, 0 on the node for each
allocatable device that nobody holds. While the kubelet's content stays the same, so does the layout object.
What a failed scrape does not know is not said again under a new time.
"""

from __future__ import annotations

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Metrics, Settings
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Resource, Scope, Series, Value
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.receivers.pod_resources.allocations import Allocations, Owner, Reader
from gpulens.receivers.pod_resources.client import KubeletClient
from gpulens.receivers.pod_resources.config import PodResourcesConfig
from gpulens.receivers.pod_resources.device_ids import Selection

SOURCE = "pod_resources"


class PodResourcesScraper:
    """One kubelet socket as a stream of allocations."""

    def __init__(
        self, client: KubeletClient, reader: Reader, clock: Clock, node: str, stream: str, reuse_s: float = 60.0
    ) -> None:
        self._reuse_s = reuse_s
        self._devices: bytes | None = None
        self._devices_at = 0.0
        self._client = client
        self._reader = reader
        self._clock = clock
        self._stream = stream
        self._builder = LayoutBuilder(node)
        self._replies: tuple[bytes, bytes | None] | None = None
        self._read: Allocations | None = None
        self._layout: Layout = EMPTY_LAYOUT
        self._values: tuple[Value, ...] = ()

    async def scrape(self, now_ns: int) -> Scraped:
        """Asks the kubelet. What it says was true at some instant between request and reply: the readings' start
        time is the request's, their time the reply's."""
        allocatable, failed = await self._allocatable()
        asked_ns = self._clock.now_ns()
        replies = (await self._client.list(), allocatable)
        if replies != self._replies:
            self._take_up(*replies)
            self._replies = replies
        batch = Batch.of(self._layout, self._values, self._clock.now_ns(), self._stream, start_ns=asked_ns)
        rejected = dict(() if self._read is None else self._read.rejected)
        return Scraped(batch, {**rejected, **({"allocatable_failed": 1} if failed else {})})

    async def _allocatable(self) -> tuple[bytes | None, bool]:
        """The devices that exist, and whether asking failed: then the last answer stands for as long as owners would.
        List alone says who holds what, so the batch is complete all the same."""
        try:
            self._devices = await self._client.allocatable()
        except ScrapeError:
            if self._clock.monotonic() - self._devices_at > self._reuse_s:
                self._devices = None
            return self._devices, True
        self._devices_at = self._clock.monotonic()
        return self._devices, False

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()

    def _take_up(self, pods: bytes, allocatable: bytes | None) -> None:
        read = self._reader.read_encoded(pods, allocatable)
        if read != self._read:  # the kubelet lists in any order: other bytes are seldom another content
            self._layout, self._values = self._builder.build(read)
            self._read = read


class LayoutBuilder:
    """Makes the series of allocations; an owner whose devices stay keeps its block object."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._scope = Scope(f"gpulens/{SOURCE}")
        self._blocks: dict[tuple[Owner, tuple[str, ...]], Block] = {}

    def build(self, read: Allocations) -> tuple[Layout, tuple[Value, ...]]:
        """The layout and one number a slot."""
        rows: list[tuple[Series, Value]] = [(_allocated(hw_id), 0) for hw_id in read.free]
        rows += [(Series(metric("gpu.allocation.replicas"), {"hw.id": hw_id}), r) for hw_id, r in read.replicas]
        rows += [
            (Series(metric("gpu.sharing"), {"hw.id": hw_id, "gpu.sharing.mode": mode}), 1)
            for hw_id, mode in read.sharing
        ]
        known, self._blocks = self._blocks, {}
        for held in read.held:
            self._blocks[held] = known.get(held) or self._owner_block(*held)
        node = Block(node_resource(self._node), self._scope, [series for series, _ in rows])
        layout = Layout((node, *self._blocks.values()))
        values = [value for _, value in rows]
        return layout, (*values, *[1] * (layout.size - len(values)))

    def _owner_block(self, owner: Owner, hw_ids: tuple[str, ...]) -> Block:
        resource = Resource(
            {
                **node_resource(self._node).map,
                "k8s.container.name": owner.container,
                "k8s.namespace.name": owner.namespace,
                "k8s.pod.name": owner.pod,
            }
        )
        return Block(resource, self._scope, [_allocated(hw_id) for hw_id in hw_ids])


def _allocated(hw_id: str) -> Series:
    return Series(metric("gpu.allocated"), {"hw.id": hw_id, "gpu.allocation.source": SOURCE})


def create(settings: Settings, config: PodResourcesConfig, consumer: Metrics) -> ScrapeReceiver:
    """The receiver of one `pod_resources` block."""
    clock, limit = settings.clock, config.max_message_size_mib << 20
    client = KubeletClient(config.socket_path, clock, config.timeout, limit)
    reader = Reader(Selection(config.resource_names), config.sharing_mode)
    scraper = PodResourcesScraper(client, reader, clock, settings.node, str(settings.id), config.reuse)
    return ScrapeReceiver(settings, config, SOURCE, scraper, consumer, keep_s=config.reuse)
