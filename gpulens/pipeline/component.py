"""The component contract: what a receiver, processor, exporter, connector or extension owes, and is given.

Invariant: components know this module, the data model and their own config; the graph knows components only through
their factories. `consume(data, ack)` is a plain synchronous call on the loop's thread; it returns at once, never
refuses (refusal happens at the door, by `admit`), and must not change what it was given.

Lifecycle: create -> start -> run -> shutdown. `start` returns fast. `shutdown` may be called without `start`, and
twice; it stops accepting, flushes downstream, and ends background work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar, runtime_checkable

from gpulens.config.ids import ComponentID, Kind
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.data import Batch
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Report
from gpulens.pipeline.telemetry import Telemetry

T_contra = TypeVar("T_contra", contravariant=True)
C = TypeVar("C", bound=ComponentConfig)


class Stability(StrEnum):
    """How much a component may still change, in the Collector's words."""

    DEVELOPMENT = "Development"
    ALPHA = "Alpha"
    BETA = "Beta"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Log records on their way: OTLP ResourceLogs messages, encoded, and the stream they came from."""

    records: tuple[bytes, ...]
    stream: str


class Consumer(Protocol[T_contra]):
    """Takes data. `ack` is shared by whoever keeps the data beyond the call."""

    def consume(self, data: T_contra, ack: Ack) -> None:
        """Takes one batch; returns at once."""


Metrics = Consumer[Batch]
Logs = Consumer[LogBatch]


class Host(Protocol):
    """What a started component may ask of the service."""

    def extension(self, component_id: ComponentID) -> Extension | None:
        """A running extension, None where the config has none of this id."""

    def stop(self, reason: str) -> None:
        """Asks the service to end in order, as on SIGTERM (a recording was read to its end)."""


class Component(Protocol):
    """Lifecycle of everything in the graph."""

    async def start(self, host: Host) -> None:
        """Starts background work. Raises StartError when it can't."""

    async def shutdown(self) -> None:
        """Stops; safe without start and when called twice."""


Receiver = Component
Extension = Component


class Processor(Component, Protocol[T_contra]):
    """Takes data and passes it on to the consumer it was created with."""

    def consume(self, data: T_contra, ack: Ack) -> None:
        """Takes one batch; returns at once."""


class Exporter(Component, Protocol[T_contra]):
    """Takes data out of the pipeline."""

    def consume(self, data: T_contra, ack: Ack) -> None:
        """Takes one batch; returns at once."""


class Connector(Component, Protocol[T_contra]):
    """An exporter of one pipeline that is a receiver of another."""

    def consume(self, data: T_contra, ack: Ack) -> None:
        """Takes one batch; returns at once."""


@runtime_checkable
class Admission(Protocol):
    """A component that may refuse data before anything has touched it: memory_limiter, and every queue."""

    def refusal(self, data: Batch | LogBatch) -> str | None:
        """Why this batch can't be taken now; None when it can. Changes nothing."""


@runtime_checkable
class Stateful(Protocol):
    """A component whose state survives a reload and, with storage, a restart."""

    def save_state(self) -> tuple[int, bytes]:
        """(version of the format, state)."""

    def load_state(self, version: int, saved: bytes) -> bool:
        """Takes a saved state up; False (and nothing changed) when it can't be used."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the host gives a component when it is created.

    `node` is the name that an agent's own receivers put on every resource (k8s.node.name).
    """

    id: ComponentID
    kind: Kind
    node: str
    clock: Clock
    telemetry: Telemetry
    log: ComponentLog
    report: Report


@dataclass(frozen=True, slots=True)
class ReceiverFactory(Generic[C]):
    """How a receiver type is made, for each signal it supports."""

    name: str
    config: type[C]
    stability: Stability
    metrics: Callable[[Settings, C, Metrics], Receiver] | None = None
    logs: Callable[[Settings, C, Logs], Receiver] | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True)
class ProcessorFactory(Generic[C]):
    """How a processor type is made; one instance a pipeline."""

    name: str
    config: type[C]
    stability: Stability
    metrics: Callable[[Settings, C, Metrics], Processor[Batch]] | None = None
    logs: Callable[[Settings, C, Logs], Processor[LogBatch]] | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True)
class ExporterFactory(Generic[C]):
    """How an exporter type is made; one instance for all pipelines of a signal."""

    name: str
    config: type[C]
    stability: Stability
    metrics: Callable[[Settings, C], Exporter[Batch]] | None = None
    logs: Callable[[Settings, C], Exporter[LogBatch]] | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True)
class ConnectorFactory(Generic[C]):
    """How a connector type is made, for each (from, to) pair of signals."""

    name: str
    config: type[C]
    stability: Stability
    metrics_to_metrics: Callable[[Settings, C, Metrics], Connector[Batch]] | None = None
    metrics_to_logs: Callable[[Settings, C, Logs], Connector[Batch]] | None = None
    logs_to_logs: Callable[[Settings, C, Logs], Connector[LogBatch]] | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True)
class ExtensionFactory(Generic[C]):
    """How an extension type is made."""

    name: str
    config: type[C]
    stability: Stability
    create: Callable[[Settings, C], Extension]
    alias: str = ""


Factory = (
    ReceiverFactory[ComponentConfig]
    | ProcessorFactory[ComponentConfig]
    | ExporterFactory[ComponentConfig]
    | ConnectorFactory[ComponentConfig]
    | ExtensionFactory[ComponentConfig]
)
