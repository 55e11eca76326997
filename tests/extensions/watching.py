"""A started observer on a virtual clock, and waiting for what it learns over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import asynccontextmanager

from gpulens.extensions.k8s_observer.config import K8sObserverConfig
from gpulens.extensions.k8s_observer.observer import K8sObserver
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension
from gpulens.pipeline.pods import PodsSeen
from gpulens.pipeline.status import Status
from tests.receivers.page_server import Bench

PATIENCE_S = 60.0
"""Of the machine's time; only a test that fails takes it."""

ODD_EVENT = "gpulens_k8s_observer_unreadable_pods"


class PacedClock(VirtualClock):
    """A virtual clock that knows when the observer pauses between two rounds.

    While it waits for a socket instead, time that passes would cut short an answer that is on its way: how much of
    the clock an answer takes is then up to the machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pause_ends_s: float | None = None

    async def sleep(self, seconds: float) -> None:
        """Waits until `advance` passes the moment; deadlines wait in tasks of their own."""
        task = asyncio.current_task()
        if seconds <= 0 or task is None or not task.get_name().startswith("watch pods"):
            await super().sleep(seconds)
            return
        self.pause_ends_s = self.monotonic() + seconds
        try:
            await super().sleep(seconds)
        finally:
            self.pause_ends_s = None


class NoHost:
    """A host without extensions."""

    def extension(self, component_id: object) -> Extension | None:
        return None

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)


class Watching:
    """One observer and its clock."""

    def __init__(self, **block: object) -> None:
        self.clock = PacedClock()
        self.bench = Bench("k8s_observer", self.clock)
        self.observer = K8sObserver(self.bench.settings, K8sObserverConfig.model_validate(block))

    @property
    def seen(self) -> PodsSeen:
        """What it knows now."""
        return self.observer.pods()

    @property
    def names(self) -> set[str]:
        """The pods that it knows."""
        return {pod.name for pod in self.seen.pods.values()}

    @property
    def status(self) -> tuple[Status, str]:
        """Its state and why."""
        return self.bench.status

    @property
    def pausing(self) -> bool:
        """A round ended and the next one has not begun: nothing is on its way."""
        return self.clock.pause_ends_s is not None

    @property
    def odd_events(self) -> int:
        """Pods that could not be read so far."""
        return self.bench.telemetry.value(ODD_EVENT)

    async def resume(self) -> None:
        """Waits for a pause and lets exactly that pass."""
        await self.until(lambda: self.pausing)
        assert self.clock.pause_ends_s is not None
        await self.clock.advance(self.clock.pause_ends_s - self.clock.monotonic() + 1e-6)

    async def until(self, holds: Callable[[], bool], *, resuming: bool = False) -> None:
        """Waits for sockets until something holds; `resuming` lets each pause on the way pass."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                if resuming and self.pausing:
                    await self.resume()
                else:
                    await asyncio.sleep(0.002)

    async def knows(self, *names: str) -> None:
        """Waits until it knows exactly these pods and nothing is wrong."""
        await self.until(lambda: self.seen.synced and not self.seen.problem and self.names == set(names))

    async def hears(self, watchers: Sized, send_odd: Callable[[], None]) -> None:
        """Waits until its watch is open and all that was sent so far is taken in: an odd event is sent after it."""
        await self.until(lambda: len(watchers) > 0)
        before = self.odd_events
        send_odd()
        await self.until(lambda: self.odd_events > before)


@asynccontextmanager
async def watching(**block: object) -> AsyncIterator[Watching]:
    """An observer that runs."""
    running = Watching(**block)
    await running.observer.start(NoHost())
    try:
        yield running
    finally:
        await running.observer.shutdown()
