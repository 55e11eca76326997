"""The scrape helper: calls a source at its interval and says at every tick whether it lives.

Invariant: a batch leaves on every tick, also when the scrape failed; scrapes of one receiver never overlap. A source
that fails keeps its last readings for `keep_s` (two intervals by default); then a complete batch with nothing but the
signs of life takes them off.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

from pydantic import field_validator

from gpulens.config.durations import format_duration
from gpulens.config.ranges import positive, require
from gpulens.config.types import ComponentConfig, Duration
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Host, Metrics, Settings
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Resource, Scope, Series, Value, concatenate_on
from gpulens.pipeline.errors import RefusedError, ScrapeError
from gpulens.pipeline.status import Status

T = TypeVar("T")

SERVICE_NAME = "gpulens"


class ScrapeConfig(ComponentConfig):
    """What every scraping receiver's block has. Names and meaning are the Collector's scraperhelper's, but for a
    timeout of 0: that is one interval here, since a batch leaves on every tick."""

    collection_interval: Duration = 60.0
    initial_delay: Duration = 1.0
    timeout: Duration = 0.0

    _check_interval = field_validator("collection_interval")(positive)
    _check_timeout = field_validator("timeout")(require(lambda value: value >= 0, "'{key}' must not be negative"))

    def where(self) -> str:
        """What is asked, for messages of deadlines; empty where the block does not say."""
        return str(getattr(self, "endpoint", ""))

    def doubts(self) -> tuple[str, ...]:
        if self.timeout <= self.collection_interval:
            return ()
        timeout, interval = format_duration(self.timeout), format_duration(self.collection_interval)
        return (
            f"'timeout' ({timeout}) is longer than 'collection_interval' ({interval}): while the source does not "
            "answer, ticks are skipped",
        )


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a scrape found.

    - `rejected` counts struck-out values by reason.
    - `problem` is set when a part of the source could not be read, so that what is missing may still be there: the
      batch is then partial. Single bad values are no problem in this sense.
    - `window_s`: a reading at t covers [t - window_s, t] (an exporter's refresh); 0 for instants.
    """

    batch: Batch
    rejected: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    window_s: float = 0.0
    unchanged_s: float | None = None
    """How long the source has said the same, byte for byte; None where that means nothing."""
    before: tuple[Batch, ...] = ()
    """Partial batches that go out first: the 0 with which a counter begins that is first seen at 1."""


class Scraper(Protocol):
    """Reads one source once."""

    async def scrape(self, now_ns: int) -> Scraped:
        """Reads the source; points are stamped by what is known of their time, else `now_ns`.

        Raises ScrapeError (or a subclass) when nothing could be read.
        """

    async def close(self) -> None:
        """Lets go of connections; safe without a scrape and when called twice."""


@runtime_checkable
class Opens(Protocol):
    """A scraper that needs more than its settings before the first scrape: an extension, a child process."""

    async def open(self, host: Host) -> None:
        """Gets it; called once, by the receiver's start. Raises StartError."""


class DeadlineError(Exception):
    """A wait took longer than its deadline."""


async def within(clock: Clock, seconds: float, work: Awaitable[T]) -> T:
    """Awaits `work` for at most `seconds` of the clock's time (0 = no limit). Raises DeadlineError."""
    task = asyncio.ensure_future(work)
    if seconds <= 0:
        return await task
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise DeadlineError(f"no answer within {seconds:g}s")
    finally:
        for each in (task, timer):
            each.cancel()
        await asyncio.gather(task, timer, return_exceptions=True)


def node_resource(node: str) -> Resource:
    """The resource of readings without an owner: the node, and this agent as the one who tells."""
    named = {"k8s.node.name": node, "service.instance.id": node} if node else {}
    return Resource({**named, "service.name": SERVICE_NAME})


class SignsOfLife:
    """The series with which a receiver says at each tick how its source is."""

    def __init__(self, source: str, name: str, node: str, interval_s: float) -> None:
        self._name = name
        self._resource = node_resource(node)
        self._scope = Scope(f"gpulens/{source}")
        self._interval_s = interval_s
        self._window_s = 0.0
        self._unchanged_s: float | None = None
        self._rejected: Counter[str] = Counter()
        self._first_ns = 0
        self._layout = self._build()

    def learn(self, scraped: Scraped) -> None:
        """Takes in what a good scrape said of the source."""
        had = (bool(self._window_s), self._unchanged_s is None, len(self._rejected))
        self._rejected.update(scraped.rejected)
        self._window_s, self._unchanged_s = scraped.window_s, scraped.unchanged_s
        if had != (bool(self._window_s), self._unchanged_s is None, len(self._rejected)):
            self._layout = self._build()

    def batch(self, up: bool, now_ns: int, stream: str, complete: bool) -> Batch:
        """The signs of life as a batch of their own."""
        self._first_ns = self._first_ns or now_ns
        window = [self._window_s] if self._window_s else []
        window += [] if self._unchanged_s is None else [self._unchanged_s]
        rejected = (self._rejected[reason] for reason in sorted(self._rejected))
        values: list[Value] = [int(up), self._interval_s, *window, *rejected]
        return Batch.of(self._layout, values, now_ns, stream, complete, self._starts())

    def _starts(self) -> int:
        # One start for all slots is enough: exporters read it for counters only.
        return self._first_ns if self._rejected else 0

    def _build(self) -> Layout:
        source = {"gpu.source": self._name}
        series = [Series(metric("gpu.source.up"), source), Series(metric("gpu.source.interval"), source)]
        if self._window_s:
            series.append(Series(metric("gpu.source.window"), source))
        if self._unchanged_s is not None:
            series.append(Series(metric("gpu.source.unchanged"), source))
        rejected = metric("gpu.telemetry.rejected")
        series += [Series(rejected, {**source, "reason": reason}) for reason in sorted(self._rejected)]
        return Layout([Block(self._resource, self._scope, series)])


class ScrapeReceiver:
    """A receiver made of a scraper and a timer.

    A source that is read at several intervals has one for each `tier`: their streams are `<id>/<tier>`, and only the
    one without a tier tells the signs of life.
    """

    def __init__(
        self,
        settings: Settings,
        config: ScrapeConfig,
        source: str,
        scraper: Scraper,
        consumer: Metrics,
        keep_s: float | None = None,
        tier: str = "",
    ) -> None:
        self._settings = settings
        self._config = config
        self._scraper = scraper
        self._consumer = consumer
        self._tier = tier
        self._stream = f"{settings.id}/{tier}" if tier else str(settings.id)
        # Two receivers of one type are two sources: `dcgm` and `dcgm/b`.
        name = f"{source}/{settings.id.name}" if settings.id.name else source
        self._life = SignsOfLife(source, name, settings.node, config.collection_interval)
        self._keep_s = 2 * config.collection_interval if keep_s is None else keep_s
        self._task: asyncio.Task[None] | None = None
        self._last_good_s: float | None = None
        self._joined: tuple[Layout, Layout, Layout] | None = None
        self._refused = False

    async def start(self, host: Host) -> None:
        """Starts the timer; the first scrape comes after initial_delay."""
        if isinstance(self._scraper, Opens):
            await self._scraper.open(host)
        self._task = asyncio.create_task(self._run(), name=f"scrape {self._stream}")

    async def shutdown(self) -> None:
        """Stops the timer and lets go of the source."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._scraper.close()

    async def _run(self) -> None:
        clock, interval = self._settings.clock, self._config.collection_interval
        await clock.sleep(self._config.initial_delay)
        due = clock.monotonic()
        while True:
            await self.tick()
            due += interval
            late = clock.monotonic() - due
            if late > 0:  # a slow scrape skips ticks, it never overlaps with the next
                due += interval * (late // interval + 1)
            await clock.sleep(due - clock.monotonic())

    async def tick(self) -> None:
        """One scrape and one batch."""
        settings = self._settings
        now_ns = settings.clock.now_ns()
        # Without a deadline a source that hangs would silence the signs of life too.
        limit_s = self._config.timeout or self._config.collection_interval
        try:
            scraped = await within(settings.clock, limit_s, self._scraper.scrape(now_ns))
        except DeadlineError as error:
            where = self._config.where()
            self._failed(ScrapeError(f"{error} from {where}" if where else str(error), "timeout"), now_ns)
        except ScrapeError as error:
            self._failed(error, now_ns)
        except Exception as error:  # noqa: BLE001 - a scraper's defect is one failed tick, not the end of all ticks
            settings.log.debug("Scraper raised.", error="".join(traceback.format_exception(error)))
            self._failed(ScrapeError(f"defect in the scraper: {error!r}", "internal_error"), now_ns)
        else:
            self._succeeded(scraped, now_ns)

    def _succeeded(self, scraped: Scraped, now_ns: int) -> None:
        settings, batch = self._settings, scraped.batch
        self._last_good_s = settings.clock.monotonic()
        settings.telemetry.count("otelcol_scraper_scraped_metric_points", batch.layout.size, receiver=self._stream)
        if scraped.problem:
            self._report(scraped.problem)
            batch = replace(batch, complete=False)
        elif settings.report(Status.OK, ""):
            settings.log.info("Scrape recovered.")
        for earlier in scraped.before:
            self._emit(earlier)
        if self._tier:
            self._emit(batch)
            return
        self._life.learn(scraped)
        life = self._life.batch(True, now_ns, self._stream, batch.complete)
        self._emit(concatenate_on(self._join(life.layout, batch.layout), life, batch))

    def _failed(self, error: ScrapeError, now_ns: int) -> None:
        settings = self._settings
        settings.telemetry.count("otelcol_scraper_errored_metric_points", 1, receiver=self._stream, reason=error.reason)
        self._report(str(error))
        silent = self._last_good_s is None or settings.clock.monotonic() - self._last_good_s >= self._keep_s
        if not self._tier:
            self._emit(self._life.batch(False, now_ns, self._stream, complete=silent))
        elif silent:
            self._emit(Batch.of(EMPTY_LAYOUT, (), now_ns, self._stream))

    def _report(self, problem: str) -> None:
        """Says it once for each change of state, not at each tick."""
        if self._settings.report(Status.RECOVERABLE, problem):
            self._settings.log.warning("Scrape failed.", error=problem)

    def _join(self, life: Layout, readings: Layout) -> Layout:
        """The layout of both, built once while neither changes."""
        known = self._joined
        if known is None or known[0] is not life or known[1] is not readings:
            known = self._joined = (life, readings, Layout((*life.blocks, *readings.blocks)))
        return known[2]

    def _emit(self, batch: Batch) -> None:
        try:
            self._consumer.consume(batch, Ack(can_resend=False))
        except RefusedError as error:
            self._settings.telemetry.count(
                "otelcol_receiver_refused_metric_points",
                batch.layout.size,
                receiver=self._stream,
                reason=error.reason,
            )
            if not self._refused:  # what is shown and known from here on is old, and nobody else says so
                self._settings.log.warning("Data refused. Nothing of this source goes on.", error=str(error))
            self._refused = True
        else:
            self._refused = False
            self._settings.telemetry.count(
                "otelcol_receiver_accepted_metric_points", batch.layout.size, receiver=self._stream
            )
