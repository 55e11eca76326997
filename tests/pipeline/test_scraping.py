"""The scrape helper: ticks, deadlines, signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import Clock, VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Block, Layout, Scope, Series, Value
from gpulens.pipeline.errors import RefusedError, ScrapeError
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scraping import (
    DeadlineError,
    ScrapeConfig,
    Scraped,
    ScrapeReceiver,
    node_resource,
    within,
)
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry
from tests.pipeline.parts import Bench

READINGS = Layout([Block(node_resource("n"), Scope("gpulens/fake"), [Series(metric("gpu.sm.active"))])])
Answer = Callable[[int], Awaitable[Scraped]]


def reading(now_ns: int, value: float = 0.5) -> Batch:
    """One good reading."""
    return Batch.of(READINGS, [value], now_ns, "fake/a")


async def fine(now_ns: int) -> Scraped:
    """A scrape without trouble."""
    return Scraped(reading(now_ns))


@dataclass
class Rig:
    """A receiver on a virtual clock with a scraper that a test scripts."""

    interval_s: float = 10.0
    delay_s: float = 1.0
    timeout_s: float = 0.0
    keep_s: float | None = None
    tier: str = ""
    answer: Answer = fine
    refuse: str = ""
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(start_ns=0))
    telemetry: Telemetry = field(default_factory=Telemetry)
    batches: list[Batch] = field(default_factory=list)
    reports: list[tuple[Status, str]] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)
    running: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        times = {"collection_interval": self.interval_s, "initial_delay": self.delay_s, "timeout": self.timeout_s}
        self.receiver = ScrapeReceiver(
            Settings(
                ComponentID("fake", "a"), Kind.RECEIVERS, "n", self.clock, self.telemetry, ComponentLog(), self.report
            ),
            ScrapeConfig.model_validate({key: f"{seconds}s" for key, seconds in times.items()}),
            "fake",
            self,
            self,
            self.keep_s,
            self.tier,
        )

    def report(self, status: Status, reason: str) -> bool:
        if self.reports and self.reports[-1] == (status, reason):
            return False
        self.reports.append((status, reason))
        return True

    async def scrape(self, now_ns: int) -> Scraped:
        assert now_ns == self.clock.now_ns()
        self.scrapes.append(self.clock.monotonic())
        self.running += 1
        assert self.running == 1, "two scrapes of one receiver overlap"
        try:
            return await self.answer(now_ns)
        finally:
            self.running -= 1

    async def close(self) -> None:
        self.closed += 1

    def consume(self, data: Batch, ack: Ack) -> None:
        if self.refuse:
            raise RefusedError("queue is full", self.refuse)
        self.batches.append(data)
        ack.settle()

    async def run(self, seconds: float) -> None:
        """Starts the receiver, lets this time pass, and stops it."""
        await self.receiver.start(Bench().service(_ANY))
        await self.clock.advance(seconds)
        await self.receiver.shutdown()


_ANY = "receivers: {src: }\nexporters: {tap: }\nservice: {pipelines: {metrics: {receivers: [src], exporters: [tap]}}}"


def said(batch: Batch) -> Mapping[str, Value | None]:
    """The readings of a batch by metric name, with the reason where there is one."""
    return {
        series.metric.name + (f"/{series.text('reason')}" if series.text("reason") else ""): value
        for (_, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
    }


async def test_the_first_scrape_comes_after_the_delay_and_then_at_each_interval() -> None:
    """Initial delay 1 s, interval 10 s: at 1, 11, 21, 31."""
    rig = Rig()
    await rig.run(35)
    assert rig.scrapes == [1, 11, 21, 31]
    assert [batch.time_ns for batch in rig.batches] == [t * 10**9 for t in (1, 11, 21, 31)]


async def test_a_good_batch_is_complete_and_carries_the_signs_of_life() -> None:
    """Source up, the interval in seconds, then the readings; the stream is the receiver's id."""
    rig = Rig()
    await rig.run(1)
    (batch,) = rig.batches
    assert said(batch) == {"gpu.source.up": 1, "gpu.source.interval": 10.0, "gpu.sm.active": 0.5}
    assert (batch.stream, batch.complete) == ("fake/a", True)
    resource, scope, series = next(iter(batch.layout.identities()))
    assert (resource.map, scope.name, series.map) == (
        {"k8s.node.name": "n", "service.name": "gpulens", "service.instance.id": "n"},
        "gpulens/fake",
        {"gpu.source": "fake/a"},
    )


async def test_the_same_layout_object_comes_back_in_the_steady_state() -> None:
    """So that every step's work on identities is done once."""
    rig = Rig()
    await rig.run(31)
    assert len({id(batch.layout) for batch in rig.batches}) == 1


async def test_a_slow_scrape_skips_ticks_and_never_overlaps() -> None:
    """A scrape of 25 s at an interval of 10 s: the ticks that pass meanwhile are left out, the rest stay in step."""
    rig = Rig(delay_s=0, timeout_s=60)

    async def slow(now_ns: int) -> Scraped:
        await rig.clock.sleep(25)
        return Scraped(reading(now_ns))

    rig.answer = slow
    await rig.run(100)
    assert rig.scrapes == [0, 30, 60, 90]


async def test_a_scrape_of_exactly_one_interval_skips_nothing() -> None:
    """The next tick is due at the moment when it ends."""
    rig = Rig(delay_s=0)

    async def slow(now_ns: int) -> Scraped:
        await rig.clock.sleep(10)
        return Scraped(reading(now_ns))

    rig.answer = slow
    await rig.run(35)
    assert rig.scrapes == [0, 10, 20, 30]


async def test_without_a_timeout_the_interval_is_the_deadline() -> None:
    """A source that hangs must not silence the signs of life."""
    rig = Rig(delay_s=0)

    async def hung(now_ns: int) -> Scraped:
        await rig.clock.sleep(10**6)
        return Scraped(reading(now_ns))

    rig.answer = hung
    await rig.run(35)
    assert rig.scrapes == [0, 10, 20, 30]


async def test_a_scrape_that_misses_its_deadline_is_a_failure_of_that_tick() -> None:
    """It is cancelled, said, counted as `timeout`, and the next tick comes in time."""
    rig = Rig(delay_s=0, timeout_s=3)

    async def hang(now_ns: int) -> Scraped:
        await asyncio.Event().wait()
        return Scraped(reading(now_ns))

    rig.answer = hang
    await rig.run(12)
    assert rig.scrapes == [0, 10]
    assert rig.running == 0
    assert said(rig.batches[0])["gpu.source.up"] == 0
    assert rig.reports == [(Status.RECOVERABLE, "no answer within 3s")]
    assert rig.telemetry.value("otelcol_scraper_errored_metric_points", reason="timeout") == 1


def sequence(*answers: Answer) -> Answer:
    """One answer a tick, the last one again and again."""
    left = list(answers)

    async def answer(now_ns: int) -> Scraped:
        return await (left.pop(0) if len(left) > 1 else left[0])(now_ns)

    return answer


async def refused(now_ns: int) -> Scraped:
    """A source that does not answer."""
    raise ScrapeError("http://node:9400/metrics: connection refused", "connection")


async def test_a_failed_scrape_says_so_at_once_and_keeps_the_readings_for_two_intervals() -> None:
    """Down and partial at first, so that the last readings stay; complete, so that they go, after two intervals."""
    rig = Rig(delay_s=0, answer=sequence(fine, refused))
    await rig.run(35)
    assert [said(batch)["gpu.source.up"] for batch in rig.batches] == [1, 0, 0, 0]
    assert [batch.complete for batch in rig.batches] == [True, False, True, True]
    assert all(set(said(batch)) == {"gpu.source.up", "gpu.source.interval"} for batch in rig.batches[1:])


async def test_a_source_that_never_answered_has_nothing_to_keep() -> None:
    """Its signs of life are complete from the first tick."""
    rig = Rig(delay_s=0, answer=refused)
    await rig.run(5)
    assert [batch.complete for batch in rig.batches] == [True]


async def test_readings_are_kept_as_long_as_the_receiver_says() -> None:
    """`keep_s` in place of two intervals: here 25 s after the last good scrape."""
    rig = Rig(delay_s=0, keep_s=25, answer=sequence(fine, refused))
    await rig.run(45)
    assert [batch.complete for batch in rig.batches] == [True, False, False, True, True]


async def test_a_source_that_comes_back_is_complete_again() -> None:
    """Up, readings, status OK."""
    rig = Rig(delay_s=0, answer=sequence(refused, refused, fine))
    await rig.run(25)
    assert said(rig.batches[-1]) == {"gpu.source.up": 1, "gpu.source.interval": 10.0, "gpu.sm.active": 0.5}
    assert rig.batches[-1].complete
    assert [status for status, _ in rig.reports] == [Status.RECOVERABLE, Status.OK]


async def test_a_source_that_is_read_in_part_is_up_and_partial() -> None:
    """What is missing may still be there: its earlier readings are not replaced, and the status says why."""

    async def cut(now_ns: int) -> Scraped:
        return Scraped(reading(now_ns), problem="the page was cut at 16 MiB")

    rig = Rig(delay_s=0, answer=sequence(cut, cut, fine))
    await rig.run(25)
    assert [batch.complete for batch in rig.batches] == [False, False, True]
    assert [said(batch)["gpu.source.up"] for batch in rig.batches] == [1, 1, 1]
    assert rig.reports == [(Status.RECOVERABLE, "the page was cut at 16 MiB"), (Status.OK, "")]


async def test_a_defect_of_the_scraper_costs_one_tick() -> None:
    """An exception that nobody foresaw is a failed scrape; the batch of that tick and all later ticks come."""

    async def defect(now_ns: int) -> Scraped:
        raise KeyError("oops")

    rig = Rig(delay_s=0, answer=sequence(fine, defect, fine))
    await rig.run(25)
    assert [said(batch)["gpu.source.up"] for batch in rig.batches] == [1, 0, 1]
    assert rig.reports[1] == (Status.RECOVERABLE, "defect in the scraper: KeyError('oops')")
    assert rig.telemetry.value("otelcol_scraper_errored_metric_points", reason="internal_error") == 1


async def test_struck_out_values_are_counted_by_reason_and_never_fall() -> None:
    """The counter adds up over ticks, keeps its start, stays when a reason does not occur or the scrape fails, and a
    new reason costs one new layout."""

    def rejecting(**rejected: int) -> Answer:
        async def answer(now_ns: int) -> Scraped:
            return Scraped(reading(now_ns), rejected)

        return answer

    rig = Rig(delay_s=0, answer=sequence(fine, rejecting(blank=2), rejecting(blank=1, range=1), fine, refused))
    await rig.run(45)
    name = "gpu.telemetry.rejected"
    assert [said(batch).get(f"{name}/blank") for batch in rig.batches] == [None, 2, 3, 3, 3]
    assert [said(batch).get(f"{name}/range") for batch in rig.batches] == [None, None, 1, 1, 1]
    assert rig.batches[2].layout is rig.batches[3].layout
    starts = {
        start
        for batch in rig.batches
        for (_, _, series), start in zip(batch.layout.identities(), batch.starts(), strict=True)
        if series.metric.name == name
    }
    assert len(starts) == 1


async def test_the_window_of_a_source_is_a_series_while_it_is_known() -> None:
    """Instants have none; a page's refresh has, with its latest value."""

    def windowed(window_s: float) -> Answer:
        async def answer(now_ns: int) -> Scraped:
            return Scraped(reading(now_ns), window_s=window_s)

        return answer

    rig = Rig(delay_s=0, answer=sequence(fine, windowed(30), windowed(20), refused, fine))
    await rig.run(45)
    assert [said(batch).get("gpu.source.window") for batch in rig.batches] == [None, 30, 20, 20, None]


async def test_a_tier_has_a_stream_of_its_own_without_signs_of_life() -> None:
    """One source read at two intervals must not say twice that it lives."""
    rig = Rig(tier="errors")
    await rig.run(12)
    assert [said(batch) for batch in rig.batches] == [{"gpu.sm.active": 0.5}] * 2
    assert all(batch.complete for batch in rig.batches)


async def test_a_tier_that_stays_silent_is_taken_back() -> None:
    """Nothing is said while its last readings are kept; then an empty complete batch takes them off."""
    rig = Rig(tier="errors")

    async def answer(now_ns: int) -> Scraped:
        if rig.clock.monotonic() > 5:
            raise ScrapeError("gone", "gone")
        return await fine(now_ns)

    rig.answer = answer
    await rig.run(35)
    assert [said(batch) for batch in rig.batches] == [{"gpu.sm.active": 0.5}, {}, {}]
    assert [batch.stream for batch in rig.batches][1:] == ["fake/a/errors"] * 2
    assert rig.reports[-1] == (Status.RECOVERABLE, "gone")


async def test_what_comes_before_a_batch_goes_out_first() -> None:
    """A counter that is first seen at 1 begins with a 0 at its start time."""

    async def answer(now_ns: int) -> Scraped:
        zero = Batch.of(READINGS, [0.0], now_ns - 1, "fake/a", complete=False)
        return Scraped(reading(now_ns, 1.0), before=(zero,))

    rig = Rig(answer=answer)
    await rig.run(2)
    assert [said(batch).get("gpu.sm.active") for batch in rig.batches] == [0.0, 1.0]


async def test_refused_batches_are_counted_and_not_sent_again() -> None:
    """Accepted and refused points are counted apart, the refusal with its reason; the next tick goes on."""
    rig = Rig(delay_s=0, refuse="refused")
    await rig.receiver.start(Bench().service(_ANY))
    await rig.clock.advance(5)
    rig.refuse = ""
    await rig.clock.advance(10)
    await rig.receiver.shutdown()
    assert len(rig.batches) == 1
    count = rig.telemetry.value
    assert count("otelcol_receiver_refused_metric_points", receiver="fake/a", reason="refused") == 3
    assert count("otelcol_receiver_accepted_metric_points", receiver="fake/a") == 3
    assert count("otelcol_scraper_scraped_metric_points", receiver="fake/a") == 2


async def test_a_change_of_state_is_reported_once() -> None:
    """The same failure at every tick is one report; another text is another."""

    async def other(now_ns: int) -> Scraped:
        raise ScrapeError("HTTP 500")

    rig = Rig(delay_s=0, answer=sequence(refused, refused, refused, other, other))
    await rig.run(45)
    assert [reason for _, reason in rig.reports] == ["http://node:9400/metrics: connection refused", "HTTP 500"]


async def test_shutdown_without_start_and_twice_is_safe() -> None:
    """The source is let go of each time and nothing is scraped."""
    rig = Rig()
    await rig.receiver.shutdown()
    await rig.receiver.shutdown()
    assert rig.closed == 2
    await rig.run(12)
    await rig.receiver.shutdown()
    await rig.clock.advance(50)
    assert rig.scrapes == [1, 11]


async def test_shutdown_ends_a_scrape_that_is_under_way() -> None:
    """It is cancelled, no batch leaves after the shutdown, and the source is closed when the scrape is over."""
    rig = Rig(delay_s=0, timeout_s=100)

    async def hang(now_ns: int) -> Scraped:
        await rig.clock.sleep(50)
        return Scraped(reading(now_ns))

    rig.answer = hang
    await rig.run(5)
    await rig.clock.advance(100)
    assert (rig.batches, rig.running, rig.closed) == ([], 0, 1)


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ({"collection_interval": "0s"}, "'collection_interval' must be positive"),
        ({"collection_interval": "-1s"}, "'collection_interval' must be positive"),
        ({"timeout": "-1s"}, "'timeout' must not be negative"),
        ({"collection_interval": 10}, "has no unit"),
    ],
)
def test_times_that_make_no_sense_are_refused(block: dict[str, object], complaint: str) -> None:
    """An interval of nothing would scrape without a pause."""
    with pytest.raises(ValidationError, match=complaint):
        ScrapeConfig.model_validate(block)


def test_the_defaults_are_the_collectors() -> None:
    """One minute, one second, no deadline."""
    config = ScrapeConfig()
    assert (config.collection_interval, config.initial_delay, config.timeout) == (60, 1, 0)


# --- within


async def test_work_in_time_gives_its_result_or_its_error() -> None:
    """And leaves no timer behind."""
    clock = VirtualClock()

    async def work(seconds: float, error: Exception | None) -> int:
        await clock.sleep(seconds)
        if error:
            raise error
        return 7

    for seconds in (0, 5):
        good = asyncio.create_task(within(clock, seconds, work(0, None)))
        bad = asyncio.create_task(within(clock, seconds, work(0, KeyError("k"))))
        await clock.advance(1)
        assert good.result() == 7
        assert isinstance(bad.exception(), KeyError)
    assert len(asyncio.all_tasks()) == 1


async def test_work_that_is_late_is_cancelled_before_the_error_is_raised() -> None:
    """It has cleaned up when the caller goes on."""
    clock: Clock = VirtualClock()
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    waiting = asyncio.create_task(within(clock, 2, work()))
    assert isinstance(clock, VirtualClock)
    await clock.advance(1.9)
    assert not waiting.done()
    await clock.advance(0.2)
    error = waiting.exception()
    assert isinstance(error, DeadlineError)
    assert (str(error), cleaned) == ("no answer within 2s", [True])


async def test_cancelling_the_wait_cancels_the_work() -> None:
    """With and without a deadline."""
    clock = VirtualClock()
    for seconds in (0.0, 5.0):
        inner: list[asyncio.Task[object] | None] = []

        async def work(inner: list[asyncio.Task[object] | None] = inner) -> None:
            inner.append(asyncio.current_task())
            await asyncio.Event().wait()

        waiting = asyncio.create_task(within(clock, seconds, work()))
        await clock.advance(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert inner[0] is not None
        assert inner[0].cancelled()
