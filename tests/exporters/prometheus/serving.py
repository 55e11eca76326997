"""A prometheus exporter on a free port, with everything it was given at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.prometheus.config import PrometheusConfig
from gpulens.exporters.prometheus.server import PrometheusExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension, Settings
from gpulens.pipeline.data import AttributeValue, Batch, Resource, Scope, Series, Value, build_layout
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.telemetry import Telemetry

OWN = Scope("gpulens")
NODE = Resource({"k8s.node.name": "node-a"})
START_NS = 1_700_000_000 * 10**9


class Host:
    """A service without extensions."""

    def extension(self, component_id: ComponentID) -> Extension | None:
        """None is there."""
        return None

    def stop(self, reason: str) -> None:
        """Nobody asks."""


@dataclass
class Served:
    """An exporter and its surroundings."""

    exporter: PrometheusExporter
    clock: VirtualClock
    telemetry: Telemetry
    statuses: list[str] = field(default_factory=list)

    def take(self, *batches: Batch) -> None:
        """Hands batches to the exporter."""
        for batch in batches:
            self.exporter.consume(batch, Ack())

    def page(self, open_metrics: bool = False) -> str:
        """The page as text."""
        return self.exporter.page(open_metrics).decode()

    def samples(self) -> dict[str, str]:
        """The page's samples: what stands before the last blank, and the value."""
        lines = [line for line in self.page().splitlines() if not line.startswith("#")]
        return {head: value for head, _, value in (line.rpartition(" ") for line in lines)}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.exporter.port}"


def make(**config: object) -> Served:
    """An exporter that was not started."""
    clock, telemetry = VirtualClock(), Telemetry()
    component = ComponentID("prometheus")
    statuses: list[str] = []

    def report(status: str, reason: str) -> bool:
        statuses.append(status)
        return True

    settings = Settings(
        component, Kind.EXPORTERS, "node-a", clock, telemetry, ComponentLog("exporter", "prometheus"), report
    )
    parsed = PrometheusConfig.model_validate({"endpoint": "127.0.0.1:0", **config})
    return Served(PrometheusExporter(settings, parsed), clock, telemetry, statuses)


@asynccontextmanager
async def serving(**config: object) -> AsyncIterator[tuple[Served, ClientSession]]:
    """A started exporter and a client."""
    served = make(**config)
    await served.exporter.start(Host())
    try:
        async with ClientSession() as client:
            yield served, client
    finally:
        await served.exporter.shutdown()


def pod(name: str, namespace: str = "ml", container: str = "main") -> Resource:
    """An owner's resource."""
    return Resource(
        {
            "k8s.namespace.name": namespace,
            "k8s.pod.name": name,
            "k8s.pod.uid": f"uid-{name}",
            "k8s.container.name": container,
            "k8s.node.name": "node-a",
            "service.name": "gpulens",
            "service.instance.id": "node-a",
        }
    )


Reading = tuple[Resource, str, Mapping[str, AttributeValue], Value | None]


def own_batch(
    *readings: Reading,
    stream: str = "dcgm",
    complete: bool = True,
    scope: Scope = OWN,
    time_ns: int = START_NS,
) -> Batch:
    """A batch of catalogued metrics: (resource, metric's name, attributes, value)."""
    identities = [(resource, scope, Series(metric(name), attrs)) for resource, name, attrs, _ in readings]
    layout, slots = build_layout(identities)
    values: list[Value | None] = [None] * layout.size
    for slot, (_, _, _, value) in zip(slots, readings, strict=True):
        values[slot] = value
    return Batch.of(layout, values, time_ns, stream, complete)
