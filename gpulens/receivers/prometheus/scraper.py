"""Reads a page into series: under its own names, or as a mapping says.

Invariant: points carry the time of the scrape, or the sample's own where it has one; a counter never steps back under
one start time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import isfinite
from typing import Final, Protocol

from gpulens.pipeline.component import Host, Metrics, Receiver, Settings
from gpulens.pipeline.counters import CounterPoint, CounterStarts
from gpulens.pipeline.data import Batch, Identity, Layout, Scope, Times, Value
from gpulens.pipeline.discovery import page_source
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.exposition import DEFAULT_MAX_SERIES, LOST_LINES, Page, PageLayout, PageParser
from gpulens.pipeline.scrape_client import Body, HttpPages, PageReader, PageSource, Reading
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.pipeline.streams import StreamLayout
from gpulens.receivers.prometheus.config import PrometheusConfig
from gpulens.receivers.prometheus.credentials import BearerToken, LazyTls
from gpulens.receivers.prometheus.foreign import ForeignPlanner, Keeps
from gpulens.receivers.prometheus.plan import Plan, Read
from gpulens.receivers.prometheus.vendor import SOURCE, VendorPlanner

_MOST_SERIES: Final = 2 * DEFAULT_MAX_SERIES
"""Series of a stream, with those that are absent for now: a page may name others at each tick."""
_MOST_NAMES: Final = 4096
_SHOWN: Final = 10
_EXCERPT: Final = 40


class Planner(Protocol):
    """Makes plans of page layouts."""

    def plan(self, layout: PageLayout) -> Plan:
        """The plan of a page layout."""


class Timeline:
    """Times and start times of a stream's slots, and what counters come to."""

    def __init__(self) -> None:
        self._starts: CounterStarts[Identity] = CounterStarts()
        self._points: dict[Identity, CounterPoint] = {}
        self._layout: Layout | None = None
        self._counters: list[tuple[int, Identity]] = []

    def settle(
        self, layout: Layout, values: list[Value | None], times: Times, sources: Mapping[int, int]
    ) -> tuple[Times, Times]:
        """The times and start times of the slots. Counters in `values` are put to what they come to: a total whose own
        time has not moved stays as it was. `sources` says for a slot which of several samples it was read from."""
        if layout is not self._layout:
            self._adopt(layout)
        if not self._counters:
            return times, 0
        each = array("Q", [times]) * layout.size if isinstance(times, int) else times
        starts = array("Q", bytes(8 * layout.size))
        moved = False
        for slot, identity in self._counters:
            raw = values[slot]
            if raw is None or not isfinite(raw):
                values[slot] = None
                continue
            point = self._starts.observe(identity, raw, each[slot], source=str(sources.get(slot, 0)))
            if point is None:
                point = self._points.get(identity)
            if point is None:
                values[slot] = None
                continue
            self._points[identity] = point
            values[slot], starts[slot] = point.value, point.start_ns
            if each[slot] != point.time_ns:
                each[slot], moved = point.time_ns, True
        return (each if moved else times), starts

    def _adopt(self, layout: Layout) -> None:
        self._counters = [
            (slot, identity) for slot, identity in enumerate(layout.identities()) if identity[2].metric.is_counter
        ]
        gone = self._points.keys() - {identity for _, identity in self._counters}
        for identity in gone:
            del self._points[identity]
        self._starts.retain({identity for _, identity in self._counters})
        self._layout = layout


class PrometheusScraper:
    """Reads one page once a tick. `mapping` names the mapping in messages, empty without one."""

    def __init__(
        self,
        settings: Settings,
        reader: PageReader,
        planner: Planner,
        tls: LazyTls,
        mapping: str = "",
        window_s: float = 0.0,
        honor_timestamps: bool = True,
    ) -> None:
        self._settings = settings
        self._stream = str(settings.id)
        self._reader = reader
        self._planner = planner
        self._tls = tls
        self._mapping = mapping
        self._window_s = window_s
        self._honor_timestamps = honor_timestamps
        self._planned: tuple[PageLayout, Plan] | None = None
        self._steady = StreamLayout()
        self._timeline = Timeline()
        self._said: tuple[PageLayout, tuple[str, ...]] | None = None
        self._said_ns = 0
        self._strangers: set[str] = set()
        self._origin = ""
        self._shift: tuple[Layout, Layout, list[int]] | None = None

    async def open(self, host: Host) -> None:
        """Reads the files of TLS, and gives the page's source what it needs of the host. Raises StartError."""
        self._tls.context()
        await self._reader.open(host)

    async def scrape(self, now_ns: int) -> Scraped:
        """The page as it is now. Raises ScrapeError."""
        return self.convert(await self._reader.read(now_ns), now_ns)

    async def close(self) -> None:
        """Closes the connection."""
        await self._reader.close()

    def convert(self, reading: Reading, now_ns: int) -> Scraped:
        """What a page says. Raises ScrapeError when it is none of metrics, or when a mapping finds no device on it."""
        page = reading.page
        bad = [line for line in page.examples if line.reason != "truncated"]
        if bad and not page.layout.samples and not reading.cut:
            start = bad[0].text.strip()[:_EXCERPT]
            raise ScrapeError(f"what is served is no page of metrics: it starts with {start!r}", "no_metrics")
        if reading.origin != self._origin:
            self._origin = reading.origin
            if not self._mapping:  # a device's totals outlive the exporter, another program's do not
                self._timeline = Timeline()
        plan = self._plan(page.layout)
        self._count(plan)
        if self._mapping and not plan.layout.size:
            raise ScrapeError(reading.cut or self._nothing(page, plan), "cut" if reading.cut else "nothing_mapped")
        rejected = Counter({reason: page.errors[reason] for reason in LOST_LINES if reason in page.errors})
        read = plan.read(page, now_ns, self._honor_timestamps, rejected)
        layout, settled = self._steady.settle(plan.layout, read.values)
        if layout.size > _MOST_SERIES:
            self._steady = StreamLayout()
            layout, settled = self._steady.settle(plan.layout, read.values)
        values = list(settled)
        sources, times = self._shifted(plan.layout, layout, read, now_ns)
        times, starts = self._timeline.settle(layout, values, times, sources)
        batch = Batch.of(layout, values, times, self._stream, start_ns=starts)
        unchanged_s = self._unchanged_s(page, plan, now_ns) if self._mapping else None
        reasons = {str(reason): count for reason, count in rejected.items()}
        return Scraped(batch, reasons, self._problem(reading, plan), self._window_s, unchanged_s)

    def _shifted(self, plan: Layout, stream: Layout, read: Read, now_ns: int) -> tuple[Mapping[int, int], Times]:
        """What was read by slots of the plan's layout, by slots of the stream's."""
        if not read.times and not read.sources:
            return {}, now_ns
        if self._shift is None or self._shift[0] is not plan or self._shift[1] is not stream:
            # A series that has not had a number yet stands in the plan and not in the stream.
            places = [stream.slots.get(identity, -1) for identity in plan.identities()]
            self._shift = (plan, stream, places)
        places = self._shift[2]
        sources = {places[slot]: number for slot, number in read.sources.items()}
        if not read.times:
            return sources, now_ns
        times = array("Q", [now_ns]) * stream.size
        for slot, time_ns in read.times.items():
            if places[slot] >= 0:
                times[places[slot]] = time_ns
        return sources, times

    def _unchanged_s(self, page: Page, plan: Plan, now_ns: int) -> float:
        """For how long what is read has been the same; the page as a whole never stands still (go_*, process_*)."""
        said = (page.layout, plan.said(page))
        if said != self._said:
            self._said, self._said_ns = said, now_ns
        return max(0, now_ns - self._said_ns) / 1e9

    def _plan(self, layout: PageLayout) -> Plan:
        if self._planned is None or self._planned[0] is not layout:
            self._planned = (layout, self._planner.plan(layout))
        return self._planned[1]

    def _count(self, plan: Plan) -> None:
        """Counts what nothing reads, and names it once."""
        if not plan.unmapped:
            return
        self._settings.telemetry.count("gpulens_receiver_unmapped_points", plan.unmapped, receiver=self._stream)
        new = sorted(plan.strangers.keys() - self._strangers)[: max(0, _MOST_NAMES - len(self._strangers))]
        if new and self._mapping:
            self._strangers.update(new)
            shown = ",".join(name[:100] for name in new[:_SHOWN])
            self._settings.log.info("Metrics without a mapping were skipped.", count=len(new), names=shown)

    def _nothing(self, page: Page, plan: Plan) -> str:
        if not page.layout.samples:
            return "the page has no samples: the exporter sees no device, or it has just started"
        if plan.dropped["no_device"]:
            return f"no sample has a label that the mapping '{self._mapping}' knows a device by"
        return (
            f"the mapping '{self._mapping}' names none of the page's metrics, or 'keep' and 'drop' leave none: "
            "is it the right exporter's page?"
        )

    @staticmethod
    def _problem(reading: Reading, plan: Plan) -> str:
        if reading.cut:
            return reading.cut
        lost = reading.page.errors.get("too_many_series", 0)
        lost += plan.dropped["too_many_devices"] + plan.dropped["too_many_owners"]
        return f"{lost} series over the limit were left out" if lost else ""


class LazyPages:
    """A page whose connection is made at the first fetch: its TLS files are not read before the start."""

    def __init__(self, connect: Callable[[], PageSource]) -> None:
        self._connect = connect
        self._pages: PageSource | None = None

    async def fetch(self) -> Body:
        """The page as it is now. Raises ScrapeError."""
        if self._pages is None:
            self._pages = self._connect()
        return await self._pages.fetch()

    async def close(self) -> None:
        """Lets go of the connection."""
        pages, self._pages = self._pages, None
        if pages is not None:
            await pages.close()


def keeps(config: PrometheusConfig) -> Keeps:
    """Which metrics the block's `keep` and `drop` let through."""
    keep, drop = config.keep, config.drop

    def kept(name: str) -> bool:
        wanted = not keep or any(fnmatchcase(name, pattern) for pattern in keep)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in drop)

    return kept


def create(settings: Settings, config: PrometheusConfig, consumer: Metrics) -> Receiver:
    """The receiver of one `prometheus:` block."""
    token = BearerToken(config.bearer_token, config.bearer_token_file)
    tls = LazyTls(config.tls)
    server_name = config.tls.server_name_override if config.tls is not None else ""

    def connect(url: str) -> PageSource:
        return LazyPages(
            lambda: HttpPages(
                url,
                config.headers,
                config.max_page_size,
                tls=tls.context(),
                fresh_headers=token.headers,
                server_name=server_name,
            )
        )

    node, scope = node_resource(settings.node), Scope(f"gpulens/{SOURCE}")
    mapping = config.vendor()
    planner: Planner
    if mapping is None:
        planner = ForeignPlanner(node, scope, keeps(config), config.labels_drop)
    else:
        planner = VendorPlanner(node, scope, keeps(config), mapping)
    scraper = PrometheusScraper(
        settings,
        PageReader(page_source(config, connect), PageParser()),
        planner,
        tls,
        config.mapping,
        mapping.window_s if mapping is not None else 0.0,
        config.honor_timestamps,
    )
    return ScrapeReceiver(settings, config, SOURCE, scraper, consumer)
