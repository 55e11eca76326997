"""Keeps one process alive that owns NVML.

Invariant: at most one process has NVML open for us. One that must go is asked, then killed, and if it survives that
(it hangs in the driver) it is left alone: no other is started while it is there, and nobody waits for it.

Killing a process in the middle of a driver call has wedged GPUs (dcgm-exporter 84), so asking comes first, and it is
done only when nothing answers any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

from gpulens.nvml.protocol import Do, Json, Message
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scraping import DeadlineError, within
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.nvml.process import Child, Start

STOP_S: Final = 10.0
"""How long a process that was asked to stop has, before it is killed."""
KILL_S: Final = 2.0
"""How long the kernel has to end a process that was killed; then it hangs in the driver."""
STEADY_S: Final = 60.0
"""A process that lived so long was a good one: its successor starts at once."""
LONGEST_PAUSE_S: Final = 60.0


class Peer(Protocol):
    """Who talks with the process."""

    def began(self) -> Message:
        """A new process is there; what it is to be told first."""

    def heard(self, message: Message) -> None:
        """It said something. Raises ProtocolError for what makes no sense."""

    def ended(self, why: str) -> None:
        """It is gone, or going; nothing more will be heard of it."""


def pause_s(failures: int) -> float:
    """How long to wait after so many short-lived processes in a row: nothing, 1 s, 2 s ... a minute."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 10), LONGEST_PAUSE_S)


class _Life:
    """One process, from its start until it is of no use: passes on what it says, and knows why it must go."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def heard(self, message: Message) -> None:
        """Raises ProtocolError."""
        if not self.over.done():
            self._peer.heard(message)

    def garbled(self, why: str) -> None:
        self.end(f"what it says makes no sense: {why}")

    def end(self, why: str) -> None:
        """The first reason counts."""
        if not self.over.done():
            self.over.set_result(why)


class Supervisor:
    """Starts the process, replaces it when it dies or must go, and ends it."""

    def __init__(self, start: Start, peer: Peer, clock: Clock, telemetry: Telemetry, log: ComponentLog) -> None:
        self._start = start
        self._peer = peer
        self._clock = clock
        self._telemetry = telemetry
        self._log = log
        self._child: Child | None = None
        self._life: _Life | None = None
        self._abandoned = False
        self._task: asyncio.Task[None] | None = None

    @property
    def abandoned(self) -> bool:
        """A process survived SIGKILL and is still there."""
        return self._abandoned

    def start(self) -> None:
        """Begins; the first process comes with the next turns of the loop."""
        self._task = asyncio.create_task(self._run(), name="nvml supervisor")

    def send(self, message: Mapping[str, Json]) -> None:
        """Tells the process something; nothing happens while there is none."""
        if self._child is not None:
            self._child.send(message)

    def replace(self, why: str) -> None:
        """The process is of no use any more: it is asked to stop, and another takes its place."""
        if self._life is not None:
            self._life.end(why)

    async def stop(self) -> None:
        """Ends the process. What does not die is left behind."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.replace("the receiver stops")
        child, self._child = self._child, None
        if child is not None:
            if not self._abandoned:
                await self._end(child)
            child.close()

    async def _run(self) -> None:
        failures = 0
        while True:
            born = self._clock.monotonic()
            why = await self._one_life()
            self._peer.ended(why)
            lived = self._clock.monotonic() - born
            failures = 1 if lived >= STEADY_S else failures + 1
            wait = pause_s(failures)
            self._telemetry.count("gpulens_nvml_restarts", receiver=self._log.id)
            if wait:
                self._log.warning("NVML process ended. Another starts after a pause.", reason=why, pause_s=wait)
            else:
                self._log.warning("NVML process ended. Another starts at once.", reason=why)
            await self._clock.sleep(wait)

    async def _one_life(self) -> str:
        """From a process's start to its end; why it ended."""
        life = self._life = _Life(self._peer)
        first = self._peer.began()
        try:
            child = self._child = await self._start(life)
        except OSError as error:
            return f"it could not be started: {error}"
        child.send(first)
        watch = asyncio.create_task(self._watch(child, life), name="nvml watch")
        try:
            why = await life.over
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        self._peer.ended(why)
        if not await self._end(child):
            self._abandoned = True
            self._log.error("NVML process survived SIGKILL. It is left alone; no other is started.", reason=why)
            self._peer.ended(f"{why}; the process survived SIGKILL and hangs in the driver, so no other is started")
            await child.wait()
            self._abandoned = False
        self._child = None
        child.close()
        return why

    async def _watch(self, child: Child, life: _Life) -> None:
        """Tells when the output of a process ends, and how the process did."""
        await child.silence()
        if not await self._gone(child, KILL_S):
            life.end("it closed its output")
        else:
            code = await child.wait()
            life.end(f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}")

    async def _end(self, child: Child) -> bool:
        """Asks, then kills; whether it is gone."""
        child.send({"do": str(Do.STOP)})
        child.hang_up()
        if await self._gone(child, STOP_S):
            return True
        self._log.warning("NVML process did not stop. It is killed.", after_s=STOP_S)
        self._telemetry.count("gpulens_nvml_kills", receiver=self._log.id)
        child.kill()
        return await self._gone(child, KILL_S)

    async def _gone(self, child: Child, limit_s: float) -> bool:
        try:
            await within(self._clock, limit_s, child.wait())
        except DeadlineError:
            return False
        return True
