"""The debug exporter's lines and sampling."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs
from pydantic import ValidationError

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.debug import FACTORY
from gpulens.exporters.debug.config import DebugConfig
from gpulens.exporters.debug.printer import Sampler, create, create_logs
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import LogBatch, Settings
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.journal import ComponentLog, configure
from gpulens.pipeline.telemetry import Telemetry

SCOPE = Scope("gpulens", "1.0")
LAYOUT = Layout(
    [
        Block(
            Resource({"k8s.pod.name": "a"}),
            SCOPE,
            [Series(metric("hw.gpu.memory.usage"), {"hw.id": f"GPU-{i}"}) for i in range(2)],
        ),
        Block(Resource({"k8s.node.name": "n"}), SCOPE, [Series(metric("hw.power")), Series(metric("hw.energy"))]),
    ]
)
BATCH = Batch.of(LAYOUT, [448, 0, 70.5, None], 1_700_000_000_123_456_789, "dcgm", start_ns=1_600_000_000 * 10**9)


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What the log wrote."""
    stream = io.StringIO()
    logger = logging.getLogger("gpulens")
    before = (logger.handlers[:], logger.propagate, logger.level)
    configure("info", "console", stream)
    yield stream
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


def settings(clock: VirtualClock | None = None) -> Settings:
    """What the host gives."""
    return Settings(
        ComponentID("debug"),
        Kind.EXPORTERS,
        "n",
        clock or VirtualClock(),
        Telemetry(),
        ComponentLog("exporter", "debug"),
        lambda *_: True,
    )


def export(given: Settings, batch: Batch, **config: object) -> None:
    """Sends one batch through a new exporter."""
    create(given, DebugConfig.model_validate(config)).consume(batch, Ack())


def test_basic_writes_one_line_a_batch(output: io.StringIO) -> None:
    """The line has the Collector's three figures; absent points are not counted."""
    given = settings()
    export(given, BATCH)
    (line,) = output.getvalue().splitlines()
    assert line.endswith(
        "\tinfo\tMetrics\totelcol.component.kind=exporter\totelcol.component.id=debug"
        "\tresource metrics=2\tmetrics=2\tdata points=3"
    )
    assert given.telemetry.value("otelcol_exporter_sent_metric_points", exporter="debug") == 3


def test_normal_writes_a_line_a_point(output: io.StringIO) -> None:
    """Every present point has a line with its attributes and value, zero included."""
    export(settings(), BATCH, verbosity="normal")
    text = output.getvalue()
    assert "hw.gpu.memory.usage{k8s.pod.name=a,hw.id=GPU-0} 448\n" in text
    assert "hw.gpu.memory.usage{k8s.pod.name=a,hw.id=GPU-1} 0\n" in text
    assert "hw.power{} 70.5" in text
    assert "hw.energy" not in text


@pytest.mark.parametrize("verbosity", ["normal", "detailed"])
def test_sharing_pods_and_two_gpus_of_a_pod_are_told_apart(output: io.StringIO, verbosity: str) -> None:
    """Two pods of one namespace on one GPU, one of them with a second one: no two points read the same."""
    held = {"a": ("GPU-0", "GPU-1"), "b": ("GPU-0",)}
    blocks = [
        Block(
            Resource({"k8s.namespace.name": "ml", "k8s.pod.name": pod}),
            SCOPE,
            [Series(metric("gpu.allocated"), {"hw.id": gpu}) for gpu in gpus],
        )
        for pod, gpus in held.items()
    ]
    export(settings(), Batch.of(Layout(blocks), [1, 1, 1], 10**18, "s"), verbosity=verbosity)
    text = output.getvalue()
    if verbosity == "normal":
        lines = [line[line.index("gpu.") :] for line in text.splitlines() if "gpu.allocated{" in line]
        assert len(set(lines)) == len(lines) == 3
    assert text.count("k8s.pod.name") == (3 if verbosity == "normal" else 2)


def test_detailed_writes_everything(output: io.StringIO) -> None:
    """Resource, scope, metric, times and what is absent are all there."""
    export(settings(), BATCH, verbosity="detailed")
    text = output.getvalue()
    for expected in (
        "Stream: dcgm (complete)",
        "     -> k8s.pod.name: a",
        "Scope: gpulens 1.0",
        "Metric: hw.energy",
        "  Unit: J",
        "  Monotonic: true",
        "  Start: 2020-09-13T12:26:40.000000000Z",
        "  Time: 2023-11-14T22:13:20.123456789Z",
        "  Value: 448",
        "  Value: absent",
    ):
        assert expected in text
    assert text.count("Metric: hw.gpu.memory.usage") == 1


def test_the_last_time_there_is(output: io.StringIO) -> None:
    """The largest time that a foreign point can carry is written like any other."""
    export(settings(), Batch.of(LAYOUT, [1, 2, 3.0, 4.0], 2**64 - 1, "x"), verbosity="detailed")
    assert "  Time: 2554-07-21T23:34:33.709551615Z" in output.getvalue()


def test_sampling() -> None:
    """The first batches of each second pass, then every n-th; a new second begins anew."""
    sampler = Sampler(initial=2, thereafter=3)
    assert [n for n in range(1, 10) if sampler.passes(0.0)] == [1, 2, 5, 8]
    assert sampler.passes(1.0)
    everything = Sampler(initial=2, thereafter=1)
    assert all(everything.passes(0.5) for _ in range(10))


def test_what_sampling_leaves_out_is_still_counted(output: io.StringIO) -> None:
    """Sampling is about lines, not about points."""
    given = settings()
    exporter = create(given, DebugConfig(sampling_initial=1, sampling_thereafter=100))
    for _ in range(5):
        exporter.consume(BATCH, Ack())
    assert len(output.getvalue().splitlines()) == 1
    assert given.telemetry.value("otelcol_exporter_sent_metric_points") == 15


def test_logs_are_counted(output: io.StringIO) -> None:
    """A log batch gives one line with its figures; bytes that can't be read count no records."""
    message = ResourceLogs()
    message.scope_logs.add().log_records.add()
    exporter = create_logs(settings(), DebugConfig())
    exporter.consume(LogBatch((message.SerializeToString(), b"\xff"), "x"), Ack())
    assert output.getvalue().endswith("resource logs=2\tlog records=1\n")


def test_config() -> None:
    """Defaults are the Collector's; a word that is no verbosity is refused."""
    assert DebugConfig.model_validate({"verbosity": "detailed"}).sampling_initial == 2
    with pytest.raises(ValidationError, match="verbosity"):
        DebugConfig.model_validate({"verbosity": "loud"})
    assert FACTORY.config is DebugConfig
