"""A started observer on a virtual clock, and waiting for what it learns over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gpulens.extensions.k8s_observer.config import K8sObserverConfig
from gpulens.extensions.k8s_observer.observer import K8sObserver
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension
from gpulens.pipeline.pods import PodsSeen
from gpulens.pipeline.status import Status
from tests.receivers.page_server import Bench

PATIENCE_S = 5.0


class NoHost:
    """A host without extensions."""

    def extension(self, component_id: object) -> Extension | None:
        return None

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)


class Watching:
    """One observer and its clock."""

    def __init__(self, **block: object) -> None:
        self.clock = VirtualClock()
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

    async def until(self, holds: Callable[[], bool], pass_s: float = 0.0) -> None:
        """Waits for sockets until something holds; each look lets `pass_s` of the clock pass."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.002)
                if pass_s:
                    await self.clock.advance(pass_s)

    async def knows(self, *names: str) -> None:
        """Waits until it knows exactly these pods and nothing is wrong."""
        await self.until(lambda: self.seen.synced and not self.seen.problem and self.names == set(names))

    async def settle(self) -> None:
        """Gives what is on its way the time to arrive."""
        for _ in range(10):
            await asyncio.sleep(0.002)


@asynccontextmanager
async def watching(**block: object) -> AsyncIterator[Watching]:
    """An observer that runs."""
    running = Watching(**block)
    await running.observer.start(NoHost())
    try:
        yield running
    finally:
        await running.observer.shutdown()
