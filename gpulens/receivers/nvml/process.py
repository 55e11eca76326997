"""One running process that owns NVML: frames in and out, its last words, its end.

Invariant: nothing here waits for the process but `wait`, which the caller bounds: one that hangs in the driver may
outlive every signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from subprocess import PIPE
from typing import Final, Protocol, cast

from gpulens.nvml.protocol import HEADER, Json, Message, ProtocolError, frame, message, size
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.journal import ComponentLog

_LINES_A_MINUTE: Final = 20
_LINE_BYTES: Final = 500
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Listener(Protocol):
    """Who is told what a process says, on the loop's thread."""

    def heard(self, message: Message) -> None:
        """One message. Raises ProtocolError for what makes no sense."""

    def garbled(self, why: str) -> None:
        """It said something that is no message; nothing more will be heard of it."""


class Child(Protocol):
    """A process that speaks frames."""

    def send(self, message: Mapping[str, Json]) -> None:
        """Writes one frame; nothing happens once the process is gone."""

    def hang_up(self) -> None:
        """Ends its input, which asks it to stop."""

    def kill(self) -> None:
        """SIGKILL."""

    async def silence(self) -> None:
        """Waits for the end of its output."""

    async def wait(self) -> int:
        """Waits for its end; the exit code, negative for a signal."""

    def close(self) -> None:
        """Lets go of the pipes, also when the process still lives."""


Start = Callable[[Listener], Awaitable[Child]]
"""Starts a process. Raises OSError."""


def starter(command: Sequence[str], env: Mapping[str, str], clock: Clock, log: ComponentLog) -> Start:
    """Starts processes by exec: a fork of a process with threads and gRPC is no place to load a driver."""

    async def start(listener: Listener) -> Child:
        loop = asyncio.get_running_loop()
        _, child = await loop.subprocess_exec(
            lambda: PipedChild(listener, clock, log),
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(env),
            start_new_session=True,
        )
        return child

    return start


class PipedChild(asyncio.SubprocessProtocol):
    """A child process on pipes. Frames are taken as they come, without a task of their own: at each tick one comes for
    each GPU."""

    def __init__(self, listener: Listener, clock: Clock, log: ComponentLog) -> None:
        loop = asyncio.get_running_loop()
        self._listener = listener
        self._clock = clock
        self._log = log
        self._transport: asyncio.SubprocessTransport | None = None
        self._silent: asyncio.Future[None] = loop.create_future()
        self._exited: asyncio.Future[int] = loop.create_future()
        self._frames = bytearray()
        self._garbled = False
        self._line = b""
        self._lines_since = clock.monotonic()
        self._lines_left = _LINES_A_MINUTE

    @property
    def pid(self) -> int:
        """The process's number; 0 before its start."""
        return 0 if self._transport is None else self._transport.get_pid()

    # --- Child

    def send(self, message: Mapping[str, Json]) -> None:
        """Writes one frame."""
        pipe = self._stdin()
        if pipe is not None and not pipe.is_closing():
            pipe.write(frame(message))

    def hang_up(self) -> None:
        """Ends its input."""
        pipe = self._stdin()
        if pipe is not None:
            pipe.close()

    def kill(self) -> None:
        """SIGKILL."""
        if self._transport is not None and self._transport.get_returncode() is None:
            self._transport.kill()

    async def silence(self) -> None:
        """Waits for the end of its output."""
        await asyncio.shield(self._silent)

    async def wait(self) -> int:
        """Waits for its end."""
        return await asyncio.shield(self._exited)

    def close(self) -> None:
        """Lets go of the pipes."""
        if self._transport is not None:
            self._transport.close()

    def _stdin(self) -> asyncio.WriteTransport | None:
        if self._transport is None:
            return None
        return cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(_STDIN))

    # --- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process was started."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It wrote something."""
        if fd == _STDERR:
            self._relay(data)
        elif not self._garbled:
            self._frames += data
            try:
                self._take_frames()
            except ProtocolError as error:
                self._garbled = True
                self._listener.garbled(str(error))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """It closed a pipe, maybe by dying."""
        if fd == _STDERR:
            self._relay(b"\n")
        elif fd == _STDOUT and not self._silent.done():
            self._silent.set_result(None)

    def process_exited(self) -> None:
        """It is gone."""
        code = None if self._transport is None else self._transport.get_returncode()
        if not self._exited.done():
            self._exited.set_result(0 if code is None else code)

    def _take_frames(self) -> None:
        frames, begin = self._frames, 0
        while len(frames) - begin >= HEADER.size:
            body = begin + HEADER.size
            end = body + size(bytes(frames[begin:body]))
            if len(frames) < end:
                break
            self._listener.heard(message(bytes(frames[body:end])))
            begin = end
        del frames[:begin]

    def _relay(self, data: bytes) -> None:
        """Its standard error, line by line, into the log: so many lines a minute, so much of each."""
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[:_LINE_BYTES]
        for line in lines:
            now = self._clock.monotonic()
            if now - self._lines_since >= 60:
                self._lines_since, self._lines_left = now, _LINES_A_MINUTE
            text = line[:_LINE_BYTES].decode("utf-8", "replace").strip()
            if text and self._lines_left > 0:
                self._lines_left -= 1
                self._log.info("NVML process reported.", report=text)
