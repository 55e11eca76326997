"""Reads the page of GKE's nvidia-metrics-collector into duty cycle, memory and allocations.

Invariant: a page without GPU series is no failure (the collector's first 30 s), and a page that stopped moving is
recognisable: the collector goes on serving its last values when the kubelet does not answer it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from gpulens.pipeline.component import Host, Metrics, Receiver, Settings
from gpulens.pipeline.data import Batch, Scope
from gpulens.pipeline.discovery import page_source
from gpulens.pipeline.exposition import LOST_LINES, Page, PageLayout, PageParser
from gpulens.pipeline.scrape_client import HttpPages, PageReader, Reading
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.pipeline.streams import StreamLayout
from gpulens.receivers.gke.config import GkeConfig
from gpulens.receivers.gke.plan import Plan, Planner

SOURCE: Final = "gke"
WINDOW_S: Final = 60.0
"""What a reading covers: the collector renews its page every 30 s, and drops ended pods up to 60 s late."""

_REFUSED: Final = (
    "GKE's device plugin serves no metrics on MIG nodes (a partition size is set), and its port belongs to the "
    "plugin's pod, never to localhost"
)


class GkeScraper:
    """Reads one collector's page once a tick."""

    def __init__(self, reader: PageReader, node: str, stream: str) -> None:
        self._reader = reader
        self._stream = stream
        self._planner = Planner(node_resource(node), Scope(f"gpulens/{SOURCE}"), SOURCE)
        self._planned: tuple[PageLayout, Plan] | None = None
        self._steady = StreamLayout()
        self._said: tuple[PageLayout, tuple[str, ...]] | None = None
        self._said_ns = 0

    async def open(self, host: Host) -> None:
        """Gives the page's source what it needs of the host. Raises StartError."""
        await self._reader.open(host)

    async def scrape(self, now_ns: int) -> Scraped:
        """The page as it is now, stamped with the time of the scrape. Raises ScrapeError."""
        return self.convert(await self._reader.read(now_ns), now_ns)

    async def close(self) -> None:
        """Closes the connection."""
        await self._reader.close()

    def convert(self, reading: Reading, now_ns: int) -> Scraped:
        """What a page says."""
        page = reading.page
        plan = self._plan(page.layout)
        rejected = Counter({reason: page.errors[reason] for reason in LOST_LINES if reason in page.errors})
        values = plan.fill(page, rejected)
        layout, settled = self._steady.settle(plan.layout, values)
        batch = Batch.of(layout, settled, now_ns, self._stream)
        return Scraped(batch, rejected, reading.cut, WINDOW_S, self._unchanged_s(page, plan, now_ns))

    def _unchanged_s(self, page: Page, plan: Plan, now_ns: int) -> float:
        """For how long the GPU families have said the same. The page as a whole never stands still: it holds the
        collector's own go_* and process_* too."""
        said = (page.layout, tuple(page.tokens[feed.index] for feed in plan.feeds))
        if said != self._said:
            self._said, self._said_ns = said, now_ns
        return max(0, now_ns - self._said_ns) / 1e9

    def _plan(self, layout: PageLayout) -> Plan:
        if self._planned is None or self._planned[0] is not layout:
            self._planned = (layout, self._planner.plan(layout))
        return self._planned[1]


def create(settings: Settings, config: GkeConfig, consumer: Metrics) -> Receiver:
    """The receiver of one `gke:` block."""
    pages = page_source(config, lambda url: HttpPages(url, config.headers, config.max_page_size, _REFUSED))
    scraper = GkeScraper(PageReader(pages, PageParser()), settings.node, str(settings.id))
    return ScrapeReceiver(settings, config, SOURCE, scraper, consumer)
