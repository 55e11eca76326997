"""Connectors: one pipeline's exporter is another's receiver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import LogBatch
from gpulens.pipeline.errors import ConfigError, RefusedError
from tests.connectors.relay import RELAY
from tests.pipeline.parts import Bench, batch

CHAIN = """
receivers: {src: }
processors: {step: , step/b: }
connectors: {relay: }
exporters: {queue: , queue/logs: }
service:
  pipelines:
    metrics/in: {receivers: [src], processors: [step], exporters: [relay]}
    metrics/out: {receivers: [relay], processors: [step/b], exporters: [queue]}
    logs: {receivers: [relay], exporters: [queue/logs]}
"""


@pytest.fixture
def bench() -> Bench:
    """A workbench that knows the relay."""
    return Bench(extra=(RELAY,))


def test_metrics_pass_through_to_metrics_and_events_to_logs(bench: Bench) -> None:
    """One batch with events arrives as metrics in one pipeline and as log records in the other."""
    bench.service(CHAIN)
    data = replace(batch(), events=(b"xid 79",))
    ack = bench.source().emit(data)
    assert bench.queue("queue").seen == [data]
    assert bench.queue("queue/logs").seen == [LogBatch((b"xid 79",), "src")]
    assert ack.settled


async def test_a_connector_starts_before_what_feeds_it_and_after_what_it_feeds(bench: Bench) -> None:
    """So that no data meets a stopped part, from the first to the last."""
    service = bench.service(CHAIN)
    await service.start()
    await service.shutdown()
    keys = [node.key for node in service.graph.nodes]
    assert keys.index("processors/step/b@metrics/out") < keys.index("connectors/relay@metrics/in-metrics")
    assert keys.index("connectors/relay@metrics/in-metrics") < keys.index("processors/step@metrics/in")
    assert bench.did("start") == ["queue", "queue/logs", "step/b", "step", "src"]
    assert bench.did("shutdown") == ["src", "step", "step/b", "queue/logs", "queue"]


@pytest.mark.parametrize("who", ["queue", "queue/logs"])
def test_admission_reaches_through_a_connector(bench: Bench, who: str) -> None:
    """A full queue behind a connector refuses the batch at the first door, for either signal."""
    bench.service(CHAIN)
    bench.queue(who).full = "sending queue is full"
    with pytest.raises(RefusedError, match="sending queue is full"):
        bench.source().emit()
    assert bench.did("consume") == []


def test_acknowledgement_reaches_through_a_connector(bench: Bench) -> None:
    """A queue behind it that keeps the data holds the source's ack."""
    bench.service(CHAIN)
    bench.queue("queue").keeps = True
    heard: list[Exception | None] = []
    bench.source().consumer.consume(batch(), Ack(heard.append))
    assert heard == []
    bench.queue("queue").held[0].settle()
    assert heard == [None]


def test_a_defect_behind_a_connector_stays_there(bench: Bench) -> None:
    """The logs pipeline still gets its records."""
    service = bench.service(CHAIN)
    bench.steps("step/b")[0].defect = KeyError("defect")
    bench.source().emit(replace(batch(), events=(b"e",)))
    assert bench.queue("queue").seen == []
    assert len(bench.queue("queue/logs").seen) == 1
    assert service.telemetry.value("gpulens_pipeline_dropped_items", consumer="pipelines/metrics/out") == 1


def test_streams_that_meet_again_in_one_exporter_stay_apart(bench: Bench) -> None:
    """Direct and by way of a connector, one receiver's stream comes twice: under two names, so that neither complete
    batch replaces the other."""
    bench.service("""
receivers: {src: }
connectors: {relay: }
exporters: {tap: }
service:
  pipelines:
    metrics/in: {receivers: [src], exporters: [relay, tap]}
    metrics/out: {receivers: [relay], exporters: [tap]}
""")
    bench.source().emit()
    assert sorted(bench.tap().streams) == ["src@metrics/in", "src@metrics/out"]


def test_streams_that_meet_in_one_connector_stay_apart(bench: Bench) -> None:
    """Two pipelines of one receiver that end in the same connector are told apart behind it."""
    bench.service("""
receivers: {src: }
connectors: {relay: }
exporters: {tap: }
service:
  pipelines:
    metrics/a: {receivers: [src], exporters: [relay]}
    metrics/b: {receivers: [src], exporters: [relay]}
    metrics/out: {receivers: [relay], exporters: [tap]}
""")
    bench.source().emit()
    assert sorted(bench.tap().streams) == ["src@metrics/a", "src@metrics/b"]


def test_logs_pass_through_to_logs(bench: Bench) -> None:
    """The third pair of signals."""
    bench.service("""
receivers: {src: }
connectors: {relay: }
exporters: {tap: }
service:
  pipelines:
    logs/in: {receivers: [src], exporters: [relay]}
    logs/out: {receivers: [relay], exporters: [tap]}
""")
    logs = LogBatch((b"record",), "src")
    bench.source().emit(logs)
    assert bench.tap().seen == [logs]


def test_a_cycle_is_refused(bench: Bench) -> None:
    """Data that would come back to its own pipeline is a mistake of the configuration, told with the way it takes."""
    with pytest.raises(ConfigError, match="cycle detected") as raised:
        bench.service("""
receivers: {src: }
connectors: {relay: , relay/back: }
exporters: {tap: }
service:
  pipelines:
    metrics/a: {receivers: [src, relay/back], exporters: [relay]}
    metrics/b: {receivers: [relay], exporters: [relay/back, tap]}
""")
    assert raised.value.problems[0].line == 8
