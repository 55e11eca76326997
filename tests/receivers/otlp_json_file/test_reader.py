from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.file.config import FileConfig
from gpulens.exporters.file.writer import FileExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension, Settings
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.errors import RefusedError, StartError
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Report, Status
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.otlp_json_file import FACTORY
from gpulens.receivers.otlp_json_file.config import OtlpJsonFileConfig
from gpulens.receivers.otlp_json_file.reader import OtlpJsonFileReceiver
from gpulens.receivers.otlp_json_file.worker import Worker
from tests.pipeline.otlp_batches import batches, same_batch

GOOD = (
    b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","gauge":'
    b'{"dataPoints":[{"timeUnixNano":"%d","asDouble":1}]}}]}]}]}\n'
)


class Rig:
    """A receiver with what it handed on."""

    def __init__(self, *include: Path, **config: object) -> None:
        self.clock = VirtualClock()
        self.telemetry = Telemetry()
        self.batches: list[Batch] = []
        self.refusals = 0
        self.broken = False
        self.reports: list[tuple[Status, str]] = []
        self.reasons: list[str] = []
        self.stopped = asyncio.Event()
        parsed = OtlpJsonFileConfig.model_validate({"include": [str(path) for path in include], **config})
        self.receiver = OtlpJsonFileReceiver(
            make_settings("otlp_json_file", self.clock, self.telemetry, self.report), parsed, self
        )

    def consume(self, data: Batch, ack: Ack) -> None:
        """Takes a batch, unless the test wants it refused."""
        if self.broken:
            raise ZeroDivisionError("ours")
        if self.refusals:
            self.refusals -= 1
            raise RefusedError("sending queue is full", "queue_full")
        self.batches.append(data)

    def report(self, status: Status, reason: str) -> bool:
        """Takes a status."""
        self.reports.append((status, reason))
        return True

    def extension(self, component_id: ComponentID) -> Extension | None:
        """No extensions here."""
        return None

    def stop(self, reason: str) -> None:
        """Takes the wish to end."""
        self.reasons.append(reason)
        self.stopped.set()

    async def to_the_end(self) -> list[Batch]:
        """Reads everything and shuts down."""
        await self.receiver.start(self)
        await asyncio.wait_for(self.stopped.wait(), 20)
        await self.receiver.shutdown()
        return self.batches

    async def until(self, done: Callable[[], bool]) -> None:
        """Turns the loop and the clock until something holds."""
        for _ in range(100_000):
            if done():
                return
            await self.clock.advance(0.2, turns=2)
        raise AssertionError("it never came")


def make_settings(kind: str, clock: VirtualClock, telemetry: Telemetry, report: Report) -> Settings:
    """Settings of a component under test."""
    return Settings(ComponentID(kind), Kind.RECEIVERS, "node-a", clock, telemetry, ComponentLog(), report)


async def record(path: Path, sent: list[Batch]) -> None:
    """Writes a recording with the file exporter."""
    exporter = FileExporter(
        make_settings("file", VirtualClock(), Telemetry(), lambda *_: True), FileConfig(path=str(path))
    )
    await exporter.start(Rig(path))
    for each in sent:
        exporter.consume(each, Ack())
    await exporter.shutdown()


def series_of_a_run() -> list[Batch]:
    """Two streams: a device that misses a tick and leaves, counters with starts, an owner that ends."""
    node, pod = Resource({"k8s.node.name": "a"}), Resource({"k8s.node.name": "a", "k8s.pod.name": "p"})
    dcgm, kubelet = Scope("gpulens/dcgm"), Scope("gpulens/pod_resources")
    device = [
        Series(metric("hw.power"), {"hw.id": "0"}),
        Series(metric("hw.energy"), {"hw.id": "0"}),
        Series(metric("gpu.xid.last"), {"hw.id": "1"}),
    ]
    whole = Layout([Block(node, dcgm, device)])
    less = Layout([Block(node, dcgm, device[:2])])
    held = Layout([Block(pod, kubelet, [Series(metric("gpu.allocated"), {"hw.id": "0"})])])
    free = Layout([Block(node, kubelet, [Series(metric("gpu.allocated"), {"hw.id": "0"})])])
    starts = array("Q", [0, 77, 0])
    return [
        Batch.of(held, [1], 1_000, "pod_resources"),
        Batch.of(whole, [0.1 + 0.2, 1e300, 2**63 - 1], 1_001, "dcgm", start_ns=starts),
        Batch.of(whole, [None, -0.0, -(2**63)], array("Q", [5, 6, 7]), "dcgm", start_ns=starts),
        Batch.of(free, [0], 2_000, "pod_resources"),
        Batch.of(less, [1.0, 2.0], 2_001, "dcgm", complete=False),
        Batch.of(less, [1.5, 2.5], 3_001, "dcgm"),
        Batch.of(free, [0], 3_000, "pod_resources"),
        Batch(EMPTY_LAYOUT, b"", 4_000, "dcgm", True),
        Batch(EMPTY_LAYOUT, b"", 5_000, "dcgm", True),
    ]


async def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    """Layouts, numbers bit by bit, times, starts, absence, stream and completeness, in order, and nothing
    else."""
    sent = series_of_a_run()
    await record(tmp_path / "r.jsonl", sent)
    found = await Rig(tmp_path / "r.jsonl", on_end="stop").to_the_end()
    assert len(found) == len(sent)
    for back, each in zip(found, sent, strict=True):
        assert same_batch(back, each)
        assert (back.values, back.absent) == (each.values, each.absent)
        assert (back.stream, back.complete, back.latest_ns()) == (each.stream, each.complete, each.latest_ns())
    assert found[1].layout is found[2].layout


async def test_a_replay_records_the_same_bytes(tmp_path: Path) -> None:
    """Recording what a recording plays gives the same file, departures included."""
    await record(tmp_path / "live.jsonl", series_of_a_run())
    found = await Rig(tmp_path / "live.jsonl", on_end="stop").to_the_end()
    await record(tmp_path / "again.jsonl", found)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "live.jsonl").read_bytes()


@given(st.data())
def test_any_batches_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the batches, what is read is what was written."""
    path = tmp_path_factory.mktemp("any") / "r.jsonl"
    sent = [replace(each, complete=True) for each in data.draw(st.lists(batches(), max_size=3))]

    async def there_and_back() -> list[Batch]:
        await record(path, sent)
        return await Rig(path, on_end="stop").to_the_end()

    found = asyncio.run(there_and_back())
    assert len(found) == len(sent)
    assert all(same_batch(back, each) for back, each in zip(found, sent, strict=True))


async def test_foreign_points_are_named_after_their_file(tmp_path: Path) -> None:
    """Without marks the stream is the receiver and the file, and nothing is complete."""
    path = tmp_path / "other.jsonl"
    path.write_bytes(GOOD % 5)
    (found,) = await Rig(path, on_end="stop").to_the_end()
    assert (found.stream, found.complete) == ("otlp_json_file/other.jsonl", False)
    assert found.readings() == [1.0]


async def test_bad_lines_harm_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each bad line is counted; the first is logged with file and line, and the good ones come through."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD % 1 + b"{torn\n\n" + GOOD % 2 + b'{"resourceMetrics":5}\n' + GOOD % 3)
    rig = Rig(path, on_end="stop")
    found = await rig.to_the_end()
    assert [batch.time_ns for batch in found] == [1, 2, 3]
    assert rig.telemetry.value("gpulens_receiver_bad_lines") == 2
    logged = [record for record in caplog.records if record.message == "A line of a recording was not read."]
    assert [record.__dict__["gpulens_fields"]["at"] for record in logged] == [f"{path}:2"]


async def test_the_end_is_said_once_after_the_last_batch(tmp_path: Path) -> None:
    """`on_end: stop` asks the service to end when everything was taken, not before."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD % 1 + GOOD % 2)
    rig = Rig(path, on_end="stop")
    rig.refusals = 3
    await rig.receiver.start(rig)
    await rig.until(rig.stopped.is_set)
    await rig.receiver.shutdown()
    assert [batch.time_ns for batch in rig.batches] == [1, 2]
    assert rig.reasons == ["otlp_json_file has read its files to the end"]
    assert rig.telemetry.value("otelcol_receiver_refused_metric_points", reason="queue_full") == 3
    assert rig.telemetry.value("otelcol_receiver_accepted_metric_points") == 2


async def test_a_fault_of_ours_ends_a_replay_with_its_reason(tmp_path: Path) -> None:
    """An unexpected error is reported, and the service is asked to end instead of waiting for ever."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD % 1)
    rig = Rig(path, on_end="stop")
    rig.broken = True
    assert await rig.to_the_end() == []
    assert rig.reasons == ["otlp_json_file failed"]
    assert rig.reports == [(Status.PERMANENT, "reading stopped: ZeroDivisionError('ours')")]


async def test_appended_lines_are_read_at_the_next_poll(tmp_path: Path) -> None:
    """`on_end: keep` goes on with what comes, also in files that were not there."""
    path = tmp_path / "a.jsonl"
    rig = Rig(tmp_path / "*.jsonl", poll_interval="200ms")
    await rig.receiver.start(rig)
    path.write_bytes(GOOD % 1)
    await rig.until(lambda: len(rig.batches) == 1)
    with path.open("ab") as file:
        file.write(GOOD % 2)
    await rig.until(lambda: len(rig.batches) == 2)
    await rig.receiver.shutdown()
    assert [batch.time_ns for batch in rig.batches] == [1, 2]
    assert rig.reasons == []


async def test_a_missing_recording_ends_the_start(tmp_path: Path) -> None:
    """A replay of a file that is not there is a mistake; a glob, or waiting for it, is none."""
    with pytest.raises(StartError, match=r"there is no file .*r\.jsonl"):
        await Rig(tmp_path / "r.jsonl", on_end="stop").receiver.start(Rig(tmp_path))
    assert await Rig(tmp_path / "*.jsonl", on_end="stop").to_the_end() == []


async def test_shutdown_is_safe_at_any_time(tmp_path: Path) -> None:
    """Without a start, twice, and while the pipeline refuses."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD % 1)
    rig = Rig(path)
    await rig.receiver.shutdown()
    rig.refusals = 10**9
    await rig.receiver.start(rig)
    await rig.until(lambda: rig.refusals < 10**9)
    await rig.receiver.shutdown()
    await rig.receiver.shutdown()
    assert rig.batches == []


async def test_a_failing_call_fails_where_it_was_made() -> None:
    """The worker hands on results and exceptions, and takes the next call after either."""
    worker = Worker("test")
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0)
    assert await worker.call(lambda: 5) == 5
    worker.close()
    worker.close()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"include": []}, "at least one file"),
        ({"include": [""]}, "at least one file"),
        ({"include": ["x"], "poll_interval": "0s"}, "greater than 0"),
        ({"include": ["x"], "on_end": "stop", "start_at": "end"}, "would read nothing"),
        ({"include": ["x"], "on_end": "wait"}, "stop"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, object], text: str) -> None:
    """A setting that can't work is refused with what would."""
    with pytest.raises(ValidationError, match=text):
        OtlpJsonFileConfig.model_validate(config)


def test_the_factory_keeps_the_collectors_name() -> None:
    """The Collector's spelling is an alias."""
    assert (FACTORY.name, FACTORY.alias) == ("otlp_json_file", "otlpjsonfile")
