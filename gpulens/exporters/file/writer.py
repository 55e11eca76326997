"""The file exporter: lines made on the loop, written by one thread of their own.

Invariant: `consume` never waits for the disk. What the disk does not take is dropped and counted, and the
next line is tried again; shutdown writes what is queued, within a grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from gpulens.exporters.file.config import FileConfig
from gpulens.exporters.file.files import LineFile, Opener, open_file
from gpulens.exporters.file.lines import LineEncoder
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Host, LogBatch, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.departures import Departures
from gpulens.pipeline.errors import DecodeError, StartError
from gpulens.pipeline.otlp_json import mark_departed
from gpulens.pipeline.status import Status

QUEUE_LINES: Final = 1000
QUEUE_BYTES: Final = 64 << 20
DOOR: Final = 0.5
"""Part of the queue at which the door refuses: one batch may become several on its way, and all must still
fit (a replay may not lose any)."""
GRACE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Line:
    text: bytes
    points: int


class _Queue:
    """Lines between the loop and the thread, bounded in number and bytes. What is being written still
    counts."""

    def __init__(self) -> None:
        self._lines: deque[_Line] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.lines = 0
        self.bytes = 0
        self.points = 0

    def full(self, part: float = 1.0) -> bool:
        """This part of the room is taken. An empty queue takes any line."""
        return self.lines >= part * QUEUE_LINES or self.bytes >= part * QUEUE_BYTES

    def put(self, line: _Line) -> None:
        """Adds a line."""
        with self._changed:
            self._lines.append(line)
            self.lines += 1
            self.bytes += len(line.text)
            self.points += line.points
            self._changed.notify()

    def take(self) -> _Line | None:
        """The next line, waiting for it; None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            return self._lines.popleft() if self._lines else None

    def done(self, line: _Line) -> None:
        """The line was written or given up."""
        with self._changed:
            self.lines -= 1
            self.bytes -= len(line.text)
            self.points -= line.points

    def close(self) -> None:
        """Lets the thread end once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abandon(self) -> int:
        """Empties the queue; the points that were in it, with those of the line that is being written."""
        with self._changed:
            self._lines.clear()
            return self.points


class FileExporter:
    """One file."""

    def __init__(
        self, settings: Settings, config: FileConfig, opener: Opener = open_file, grace_s: float = GRACE_S
    ) -> None:
        self._settings = settings
        self._path = Path(config.path)
        self._file = LineFile(self._path, config.append, config.rotation, settings.clock.now_ns, opener)
        self._encoder = LineEncoder()
        self._departures = Departures()
        self._queue = _Queue()
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._abandoned = False

    async def start(self, host: Host) -> None:
        """Opens the file and starts the thread. Raises StartError when the file can't be opened."""
        if not self._path.parent.is_dir():
            raise StartError(f"{self._settings.id}: there is no directory {self._path.parent}: create it, or mount it")
        try:
            self._file.open()
        except OSError as error:
            raise StartError(f"{self._settings.id}: can't write {self._path}: {error.strerror or error}") from error
        settings, queue = self._settings, self._queue
        settings.telemetry.watch("otelcol_exporter_queue_size", lambda: queue.lines, exporter=str(settings.id))
        settings.telemetry.watch("otelcol_exporter_queue_capacity", lambda: QUEUE_LINES, exporter=str(settings.id))
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        name = f"gpulens {settings.id}"
        threading.Thread(target=self._run, args=(self._ended.set,), name=name, daemon=True).start()

    async def shutdown(self) -> None:
        """Writes what is queued, for at most the grace period, and closes the file."""
        ended, self._ended = self._ended, None
        if ended is None:
            self._file.close()
            return
        self._queue.close()
        try:
            await asyncio.wait_for(ended.wait(), self._grace_s)
        except TimeoutError:
            self._abandoned = True
            lost = self._queue.abandon()
            self._count("send_failed", lost, "shutdown")
            self._settings.log.error("Exporting failed. Dropping data.", error="the disk hangs", dropped_items=lost)

    def refusal(self, data: Batch | LogBatch) -> str | None:
        """Refuses at the door while the queue is half full."""
        return "sending queue is full" if self._queue.full(DOOR) else None

    def consume(self, data: Batch, ack: Ack) -> None:
        """Makes the line and queues it. As every memory queue's, its share of the acknowledgement ends with
        that."""
        if self._queue.full():
            self._count("enqueue_failed", data.layout.size, "queue_full")
            return
        try:
            line = self._encoder.encode(self._with_departures(data))
        except DecodeError as error:
            self._count("enqueue_failed", data.layout.size, "undecodable")
            self._settings.log.error("Exporting failed. Dropping data.", error=str(error))
        else:
            self._queue.put(_Line(line, data.layout.size))

    def _count(self, what: str, points: int, reason: str) -> None:
        name = f"otelcol_exporter_{what}_metric_points"
        if points:
            self._settings.telemetry.count(name, points, exporter=str(self._settings.id), reason=reason)

    def _with_departures(self, batch: Batch) -> Batch:
        """The batch with what it says of departed series marked as such: reading a recording leaves that
        out again, since complete batches say it already."""
        extended = self._departures.extend(batch)
        if extended is batch:
            return batch
        known = len(batch.opaque)
        departed = map(mark_departed, extended.opaque[known:])
        return replace(extended, opaque=(*extended.opaque[:known], *departed))

    # --- on the thread

    def _run(self, ended: Callable[[], None]) -> None:
        try:
            while (line := self._queue.take()) is not None:
                problem = self._write(line)
                self._queue.done(line)
                self._tell(partial(self._wrote, line.points, problem))
        finally:
            self._file.close()
            self._tell(ended)

    def _write(self, line: _Line) -> str:
        """Writes a line; what went wrong, if anything."""
        try:
            self._file.write(line.text)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _tell(self, call: Callable[[], None]) -> None:
        """Runs something on the loop; the thread may outlive it when the disk hangs."""
        assert self._loop is not None  # set before the thread starts
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # --- back on the loop

    def _wrote(self, points: int, problem: str) -> None:
        settings = self._settings
        if self._abandoned:  # the disk woke up after all; the line is counted as lost already
            return
        if not problem:
            settings.telemetry.count("otelcol_exporter_sent_metric_points", points, exporter=str(settings.id))
            settings.report(Status.OK, "")
            return
        self._count("send_failed", points, "write")
        if settings.report(Status.RECOVERABLE, f"can't write {self._path}: {problem}"):
            settings.log.error("Exporting failed. Dropping data.", error=problem, dropped_items=points)


def create(settings: Settings, config: FileConfig) -> FileExporter:
    """The exporter of one `file` block."""
    return FileExporter(settings, config)
