"""A simulated node under churn: the real receivers' conversion and the real attribution on virtual time, without
sockets, and a scorer that knows the truth."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import MetricScope, scope_of
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Metrics, Settings
from gpulens.pipeline.data import Batch, Identity, Layout, Resource, Series
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scrape_client import Body, PageReader
from gpulens.pipeline.scraping import ScrapeConfig, Scraper, ScrapeReceiver
from gpulens.pipeline.telemetry import Telemetry
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.join import AttributionProcessor
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper
from gpulens.receivers.gke.scraper import GkeScraper
from gpulens.receivers.pod_resources.allocations import Reader
from gpulens.receivers.pod_resources.client import KubeletClient
from gpulens.receivers.pod_resources.device_ids import Selection
from gpulens.receivers.pod_resources.scraper import PodResourcesScraper
from gpulens.simulator.inventory import inventory
from gpulens.simulator.layout import DeviceKey, Owner
from gpulens.simulator.schema import FaultKind
from gpulens.simulator.world import World

NS = 10**9
REUSE_S = 60.0
"""The default of pod_resources: its last word stays for so long while the kubelet is silent."""


class WorldKubelet(KubeletClient):
    """The kubelet of a world, asked without a socket. `asked_s` are the moments at which it answered."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        super().__init__("", clock, 0.0, 0)
        self._world, self._now = world, clock
        self.asked_s: list[float] = []

    async def list(self) -> bytes:
        """List, or the error of a socket that is gone."""
        self._check()
        self.asked_s.append(self._now.now_ns() / NS)
        return self._world.pod_resources(self._now.now_ns() / NS)

    async def allocatable(self) -> bytes | None:
        """Every allocatable device, or the error of a socket that is gone."""
        self._check()
        return self._world.allocatable(self._now.now_ns() / NS)

    def _check(self) -> None:
        if not self._world.kubelet_reachable(self._now.now_ns() / NS):
            raise ScrapeError("there is no socket", "no_socket")


class WorldPage:
    """One page of a world, fetched without a socket."""

    def __init__(self, world: World, clock: VirtualClock, name: str) -> None:
        self._world, self._clock, self._name = world, clock, name

    async def fetch(self) -> Body:
        """The page as it is now, or the error of a closed port."""
        now_s = self._clock.now_ns() / NS
        down: FaultKind = "dcgm_down" if self._name == "dcgm" else "gke_down"
        if self._world.fault(down, now_s) or (self._name == "gke" and self._world.gke_refuses()):
            raise ScrapeError("connection refused", "refused")
        page = self._world.dcgm_page(now_s) if self._name == "dcgm" else self._world.gke_page(now_s)
        return Body(page.encode())

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class Tee:
    """Hands each batch to several consumers."""

    consumers: list[Metrics]

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Passes the batch on."""
        for consumer in self.consumers:
            consumer.consume(batch, ack)


class Node:
    """The receivers of a world and the attribution behind them; `sinks` take what it passes on.

    `more` are receivers of a test's own: name, first tick, interval, and what makes the scraper; with `only`, no others
    than these receivers tick.
    """

    def __init__(
        self,
        world: World,
        sinks: list[Metrics],
        intervals: tuple[float, float, float] = (10.0, 15.0, 30.0),
        more: Sequence[tuple[str, float, float, Callable[[World, VirtualClock], Scraper]]] = (),
        only: Sequence[str] = (),
    ) -> None:
        self.world = world
        self.clock = VirtualClock(round(world.start_s * NS))
        self.telemetry = Telemetry()
        self.join = AttributionProcessor(
            self._settings("attribution", Kind.PROCESSORS), AttributionConfig(), Tee(sinks)
        )
        self.kubelet = WorldKubelet(world, self.clock)
        log, node = ComponentLog(), world.spec.node
        dcgm_config = DcgmConfig(endpoint="http://exporter:9400", collection_interval=_text(intervals[1]))
        scrapers: list[tuple[str, float, float, Scraper]] = [
            (
                "pod_resources",
                1.0,
                intervals[0],
                PodResourcesScraper(self.kubelet, Reader(Selection()), self.clock, node, "pod_resources"),
            ),
            ("dcgm", 3.7, intervals[1], DcgmScraper(self._page("dcgm"), dcgm_config, node, "dcgm", log)),
            ("gke", 6.1, intervals[2], GkeScraper(self._page("gke"), node, "gke")),
        ]
        self._ticks: list[tuple[float, int, float, ScrapeReceiver]] = []
        scrapers += [(name, first_s, each_s, make(world, self.clock)) for name, first_s, each_s, make in more]
        for order, (name, first_s, interval_s, scraper) in enumerate(scrapers):
            if only and name not in only:
                continue
            receiver = ScrapeReceiver(
                self._settings(name, Kind.RECEIVERS),
                ScrapeConfig(collection_interval=_text(interval_s)),
                name,
                scraper,
                self.join,
                keep_s=REUSE_S if name == "pod_resources" else None,
            )
            self._ticks.append((first_s, order, interval_s, receiver))
        heapq.heapify(self._ticks)

    def _page(self, name: str) -> PageReader:
        return PageReader(WorldPage(self.world, self.clock, name), PageParser())

    def _settings(self, name: str, kind: Kind) -> Settings:
        return Settings(
            id=ComponentID(name),
            kind=kind,
            node=self.world.spec.node,
            clock=self.clock,
            telemetry=self.telemetry,
            log=ComponentLog(),
            report=lambda *_: False,
        )

    def know_the_instances(self) -> None:
        """Tells which MIG UUID is which instance, as NVML would."""
        self.join.consume(inventory(self.world), Ack())

    async def run(self, until_s: float) -> None:
        """Lets every receiver tick until this time since the world's start."""
        while self._ticks[0][0] <= until_s:
            due_s, order, interval_s, receiver = heapq.heappop(self._ticks)
            await self.clock.advance(due_s - self.clock.monotonic(), turns=0)
            await receiver.tick()
            heapq.heappush(self._ticks, (round(due_s + interval_s, 6), order, interval_s, receiver))

    async def stop(self) -> None:
        """Lets go of what waits."""
        await self.join.shutdown()


def _text(seconds: float) -> float:
    """A duration as a user writes it, read by the config model."""
    return cast(float, f"{seconds:g}s")


@dataclass(frozen=True, slots=True)
class _Work:
    """One work series of a layout."""

    slot: int
    key: DeviceKey
    owner: str
    witness: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """A sample charged to somebody who did not hold the device throughout; times in s since the world's start."""

    key: DeviceKey
    begin_s: float
    end_s: float
    owner: str
    truly: tuple[str, ...]


@dataclass(slots=True)
class Score:
    """Counts samples of work series by how they compare with the truth.

    - `wrong`: owned by somebody who did not hold the device during all of [t - w, t].
    - `swapped`: the same, but the owner held it at the snapshots before and after: invisible to any poll.
    - `sole`: samples of devices that had exactly one owner, the same, during all of [t - w, t].
    - `owned`: those of them that have an owner.
    """

    world: World
    kubelet: WorldKubelet | None = None
    wrong: list[Wrong] = field(default_factory=list)
    samples: Counter[str] = field(default_factory=Counter)
    sole: Counter[str] = field(default_factory=Counter)
    owned: Counter[str] = field(default_factory=Counter)
    swapped: int = 0
    _works: dict[Layout, tuple[list[_Work], dict[str, int]]] = field(default_factory=dict)
    _truth: dict[tuple[DeviceKey, float, float], tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Judges every work sample of a batch."""
        works, windows = self._of(batch.layout)
        if not works:
            return
        readings, end_s = batch.readings(), batch.latest_ns() / NS
        window_s = {source: readings[slot] or 0 for source, slot in windows.items()}
        for work in works:
            if readings[work.slot] is not None:
                self._judge(work, end_s - window_s.get(work.witness, 0), end_s)

    def _judge(self, work: _Work, begin_s: float, end_s: float) -> None:
        held, throughout = self._holders(work.key, begin_s, end_s)
        self.samples[work.witness] += 1
        if len(held) == 1 and held == throughout:
            self.sole[work.witness] += 1
            self.owned[work.witness] += bool(work.owner)
        if work.owner and work.owner not in throughout:
            if self._is_swap(work, begin_s, end_s):
                self.swapped += 1
            else:
                begin_s, end_s = (round(each - self.world.start_s, 3) for each in (begin_s, end_s))
                self.wrong.append(Wrong(work.key, begin_s, end_s, work.owner, tuple(sorted(held))))

    def _is_swap(self, work: _Work, begin_s: float, end_s: float) -> bool:
        """The owner lost and regained the device unseen: it held it at every snapshot from before the window to
        after it."""
        asked = self.kubelet.asked_s if self.kubelet else []
        before = max((each for each in asked if each <= begin_s), default=None)
        after = min((each for each in asked if each >= end_s), default=None)
        if before is None or after is None:
            return False
        seen = (each for each in asked if before <= each <= after)
        return all(work.owner in self._holders(work.key, each, each)[0] for each in seen)

    def _holders(self, key: DeviceKey, begin_s: float, end_s: float) -> tuple[frozenset[str], frozenset[str]]:
        mark = (key, begin_s, end_s)
        found = self._truth.get(mark)
        if found is None:
            if len(self._truth) > 20_000:
                self._truth.clear()
            parts = (self.world.owners(key, begin_s, end_s), self.world.held_throughout(key, begin_s, end_s))
            found = self._truth[mark] = (frozenset(map(owner_text, parts[0])), frozenset(map(owner_text, parts[1])))
        return found

    def _of(self, layout: Layout) -> tuple[list[_Work], dict[str, int]]:
        known = self._works.get(layout)
        if known is None:
            works, windows = list(self._work_series(layout)), {}
            for slot, (_, _, series) in enumerate(layout.identities()):
                if series.metric.name == "gpu.source.window":
                    windows[series.text("gpu.source")] = slot
            known = self._works[layout] = (works, windows)
        return known

    def _work_series(self, layout: Layout) -> Iterator[_Work]:
        for slot, (resource, scope, series) in enumerate(layout.identities()):
            key = self.world.key_of(series.text("hw.id"))
            if scope_of(series.metric.name) is MetricScope.WORK and key is not None:
                yield _Work(slot, key, resource_text(resource), scope.name.removeprefix("gpulens/"))


@cache
def owner_text(owner: Owner) -> str:
    """A true owner as text."""
    return f"{owner.namespace}/{owner.pod}/{owner.container}"


def resource_text(resource: Resource) -> str:
    """The owner that a resource names, as text; empty for the node's."""
    if not resource.text("k8s.pod.name"):
        return ""
    keys = ("k8s.namespace.name", "k8s.pod.name", "k8s.container.name")
    return "/".join(resource.text(key) for key in keys)


@dataclass(slots=True)
class Names:
    """Which series were seen, by the scope of their metric."""

    seen: defaultdict[str, set[tuple[Resource, Series]]] = field(default_factory=lambda: defaultdict(set))

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Notes the series that have a reading."""
        for identity, value in zip(batch.layout.identities(), batch.readings(), strict=True):
            if value is not None:
                self._note(identity)

    def _note(self, identity: Identity) -> None:
        resource, _, series = identity
        scope = scope_of(series.metric.name)
        place = "" if scope is None else scope.value
        if place == "work":
            place = "owned" if resource.text("k8s.pod.name") else "unowned"
        elif place == "fact":
            place = series.metric.name
        self.seen[place].add((resource, series))
