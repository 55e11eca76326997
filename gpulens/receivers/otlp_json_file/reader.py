"""The receiver of recordings: lines become batches and go on, in order, as fast as the pipeline takes them.

Invariant: it adds nothing of its own (no signs of life, no times), so a replay meets what the live run met.
A line that is no OTLP JSON is counted and passed over; a batch that the pipeline refuses is offered again
until it is taken.
"""

from __future__ import annotations

import asyncio
import glob
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Host, Metrics, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import DecodeError, RefusedError, StartError
from gpulens.pipeline.otlp import Decoder
from gpulens.pipeline.otlp_json import DEPARTED_KEY, TIME_KEY, decode_json, marked_time, strip_departed
from gpulens.pipeline.status import Status
from gpulens.receivers.otlp_json_file.config import OtlpJsonFileConfig
from gpulens.receivers.otlp_json_file.tail import Line, Tail
from gpulens.receivers.otlp_json_file.worker import Worker

OFFER_AGAIN_S: Final = 0.05
"""How long a refused batch waits; a full queue needs about that long to send a request."""

_DEPARTED: Final = DEPARTED_KEY.encode()
_TIME: Final = TIME_KEY.encode()


@dataclass(frozen=True, slots=True)
class _Parsed:
    line: Line
    request: ExportMetricsServiceRequest | None
    problem: str = ""
    time_ns: int | None = None  # of a batch without points


class OtlpJsonFileReceiver:
    """Reads the files of one block. Points without `gpulens.stream` are of the stream
    `<receiver id>/<name of the file>`, partial."""

    def __init__(self, settings: Settings, config: OtlpJsonFileConfig, consumer: Metrics) -> None:
        self._settings = settings
        self._config = config
        self._consumer = consumer
        self._stop_at_end = config.on_end == "stop"
        self._tail = Tail(config.include, config.exclude, config.start_at == "end", once=self._stop_at_end)
        self._decoder = Decoder()
        self._worker = Worker(f"gpulens {settings.id}")
        self._task: asyncio.Task[None] | None = None
        self._bad: Counter[Path] = Counter()

    async def start(self, host: Host) -> None:
        """Begins to read. Raises StartError when a file that must be there for `on_end: stop` is not."""
        missing = self._missing() if self._stop_at_end else []
        if missing:
            raise StartError(f"{self._settings.id}: there is no file {', '.join(missing)}")
        self._task = asyncio.create_task(self._run(host), name=f"read {self._settings.id}")
        self._task.add_done_callback(partial(self._ended, host))

    def _missing(self) -> list[str]:
        plain = [pattern for pattern in self._config.include if glob.escape(pattern) == pattern]
        return [path for path in plain if not Path(path).is_file()]

    async def shutdown(self) -> None:
        """Stops reading."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._worker.close()

    async def _run(self, host: Host) -> None:
        while True:
            lines = await self._worker.call(self._read)
            for parsed in lines:
                await self._take(parsed)
                await asyncio.sleep(0)
            if lines:
                continue
            if self._stop_at_end:
                break
            await self._settings.clock.sleep(self._config.poll_interval)
        for path, count in self._bad.items():
            self._settings.log.warning("Lines of a recording were not read.", file=str(path), lines=count)
        host.stop(f"{self._settings.id} has read its files to the end")

    def _ended(self, host: Host, task: asyncio.Task[None]) -> None:
        """Reading ended by a fault of ours: say so, and let a replay end instead of waiting for ever."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._settings.report(Status.PERMANENT, f"reading stopped: {error!r}")
        self._settings.log.error("Reading recordings failed.", error=repr(error))
        if self._stop_at_end:
            host.stop(f"{self._settings.id} failed")

    def _read(self) -> list[_Parsed]:
        """On the thread: reads and parses, the part that takes long for long lines."""
        return [_parse(line) for line in self._tail.read()]

    async def _take(self, parsed: _Parsed) -> None:
        line = parsed.line
        if parsed.request is None:
            if parsed.problem:
                self._strike(line, parsed.problem)
            return
        for batch in self._decoder.decode(parsed.request, f"{self._settings.id}/{line.path.name}"):
            if parsed.time_ns is not None and not batch.layout.size:
                batch = replace(batch, time_ns=parsed.time_ns)
            await self._offer(batch)

    async def _offer(self, batch: Batch) -> None:
        """Hands a batch on; one that is refused is offered again, since a file can wait."""
        settings, receiver = self._settings, str(self._settings.id)
        while True:
            try:
                self._consumer.consume(batch, Ack())
            except RefusedError as error:
                settings.telemetry.count(
                    "otelcol_receiver_refused_metric_points",
                    batch.layout.size,
                    receiver=receiver,
                    reason=error.reason,
                )
                await settings.clock.sleep(OFFER_AGAIN_S)
            else:
                settings.telemetry.count(
                    "otelcol_receiver_accepted_metric_points", batch.layout.size, receiver=receiver
                )
                return

    def _strike(self, line: Line, problem: str) -> None:
        """Counts a line that can't be used; the first one of each file is logged."""
        self._settings.telemetry.count("gpulens_receiver_bad_lines", 1, receiver=str(self._settings.id))
        self._bad[line.path] += 1
        if self._bad[line.path] == 1:
            where = f"{line.path}:{line.number}" if line.number else str(line.path)
            self._settings.log.warning("A line of a recording was not read.", at=where, error=problem)


def _parse(line: Line) -> _Parsed:
    if line.problem or not line.text.strip():
        return _Parsed(line, None, line.problem)
    try:
        request = decode_json(line.text)
    except DecodeError as error:
        return _Parsed(line, None, str(error))
    if _DEPARTED in line.text:
        strip_departed(request)
    return _Parsed(line, request, time_ns=marked_time(request) if _TIME in line.text else None)


def create(settings: Settings, config: OtlpJsonFileConfig, consumer: Metrics) -> OtlpJsonFileReceiver:
    """The receiver of one `otlp_json_file` block."""
    return OtlpJsonFileReceiver(settings, config, consumer)
