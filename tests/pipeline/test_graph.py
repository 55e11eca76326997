"""The graph: who gets what, in which order, and who is asked first."""

from __future__ import annotations

import pytest

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import LogBatch
from gpulens.pipeline.errors import ConfigError, RefusedError, StartError
from tests.pipeline.parts import Bench, Source, Tap, batch

CROSS = """
receivers: {src: , src/b: }
exporters: {tap: , tap/b: }
service:
  pipelines:
    metrics/one: {receivers: [src, src/b], exporters: [tap]}
    metrics/two: {receivers: [src], exporters: [tap, tap/b]}
"""

QUEUES = """
receivers: {src: }
processors: {step: , gate: }
exporters: {queue: , queue/b: , tap: }
service:
  pipelines:
    metrics/one: {receivers: [src], processors: [step], exporters: [queue, tap]}
    metrics/two: {receivers: [src], processors: [step, gate], exporters: [queue/b]}
"""


@pytest.fixture
def bench() -> Bench:
    """An empty workbench."""
    return Bench()


def test_every_batch_reaches_every_pipeline_of_its_receiver(bench: Bench) -> None:
    """Receivers fan out to their pipelines, pipelines to their exporters; the batch is shared, not copied."""
    bench.service(CROSS)
    one, two = batch(1), batch(2, "src/b")
    bench.source("src").emit(one)
    bench.source("src/b").emit(two)
    assert bench.tap("tap/b").seen == [one]
    assert [data.values for data in bench.tap("tap").seen if not isinstance(data, LogBatch)] == [
        one.values, one.values, two.values,
    ]  # fmt: skip
    assert bench.tap("tap/b").seen[0] is one


def test_there_is_one_instance_for_each_receiver_and_exporter_id(bench: Bench) -> None:
    """However many pipelines use them."""
    bench.service(CROSS)
    assert {name: len(parts) for name, parts in bench.parts.items()} == {"src": 1, "src/b": 1, "tap": 1, "tap/b": 1}


def test_each_pipeline_has_processors_of_its_own(bench: Bench) -> None:
    """The same id in two pipelines is two instances, and each sees only its own pipeline's data."""
    bench.service("""
receivers: {src: , src/b: }
processors: {step: }
exporters: {tap: }
service:
  pipelines:
    metrics/one: {receivers: [src], processors: [step], exporters: [tap]}
    metrics/two: {receivers: [src/b], processors: [step], exporters: [tap]}
""")
    bench.source("src").emit()
    assert sorted(len(step.seen) for step in bench.steps()) == [0, 1]


def test_processors_run_in_the_order_written(bench: Bench) -> None:
    """From the receiver's side to the exporter's."""
    bench.service("""
receivers: {src: }
processors: {step/c: , step/a: , step/b: }
exporters: {tap: }
service: {pipelines: {metrics: {receivers: [src], processors: [step/b, step/c, step/a], exporters: [tap]}}}
""")
    bench.source().emit()
    assert bench.did("consume") == ["step/b", "step/c", "step/a", "tap"]


async def test_start_goes_against_the_flow_and_stop_with_it(bench: Bench) -> None:
    """Extensions, exporters, processors (last first), receivers; and back."""
    service = bench.service("""
receivers: {src: , src/b: }
processors: {step: , step/b: }
exporters: {tap: , tap/b: }
extensions: {ext: }
service:
  extensions: [ext]
  pipelines: {metrics: {receivers: [src, src/b], processors: [step, step/b], exporters: [tap, tap/b]}}
""")
    await service.start()
    await service.shutdown()
    order = ["ext", "tap", "tap/b", "step/b", "step", "src", "src/b"]
    assert bench.did("start") == order
    assert bench.did("shutdown") == order[::-1]


def test_one_receiver_id_for_two_signals_is_two_instances(bench: Bench) -> None:
    """Metrics and logs of one id do not mix."""
    bench.service("""
receivers: {src: }
exporters: {tap: }
service:
  pipelines:
    metrics: {receivers: [src], exporters: [tap]}
    logs: {receivers: [src], exporters: [tap]}
""")
    sources = [part for part in bench.parts["src"] if isinstance(part, Source)]
    taps = [part for part in bench.parts["tap"] if isinstance(part, Tap)]
    logs = LogBatch((b"record",), "src")
    sources[1].emit(logs)
    assert [tap.seen for tap in taps] == [[], [logs]]
    assert len(sources) == 2


def test_a_signal_that_a_component_does_not_support_is_refused_before_building(bench: Bench) -> None:
    """The text is the Collector's."""
    text = """
receivers: {metrics_only: }
exporters: {tap: }
service: {pipelines: {logs: {receivers: [metrics_only], exporters: [tap]}}}
"""
    with pytest.raises(ConfigError, match='failed to create "metrics_only" receiver for data type "logs"'):
        bench.service(text)


# --- admission at the door


@pytest.mark.parametrize("who", ["queue", "queue/b", "gate"])
def test_one_no_refuses_the_batch_with_nothing_changed(bench: Bench, who: str) -> None:
    """Whichever queue or limiter says no, in whichever pipeline, no processor and no exporter has seen the batch."""
    bench.service(QUEUES)
    refusing = bench.gate() if who == "gate" else bench.queue(who)
    refusing.full = "queue is full"
    with pytest.raises(RefusedError, match="queue is full") as raised:
        bench.source().emit()
    assert raised.value.reason == "refused"
    assert bench.did("consume") == []


def test_the_ack_of_a_refused_batch_is_the_sources_own(bench: Bench) -> None:
    """Nobody settled it and nobody took a share: the source may send the same batch again with it."""
    bench.service(QUEUES)
    bench.queue().full = "full"
    heard: list[Exception | None] = []
    ack = Ack(heard.append)
    with pytest.raises(RefusedError):
        bench.source().consumer.consume(batch(), ack)
    assert (ack.settled, heard) == (False, [])
    bench.queue().full = ""
    bench.source().consumer.consume(batch(), ack)
    assert heard == [None]


def test_everybody_is_asked_once_and_limiters_before_queues(bench: Bench) -> None:
    """A queue that two pipelines share is asked one time; what is cheap to ask comes first in its pipeline."""
    bench.service("""
receivers: {src: }
processors: {gate: }
exporters: {queue: }
service:
  pipelines:
    metrics/one: {receivers: [src], processors: [gate], exporters: [queue]}
    metrics/two: {receivers: [src], exporters: [queue]}
""")
    bench.source().emit()
    assert bench.did("ask") == ["gate", "queue"]


def test_only_what_the_batch_would_reach_is_asked(bench: Bench) -> None:
    """A full queue behind another receiver refuses nothing here."""
    bench.service("""
receivers: {src: , src/b: }
exporters: {queue: , queue/b: }
service:
  pipelines:
    metrics/one: {receivers: [src], exporters: [queue]}
    metrics/two: {receivers: [src/b], exporters: [queue/b]}
""")
    bench.queue("queue/b").full = "full"
    bench.source("src").emit()
    assert len(bench.queue("queue").seen) == 1


def test_a_source_that_cannot_resend_is_refused_by_a_memory_limiter_only(bench: Bench) -> None:
    """A scraper's data is lost when it is refused: a full queue costs its own exporter the batch and nobody else."""
    bench.service(QUEUES)
    bench.queue("queue").full = "queue is full"
    bench.source().consumer.consume(batch(), Ack(can_resend=False))
    assert len(bench.queue("queue/b").seen) == 1
    bench.gate().full = "memory"
    with pytest.raises(RefusedError, match="memory"):
        bench.source().consumer.consume(batch(), Ack(can_resend=False))


def test_a_defect_while_asking_is_a_refusal(bench: Bench) -> None:
    """The source gets the error that it knows how to handle, and nothing was changed."""
    bench.service(QUEUES)
    bench.gate().full = "defect"
    with pytest.raises(RefusedError, match="admission failed: KeyError") as raised:
        bench.source().emit()
    assert raised.value.reason == "internal_error"
    assert bench.did("consume") == []


# --- acknowledgement


def test_the_ack_settles_with_the_call_when_nobody_keeps_the_data(bench: Bench) -> None:
    """With exporters that are done at once the source knows at once."""
    bench.service(CROSS)
    assert bench.source("src").emit().settled


def test_the_ack_waits_for_every_share_of_a_fan_out(bench: Bench) -> None:
    """Three exporters that keep the data in two pipelines: settled with the last one."""
    bench.service(CROSS)
    for name in ("tap", "tap/b"):
        bench.tap(name).keeps = True
    ack = bench.source("src").emit()
    shares = [*bench.tap("tap").held, *bench.tap("tap/b").held]
    assert len(shares) == 3
    for share in shares:
        assert not ack.settled
        share.settle()
    assert ack.settled


def test_the_source_hears_the_first_error(bench: Bench) -> None:
    """Later errors and successes of other shares do not hide it."""
    bench.service(CROSS)
    bench.tap("tap").keeps = True
    heard: list[Exception | None] = []
    bench.source("src").consumer.consume(batch(), Ack(heard.append))
    first, second = bench.tap("tap").held
    failure = RefusedError("disk is full")
    second.settle(failure)
    first.settle()
    assert heard == [failure]


# --- isolation


def test_a_processor_that_fails_harms_no_other_pipeline(bench: Bench) -> None:
    """The others get the batch, the source sees no error, the loss is counted by consumer and the ack settles."""
    service = bench.service(QUEUES)
    first = next(step for step in bench.steps() if "one" in _pipeline_of(service.graph.nodes, step))
    first.defect = KeyError("defect")
    ack = bench.source().emit()
    assert (bench.queue("queue").seen, len(bench.queue("queue/b").seen)) == ([], 1)
    assert ack.settled
    dropped = service.telemetry.value("gpulens_pipeline_dropped_items", reason="internal_error")
    assert dropped == service.telemetry.value("gpulens_pipeline_dropped_items", consumer="pipelines/metrics/one") == 1


def _pipeline_of(nodes: tuple[object, ...], part: object) -> str:
    from gpulens.pipeline.graph import Node

    return next(node.key for node in nodes if isinstance(node, Node) and node.component is part)


def test_an_exporter_that_fails_harms_no_other_of_its_pipeline(bench: Bench) -> None:
    """The exporter after it in the list still gets the batch, and it may recover with the next one."""
    service = bench.service(QUEUES)
    bench.queue("queue").defect = ValueError("defect")
    bench.source().emit()
    assert len(bench.tap().seen) == 1
    bench.queue("queue").defect = None
    bench.source().emit()
    assert len(bench.queue("queue").seen) == 1
    assert service.telemetry.value("gpulens_pipeline_dropped_items", consumer="exporters/queue") == 1


# --- streams in shared exporters


def test_two_pipelines_of_one_receiver_stay_apart_in_a_shared_exporter(bench: Bench) -> None:
    """A complete batch of one pipeline must not replace what the other said: each has its own stream name there."""
    bench.service(CROSS)
    bench.source("src").emit(batch())
    assert sorted(bench.tap("tap").streams) == ["src@metrics/one", "src@metrics/two"]
    assert bench.tap("tap/b").streams == ["src"]


def test_pipelines_of_different_receivers_keep_the_stream_as_it_is(bench: Bench) -> None:
    """Where nothing can be confused no name is changed."""
    bench.service("""
receivers: {src: , src/b: }
exporters: {tap: }
service:
  pipelines:
    metrics/one: {receivers: [src], exporters: [tap]}
    metrics/two: {receivers: [src/b], exporters: [tap]}
""")
    bench.source("src").emit(batch(1, "src"))
    bench.source("src/b").emit(batch(1, "src/b"))
    assert bench.tap("tap").streams == ["src", "src/b"]


def test_logs_pipelines_share_an_exporter_without_more_ado(bench: Bench) -> None:
    """Log batches replace nothing, so they pass as they are."""
    bench.service("""
receivers: {src: }
exporters: {tap: }
service:
  pipelines:
    logs/one: {receivers: [src], exporters: [tap]}
    logs/two: {receivers: [src], exporters: [tap]}
""")
    logs = LogBatch((b"record",), "src")
    bench.source().emit(logs)
    assert bench.tap().seen == [logs, logs]


# --- what a component is given


def test_components_are_told_who_they_are(bench: Bench) -> None:
    """Kind, id, node and clock arrive in the settings, and the status board knows each instance by its own key."""
    service = bench.service(QUEUES)
    settings = bench.source().settings
    assert (settings.kind, settings.id, settings.node) == (Kind.RECEIVERS, ComponentID("src"), "node-1")
    assert settings.clock is bench.clock
    assert [node.key for node in service.graph.nodes] == [
        "exporters/queue",
        "exporters/tap",
        "exporters/queue/b",
        "processors/step@metrics/one",
        "processors/gate@metrics/two",
        "processors/step@metrics/two",
        "receivers/src",
    ]
    assert service.graph.component("receivers/src") is bench.source()
    with pytest.raises(KeyError):
        service.graph.component("receivers/other")


def test_components_that_no_pipeline_uses_are_not_made(bench: Bench) -> None:
    """They are checked and left alone, as in the Collector."""
    bench.service("""
receivers: {src: , src/unused: }
processors: {step: }
exporters: {tap: , tap/unused: }
extensions: {ext: }
service: {pipelines: {metrics: {receivers: [src], exporters: [tap]}}}
""")
    assert sorted(bench.parts) == ["src", "tap"]


def test_a_factory_that_fails_ends_the_building(bench: Bench) -> None:
    """An error of a constructor comes through; nothing was started."""
    from typing import cast

    from gpulens.pipeline.component import ExporterFactory, Factory, Settings, Stability
    from tests.pipeline.parts import PartConfig

    def broken(settings: Settings, config: PartConfig) -> Tap:
        raise StartError("needs the extra `google`")

    factory = cast(Factory, ExporterFactory("broken", PartConfig, Stability.DEVELOPMENT, broken))
    bench.extra = ((Kind.EXPORTERS, factory),)
    with pytest.raises(StartError, match="needs the extra"):
        bench.service("""
receivers: {src: }
exporters: {broken: }
service: {pipelines: {metrics: {receivers: [src], exporters: [broken]}}}
""")
    assert bench.did("start") == []
