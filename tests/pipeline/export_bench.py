"""A queued exporter on a virtual clock, and the destination that it sends to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpulens.config.ids import ComponentID, Kind, Signal
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension, Settings
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.data import Metric as MetricDef
from gpulens.pipeline.exporting import QueuedExporter, SendingConfig
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.otlp import encode, parse_request
from gpulens.pipeline.status import Status, StatusBoard
from gpulens.pipeline.telemetry import Telemetry

T = 1_700_000_000_000_000_000


class NoExtensions:
    """A host without extensions."""

    def extension(self, component_id: ComponentID) -> Extension | None:
        return None

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)


@dataclass
class FakeDestination:
    """Takes what comes; answers as `answer` says; holds pushes back while `gate` is shut."""

    clock: VirtualClock
    answer: Callable[[], Exception | None] = lambda: None
    pushed: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    timeouts: set[float] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    opened: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def open(self) -> None:
        self.opened += 1

    async def push(self, request: bytes, items: int, timeout_s: float) -> None:
        self.pushed.append(request)
        self.times.append(self.clock.monotonic())
        self.timeouts.add(timeout_s)
        await self.gate.wait()
        error = self.answer()
        if error is not None:
            raise error

    async def close(self) -> None:
        self.closed += 1


class Bench:
    """An exporter on a virtual clock, with all that can be seen of it."""

    def __init__(self, config: SendingConfig | None = None, size: int = 3) -> None:
        self.clock = VirtualClock()
        self.telemetry = Telemetry()
        self.board = StatusBoard(self.clock.now_ns)
        self.board.set("x", Status.STARTING)
        self.board.set("x", Status.OK)
        self.destination = FakeDestination(self.clock)
        settings = Settings(
            ComponentID("otlp_grpc"),
            Kind.EXPORTERS,
            "n1",
            self.clock,
            self.telemetry,
            ComponentLog("exporter", "otlp_grpc"),
            lambda status, reason: self.board.set("x", status, reason),
        )
        self.exporter: QueuedExporter[Batch] = QueuedExporter(
            settings,
            config or SendingConfig(),
            Signal.METRICS,
            lambda batch: (encode(batch), batch.layout.size),
            self.destination,
            jitter=lambda: 0.5,
        )
        series = [Series(MetricDef("m"), {"i": str(i)}) for i in range(size)]
        self.layout = Layout([Block(Resource(), Scope(), series)])

    def batch(self, number: int) -> Batch:
        return Batch.of(self.layout, [float(number)] * self.layout.size, T + number, "s")

    def feed(self, *numbers: int) -> None:
        for number in numbers:
            self.exporter.consume(self.batch(number), Ack())

    def sent(self) -> list[int]:
        """The batch numbers of all pushes, those of one push side by side."""
        return [
            rm.scope_metrics[0].metrics[0].gauge.data_points[0].time_unix_nano - T
            for data in self.destination.pushed
            for rm in parse_request(data).resource_metrics
        ]

    def count(self, name: str, **labels: str) -> int:
        return self.telemetry.value(f"otelcol_exporter_{name}", exporter="otlp_grpc", **labels)

    def gauge(self, name: str) -> float:
        return next(value for key, _, value in self.telemetry.read() if key == f"otelcol_exporter_{name}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        await self.exporter.start(NoExtensions())
        await self.clock.advance(0)
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        ending = asyncio.ensure_future(self.exporter.shutdown())
        await self.clock.advance(60)
        await ending
