"""Real processes at the other end of the pipes: good ones, bad ones, and ones that do not go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from gpulens.pipeline.clock import VirtualClock
from tests.receivers.nvml.kit import Live, until

SCRIPT = Path(__file__).with_name("scripted.py")


def live(mode: str) -> Live:
    """The receiver with such a process; its first pipe only carries what the mode says."""
    return Live([sys.executable, "-S", "-E", str(SCRIPT), mode], os.environ)


def exists(pid: int) -> bool:
    """Whether the kernel knows the process and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def went_on(rig: Live, ticks: int) -> bool:
    """Whether a tick more came."""
    return len(rig.up) > ticks


async def test_readings_come_over_the_pipes_and_nothing_is_left() -> None:
    """No task, no thread of ours, no process."""
    before = threading.active_count()
    rig = live("good")
    async with rig:
        await rig.tick(seconds=1)
        await rig.tick(2)
        pid = rig.pid
        assert exists(pid)
    assert rig.up == [1, 1, 1]
    assert not exists(pid)
    await until(lambda: len(asyncio.all_tasks()) == 1)
    await until(lambda: threading.active_count() <= before)


async def test_a_process_that_is_killed_costs_no_more_than_one_tick() -> None:
    """The next tick is the new process's."""
    async with live("good") as rig:
        await rig.tick(seconds=1)
        os.kill(rig.pid, signal.SIGKILL)
        await until(lambda: len(rig.children) == 2)
        await rig.tick(2)
    assert rig.up == [1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("garbage", "makes no sense"),
        ("huge", "makes no sense"),
        ("torn", "exit code 0"),
        ("dies", "exit code 7"),
    ],
)
async def test_a_bad_process_fails_its_ticks_and_is_replaced(
    mode: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each tick says so at once, whatever the process does, and the next process is tried."""
    async with live(mode) as rig:
        await until(lambda: len(rig.children) >= 2)  # the inventory is asked for at once
        for _ in range(3):
            await rig.gone()  # none of them is to be killed
            ticks = len(rig.up)
            await rig.advance(10 if ticks else 1)
            await until(partial(went_on, rig, ticks))
        assert 1 not in rig.up
        assert any(words in text for _, text in rig.statuses)
        assert rig.telemetry.value("gpulens_nvml_kills") == 0


async def test_a_process_that_says_nothing_is_found_out() -> None:
    """By the clock alone; it stops when asked, so nobody is killed."""
    async with live("still") as rig:
        await until(lambda: rig.children)
        await rig.advance(66.5)
        await until(lambda: len(rig.children) == 2)
        assert set(rig.up) == {0}
        assert rig.telemetry.value("gpulens_nvml_kills") == 0


async def test_a_process_that_does_not_stop_is_killed_after_ten_seconds() -> None:
    """Neither `stop` nor the end of its input, nor SIGTERM, makes it go."""
    rig = live("deaf")
    await rig.receiver.start(rig)
    await rig.tick(seconds=1)
    pid = rig.pid
    ending = asyncio.create_task(rig.receiver.shutdown())
    for _ in range(10):
        await rig.advance(0.01)
    await rig.advance(9)
    assert exists(pid)
    assert not ending.done()
    assert isinstance(rig.clock, VirtualClock)
    await rig.advance(1.5)
    await ending
    assert not exists(pid)
    assert rig.telemetry.value("gpulens_nvml_kills") == 1


async def test_a_flood_on_stderr_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """So many lines a minute, so much of a line, and the process never blocks on it."""
    with caplog.at_level(logging.INFO, logger="gpulens"):
        async with live("chatty") as rig:
            await rig.tick(seconds=1)
            await rig.tick(2)
    lines = [record for record in caplog.records if record.getMessage() == "NVML process reported."]
    assert 20 <= len(lines) <= 25
    assert rig.up == [1, 1, 1]


async def test_a_command_that_is_not_there_is_a_failed_tick() -> None:
    """And is tried again."""
    async with Live(["/nonexistent/python"], {}) as rig:
        await rig.advance(1)
        await until(lambda: rig.up)
        assert "could not be started" in rig.statuses[-1][1]
