"""A prometheus scraper that is fed page texts, and what it makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.data import Resource, Scope, Value
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.scrape_client import Body, PageReader, Reading
from gpulens.pipeline.scraping import Scraped, node_resource
from gpulens.receivers.prometheus.config import PrometheusConfig
from gpulens.receivers.prometheus.credentials import LazyTls
from gpulens.receivers.prometheus.foreign import ForeignPlanner
from gpulens.receivers.prometheus.mapping import VendorMapping, load_mapping
from gpulens.receivers.prometheus.scraper import Planner, PrometheusScraper, keeps
from gpulens.receivers.prometheus.vendor import VendorPlanner
from tests.receivers.page_server import Bench

S = 10**9
START_NS = 1_700_000_000 * S
NODE = node_resource("node-1")
SCOPE = Scope("gpulens/prometheus")

Point = tuple[str, Mapping[str, object]]


class NoPages:
    """A source that is never asked."""

    async def fetch(self) -> Body:
        """Must not be called."""
        raise AssertionError("this test hands pages in")

    async def close(self) -> None:
        """Nothing to let go of."""


class Page:
    """A scraper that is fed page texts, a tick of 15 s each."""

    def __init__(self, mapping: VendorMapping | str = "", **keys: object) -> None:
        config = PrometheusConfig.model_validate({"endpoint": "http://h", **keys})
        vendor = (load_mapping(mapping) if mapping else None) if isinstance(mapping, str) else mapping
        self.bench = Bench("prometheus", VirtualClock())
        planner: Planner = ForeignPlanner(NODE, SCOPE, keeps(config), config.labels_drop)
        if vendor is not None:
            planner = VendorPlanner(NODE, SCOPE, keeps(config), vendor)
        self._parser = PageParser()
        self._scraper = PrometheusScraper(
            self.bench.settings,
            PageReader(NoPages(), self._parser),
            planner,
            LazyTls(None),
            "a mapping" if vendor is not None else "",
            vendor.window_s if vendor is not None else 0.0,
            config.honor_timestamps,
        )
        self.now_ns = START_NS

    def read(self, text: str | bytes, origin: str = "") -> Scraped:
        """What the scraper makes of this page at the next tick."""
        data = text.encode() if isinstance(text, str) else text
        self.now_ns += 15 * S
        return self._scraper.convert(Reading(self._parser.parse(data), 0.0, "", origin), self.now_ns)

    @property
    def unmapped(self) -> int:
        """Samples that nothing read so far."""
        return self.bench.telemetry.value("gpulens_receiver_unmapped_points")


def points(scraped: Scraped, resource: Resource = NODE) -> dict[tuple[object, ...], Value | None]:
    """Readings on a resource by (hw.id, metric, attributes that say no device), sorted attributes as k=v."""
    found: dict[tuple[object, ...], Value | None] = {}
    batch = scraped.batch
    for (where, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
        attributes = series.map
        device = attributes.pop("hw.id", "")
        for key in ("hw.parent", "hw.name", "hw.model"):
            attributes.pop(key, None)
        if where == resource and series.metric.name not in ("gpu.device.info", "gpu.allocated"):
            found[device, series.metric.name, *("=".join((key, str(text))) for key, text in attributes.items())] = value
    return found


def infos(scraped: Scraped) -> dict[object, dict[str, object]]:
    """What is said of devices: the attributes of gpu.device.info by hw.id."""
    found: dict[object, dict[str, object]] = {}
    for _, _, series in scraped.batch.layout.identities():
        if series.metric.name == "gpu.device.info":
            attributes: dict[str, object] = dict(series.map)
            found[attributes.pop("hw.id")] = attributes
    return found


def owners(scraped: Scraped) -> set[tuple[object, ...]]:
    """(hw.id, namespace, pod, container) of every allocation."""
    batch = scraped.batch
    found: set[tuple[object, ...]] = set()
    for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
        if series.metric.name == "gpu.allocated":
            assert value == 1
            assert series.map["gpu.allocation.source"] == "prometheus"
            assert resource.text("k8s.node.name") == "node-1"
            names = ("k8s.namespace.name", "k8s.pod.name", "k8s.container.name")
            found.add((series.map["hw.id"], *(resource.text(name) for name in names)))
    return found
