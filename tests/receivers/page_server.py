"""A real HTTP server on 127.0.0.1 whose page a test scripts, and the settings of a receiver under test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Status, StatusBoard
from gpulens.pipeline.telemetry import Telemetry

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer | str | bytes) -> AsyncIterator[str]:
    """Serves one page at the address that it yields."""

    async def fixed(request: web.Request) -> web.StreamResponse:
        body = answer.encode() if isinstance(answer, str) else answer
        assert isinstance(body, bytes)
        return web.Response(body=body, content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", fixed if isinstance(answer, str | bytes) else answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/metrics"
    finally:
        await runner.cleanup()


@dataclass(slots=True)
class Sink:
    """Keeps the batches it is given."""

    batches: list[Batch] = field(default_factory=list)

    def consume(self, data: Batch, ack: Ack) -> None:
        """Takes one batch."""
        self.batches.append(data)

    def last(self) -> dict[str, list[object]]:
        """The newest batch's readings by metric."""
        batch = self.batches[-1]
        found: dict[str, list[object]] = {}
        for (_, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
            found.setdefault(series.metric.name, []).append(value)
        return found


class Bench:
    """Everything a receiver gets from its host, and what it told the host."""

    def __init__(self, kind: str, clock: Clock) -> None:
        self.telemetry = Telemetry()
        self.board = StatusBoard(clock.now_ns)
        self.board.set(kind, Status.STARTING)
        self.changes = 0
        self._kind = kind
        self.settings = Settings(
            id=ComponentID(kind),
            kind=Kind.RECEIVERS,
            node="node-1",
            clock=clock,
            telemetry=self.telemetry,
            log=ComponentLog("receiver", kind),
            report=self._report,
        )

    def _report(self, status: Status, reason: str) -> bool:
        changed = self.board.set(self._kind, status, reason)
        self.changes += changed
        return changed

    @property
    def status(self) -> tuple[Status, str]:
        """The receiver's state and why."""
        event = self.board.get(self._kind)
        return event.status, event.reason
