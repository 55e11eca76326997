"""Makes one registered component with its case's config, between ends that remember what passed.

Invariant: the component is made as the graph makes it: by its factory, from a config that was loaded and resolved.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from gpulens.config import load, resolve
from gpulens.config.ids import ComponentID, Kind, Signal
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import SystemClock
from gpulens.pipeline.component import (
    Component,
    Consumer,
    ExporterFactory,
    Extension,
    ExtensionFactory,
    LogBatch,
    ProcessorFactory,
    ReceiverFactory,
    Settings,
)
from gpulens.pipeline.data import Batch
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.registry import BUILT_IN, Registry
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry
from tests.conformance.cases import CASES, Block, Place
from tests.pipeline.parts import Bench

Data = Batch | LogBatch
Key = tuple[Kind, str]

ALL: list[Key] = [(kind, name) for kind, names in BUILT_IN.items() for name in names]


def of_kind(*kinds: Kind) -> list[Key]:
    """The registered components of some kinds."""
    return [key for key in ALL if key[0] in kinds]


def key_id(key: Key) -> str:
    """A component's name in the test's id."""
    return f"{key[0]}-{key[1]}"


NODE = "node-1"


class Sink:
    """The end of the pipeline: keeps what comes, and wakes who waits for it."""

    def __init__(self) -> None:
        self.seen: list[Data] = []
        self._came = asyncio.Event()

    def consume(self, data: Data, ack: Ack) -> None:
        self.seen.append(data)
        self._came.set()

    async def wait(self, count: int, timeout_s: float = 30.0) -> list[Batch]:
        """The first `count` metrics batches. Raises TimeoutError when they do not come."""
        async with asyncio.timeout(timeout_s):
            while len(self.metrics()) < count:
                self._came.clear()
                await self._came.wait()
        return self.metrics()

    def metrics(self) -> list[Batch]:
        """The metrics batches that came."""
        return [data for data in self.seen if isinstance(data, Batch)]


@dataclass
class Rig:
    """One component, made and not started. It is its own host."""

    key: Key
    place: Place
    changes: Block = field(default_factory=dict)
    signal: Signal = Signal.METRICS
    telemetry: Telemetry = field(default_factory=Telemetry)
    statuses: list[tuple[Status, str]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    sink: Sink = field(default_factory=Sink)

    def __post_init__(self) -> None:
        kind, name = self.key
        component_id = ComponentID(name, "case")
        self.settings = Settings(
            component_id, kind, NODE, SystemClock(), self.telemetry, ComponentLog(str(kind), name), self.report
        )
        self.config = config_of(self.key, {**CASES[self.key].block(self.place), **self.changes})
        self.component = self._make(Registry().factory(kind, name))

    def _make(self, factory: object) -> Component:
        metrics = self.signal is Signal.METRICS
        if isinstance(factory, ReceiverFactory):
            receiver = factory.metrics if metrics else factory.logs
            assert receiver is not None
            return receiver(self.settings, self.config, self.sink)
        if isinstance(factory, ProcessorFactory):
            processor = factory.metrics if metrics else factory.logs
            assert processor is not None
            made: Component = processor(self.settings, self.config, self.sink)
            return made
        if isinstance(factory, ExporterFactory):
            exporter = factory.metrics if metrics else factory.logs
            assert exporter is not None
            sink: Component = exporter(self.settings, self.config)
            return sink
        assert isinstance(factory, ExtensionFactory), "connectors get a case of their own here when there is one"
        extension: Component = factory.create(self.settings, self.config)
        return extension

    def report(self, status: Status, reason: str) -> bool:
        changed = not self.statuses or self.statuses[-1] != (status, reason)
        self.statuses.append((status, reason))
        return changed

    def extension(self, component_id: ComponentID) -> Extension | None:
        return CASES[self.key].extensions.get(str(component_id))

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def consume(self, data: Data) -> Ack:
        """Hands data to the component as a door does; gives the ack."""
        ack = Ack()
        cast(Consumer[Data], self.component).consume(data, ack)
        ack.settle()
        return ack


def document(key: Key, block: Block) -> str:
    """A whole configuration as YAML with this component in use."""
    kind, name = key
    own = {f"{name}/case": dict(block)}
    sections: dict[str, dict[str, object]] = {
        "receivers": {"src": {}},
        "exporters": {"tap": {}},
        "processors": {},
        "extensions": {},
        "connectors": {},
    }
    sections[str(kind)] = {**own}
    if isinstance(block.get("observer"), str):
        sections["extensions"][str(block["observer"])] = {}
    signal = "metrics" if Signal.METRICS in Registry().signals(kind, name) or kind is Kind.EXTENSIONS else "logs"
    service = {
        "extensions": list(sections["extensions"]),
        "pipelines": {signal: {part: list(sections[part]) for part in ("receivers", "processors", "exporters")}},
    }
    # JSON is YAML, and one key a line makes positions tell something.
    return json.dumps({**sections, "service": service}, indent=1)


def config_of(key: Key, block: Block) -> ComponentConfig:
    """The component's config from a document. Raises ConfigError."""
    bench = Bench()
    found = resolve(load([f"yaml:{document(key, block)}"], [], {}), bench.registry())
    return found.components[key[0], ComponentID(key[1], "case")].config


def signals(keys: list[Key]) -> Iterator[tuple[Key, Signal]]:
    """Each component with each signal that it supports."""
    registry = Registry()
    for kind, name in keys:
        for signal in sorted(registry.signals(kind, name) or {Signal.METRICS}):
            yield (kind, name), signal
