"""The graph: components of one config, wired by its pipelines.

Invariant: one instance for each receiver and exporter id (and signal), processors for each pipeline of their own. Data
is refused at the door or not at all: before the first processor the door asks every reachable memory limiter and
queue; one no refuses the batch whole with nothing changed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.service import ServiceConfig
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import (
    Admission,
    Component,
    ConnectorFactory,
    Consumer,
    Exporter,
    ExporterFactory,
    ExtensionFactory,
    LogBatch,
    ProcessorFactory,
    ReceiverFactory,
    Settings,
)
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import RefusedError, StartError
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.telemetry import Telemetry

T = TypeVar("T", bound=Batch | LogBatch)
MakeSettings = Callable[[Kind, ComponentID, str], Settings]
"""(kind, id, pipeline or "") -> what the host gives that component."""


class FanOut(Generic[T]):
    """Hands each batch to several consumers. They share it: a batch is immutable. One that fails by a defect of its
    own harms no other; the loss is counted and logged with its traceback."""

    def __init__(self, consumers: Sequence[tuple[str, Consumer[T]]], telemetry: Telemetry, log: ComponentLog) -> None:
        self._consumers = tuple(consumers)
        self._telemetry = telemetry
        self._log = log
        self._failing: set[str] = set()

    def consume(self, data: T, ack: Ack) -> None:
        """Passes the batch on."""
        for name, consumer in self._consumers:
            try:
                consumer.consume(data, ack)
            except Exception as error:  # noqa: BLE001 - the isolation boundary between pipelines
                self._failed(name, data, error)
            else:
                self._failing.discard(name)

    def _failed(self, name: str, data: T, error: Exception) -> None:
        items = data.layout.size if isinstance(data, Batch) else len(data.records)
        self._telemetry.count("gpulens_pipeline_dropped_items", items, consumer=name, reason="internal_error")
        if name not in self._failing:
            self._failing.add(name)
            self._log.error("Consumer failed. Dropping data.", consumer=name, error="".join(
                traceback.format_exception(error)
            ))  # fmt: skip


class Door(Generic[T]):
    """Where data enters: asks for admission, then hands it to every pipeline of its source.

    Memory limiters are asked for every batch. Queues are asked only where the source keeps what is refused and offers
    it again: what a scraper reads is lost anyway, and a refusal would stop every other exporter and the processors'
    sense of time along with the full one, which counts its drop.
    """

    def __init__(self, pipelines: Consumer[T], limiters: Sequence[Admission], queues: Sequence[Admission]) -> None:
        self._pipelines = pipelines
        self._limiters = tuple(limiters)
        self._everyone = (*limiters, *queues)

    def consume(self, data: T, ack: Ack) -> None:
        """Takes the batch, and gives the source's share of the ack back when the call is through.

        Raises RefusedError, with nothing changed, when somebody can't take it.
        """
        for admission in self._everyone if ack.can_resend else self._limiters:
            try:
                reason = admission.refusal(data)
            except Exception as error:
                raise RefusedError(f"admission failed: {error!r}", "internal_error") from error
            if reason is not None:
                raise RefusedError(reason, "refused")
        self._pipelines.consume(data, ack)
        ack.settle()


class _OwnStreams:
    """Keeps the streams of one pipeline apart from those of the others that share an exporter: the same receiver
    feeds both, and a complete batch of one must not replace what the other said."""

    def __init__(self, consumer: Consumer[Batch], pipeline: PipelineID) -> None:
        self._consumer = consumer
        self._suffix = f"@{pipeline}"

    def consume(self, data: Batch, ack: Ack) -> None:
        """Passes the batch on under this pipeline's name of the stream."""
        self._consumer.consume(replace(data, stream=data.stream + self._suffix), ack)


@dataclass(frozen=True, slots=True)
class Node:
    """A component in the graph. `key` names it on the status board."""

    key: str
    component: Component
    settings: Settings


class Graph:
    """Every component of a config, in the order in which it is started; stopped in reverse."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    def component(self, key: str) -> Component:
        """A component by its key, such as "receivers/dcgm". Raises KeyError."""
        for node in self.nodes:
            if node.key == key:
                return node.component
        raise KeyError(key)


class _Builder:
    def __init__(self, config: ServiceConfig, registry: Registry, settings: MakeSettings) -> None:
        self._config = config
        self._registry = registry
        self._settings = settings
        self._nodes: list[Node] = []
        self._sinks: dict[tuple[ComponentID, Signal], tuple[str, Exporter[Any]]] = {}
        # Which signal a consumer takes is known by its pipeline, not by its type: hence Any inside the builder.
        self._entries: dict[PipelineID, tuple[str, Consumer[Any]]] = {}
        self._limiters: dict[PipelineID, list[Admission]] = {}
        self._queues: dict[PipelineID, list[Admission]] = {}

    def build(self) -> Graph:
        self._extensions()
        self._exporters()
        for pipeline in self._downstream_first():
            self._pipeline(pipeline)
        self._receivers()
        return Graph(self._nodes)

    # --- making components

    def _make(self, kind: Kind, component_id: ComponentID, pipeline: str = "") -> tuple[str, Settings, ComponentConfig]:
        entry = self._config.components[kind, component_id]
        key = f"{kind}/{component_id}" + (f"@{pipeline}" if pipeline else "")
        return key, self._settings(kind, component_id, pipeline), entry.config

    def _factory(self, kind: Kind, component_id: ComponentID) -> object:
        return self._registry.factory(kind, self._config.components[kind, component_id].type)

    def _add(self, key: str, component: Component, settings: Settings) -> None:
        self._nodes.append(Node(key, component, settings))

    def _extensions(self) -> None:
        for component_id in self._config.extensions:
            factory = self._factory(Kind.EXTENSIONS, component_id)
            assert isinstance(factory, ExtensionFactory)
            key, settings, config = self._make(Kind.EXTENSIONS, component_id)
            self._add(key, factory.create(settings, config), settings)

    def _exporters(self) -> None:
        for pipeline, body in self._config.pipelines.items():
            for component_id in body.exporters:
                if self._is_connector(component_id) or (component_id, pipeline.signal) in self._sinks:
                    continue
                factory = self._factory(Kind.EXPORTERS, component_id)
                assert isinstance(factory, ExporterFactory)
                key, settings, config = self._make(Kind.EXPORTERS, component_id)
                maker = factory.metrics if pipeline.signal is Signal.METRICS else factory.logs
                if maker is None:
                    raise _unsupported("exporter", component_id, pipeline.signal)
                exporter = maker(settings, config)
                self._sinks[component_id, pipeline.signal] = (key, exporter)
                self._add(key, exporter, settings)

    def _receivers(self) -> None:
        wanted: dict[tuple[ComponentID, Signal], list[PipelineID]] = {}
        for pipeline, body in self._config.pipelines.items():
            for component_id in dict.fromkeys(body.receivers):
                if not self._is_connector(component_id):
                    wanted.setdefault((component_id, pipeline.signal), []).append(pipeline)
        for (component_id, signal), pipelines in wanted.items():
            factory = self._factory(Kind.RECEIVERS, component_id)
            assert isinstance(factory, ReceiverFactory)
            key, settings, config = self._make(Kind.RECEIVERS, component_id)
            limiters, queues = _each_once(self._limiters, pipelines), _each_once(self._queues, pipelines)
            door = Door(self._fan_out(pipelines, settings), limiters, queues)
            maker = factory.metrics if signal is Signal.METRICS else factory.logs
            if maker is None:
                raise _unsupported("receiver", component_id, signal)
            self._add(key, maker(settings, config, door), settings)

    # --- wiring pipelines

    def _pipeline(self, pipeline: PipelineID) -> None:
        body = self._config.pipelines[pipeline]
        limiters: list[Admission] = []
        queues: list[Admission] = []
        sinks: list[tuple[str, Consumer[Any]]] = []
        settings = self._settings(Kind.EXPORTERS, body.exporters[0], str(pipeline))
        for component_id in dict.fromkeys(body.exporters):
            if self._is_connector(component_id):
                sinks.extend(self._connector(component_id, pipeline, limiters, queues))
                continue
            key, exporter = self._sinks[component_id, pipeline.signal]
            if isinstance(exporter, Admission):
                queues.append(exporter)
            sinks.append((key, self._apart(exporter, component_id, pipeline)))
        consumer: Consumer[Any] = FanOut(sinks, settings.telemetry, settings.log)
        for component_id in reversed(body.processors):
            factory = self._factory(Kind.PROCESSORS, component_id)
            assert isinstance(factory, ProcessorFactory)
            key, settings, config = self._make(Kind.PROCESSORS, component_id, str(pipeline))
            maker = factory.metrics if pipeline.signal is Signal.METRICS else factory.logs
            if maker is None:
                raise _unsupported("processor", component_id, pipeline.signal)
            processor = maker(settings, config, consumer)
            if isinstance(processor, Admission):
                limiters.insert(0, processor)
            self._add(key, processor, settings)
            consumer = processor
        self._entries[pipeline] = (f"pipelines/{pipeline}", consumer)
        self._limiters[pipeline], self._queues[pipeline] = limiters, queues

    def _connector(
        self, component_id: ComponentID, source: PipelineID, limiters: list[Admission], queues: list[Admission]
    ) -> list[tuple[str, Consumer[Any]]]:
        """A connector as a sink of `source`: one instance for each signal it feeds."""
        factory = self._factory(Kind.CONNECTORS, component_id)
        assert isinstance(factory, ConnectorFactory)
        targets: dict[Signal, list[PipelineID]] = {}
        for pipeline, body in self._config.pipelines.items():
            if component_id in body.receivers:
                targets.setdefault(pipeline.signal, []).append(pipeline)
        sinks: list[tuple[str, Consumer[Any]]] = []
        for signal, pipelines in targets.items():
            key, settings, config = self._make(Kind.CONNECTORS, component_id, f"{source}-{signal}")
            makers = {
                (Signal.METRICS, Signal.METRICS): factory.metrics_to_metrics,
                (Signal.METRICS, Signal.LOGS): factory.metrics_to_logs,
                (Signal.LOGS, Signal.LOGS): factory.logs_to_logs,
            }
            maker = makers.get((source.signal, signal))
            if maker is None:
                raise _unsupported("connector", component_id, signal)
            connector = maker(settings, config, self._fan_out(pipelines, settings))
            limiters.extend(_each_once(self._limiters, pipelines))
            queues.extend(_each_once(self._queues, pipelines))
            self._add(key, connector, settings)
            sinks.append((key, self._apart(connector, component_id, source)))
        return sinks

    def _apart(self, consumer: Consumer[Any], component_id: ComponentID, pipeline: PipelineID) -> Consumer[Any]:
        """The consumer itself, or behind its own stream names when two pipelines bring it the same streams."""
        users = [
            self._origins(other)
            for other, body in self._config.pipelines.items()
            if component_id in body.exporters and other.signal is pipeline.signal
        ]
        shared = sum(map(len, users)) > len(set().union(*users))
        if pipeline.signal is Signal.METRICS and shared:
            return _OwnStreams(consumer, pipeline)
        return consumer

    def _origins(self, pipeline: PipelineID) -> set[ComponentID]:
        """The receivers whose streams reach a pipeline, directly or through connectors."""
        found: set[ComponentID] = set()
        for component_id in self._config.pipelines[pipeline].receivers:
            if not self._is_connector(component_id):
                found.add(component_id)
                continue
            for other, body in self._config.pipelines.items():
                if component_id in body.exporters:
                    found |= self._origins(other)
        return found

    def _fan_out(self, pipelines: Iterable[PipelineID], settings: Settings) -> FanOut[Any]:
        entries = [self._entries[pipeline] for pipeline in pipelines]
        return FanOut(entries, settings.telemetry, settings.log)

    # --- order

    def _is_connector(self, component_id: ComponentID) -> bool:
        return (Kind.CONNECTORS, component_id) in self._config.components

    def _downstream_first(self) -> list[PipelineID]:
        """Pipelines so that each comes after those that its connectors feed; `resolve` has refused cycles."""
        feeds: Mapping[PipelineID, set[PipelineID]] = {
            source: {
                target
                for target, other in self._config.pipelines.items()
                if any(self._is_connector(each) and each in other.receivers for each in body.exporters)
            }
            for source, body in self._config.pipelines.items()
        }
        ordered: list[PipelineID] = []

        def visit(pipeline: PipelineID) -> None:
            if pipeline in ordered:
                return
            for target in feeds[pipeline]:
                visit(target)
            ordered.append(pipeline)

        for pipeline in feeds:
            visit(pipeline)
        return ordered


def _each_once(asked: Mapping[PipelineID, list[Admission]], pipelines: Iterable[PipelineID]) -> list[Admission]:
    """Who must agree before data enters these pipelines."""
    return list({id(each): each for pipeline in pipelines for each in asked[pipeline]}.values())


def _unsupported(kind: str, component_id: ComponentID, signal: Signal) -> StartError:
    return StartError(
        f'failed to build pipelines: failed to create "{component_id}" {kind} for data type "{signal}": '
        "telemetry type is not supported"
    )


def build(config: ServiceConfig, registry: Registry, settings: MakeSettings) -> Graph:
    """Makes every component that the config's pipelines use; starts none. Raises StartError."""
    return _Builder(config, registry, settings).build()
