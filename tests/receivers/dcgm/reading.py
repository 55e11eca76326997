"""Turns page texts into what the dcgm receiver makes of them, and finds single readings in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulens.pipeline.data import Batch, Value
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scrape_client import Body, PageReader, Reading
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper

NODE = "node-1"
START_NS = 1_800_000_000 * 10**9
SOURCE_METRICS: set[str] = set()
FACTS = {"gpu.device.info", "gpu.info", "gpu.allocated"}


class NoPages:
    """A source that is never asked."""

    async def fetch(self) -> Body:
        """Must not be called."""
        raise AssertionError("this test hands pages in")

    async def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One series and its reading."""

    resource: Mapping[str, object]
    metric: str
    attributes: Mapping[str, object]
    value: Value | None
    start_ns: int


class Node:
    """A dcgm scraper that is fed page texts, 15 s apart."""

    def __init__(self, **config: object) -> None:
        settings = DcgmConfig.model_validate({"endpoint": "http://127.0.0.1:9400/metrics", **config})
        self.parser = PageParser()
        self.scraper = DcgmScraper(PageReader(NoPages(), self.parser), settings, NODE, "dcgm", ComponentLog())
        self.now_ns = START_NS
        self.rejected: Mapping[str, int] = {}
        self.problem = ""
        self.window_s = 0.0
        self.unchanged_s: float | None = None
        self.batch: Batch | None = None

    def read(self, text: str | bytes, unchanged_s: float = 0.0, step_s: float = 15.0) -> list[Row]:
        """What the scraper makes of this page; time moves on by `step_s` afterwards."""
        data = text.encode() if isinstance(text, str) else text
        scraped = self.scraper.convert(Reading(self.parser.parse(data), unchanged_s, ""), self.now_ns)
        self.now_ns += int(step_s * 1e9)
        self.rejected, self.problem, self.batch = scraped.rejected, scraped.problem, scraped.batch
        self.window_s = scraped.window_s
        self.unchanged_s = scraped.unchanged_s
        return rows(scraped.batch)


def rows(batch: Batch) -> list[Row]:
    """A batch as a list of its series."""
    return [
        Row(resource.map, series.metric.name, series.map, value, start)
        for (resource, _, series), value, start in zip(
            batch.layout.identities(), batch.readings(), batch.starts(), strict=True
        )
    ]


def find(found: list[Row], metric: str, **attributes: str) -> list[Row]:
    """The rows of a metric whose attributes have these values (dots written as underscores)."""
    return [
        row for row in found if row.metric == metric and attributes.items() <= _spelled_as_names(row.attributes).items()
    ]


def _spelled_as_names(attributes: Mapping[str, object]) -> dict[str, object]:
    return {key.replace(".", "_"): each for key, each in attributes.items()}


def value(found: list[Row], metric: str, **attributes: str) -> Value | None:
    """The reading of the one row that fits; None when it has none, or when there is no such row."""
    fitting = find(found, metric, **attributes)
    assert len(fitting) <= 1, fitting
    return fitting[0].value if fitting else None


def owners(found: list[Row]) -> set[tuple[object, object, object, object]]:
    """(device, namespace, pod, container) of every allocation."""
    return {
        (
            row.attributes["hw.id"],
            row.resource["k8s.namespace.name"],
            row.resource["k8s.pod.name"],
            row.resource.get("k8s.container.name"),
        )
        for row in find(found, "gpu.allocated")
    }


def readings(found: list[Row]) -> list[Row]:
    """The rows that are readings of a device."""
    return [row for row in found if row.metric not in SOURCE_METRICS | FACTS]
