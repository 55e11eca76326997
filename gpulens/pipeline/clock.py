"""Time as an argument: what reads a clock or waits gets one handed in, so tests need no sleeps.

Invariant: `now_ns` is event time (since 1970) and `monotonic` measures waits; nothing mixes them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from typing import Protocol


class Clock(Protocol):
    """What components may know of time."""

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""

    def monotonic(self) -> float:
        """Seconds, never going back; only differences mean something."""

    async def sleep(self, seconds: float) -> None:
        """Waits; 0 or less only gives others a turn."""


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits on the running loop."""
        await asyncio.sleep(max(0.0, seconds))


class ScaledClock(SystemClock):
    """The machine's clock running `scale` times as fast from `start_ns` on: simulated nodes and demos."""

    def __init__(self, start_ns: int, scale: float) -> None:
        if scale <= 0:
            raise ValueError(f"a clock's scale must be above 0, not {scale}")
        self._start_ns = start_ns
        self._scale = scale
        self._origin = time.monotonic()

    def now_ns(self) -> int:
        """Scaled nanoseconds since 1970."""
        return self._start_ns + int((time.monotonic() - self._origin) * self._scale * 1e9)

    def monotonic(self) -> float:
        """Scaled seconds."""
        return (time.monotonic() - self._origin) * self._scale

    async def sleep(self, seconds: float) -> None:
        """Waits `seconds` of scaled time."""
        await asyncio.sleep(max(0.0, seconds / self._scale))


class VirtualClock:
    """Time that moves only when told to: `await clock.advance(30)` wakes every sleeper that is due, in order."""

    def __init__(self, start_ns: int = 1_700_000_000 * 10**9) -> None:
        self._start_ns = start_ns
        self._elapsed_ns = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tick = count()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._start_ns + self._elapsed_ns

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._elapsed_ns / 1e9

    async def sleep(self, seconds: float) -> None:
        """Waits until `advance` passes the moment."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed_ns + round(seconds * 1e9), next(self._tick), future))
        await future

    async def advance(self, seconds: float, turns: int = 20) -> None:
        """Moves time on, stopping at each sleeper that falls due and giving the loop `turns` turns to act on it."""
        target = self._elapsed_ns + round(seconds * 1e9)
        await self._settle(turns)
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            self._elapsed_ns = max(self._elapsed_ns, due)
            if not future.done():
                future.set_result(None)
            await self._settle(turns)
        self._elapsed_ns = target
        await self._settle(turns)

    @staticmethod
    async def _settle(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
