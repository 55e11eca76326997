from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.file import FACTORY
from gpulens.exporters.file.config import FileConfig
from gpulens.exporters.file.files import Opener, OutputFile, open_file
from gpulens.exporters.file.writer import QUEUE_LINES, FileExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Admission, Extension, Settings
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.otlp import decode_request, record_request
from gpulens.pipeline.otlp_json import decode_json, encode_json, strip_departed
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry


class Rig:
    """A file exporter with what it reported."""

    def __init__(self, path: Path, opener: Opener = open_file, grace_s: float = 10.0) -> None:
        self.telemetry = Telemetry()
        self.reports: list[tuple[Status, str]] = []
        settings = Settings(
            ComponentID("file"), Kind.EXPORTERS, "a", VirtualClock(), self.telemetry, ComponentLog(), self.report
        )
        self.exporter = FileExporter(settings, FileConfig(path=str(path)), opener, grace_s)

    def report(self, status: Status, reason: str) -> bool:
        """Takes a status."""
        self.reports.append((status, reason))
        return True

    def extension(self, component_id: ComponentID) -> Extension | None:
        """No extensions here."""
        return None

    def stop(self, reason: str) -> None:
        """Nothing to stop."""

    def sent(self) -> int:
        """Points that reached the disk."""
        return self.telemetry.value("otelcol_exporter_sent_metric_points")


def batch(*ids: str, time_ns: int = 5, name: str = "hw.power") -> Batch:
    """A complete batch with one reading a device."""
    block = Block(
        Resource({"k8s.node.name": "a"}), Scope("gpulens/dcgm"), [Series(metric(name), {"hw.id": i}) for i in ids]
    )
    return Batch.of(Layout([block]), [1] * len(ids), time_ns, "dcgm")


async def test_each_batch_is_a_line(tmp_path: Path) -> None:
    """Lines stand in the order of the batches, written and counted when shutdown returns."""
    path = tmp_path / "out.jsonl"
    rig = Rig(path)
    await rig.exporter.start(rig)
    sent = [batch("0", "1", time_ns=n) for n in range(1, 6)]
    for each in sent:
        ack = Ack()
        rig.exporter.consume(each, ack)
        ack.settle()
        assert ack.settled
    await rig.exporter.shutdown()
    assert path.read_bytes() == b"".join(encode_json(record_request(each)) + b"\n" for each in sent)
    assert rig.sent() == 10
    assert rig.reports[-1] == (Status.OK, "")


async def test_equal_batches_give_equal_files(tmp_path: Path) -> None:
    """The bytes depend on the batches alone."""
    for name in ("a", "b"):
        rig = Rig(tmp_path / name)
        await rig.exporter.start(rig)
        for n in range(1, 8):
            rig.exporter.consume(batch("0", *(["1"] if n % 3 else []), time_ns=n), Ack())
        await rig.exporter.shutdown()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


async def test_departures_are_said_and_read_back_as_nothing(tmp_path: Path) -> None:
    """Other readers see the end of a series; our own reading gives the batches as they were, without them."""
    path = tmp_path / "out.jsonl"
    rig = Rig(path)
    await rig.exporter.start(rig)
    flag = "gpu.allocated"
    sent = [batch("0", "1", time_ns=1, name=flag), batch("0", time_ns=2, name=flag), batch("0", time_ns=3, name=flag)]
    for each in sent:
        rig.exporter.consume(each, Ack())
    await rig.exporter.shutdown()
    requests = [decode_json(line) for line in path.read_bytes().splitlines()]
    ends = [
        [
            (point.time_unix_nano, point.as_int, point.flags)
            for part in request.resource_metrics[1:]
            for point in part.scope_metrics[0].metrics[0].gauge.data_points
        ]
        for request in requests
    ]
    assert ends == [[], [(2, 0, 0)], [(3, 0, 1)]]
    for request, each in zip(requests, sent, strict=True):
        strip_departed(request)
        (back,) = decode_request(request, "other")
        assert (back.layout, back.values, back.opaque) == (each.layout, each.values, ())


async def test_a_missing_directory_ends_the_start(tmp_path: Path) -> None:
    """The message names the directory that is not there."""
    rig = Rig(tmp_path / "no" / "out.jsonl")
    with pytest.raises(StartError, match=r"there is no directory .*no: create it"):
        await rig.exporter.start(rig)
    await rig.exporter.shutdown()


async def test_a_path_that_can_t_be_opened_ends_the_start(tmp_path: Path) -> None:
    """A directory under the file's name is no file."""
    rig = Rig(tmp_path)
    with pytest.raises(StartError, match="can't write"):
        await rig.exporter.start(rig)


async def test_a_full_disk_is_reported_and_counted() -> None:
    """What the disk does not take is dropped with a status, and shutdown still ends."""
    rig = Rig(Path("/dev/full"))
    await rig.exporter.start(rig)
    rig.exporter.consume(batch("0"), Ack())
    await rig.exporter.shutdown()
    assert rig.reports == [(Status.RECOVERABLE, "can't write /dev/full: No space left on device")]
    assert rig.telemetry.value("otelcol_exporter_send_failed_metric_points", reason="write") == 1
    assert rig.sent() == 0


class Gate:
    """A file whose writes wait for a test, and fail while it says so."""

    def __init__(self) -> None:
        self.open_now = threading.Event()
        self.fail = False
        self.lines: list[bytes] = []

    def open(self, path: Path, append: bool) -> OutputFile:
        """This object is the file."""
        return self

    def write(self, data: bytes, /) -> int:
        """Waits, then fails or takes the line."""
        self.open_now.wait()
        if self.fail:
            self.fail = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lines.append(data)
        return len(data)

    def truncate(self, size: int, /) -> int:
        """Nothing to cut."""
        return size

    def tell(self) -> int:
        """Has no position."""
        return 0

    def close(self) -> None:
        """Stays usable."""


async def test_writing_goes_on_after_a_failure(tmp_path: Path) -> None:
    """One failed line is lost; the next is written and the status is OK again."""
    gate = Gate()
    gate.fail = True
    gate.open_now.set()
    rig = Rig(tmp_path / "out", gate.open)
    await rig.exporter.start(rig)
    rig.exporter.consume(batch("0", time_ns=1), Ack())
    rig.exporter.consume(batch("0", time_ns=2), Ack())
    await rig.exporter.shutdown()
    assert [status for status, _ in rig.reports] == [Status.RECOVERABLE, Status.OK]
    assert (len(gate.lines), rig.sent()) == (1, 1)


async def test_a_full_queue_refuses_at_the_door_and_drops_behind_it(tmp_path: Path) -> None:
    """While the disk hangs the queue is bounded: half full the door says no, what no longer fits is
    counted, nothing blocks."""
    gate = Gate()
    rig = Rig(tmp_path / "out", gate.open)
    exporter = rig.exporter
    assert isinstance(exporter, Admission)
    await exporter.start(rig)
    one = batch("0")
    for number in range(QUEUE_LINES):
        assert exporter.refusal(one) == (None if number < QUEUE_LINES // 2 else "sending queue is full")
        exporter.consume(one, Ack())
    exporter.consume(one, Ack())
    assert rig.telemetry.value("otelcol_exporter_enqueue_failed_metric_points", reason="queue_full") == 1
    gate.open_now.set()
    await exporter.shutdown()
    assert len(gate.lines) == QUEUE_LINES
    assert exporter.refusal(one) is None


async def test_a_hanging_disk_does_not_stop_the_end(tmp_path: Path) -> None:
    """After the grace period shutdown returns, and what was not written is counted."""
    gate = Gate()
    rig = Rig(tmp_path / "out", gate.open, grace_s=0.01)
    await rig.exporter.start(rig)
    for _ in range(3):
        rig.exporter.consume(batch("0"), Ack())
    await rig.exporter.shutdown()
    lost = rig.telemetry.value("otelcol_exporter_send_failed_metric_points", reason="shutdown")
    gate.open_now.set()
    assert lost == 3


async def test_shutdown_is_safe_at_any_time(tmp_path: Path) -> None:
    """Without a start and twice, it just returns."""
    rig = Rig(tmp_path / "out")
    await rig.exporter.shutdown()
    await rig.exporter.start(rig)
    await rig.exporter.shutdown()
    await rig.exporter.shutdown()


def test_the_factory_names_the_destination() -> None:
    """Two exporters of one path can be told to share it."""
    assert FACTORY.name == "file"
    assert FileConfig(path="x").destination() == "file x"
