"""Clocks: the machine's, a faster one, and one that moves only when told to."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpulens.pipeline.clock import ScaledClock, SystemClock, VirtualClock


async def test_sleepers_wake_in_the_order_in_which_they_are_due() -> None:
    """Each wakes at its own moment, also when one `advance` passes all of them and they sleep again."""
    clock = VirtualClock(start_ns=0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            await clock.sleep(seconds)
            woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("three", 3, 2)), asyncio.create_task(sleeper("two", 2, 3))]
    await clock.advance(1.5)
    assert woken == []
    await clock.advance(8.5)
    await asyncio.gather(*tasks)
    assert woken == [("two", 2), ("three", 3), ("two", 4), ("three", 6), ("two", 6)]
    assert clock.now_ns() == 10 * 10**9


async def test_time_stands_still_unless_it_is_moved() -> None:
    """Sleeping and giving turns move nothing; a sleep of nothing returns at once."""
    clock = VirtualClock(start_ns=5)
    await clock.sleep(0)
    await clock.sleep(-1)
    await clock.advance(0)
    assert (clock.now_ns(), clock.monotonic()) == (5, 0)


async def test_a_cancelled_sleeper_is_passed_over() -> None:
    """Its moment comes and nothing happens."""
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep(1))
    await clock.advance(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clock.advance(5)
    assert task.cancelled()


async def test_a_scaled_clock_runs_faster_from_its_own_start() -> None:
    """A thousand times as fast: an hour's sleep takes a few seconds less than its share of real time allows."""
    clock = ScaledClock(start_ns=1_000 * 10**9, scale=100_000)
    begun = time.monotonic()
    await clock.sleep(3600)
    assert time.monotonic() - begun < 5
    assert clock.monotonic() >= 3600 * 0.99
    assert clock.now_ns() >= (1_000 + 3600 * 0.99) * 10**9


@pytest.mark.parametrize("scale", [0, -1])
def test_a_scale_must_be_above_zero(scale: float) -> None:
    """A clock that stands still or runs backwards is refused."""
    with pytest.raises(ValueError, match="must be above 0"):
        ScaledClock(0, scale)


async def test_the_system_clock_is_the_machines() -> None:
    """Event time is the wall clock's, waits use the monotonic one."""
    clock = SystemClock()
    await clock.sleep(-1)
    assert abs(clock.now_ns() - time.time_ns()) < 60 * 10**9
    assert abs(clock.monotonic() - time.monotonic()) < 60
