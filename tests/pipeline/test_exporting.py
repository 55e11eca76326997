from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Admission
from gpulens.pipeline.errors import ExportError, PermanentError, RetryableError
from gpulens.pipeline.exporting import RetryConfig, SendingConfig
from gpulens.pipeline.journal import ROOT
from gpulens.pipeline.otlp import parse_request
from gpulens.pipeline.otlp_split import count_points
from gpulens.pipeline.sending_queue import MEMORY_CEILING, QueueBatchConfig, SendingQueueConfig
from gpulens.pipeline.status import Status
from tests.pipeline.export_bench import Bench, NoExtensions


def _one(**keys: object) -> SendingConfig:
    """One consumer, so that order is strict."""
    return SendingConfig.model_validate({"sending_queue": {"num_consumers": 1}, **keys})


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """Every log record of the test."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Keep()
    logger = logging.getLogger(ROOT)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_what_is_consumed_arrives_in_order_and_is_counted() -> None:
    """With one consumer requests arrive in the order in which they came; points are counted when taken."""
    async with Bench(_one()).running() as bench:
        bench.feed(1, 2, 3)
        await bench.clock.advance(0)
        assert bench.sent() == [1, 2, 3]
        assert bench.count("sent_metric_points") == 9
        assert bench.gauge("queue_size") == 0
        assert bench.destination.timeouts == {5.0}
    assert (bench.destination.opened, bench.destination.closed) == (1, 1)


async def test_the_ack_settles_on_enqueue() -> None:
    """A memory queue keeps no share: the source is free before anything was sent."""
    bench, settled = Bench(), list[Exception | None]()
    ack = Ack(settled.append)
    bench.exporter.consume(bench.batch(1), ack)
    ack.settle()
    assert settled == [None]


@pytest.mark.parametrize("queue", [{"wait_for_result": True}, {"enabled": False}])
async def test_waiting_for_the_result_settles_the_ack_with_it(queue: dict[str, object]) -> None:
    """With `wait_for_result`, or without a queue, the source learns how it ended."""
    async with Bench(SendingConfig.model_validate({"sending_queue": queue})).running() as bench:
        settled: list[Exception | None] = []
        for error in (None, PermanentError("no")):
            bench.destination.answer = lambda error=error: error  # type: ignore[misc]
            ack = Ack(settled.append)
            bench.exporter.consume(bench.batch(1), ack)
            ack.settle()
            assert len(settled) == (0 if error is None else 1)
            await bench.clock.advance(0)
        assert settled[0] is None
        assert isinstance(settled[1], PermanentError)


async def test_a_full_queue_says_so_at_the_door_and_drops_past_it() -> None:
    """The door gets the Collector's text; what comes past it all the same is counted by reason."""
    bench = Bench(SendingConfig.model_validate({"sending_queue": {"queue_size": 2}}))
    assert isinstance(bench.exporter, Admission)
    bench.feed(1, 2)
    assert bench.exporter.refusal(bench.batch(3)) == "sending queue is full"
    bench.feed(3)
    assert bench.count("enqueue_failed_metric_points", reason="queue_full") == 3
    assert (bench.gauge("queue_size"), bench.gauge("queue_capacity")) == (2, 2)
    await bench.stop()


async def test_a_drop_past_the_door_is_no_error_for_the_source() -> None:
    """The source must not resend what processors have seen, so the ack settles without an error."""
    bench = Bench(SendingConfig.model_validate({"sending_queue": {"queue_size": 1, "wait_for_result": True}}))
    settled: list[Exception | None] = []
    bench.feed(1)
    ack = Ack(settled.append)
    bench.exporter.consume(bench.batch(2), ack)
    ack.settle()
    assert settled == [None]
    await bench.stop()


@pytest.mark.parametrize(("sizer", "size"), [("items", 7), ("bytes", 300)])
async def test_queues_can_be_sized_in_items_and_bytes(sizer: str, size: int) -> None:
    """The capacity counts in the sizer's unit, and what is being sent still counts."""
    config = SendingConfig.model_validate({"sending_queue": {"queue_size": size, "sizer": sizer}})
    async with Bench(config).running() as bench:
        bench.destination.gate.clear()
        bench.feed(1, 2)
        await bench.clock.advance(0)
        taken = 6 if sizer == "items" else sum(map(len, bench.destination.pushed))
        assert bench.gauge("queue_size") == taken
        bench.feed(3)
        assert bench.count("enqueue_failed_metric_points") == 3
        bench.destination.gate.set()
        await bench.clock.advance(0)
        assert bench.gauge("queue_size") == 0


async def test_a_request_larger_than_the_queue_is_refused_at_once() -> None:
    """It could never be taken, so it is told apart from a full queue."""
    bench = Bench(SendingConfig.model_validate({"sending_queue": {"queue_size": 2, "sizer": "items"}}))
    assert bench.exporter.refusal(bench.batch(1)) == "element size too large"
    bench.feed(1)
    assert bench.count("enqueue_failed_metric_points", reason="too_large") == 3
    await bench.stop()


async def test_memory_is_bounded_while_the_destination_is_away() -> None:
    """A queue of 1000 requests does not hold more bytes than the ceiling, however large they are."""
    bench = Bench(size=1)
    big = b"\x0a\x80\x80\x80\x02" + bytes(2 * 2**20 * 2)
    bench.exporter._encode = lambda _: (big, 1)
    for number in range(50):
        if bench.exporter.refusal(bench.batch(number)) is None:
            bench.feed(number)
    assert MEMORY_CEILING - len(big) < bench.exporter._queue.bytes <= MEMORY_CEILING
    assert bench.count("enqueue_failed_metric_points") <= 1
    await bench.stop()


async def test_retries_back_off_as_the_collector_does(lines: list[logging.LogRecord]) -> None:
    """5 s, 7.5 s, 11.25 s ... up to 30 s; given up when the next try would pass 300 s."""
    async with Bench(_one()).running() as bench:
        bench.destination.answer = lambda: RetryableError("503 Service Unavailable")
        bench.feed(1)
        await bench.clock.advance(400)
        waits = [b - a for a, b in zip(bench.destination.times, bench.destination.times[1:], strict=False)]
        assert waits[:6] == pytest.approx([5, 7.5, 11.25, 16.875, 25.3125, 30])
        assert bench.destination.times[-1] <= 300
        assert bench.destination.times[-1] + 30 > 300
        assert bench.count("send_failed_metric_points", reason="unavailable") == 3
        assert bench.board.get("x").status is Status.RECOVERABLE
    texts = [line.getMessage() for line in lines]
    assert texts == ["Exporting failed. Will retry the request after interval.", "Exporting failed. Dropping data."]
    fields = [getattr(line, "gpulens_fields") for line in lines]  # noqa: B009 - set by `extra`
    assert fields[0]["interval"] == "5.000s"
    assert (fields[1]["dropped_items"], fields[1]["error"]) == (3, "no more retries left: 503 Service Unavailable")


async def test_recovery_is_reported_and_order_is_kept(lines: list[logging.LogRecord]) -> None:
    """When the destination comes back, the waiting requests arrive in order and the status is OK again."""
    async with Bench(_one()).running() as bench:
        bench.destination.answer = lambda: RetryableError("away")
        bench.feed(1, 2, 3)
        await bench.clock.advance(1)
        assert bench.board.get("x").status is Status.RECOVERABLE
        bench.destination.answer = lambda: None
        await bench.clock.advance(10)
        assert bench.sent() == [1, 1, 2, 3]
        assert bench.board.get("x").status is Status.OK
        assert bench.count("sent_metric_points") == 9
    assert [line.getMessage() for line in lines][-1] == "Exporting recovered."


async def test_a_servers_delay_is_honoured_when_it_is_longer() -> None:
    """`delay_s` of the error wins over a shorter back-off and loses against a longer one."""
    delays = iter([20.0, 0.1])
    async with Bench(_one()).running() as bench:
        bench.destination.answer = lambda: (
            RetryableError("throttled", delay_s=delay) if (delay := next(delays, None)) is not None else None
        )
        bench.feed(1)
        await bench.clock.advance(100)
        assert bench.destination.times == pytest.approx([0, 20, 27.5])


async def test_a_permanent_error_drops_at_once() -> None:
    """What can't be taken is not sent again, and the next request is tried."""
    async with Bench(_one()).running() as bench:
        errors = iter([PermanentError("bad data", "invalid_argument")])
        bench.destination.answer = lambda: next(errors, None)
        bench.feed(1, 2)
        await bench.clock.advance(0)
        assert bench.sent() == [1, 2]
        assert bench.count("send_failed_metric_points", reason="invalid_argument") == 3
        assert bench.count("sent_metric_points") == 3


async def test_without_retries_one_failure_is_the_end() -> None:
    """`retry_on_failure: {enabled: false}` drops at the first error."""
    config = SendingConfig.model_validate({"retry_on_failure": {"enabled": False}})
    async with Bench(config).running() as bench:
        bench.destination.answer = lambda: RetryableError("away")
        bench.feed(1)
        await bench.clock.advance(100)
        assert len(bench.destination.pushed) == 1
        assert bench.count("send_failed_metric_points") == 3


async def test_a_defect_in_a_pusher_costs_one_request() -> None:
    """An unexpected exception is a counted drop; the consumer lives on."""
    async with Bench(_one()).running() as bench:
        errors: Iterator[Exception] = iter([RuntimeError("oops")])
        bench.destination.answer = lambda: next(errors, None)
        bench.feed(1, 2)
        await bench.clock.advance(0)
        assert bench.count("send_failed_metric_points", reason="internal_error") == 3
        assert bench.count("sent_metric_points") == 3


async def test_drops_of_a_long_outage_are_logged_once_a_minute_with_their_sum(lines: list[logging.LogRecord]) -> None:
    """The log does not grow with the outage, and no dropped point is left out of it."""
    config = _one(retry_on_failure={"enabled": False})
    async with Bench(config).running() as bench:
        bench.destination.answer = lambda: RetryableError("away")
        for number in range(14):
            bench.feed(number)
            await bench.clock.advance(10)
    drops = [getattr(line, "gpulens_fields")["dropped_items"] for line in lines]  # noqa: B009
    assert drops == [3, 18, 18, 3]  # the last one at the shutdown: together all that was fed


async def test_shutdown_tries_each_request_once_more(lines: list[logging.LogRecord]) -> None:
    """Waiting retries end, the queue is drained with one try each, and what fails is counted."""
    async with Bench(_one()).running() as bench:
        bench.destination.answer = lambda: RetryableError("away")
        bench.feed(1, 2, 3)
        await bench.clock.advance(1)
        assert bench.sent() == [1]
        before = bench.clock.monotonic()
        await bench.exporter.shutdown()
        assert bench.clock.monotonic() == before
        assert bench.sent() == [1, 1, 2, 3]
        assert bench.count("send_failed_metric_points") == 9
        assert bench.gauge("queue_size") == 0


async def test_shutdown_saves_what_a_live_destination_takes() -> None:
    """Everything queued at shutdown arrives when the destination is there."""
    bench = Bench(_one())
    await bench.exporter.start(NoExtensions())
    bench.feed(*range(20))
    await bench.stop()
    assert bench.sent() == list(range(20))
    assert bench.count("sent_metric_points") == 60


async def test_shutdown_is_bounded_by_its_grace() -> None:
    """A destination that hangs can't hold the process: after the grace the rest is counted as dropped."""
    bench = Bench(_one())
    await bench.exporter.start(NoExtensions())
    bench.destination.gate.clear()
    bench.feed(1, 2, 3)
    await bench.clock.advance(0)
    ending = asyncio.ensure_future(bench.exporter.shutdown())
    await bench.clock.advance(4.9)
    assert not ending.done()
    await bench.clock.advance(0.2)
    assert ending.done()
    assert bench.count("send_failed_metric_points", reason="shutdown") == 9
    assert bench.destination.closed == 1


async def test_after_shutdown_nothing_is_taken() -> None:
    """The door says why, and what comes all the same is counted."""
    bench = Bench()
    await bench.stop()
    await bench.stop()
    assert bench.exporter.refusal(bench.batch(1)) == "the exporter is shutting down"
    bench.feed(1)
    assert bench.count("enqueue_failed_metric_points", reason="shutdown") == 3


async def test_batches_are_joined_until_they_are_large_enough() -> None:
    """`min_size` items are one request, sent as soon as they are there."""
    config = _one(sending_queue={"num_consumers": 1, "batch": {"min_size": 6, "flush_timeout": "10s"}})
    async with Bench(config).running() as bench:
        bench.feed(1)
        await bench.clock.advance(1)
        assert bench.destination.pushed == []
        bench.feed(2, 3)
        await bench.clock.advance(0)
        assert [count_points(parse_request(data)) for data in bench.destination.pushed] == [6]
        await bench.clock.advance(10)
        assert bench.sent() == [1, 2, 3]
        assert bench.count("sent_metric_points") == 9


async def test_a_batch_does_not_wait_longer_than_flush_timeout() -> None:
    """What is there goes when the time is over, counted from the first request."""
    config = _one(sending_queue={"num_consumers": 1, "batch": {"flush_timeout": "200ms"}})
    async with Bench(config).running() as bench:
        bench.feed(1)
        await bench.clock.advance(0.15)
        bench.feed(2)
        assert bench.destination.pushed == []
        await bench.clock.advance(0.06)
        assert len(bench.destination.pushed) == 1
        assert bench.sent() == [1, 2]


async def test_no_request_is_larger_than_max_size() -> None:
    """Batches stop before `max_size`, and a single request above it is split."""
    queue = {"num_consumers": 1, "batch": {"min_size": 2, "max_size": 2}}
    async with Bench(_one(sending_queue=queue)).running() as bench:
        bench.feed(1)
        await bench.clock.advance(0)
        assert [count_points(parse_request(data)) for data in bench.destination.pushed] == [1, 2]
        assert bench.count("sent_metric_points") == 3


async def test_shutdown_flushes_an_unfinished_batch() -> None:
    """A batch that waits for more goes out at shutdown."""
    config = _one(sending_queue={"num_consumers": 1, "batch": {"flush_timeout": "1h"}})
    async with Bench(config).running() as bench:
        bench.feed(1)
        await bench.clock.advance(1)
        await bench.exporter.shutdown()
        assert bench.sent() == [1]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"num_consumers": 0}, "`num_consumers` must be positive"),
        ({"queue_size": 0}, "`queue_size` must be positive"),
        ({"storage": "file_storage"}, "`storage` arrives with the file_storage extension"),
        (
            {"storage": "file_storage", "wait_for_result": True},
            "`wait_for_result` is not supported with a persistent queue configured with `storage`",
        ),
        ({"batch": {"sizer": "requests"}}, "`batch` supports only `items` or `bytes` sizer, found `requests`"),
        ({"batch": {"flush_timeout": "0s"}}, "`flush_timeout` must be positive, found 0s"),
        ({"batch": {"min_size": 5, "max_size": 4}}, r"`max_size` \(4\) must be greater or equal to `min_size` \(5\)"),
        (
            {"sizer": "items", "queue_size": 5, "batch": {"min_size": 6}},
            "`min_size` must be less than or equal to `queue_size`",
        ),
    ],
)
def test_queue_errors_have_the_collectors_texts(keys: dict[str, object], text: str) -> None:
    """A bad `sending_queue` is refused with the text that Collector users know."""
    with pytest.raises(ValidationError, match=text):
        SendingQueueConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"max_elapsed_time": "1s"}, "'max_elapsed_time' must not be less than 'initial_interval'"),
        ({"max_elapsed_time": "20s"}, "'max_elapsed_time' must not be less than 'max_interval'"),
        ({"randomization_factor": 1.5}, r"'randomization_factor' must be within \[0, 1\]"),
        ({"multiplier": -1.0}, "'multiplier' must be non-negative"),
    ],
)
def test_retry_errors_have_the_collectors_texts(keys: dict[str, object], text: str) -> None:
    """A bad `retry_on_failure` is refused with the text that Collector users know."""
    with pytest.raises(ValidationError, match=text):
        RetryConfig.model_validate(keys)


def test_defaults_are_the_collectors() -> None:
    """Queue, batch, retry and timeout defaults are those of the exporterhelper."""
    queue, batch, retry = SendingQueueConfig(), QueueBatchConfig(), RetryConfig()
    assert (queue.num_consumers, queue.queue_size, queue.sizer, queue.batch) == (10, 1000, "requests", None)
    assert (batch.flush_timeout, batch.min_size, batch.max_size, batch.sizer) == (0.2, 8192, 0, "items")
    assert (retry.initial_interval, retry.randomization_factor, retry.multiplier) == (5, 0.5, 1.5)
    assert (retry.max_interval, retry.max_elapsed_time, SendingConfig().timeout) == (30, 300, 5)


async def test_never_ending_retries() -> None:
    """A `max_elapsed_time` of 0 keeps trying."""
    async with Bench(_one(retry_on_failure={"max_elapsed_time": "0s"})).running() as bench:
        bench.destination.answer = lambda: ExportError("x") if bench.clock.monotonic() > 3600 else RetryableError("x")
        bench.feed(1)
        await bench.clock.advance(3700)
        assert bench.destination.times[-1] > 3600
