"""Every registered component: starts, stops, stops again, and leaves nothing running."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gpulens.config.ids import Kind, Signal
from gpulens.pipeline.component import LogBatch
from gpulens.pipeline.status import Status
from tests.conformance.cases import Place
from tests.conformance.rig import ALL, Key, Rig, key_id, of_kind, signals
from tests.conformance.samples import samples

WAYS = list(signals(ALL))
EVERY = pytest.mark.parametrize(("key", "signal"), WAYS, ids=[f"{key_id(key)}-{signal}" for key, signal in WAYS])
TAKES = list(signals(of_kind(Kind.PROCESSORS, Kind.EXPORTERS)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for what cases need."""
    return Place(tmp_path)


async def leftovers() -> tuple[set[str], set[str]]:
    """Names of tasks and of our threads that still run, once those that are ending had their turn."""
    for left in reversed(range(100)):
        tasks = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("gpulens")}
        if not left or not (tasks or threads):
            return tasks, threads
        await asyncio.sleep(0.01)
    raise AssertionError


@EVERY
async def test_stopping_without_a_start_is_safe(key: Key, signal: Signal, place: Place) -> None:
    """Twice, too; nothing was begun, so nothing is left."""
    rig = Rig(key, place, signal=signal)
    await rig.component.shutdown()
    await rig.component.shutdown()
    assert await leftovers() == (set(), set())


@EVERY
async def test_it_starts_and_stops_twice(key: Key, signal: Signal, place: Place) -> None:
    """The start is quick although what it talks to is not there; after the stop no task and no thread is left."""
    rig = Rig(key, place, signal=signal)
    async with asyncio.timeout(5):
        await rig.component.start(rig)
    async with asyncio.timeout(10):
        await rig.component.shutdown()
        await rig.component.shutdown()
    assert await leftovers() == (set(), set())
    assert rig.stopped == []
    assert not [status for status, _ in rig.statuses if status in (Status.PERMANENT, Status.FATAL)]


@EVERY
async def test_making_one_touches_nothing(key: Key, signal: Signal, place: Place) -> None:
    """No file, no port, no task, no report before the start: `validate` makes components and leaves no trace."""
    rig = Rig(key, place, signal=signal)
    assert list(place.folder.iterdir()) == []
    assert await leftovers() == (set(), set())
    assert rig.statuses == []


@EVERY
async def test_two_of_a_type_do_not_share_anything(key: Key, signal: Signal, place: Place, tmp_path: Path) -> None:
    """Stopping one leaves the other running."""
    (tmp_path / "b").mkdir()
    one, two = Rig(key, place, signal=signal), Rig(key, Place(tmp_path / "b"), signal=signal)
    await one.component.start(one)
    await two.component.start(two)
    await one.component.shutdown()
    if key[0] in (Kind.PROCESSORS, Kind.EXPORTERS):
        two.consume(LogBatch((b"",), "s") if signal is Signal.LOGS else samples()["plain"])
    async with asyncio.timeout(10):
        await two.component.shutdown()
    assert await leftovers() == (set(), set())


@pytest.mark.parametrize(("key", "signal"), TAKES, ids=[f"{key_id(key)}-{signal}" for key, signal in TAKES])
async def test_data_before_the_start_or_after_the_stop_does_no_harm(key: Key, signal: Signal, place: Place) -> None:
    """The graph's order rules it out, yet a late batch must not end in an exception, and its ack must settle."""
    data = LogBatch((b"",), "s") if signal is Signal.LOGS else samples()["plain"]
    rig = Rig(key, place, signal=signal)
    early = rig.consume(data)
    await rig.component.start(rig)
    async with asyncio.timeout(10):
        await rig.component.shutdown()
    late = rig.consume(data)
    assert early.settled
    assert late.settled
    assert await leftovers() == (set(), set())
