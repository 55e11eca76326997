"""The queue in front of a destination, in memory: encoded requests, taken one by one or joined into batches.

Invariant: what the queue holds (waiting and being sent) never exceeds its capacity, and never `MEMORY_CEILING`
where the capacity is not given in bytes. Requests leave in the order in which they came.

Names, defaults and texts are those of the Collector's exporterhelper (`sending_queue`). One difference: nothing can
wait here for room, since `consume` returns at once, so `block_on_overflow` is refusal at the door, as without it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from gpulens.config.ranges import require
from gpulens.config.types import Block, Duration, OptionalBlock
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.otlp_split import split_request
from gpulens.pipeline.scraping import DeadlineError, within

MEMORY_CEILING: Final = 64 * 2**20
"""Bytes that a queue counted in requests or items holds at most: 1000 requests of a large node would be 900 MiB."""

FULL: Final = "sending queue is full"
TOO_LARGE: Final = "element size too large"
CLOSED: Final = "the exporter is shutting down"


class Sizer(StrEnum):
    """What a queue's or batch's size counts."""

    REQUESTS = "requests"
    ITEMS = "items"
    BYTES = "bytes"


# The Collector writes these keys in backquotes, and the values of a batch with them.
_POSITIVE: Final = AfterValidator(require(lambda value: value > 0, "`{key}` must be positive"))
_SIZE: Final = AfterValidator(require(lambda value: value >= 0, "`{key}` must be non-negative, found {value}"))
_FLUSH: Final = AfterValidator(require(lambda value: value > 0, "`{key}` must be positive, found {value:g}s"))


class QueueBatchConfig(Block):
    """The `batch` block: requests are joined until `min_size` is reached or `flush_timeout` is over."""

    flush_timeout: Annotated[Duration, _FLUSH, Field(description="How long a request waits for more.")] = 0.2
    min_size: Annotated[int, _SIZE, Field(description="Size at which a batch leaves at once.")] = 8192
    max_size: Annotated[int, _SIZE, Field(description="No request is larger; 0 = no limit.")] = 0
    sizer: Annotated[Sizer, Field(description="What the sizes count; not `requests`.")] = Sizer.ITEMS

    @field_validator("max_size")
    @classmethod
    def _check_max_size(cls, max_size: int, info: ValidationInfo) -> int:
        min_size = info.data.get("min_size", 0)  # absent when it is wrong itself
        if 0 < max_size < min_size:
            raise ValueError(f"`max_size` ({max_size}) must be greater or equal to `min_size` ({min_size})")
        return max_size

    @field_validator("sizer")
    @classmethod
    def _check_sizer(cls, sizer: Sizer) -> Sizer:
        if sizer is Sizer.REQUESTS:
            raise ValueError("`batch` supports only `items` or `bytes` sizer, found `requests`")
        return sizer


class SendingQueueConfig(Block):
    """The `sending_queue` block."""

    num_consumers: Annotated[int, _POSITIVE, Field(description="Requests under way at once; 1 keeps their order.")] = 10
    queue_size: Annotated[int, _POSITIVE, Field(description="Capacity, in the sizer's unit.")] = 1000
    sizer: Annotated[Sizer, Field(description="What `queue_size` counts.")] = Sizer.REQUESTS
    block_on_overflow: Annotated[bool, Field(description="Has no effect: a full queue refuses at the door.")] = False
    wait_for_result: Annotated[
        bool, Field(description="Acknowledges to the source after sending instead of after queueing.")
    ] = False
    storage: Annotated[str | None, Field(description="Not in this version: queues are in memory.")] = None
    batch: Annotated[
        OptionalBlock[QueueBatchConfig], Field(description="Joins requests before they are sent; off when absent.")
    ] = None

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, storage: str | None, info: ValidationInfo) -> str | None:
        if storage is not None and info.data.get("wait_for_result"):
            raise ValueError("`wait_for_result` is not supported with a persistent queue configured with `storage`")
        if storage is not None:
            raise ValueError(
                "`storage` arrives with the file_storage extension, which this version does not have; "
                "leave it out to queue in memory"
            )
        return storage

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, batch: QueueBatchConfig | None, info: ValidationInfo) -> QueueBatchConfig | None:
        capacity, sizer = info.data.get("queue_size"), info.data.get("sizer")  # absent when they are wrong themselves
        if batch is not None and capacity is not None and batch.sizer is sizer and batch.min_size > capacity:
            raise ValueError("`min_size` must be less than or equal to `queue_size`")
        return batch


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Encoded data, how many items (points, records) it holds, and who wants to know how it ended."""

    data: bytes
    items: int
    done: Callable[[Exception | None], None] | None = None


class MemoryQueue:
    """First in, first out; `size` counts what waits and what is being sent, in the sizer's unit."""

    def __init__(self, config: SendingQueueConfig, clock: Clock) -> None:
        self.capacity = config.queue_size
        self.size = 0
        self.bytes = 0
        self.held: dict[int, Request] = {}
        self._sizer = config.sizer
        self._batch = config.batch
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._arrived = asyncio.Event()
        self._taking = asyncio.Lock()
        self._closed = False

    def refusal(self, items: int) -> str | None:
        """Why a request of this many items can't be taken now. Its bytes are not known yet; it is taken to be as
        large as those held are on average."""
        if self._closed:
            return CLOSED
        likely = self.bytes // len(self.held) if self.held else 1
        size = {Sizer.REQUESTS: 1, Sizer.ITEMS: items, Sizer.BYTES: likely}[self._sizer]
        return self._room(size, likely)

    def offer(self, request: Request) -> str | None:
        """Takes a request, or says why not."""
        refusal = CLOSED if self._closed else self._room(self._measure(request), len(request.data))
        if refusal is not None:
            return refusal
        self.size += self._measure(request)
        self.bytes += len(request.data)
        self.held[id(request)] = request
        self._waiting.append(request)
        self._arrived.set()
        return None

    async def take(self) -> list[Request] | None:
        """The next request, or the next batch of them; None when the queue is closed and empty."""
        async with self._taking:
            while not self._waiting:
                if self._closed:
                    return None
                await self._wait()
            bundle = [self._waiting.popleft()]
            if self._batch is not None:
                await self._gather(bundle, self._batch)
            return bundle

    def parts(self, bundle: Sequence[Request]) -> list[tuple[bytes, int]]:
        """A bundle as requests to send, none larger than the batch's `max_size`. Encoded requests concatenate."""
        data, items = b"".join(request.data for request in bundle), sum(request.items for request in bundle)
        limit = self._batch.max_size if self._batch is not None else 0
        if self._batch is None or not limit:
            return [(data, items)]
        by_items = self._batch.sizer is Sizer.ITEMS
        if (items if by_items else len(data)) <= limit:
            return [(data, items)]
        return split_request(data, lambda size, points: (points if by_items else size) <= limit)

    def settle(self, request: Request, error: Exception | None) -> None:
        """A request is through, for better or worse: its room is free again."""
        if self.held.pop(id(request), None) is None:
            return
        self.size -= self._measure(request)
        self.bytes -= len(request.data)
        if request.done is not None:
            request.done(error)

    def close(self) -> None:
        """Takes nothing more; what waits can still be taken."""
        self._closed = True
        self._arrived.set()

    def _room(self, size: int, size_bytes: int) -> str | None:
        if size > self.capacity:
            return TOO_LARGE
        if self.size + size > self.capacity:
            return FULL
        # The ceiling never refuses the only request: then nothing would ever go.
        if self._sizer is not Sizer.BYTES and self.bytes and self.bytes + size_bytes > MEMORY_CEILING:
            return FULL
        return None

    def _measure(self, request: Request) -> int:
        match self._sizer:
            case Sizer.REQUESTS:
                return 1
            case Sizer.ITEMS:
                return request.items
            case Sizer.BYTES:
                return len(request.data)

    async def _gather(self, bundle: list[Request], batch: QueueBatchConfig) -> None:
        def size(request: Request) -> int:
            return request.items if batch.sizer is Sizer.ITEMS else len(request.data)

        total, deadline = size(bundle[0]), self._clock.monotonic() + batch.flush_timeout
        while total < batch.min_size:
            if self._waiting:
                if batch.max_size and total + size(self._waiting[0]) > batch.max_size:
                    return
                bundle.append(self._waiting.popleft())
                total += size(bundle[-1])
                continue
            left = deadline - self._clock.monotonic()
            if self._closed or left <= 0:
                return
            try:
                await within(self._clock, left, self._wait())
            except DeadlineError:
                return

    async def _wait(self) -> None:
        """Until something arrives or the queue is closed."""
        if not self._closed:
            self._arrived.clear()
        await self._arrived.wait()
