"""The exporter helper: a queue, retries and a deadline in front of a push, as the Collector's exporterhelper has.

Invariant: past the door nothing refuses. What the queue can't take, what a destination rejects and what is left at
the end is dropped and counted, by exporter and reason; one try of a request ends before its next begins.

Order of things: `consume` encodes and enqueues, a consumer takes a request (or a batch of them), the retry loop
pushes it, each try with its own deadline. With one consumer, requests arrive in order. At shutdown waiting ends, and
every request still held gets exactly one more try, all of them within a grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Annotated, Final, Generic, Protocol, Self, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from gpulens.config.ids import Signal
from gpulens.config.ranges import NON_NEGATIVE, non_negative, require
from gpulens.config.types import Block, ComponentConfig, Duration, OptionalBlock
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Host, LogBatch, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import DecodeError, ExportError, PermanentError, RetryableError
from gpulens.pipeline.scraping import DeadlineError, within
from gpulens.pipeline.sending_queue import (
    CLOSED,
    FULL,
    TOO_LARGE,
    MemoryQueue,
    Request,
    SendingQueueConfig,
)
from gpulens.pipeline.status import Status

T = TypeVar("T", Batch, LogBatch)

GRACE_S: Final = 5.0
"""Seconds that a shutdown gives to what the queue still holds."""

_DROP_LOG_INTERVAL_S: Final = 60.0
_REASONS: Final = {FULL: "queue_full", TOO_LARGE: "too_large", CLOSED: "shutdown"}
_ITEMS: Final = {Signal.METRICS: "metric_points", Signal.LOGS: "log_records"}


class RetryConfig(Block):
    """The `retry_on_failure` block; a `max_elapsed_time` of 0 retries for ever."""

    initial_interval: Annotated[Duration, NON_NEGATIVE, Field(description="Wait after the first failure.")] = 5.0
    randomization_factor: Annotated[
        float,
        AfterValidator(require(lambda value: 0 <= value <= 1, "'{key}' must be within [0, 1]")),
        Field(description="Each wait is up to this share longer or shorter."),
    ] = 0.5
    multiplier: Annotated[float, NON_NEGATIVE, Field(description="Each wait is this many times the one before.")] = 1.5
    max_interval: Annotated[
        Duration, NON_NEGATIVE, Field(description="No wait is longer, but for a server that asks for it.")
    ] = 30.0
    max_elapsed_time: Annotated[
        Duration, NON_NEGATIVE, Field(description="A request is dropped after this time; 0 = never.")
    ] = 300.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("initial_interval", "max_interval"):
            if 0 < self.max_elapsed_time < getattr(self, name):
                raise ValueError(f"'max_elapsed_time' must not be less than '{name}'")
        return self


class SendingConfig(ComponentConfig):
    """The blocks that every exporter with a queue has."""

    timeout: Annotated[Duration, Field(description="Time for each try; 0 = no limit.")] = 5.0
    sending_queue: Annotated[
        OptionalBlock[SendingQueueConfig], Field(description="The queue in front of the destination.")
    ] = SendingQueueConfig()
    retry_on_failure: Annotated[OptionalBlock[RetryConfig], Field(description="What happens after a failure.")] = (
        RetryConfig()
    )

    _check_timeout = field_validator("timeout")(non_negative)


DIRECT: Final = SendingQueueConfig(num_consumers=64, queue_size=64, wait_for_result=True)
"""What `sending_queue: {enabled: false}` means: requests go out at once, side by side, and the source's
acknowledgement waits for the result. The bound keeps a hanging destination from filling the memory."""


class Pusher(Protocol):
    """One destination. It keeps no data and retries nothing."""

    async def open(self) -> None:
        """Gets ready; connects to nothing yet. Raises StartError (a certificate that can't be read)."""

    async def push(self, request: bytes, items: int, timeout_s: float) -> None:
        """Sends one encoded request, giving up after `timeout_s` (0 = never).

        Raises PermanentError or RetryableError.
        """

    async def close(self) -> None:
        """Lets go of connections; safe without `open` and when called twice."""


class QueuedExporter(Generic[T]):
    """An exporter made of an encoder and a pusher. It says no at the door (`refusal`) when the queue is full.

    `encode` gives a batch as (encoded request, items in it), no bytes when there is nothing to send; encoded
    requests must concatenate. `jitter` gives numbers in [0, 1).
    """

    def __init__(
        self,
        settings: Settings,
        config: SendingConfig,
        signal: Signal,
        encode: Callable[[T], tuple[bytes, int]],
        pusher: Pusher,
        jitter: Callable[[], float] = random.random,
        grace_s: float = GRACE_S,
    ) -> None:
        self._queue_config = config.sending_queue or DIRECT
        self._settings = settings
        self._signal = signal
        self._encode: Callable[[T], tuple[bytes, int]] = encode
        self._pusher = pusher
        self._grace_s = grace_s
        self._queue = MemoryQueue(self._queue_config, settings.clock)
        self._sender = RetrySender(settings, config, signal, pusher, jitter)
        self._tasks: list[asyncio.Task[None]] = []
        self._unlogged = 0
        self._logged_s: float | None = None
        labels = {"exporter": str(settings.id), "data_type": str(signal)}
        settings.telemetry.watch("otelcol_exporter_queue_size", lambda: self._queue.size, **labels)
        settings.telemetry.watch("otelcol_exporter_queue_capacity", lambda: self._queue.capacity, **labels)

    def refusal(self, data: Batch | LogBatch) -> str | None:
        """Why this batch can't be taken now; None when it can."""
        return self._queue.refusal(data.layout.size if isinstance(data, Batch) else len(data.records))

    def consume(self, data: T, ack: Ack) -> None:
        """Encodes and enqueues; what the queue can't take is dropped and counted."""
        encoded, items = self._encode(data)
        if not encoded:
            return
        waits = self._queue_config.wait_for_result
        refusal = self._queue.offer(Request(encoded, items, ack.share().settle if waits else None))
        if refusal is None:
            return
        if waits:
            ack.settle()  # not an error for the source: what is past the door must not be sent again
        self._settings.telemetry.count(
            f"otelcol_exporter_enqueue_failed_{_ITEMS[self._signal]}",
            items,
            exporter=str(self._settings.id),
            reason=_REASONS[refusal],
        )
        self._log_drop(refusal, items)

    def _log_drop(self, refusal: str, items: int) -> None:
        """Logs the first drop, then their sum once a minute: a queue that is full takes something now and again."""
        self._unlogged += items
        now_s = self._settings.clock.monotonic()
        if self._logged_s is None or now_s - self._logged_s >= _DROP_LOG_INTERVAL_S:
            self._settings.log.error("Exporting failed. Dropping data.", error=refusal, dropped_items=self._unlogged)
            self._unlogged, self._logged_s = 0, now_s

    async def start(self, host: Host) -> None:
        """Opens the pusher and starts the consumers."""
        await self._pusher.open()
        for number in range(self._queue_config.num_consumers):
            self._tasks.append(asyncio.create_task(self._work(), name=f"{self._settings.id} consumer {number}"))

    async def shutdown(self) -> None:
        """Drains the queue with one try each, within the grace period; counts what is left."""
        self._queue.close()
        self._sender.stop()
        tasks, self._tasks = self._tasks, []
        if tasks:
            everyone = asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(DeadlineError):  # which cancels them; what they held is counted below
                await within(self._settings.clock, self._grace_s, everyone)
        left = list(self._queue.held.values())
        if left:
            error = ExportError(f"not sent within the {self._grace_s:g}s that a shutdown has", "shutdown")
            self._sender.dropped(error, sum(request.items for request in left))
            for request in left:
                self._queue.settle(request, error)
        self._sender.sum_up()
        await self._pusher.close()

    async def _work(self) -> None:
        while (bundle := await self._queue.take()) is not None:
            error: ExportError | None = None
            try:
                for data, items in self._queue.parts(bundle):
                    error = await self._sender.send(data, items) or error
            except DecodeError as broken:  # what is too large for one request and can't be split
                broken_items = sum(request.items for request in bundle)
                error = self._sender.dropped(PermanentError(str(broken), "malformed"), broken_items)
            for request in bundle:
                self._queue.settle(request, error)


class RetrySender:
    """Pushes one request until it is taken, rejected for good, or out of time. Counts, logs and reports health."""

    def __init__(
        self, settings: Settings, config: SendingConfig, signal: Signal, pusher: Pusher, jitter: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._retry = config.retry_on_failure
        self._timeout_s = config.timeout
        self._items = _ITEMS[signal]
        self._pusher = pusher
        self._jitter = jitter
        self._stopping = asyncio.Event()
        self._failing: str | None = None
        self._unlogged = 0
        self._drop_logged_s: float | None = None
        self._last_drop = ""

    def sum_up(self) -> None:
        """Logs the drops that no line has told yet: at the end the lines add up to what was lost."""
        if self._unlogged:
            self._settings.log.error(
                "Exporting failed. Dropping data.", error=self._last_drop, dropped_items=self._unlogged
            )
            self._unlogged = 0

    def stop(self) -> None:
        """Ends every wait between tries; from now on a request gets one try."""
        self._stopping.set()

    async def send(self, data: bytes, items: int) -> ExportError | None:
        """Sends a request; the error when it had to be dropped."""
        clock, began = self._settings.clock, self._settings.clock.monotonic()
        backoff = _Backoff(self._retry, self._jitter) if self._retry is not None else None
        while True:
            stopping = self._stopping.is_set()
            error = await self._try(data, items)
            if error is None:
                self._sent(items)
                return None
            if not isinstance(error, RetryableError):
                return self.dropped(error, items)
            if backoff is None or stopping:
                return self.dropped(error, items)
            delay = max(backoff.next(), error.delay_s or 0.0)
            if backoff.limit and clock.monotonic() - began + delay > backoff.limit:
                return self.dropped(RetryableError(f"no more retries left: {error}", error.reason), items)
            log = self._settings.log.info if self._report(error) else self._settings.log.debug
            log("Exporting failed. Will retry the request after interval.", error=str(error), interval=f"{delay:.3f}s")
            await self._pause(clock, delay)

    async def _try(self, data: bytes, items: int) -> ExportError | None:
        try:
            await self._pusher.push(data, items, self._timeout_s)
        except ExportError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a defect in one pusher costs one request, not the consumer
            return PermanentError(f"internal error: {error!r}", "internal_error")
        return None

    async def _pause(self, clock: Clock, delay: float) -> None:
        if delay <= 0:
            await clock.sleep(0)
            return
        try:
            await within(clock, delay, self._stopping.wait())
        except DeadlineError:
            return

    def _sent(self, items: int) -> None:
        settings = self._settings
        settings.telemetry.count(f"otelcol_exporter_sent_{self._items}", items, exporter=str(settings.id))
        if self._failing is not None:
            self._failing = None
            self._drop_logged_s = None
            settings.report(Status.OK, "")
            settings.log.info("Exporting recovered.")

    def _report(self, error: ExportError) -> bool:
        """Reports an outage once for each kind of failure, not at each try; True when it was news."""
        if error.reason == self._failing:
            return False
        self._failing = error.reason
        self._settings.report(Status.RECOVERABLE, str(error))
        return True

    def dropped(self, error: ExportError, items: int) -> ExportError:
        """Counts a request that is given up; logs the first of an outage, then their sum once a minute."""
        settings = self._settings
        settings.telemetry.count(
            f"otelcol_exporter_send_failed_{self._items}", items, exporter=str(settings.id), reason=error.reason
        )
        self._report(error)
        self._last_drop = str(error)
        self._unlogged += items
        now = settings.clock.monotonic()
        if self._drop_logged_s is None or now - self._drop_logged_s >= _DROP_LOG_INTERVAL_S:
            settings.log.error("Exporting failed. Dropping data.", error=str(error), dropped_items=self._unlogged)
            self._unlogged = 0
            self._drop_logged_s = now
        return error


class _Backoff:
    """Waits that grow by `multiplier` up to `max_interval`, each spread by the randomization factor."""

    def __init__(self, config: RetryConfig, jitter: Callable[[], float]) -> None:
        self.limit = config.max_elapsed_time
        self._config = config
        self._jitter = jitter
        self._interval = config.initial_interval

    def next(self) -> float:
        """Seconds to wait before the next try."""
        spread = self._config.randomization_factor * self._interval
        delay = self._interval - spread + 2 * spread * self._jitter()
        self._interval = min(self._interval * self._config.multiplier, self._config.max_interval)
        return delay
