"""A configuration that is valid: what the engine builds from.

Invariant: every reference in a ServiceConfig leads to a component in it, of a type and signal that exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.nodes import Position
from gpulens.config.types import Block, ComponentConfig


class ComponentLookup(Protocol):
    """What the configuration asks of the registry."""

    def types(self, kind: Kind) -> Sequence[str]:
        """Canonical type names."""

    def canonical(self, kind: Kind, type_name: str, /) -> tuple[str, bool]:
        """The canonical type and whether the given one is a deprecated alias. Raises KeyError if unknown."""

    def config_model(self, kind: Kind, type_name: str, /) -> type[ComponentConfig]:
        """The configuration's model; the type is canonical. Raises StartError when its module can't be imported."""

    def signals(self, kind: Kind, type_name: str, /) -> frozenset[Signal]:
        """Signals that a receiver, processor or exporter handles."""

    def connector_pairs(self, type_name: str, /) -> frozenset[tuple[Signal, Signal]]:
        """(from, to): signals that a connector takes as an exporter and gives as a receiver."""


@dataclass(frozen=True, slots=True)
class ComponentEntry:
    """One configured component: the id as typed, the canonical type, its configuration and where it
    stands."""

    id: ComponentID
    type: str
    config: ComponentConfig
    at: Position


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Ids in the order written; receivers and exporters may be connectors."""

    receivers: tuple[ComponentID, ...]
    processors: tuple[ComponentID, ...]
    exporters: tuple[ComponentID, ...]


class LogsTelemetry(Block):
    """`service::telemetry::logs`. `level` and `encoding` act; the Collector's other keys are read and have no
    effect."""

    level: Literal["debug", "info", "warn", "error", "DEBUG", "INFO", "WARN", "ERROR"] = "info"
    encoding: Literal["console", "json"] = "console"
    development: bool = False
    disable_caller: bool = False
    disable_stacktrace: bool = False
    sampling: dict[str, object] | None = None
    output_paths: tuple[str, ...] = ()
    error_output_paths: tuple[str, ...] = ()
    initial_fields: dict[str, object] | None = None
    processors: tuple[dict[str, object], ...] = ()


class MetricsTelemetry(Block):
    """`service::telemetry::metrics`. Nothing serves the agent's own metrics in this version, so the keys are read and
    have no effect; those that ask for it give a warning."""

    level: Literal["none", "basic", "normal", "detailed"] = "normal"
    address: str | None = None
    readers: tuple[dict[str, object], ...] = ()
    views: tuple[dict[str, object], ...] = ()

    def doubts(self) -> tuple[str, ...]:
        given = [name for name in ("address", "readers", "views") if getattr(self, name)]
        return tuple(f"'{name}' has no effect: this version does not serve the agent's own metrics" for name in given)


class TelemetryConfig(Block):
    """`service::telemetry`: how the agent reports on itself. A null resource attribute removes a default
    one."""

    logs: LogsTelemetry = LogsTelemetry()
    metrics: MetricsTelemetry = MetricsTelemetry()
    traces: dict[str, object] | None = None
    resource: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Everything the engine needs. `node` is empty unless `service::node` names this node."""

    components: Mapping[tuple[Kind, ComponentID], ComponentEntry]
    extensions: tuple[ComponentID, ...]
    pipelines: Mapping[PipelineID, PipelineConfig]
    telemetry: TelemetryConfig
    node: str = ""
    warnings: tuple[str, ...] = ()
