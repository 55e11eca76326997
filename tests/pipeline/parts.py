"""Small components to build graphs of, and a workbench that remembers what happened to them.

Invariant: a part does only what its test told it to; everything it does is in the bench's diary, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from gpulens.config import load, resolve
from gpulens.config.ids import Kind
from gpulens.config.service import ServiceConfig
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import (
    Consumer,
    ExporterFactory,
    ExtensionFactory,
    Factory,
    Host,
    LogBatch,
    ProcessorFactory,
    ReceiverFactory,
    Settings,
    Stability,
)
from gpulens.pipeline.data import Batch, Block, Layout, Metric, Resource, Scope, Series
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.service import Service

Data = Batch | LogBatch
NODE = Resource({"k8s.node.name": "node-1"})


def batch(value: int = 1, stream: str = "src", complete: bool = True, time_ns: int = 10**18) -> Batch:
    """A batch of one reading."""
    layout = Layout([Block(NODE, Scope("gpulens/test"), [Series(Metric("reading", is_int=True))])])
    return Batch.of(layout, [value], time_ns, stream, complete)


class PartConfig(ComponentConfig):
    """What goes wrong with a part."""

    start_error: str = ""
    start_defect: str = ""
    shutdown_defect: str = ""
    hang_on_shutdown: bool = False


class Part:
    """Lifecycle of every part."""

    def __init__(self, bench: Bench, settings: Settings, config: PartConfig) -> None:
        self.bench = bench
        self.settings = settings
        self.config = config
        self.name = str(settings.id)
        self.host: Host | None = None
        bench.parts.setdefault(self.name, []).append(self)

    def note(self, what: str) -> None:
        """Writes into the diary."""
        self.bench.diary.append(f"{what} {self.name}")

    async def start(self, host: Host) -> None:
        self.note("start")
        self.host = host
        if self.config.start_error:
            raise StartError(self.config.start_error)
        if self.config.start_defect:
            raise KeyError(self.config.start_defect)

    async def shutdown(self) -> None:
        self.note("shutdown")
        if self.config.hang_on_shutdown:
            await asyncio.Event().wait()
        if self.config.shutdown_defect:
            raise KeyError(self.config.shutdown_defect)


class Source(Part):
    """A receiver that emits what a test hands it."""

    def __init__(self, bench: Bench, settings: Settings, config: PartConfig, consumer: Consumer[Data]) -> None:
        super().__init__(bench, settings, config)
        self.consumer = consumer

    def emit(self, data: Data | None = None) -> Ack:
        """Sends a batch on its way; gives the ack. Raises RefusedError."""
        ack = Ack()
        self.consumer.consume(batch() if data is None else data, ack)
        return ack


class Step(Part):
    """A processor that passes on what it gets, or fails by a defect."""

    def __init__(self, bench: Bench, settings: Settings, config: PartConfig, consumer: Consumer[Data]) -> None:
        super().__init__(bench, settings, config)
        self.consumer = consumer
        self.seen: list[Data] = []
        self.defect: Exception | None = None

    def consume(self, data: Data, ack: Ack) -> None:
        self.seen.append(data)
        self.note("consume")
        if self.defect is not None:
            raise self.defect
        self.consumer.consume(data, ack)


class Gate(Step):
    """A step that is asked for admission, as a memory limiter is."""

    full = ""

    def refusal(self, data: Data) -> str | None:
        self.note("ask")
        if self.full == "defect":
            raise KeyError("defect")
        return self.full or None


class Tap(Part):
    """An exporter without a queue: nobody asks it for admission."""

    def __init__(self, bench: Bench, settings: Settings, config: PartConfig) -> None:
        super().__init__(bench, settings, config)
        self.seen: list[Data] = []
        self.held: list[Ack] = []
        self.keeps = False
        self.defect: Exception | None = None

    def consume(self, data: Data, ack: Ack) -> None:
        self.note("consume")
        if self.defect is not None:
            raise self.defect
        self.seen.append(data)
        if self.keeps:
            self.held.append(ack.share())

    @property
    def streams(self) -> list[str]:
        """The stream of each batch seen."""
        return [data.stream for data in self.seen]


class Queue(Tap):
    """An exporter with a queue that a test can declare full."""

    full = ""

    def refusal(self, data: Data) -> str | None:
        self.note("ask")
        return self.full or None


@dataclass
class Bench:
    """Builds services of parts, and finds the parts again by their ids."""

    diary: list[str] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=VirtualClock)
    extra: tuple[tuple[Kind, Factory], ...] = ()

    def factories(self) -> Iterable[tuple[Kind, Factory]]:
        """The parts as component types."""
        stability = Stability.DEVELOPMENT

        def source(s: Settings, c: PartConfig, n: Consumer[Any]) -> Source:
            return Source(self, s, c, n)

        def step(s: Settings, c: PartConfig, n: Consumer[Any]) -> Step:
            return Step(self, s, c, n)

        def gate(s: Settings, c: PartConfig, n: Consumer[Any]) -> Gate:
            return Gate(self, s, c, n)

        def tap(s: Settings, c: PartConfig) -> Tap:
            return Tap(self, s, c)

        def queue(s: Settings, c: PartConfig) -> Queue:
            return Queue(self, s, c)

        def extension(s: Settings, c: PartConfig) -> Part:
            return Part(self, s, c)

        made: list[tuple[Kind, object]] = [
            (Kind.RECEIVERS, ReceiverFactory("src", PartConfig, stability, source, source)),
            (Kind.RECEIVERS, ReceiverFactory("metrics_only", PartConfig, stability, source)),
            (Kind.PROCESSORS, ProcessorFactory("step", PartConfig, stability, step, step)),
            (Kind.PROCESSORS, ProcessorFactory("gate", PartConfig, stability, gate, gate)),
            (Kind.EXPORTERS, ExporterFactory("tap", PartConfig, stability, tap, tap)),
            (Kind.EXPORTERS, ExporterFactory("queue", PartConfig, stability, queue, queue)),
            (Kind.EXTENSIONS, ExtensionFactory("ext", PartConfig, stability, extension)),
        ]
        yield from ((kind, cast(Factory, factory)) for kind, factory in made)
        yield from self.extra

    def registry(self) -> Registry:
        """A registry that knows the parts beside the built-in components."""
        return Registry(self.factories())

    def config(self, text: str, environ: Mapping[str, str] | None = None) -> ServiceConfig:
        """The configuration of inline YAML. Raises ConfigError."""
        return resolve(load([f"yaml:{text}"], [], environ or {}), self.registry())

    def service(self, text: str) -> Service:
        """A service of inline YAML, not started."""
        return Service(self.config(text), "node-1", self.registry(), self.clock)

    def part(self, name: str) -> Part:
        """The only part of this id."""
        (found,) = self.parts[name]
        return found

    def source(self, name: str = "src") -> Source:
        """The only receiver of this id."""
        found = self.part(name)
        assert isinstance(found, Source)
        return found

    def tap(self, name: str = "tap") -> Tap:
        """The only exporter of this id."""
        found = self.part(name)
        assert isinstance(found, Tap)
        return found

    def queue(self, name: str = "queue") -> Queue:
        """The only exporter with a queue of this id."""
        found = self.part(name)
        assert isinstance(found, Queue)
        return found

    def gate(self, name: str = "gate") -> Gate:
        """The only gate of this id."""
        found = self.part(name)
        assert isinstance(found, Gate)
        return found

    def steps(self, name: str = "step") -> list[Step]:
        """The processors of this id, in the order in which they were made."""
        return [part for part in self.parts[name] if isinstance(part, Step)]

    def did(self, what: str) -> list[str]:
        """The names that the diary has for one kind of event, in order."""
        return [entry.split(" ", 1)[1] for entry in self.diary if entry.split(" ", 1)[0] == what]
