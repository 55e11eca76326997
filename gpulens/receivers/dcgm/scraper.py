"""Reads a dcgm-exporter page into canonical readings, device identities and allocations.

Invariant: no owner label stays on a reading, no value leaves in another unit than the catalogue's, and what
is struck out is counted by reason while every other series goes on.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from gpulens.pipeline.component import Host, Metrics, Receiver, Settings
from gpulens.pipeline.counters import CounterStarts
from gpulens.pipeline.data import Batch, Identity, Layout, Scope, Times, Value
from gpulens.pipeline.discovery import page_source
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.exposition import LOST_LINES, Page, PageLayout, PageParser
from gpulens.pipeline.exposition_line import MAX_EXCERPT
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scrape_client import HttpPages, PageReader, Reading
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.pipeline.streams import StreamLayout
from gpulens.receivers.dcgm.config import DcgmConfig, RatioNames
from gpulens.receivers.dcgm.plan import Plan, Planner
from gpulens.receivers.dcgm.refresh import RefreshLearner
from gpulens.receivers.dcgm.units import UNDECIDED, Either, Reason, Unit

SOURCE: Final = "dcgm"
_PLANNED_SERIES: Final = 40_000
_SAID: Final = 1000
"""Names that are remembered as announced; on a page whose names are others each time, later ones go unsaid."""
_SHOWN: Final = 20
_PLANS: Final = 4  # page layouts remembered; a page that flaps between two costs nothing
_EMPTY: Final = (
    "the page has no DCGM series; if the exporter has just started this passes, else look at its log for the GPU, "
    "library (libdcgm, libnvidia-ml), mount or permission (profiling needs SYS_ADMIN) that it misses"
)
_REFUSED: Final = "is dcgm-exporter running on this node, and is this its port?"


class CounterColumn:
    """Start times of a stream's counters, kept from tick to tick."""

    def __init__(self) -> None:
        self._starts: CounterStarts[Identity] = CounterStarts()
        self._layout: Layout | None = None
        self._counters: list[tuple[int, Identity]] = []
        self._column: array[int] = array("Q")

    def starts(self, layout: Layout, values: list[Value | None], now_ns: int) -> Times:
        """The start time of each slot (0 for what is no counter); a total that can't be placed becomes
        None."""
        if layout is not self._layout:
            self._adopt(layout)
        column = self._column
        for slot, identity in self._counters:
            value = values[slot]
            if value is None:
                continue
            point = self._starts.observe(identity, value, now_ns)
            if point is None:
                values[slot] = None
            elif point.start_ns != column[slot]:
                if column is self._column:  # the last batch still holds the old one
                    column = array("Q", column)
                column[slot] = point.start_ns
        self._column = column
        return column

    def _adopt(self, layout: Layout) -> None:
        self._counters = [
            (slot, identity) for slot, identity in enumerate(layout.identities()) if identity[2].metric.is_counter
        ]
        self._starts.retain({identity for _, identity in self._counters})
        self._column = array("Q", bytes(8 * layout.size))
        self._layout = layout


class UnitResolver:
    """Decides what a name that stands for two units holds, and remembers what the values have proven for
    as long as the exporter may be the same."""

    def __init__(self, setting: RatioNames) -> None:
        self._setting = setting
        self._proven: set[str] = set()
        self._page_is_new: bool | None = None

    def turn_to(self, page_is_new: bool | None) -> None:
        """Which version label the page has that is read next; with another kind it is another exporter's."""
        if page_is_new is not self._page_is_new:
            self.forget()
        self._page_is_new = page_is_new

    def forget(self) -> None:
        """The page was away: what comes back may be another release, to which no proof applies."""
        self._proven.clear()

    def __call__(self, either: Either, values: Sequence[float]) -> Unit:
        """The unit of these values."""
        if self._setting is not RatioNames.AUTO:
            return either.new if self._setting is RatioNames.NEW else either.old
        if either.name not in self._proven and any(either.tell < value <= either.by_size.ceiling for value in values):
            self._proven.add(either.name)
        if either.name in self._proven:
            return either.by_size
        if self._page_is_new is None:
            return UNDECIDED
        return either.new if self._page_is_new else either.old


class Announcer:
    """Logs each kind of trouble with a page once."""

    def __init__(self, log: ComponentLog) -> None:
        self._log = log
        self._said: set[str] = set()

    def lines(self, page: Page) -> None:
        """Lines that could not be read, with the first example of each reason."""
        for error in page.errors.keys() - self._said if page.errors else ():
            self._said.add(error)
            example = next((each for each in page.examples if each.reason == error), None)
            line, text = (example.line, example.text) if example else (0, "")
            self._log.warning("Page lines could not be read.", reason=error, line=line, text=text)

    def families(self, names: frozenset[str]) -> int:
        """Metric families without a meaning here; returns how many were not announced before."""
        new = sorted(names - self._said)[: max(0, _SAID - len(self._said))]
        if new:
            self._said.update(new)
            shown = ",".join(name[:MAX_EXCERPT] for name in new[:_SHOWN])
            self._log.info("Unknown metric families were skipped.", count=len(new), names=shown)
        return len(new)


class DcgmScraper:
    """Reads one exporter's page once a tick."""

    def __init__(self, reader: PageReader, config: DcgmConfig, node: str, stream: str, log: ComponentLog) -> None:
        self._reader = reader
        self._stream = stream
        self._planner = Planner(node_resource(node), Scope(f"gpulens/{SOURCE}"), SOURCE)
        self._plans: dict[PageLayout, Plan] = {}
        self._resolve = UnitResolver(config.renamed_units)
        self._refresh = RefreshLearner(config.collection_interval, config.refresh)
        self._announce = Announcer(log)
        self._steady = StreamLayout()
        self._counters = CounterColumn()
        self._planned: Plan | None = None
        self._origin = ""

    async def open(self, host: Host) -> None:
        """Gives the page's source what it needs of the host. Raises StartError."""
        await self._reader.open(host)

    async def scrape(self, now_ns: int) -> Scraped:
        """The page as it is now, stamped with the time of the scrape. Raises ScrapeError."""
        try:
            reading = await self._reader.read(now_ns)
        except ScrapeError:
            self._away()
            raise
        if reading.origin != self._origin:
            self._origin = reading.origin
            self._away()
        return self.convert(reading, now_ns)

    async def close(self) -> None:
        """Closes the connection."""
        await self._reader.close()

    def convert(self, reading: Reading, now_ns: int) -> Scraped:
        """What a page says. Raises ScrapeError when it says nothing about GPUs."""
        page = reading.page
        last, plan = self._planned, self._plan(page.layout)
        self._planned = plan
        if not plan.devices:
            self._away()
            raise ScrapeError(reading.cut or _EMPTY, "cut" if reading.cut else "empty_page")
        if plan is not last:
            self._refresh.interrupted()
        self._refresh.observe(plan.work_tokens(page), now_ns)
        self._resolve.turn_to(plan.new_names)
        rejected = Counter({reason: page.errors[reason] for reason in LOST_LINES if reason in page.errors})
        self._announce.lines(page)
        unknown = self._announce.families(plan.unknown)
        if unknown:
            rejected[Reason.UNKNOWN_FAMILY] += unknown
        layout, settled = self._steady.settle(plan.layout, plan.fill(page, self._resolve, rejected))
        values = list(settled)
        starts = self._counters.starts(layout, values, now_ns)
        batch = Batch.of(layout, values, now_ns, self._stream, start_ns=starts)
        reasons = {str(reason): count for reason, count in rejected.items()}
        return Scraped(batch, reasons, self._problem(reading, plan), self._refresh.refresh_s, reading.unchanged_s)

    def _plan(self, layout: PageLayout) -> Plan:
        plan = self._plans.pop(layout, None)
        if plan is None or (plan is not self._planned and not self._planner.takes_up(plan)):
            plan = self._planner.plan(layout)
        self._plans[layout] = plan
        while len(self._plans) > 1 and (len(self._plans) > _PLANS or sum(map(len, self._plans)) > _PLANNED_SERIES):
            del self._plans[next(iter(self._plans))]
        return plan

    def _away(self) -> None:
        """What was learned of the exporter may not be true of the one that comes back."""
        self._refresh.forget()
        self._resolve.forget()

    @staticmethod
    def _problem(reading: Reading, plan: Plan) -> str:
        if reading.cut:
            return reading.cut
        lost = reading.page.errors.get("too_many_series", 0)
        if lost:
            return f"{lost} series over the limit were left out"
        rows = plan.dropped[Reason.TOO_MANY_DEVICES] + plan.dropped[Reason.TOO_MANY_OWNERS]
        return f"{rows} rows name more devices or owners than a node can have and were left out" if rows else ""


def create(settings: Settings, config: DcgmConfig, consumer: Metrics) -> Receiver:
    """The receiver of one `dcgm:` block."""
    pages = page_source(config, lambda url: HttpPages(url, config.headers, config.max_page_size, _REFUSED))
    reader = PageReader(pages, PageParser())
    scraper = DcgmScraper(reader, config, settings.node, str(settings.id), settings.log)
    return ScrapeReceiver(settings, config, SOURCE, scraper, consumer)
