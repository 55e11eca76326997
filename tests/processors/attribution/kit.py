"""Builds what receivers would send, and collects what attribution passes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Resource, Scope, Series, Value, build_layout
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.telemetry import Telemetry
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.join import AttributionProcessor

NS = 10**9
T0 = 1_700_000_000
NODE = Resource({"k8s.node.name": "node-1"})
GPU = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "GPU-00000000-0000-0000-0000-000000000002"


def at(seconds: float) -> float:
    """Seconds after the start of all tests, as event time."""
    return T0 + seconds


def pod(name: str, namespace: str = "ml", container: str = "main", node: str = "node-1") -> Resource:
    """An owner's resource as `pod_resources` emits it."""
    return Resource(
        {
            "k8s.node.name": node,
            "k8s.namespace.name": namespace,
            "k8s.pod.name": name,
            "k8s.container.name": container,
        }
    )


Row = tuple[Resource, str, dict[str, str], Value]


def message(
    source: str,
    at_s: float,
    rows: Sequence[Row],
    *,
    stream: str = "",
    complete: bool = True,
    up: bool | None = True,
    window_s: float = 0,
    interval_s: float = 10,
    node: Resource = NODE,
    asked_s: float | None = None,
) -> Batch:
    """A receiver's batch: signs of life, then rows of (resource, metric, attributes, value)."""
    life: list[Row] = []
    if up is not None:
        life = [
            (node, "gpu.source.up", {"gpu.source": source}, int(up)),
            (node, "gpu.source.interval", {"gpu.source": source}, float(interval_s)),
        ]
    if window_s:
        life.append((node, "gpu.source.window", {"gpu.source": source}, float(window_s)))
    scope = Scope(f"gpulens/{source}")
    entries = [(resource, scope, Series(metric(name), attrs)) for resource, name, attrs, _ in [*life, *rows]]
    layout, slots = build_layout(entries)
    values: list[Value] = [0] * layout.size
    for slot, (_, name, _, value) in zip(slots, [*life, *rows], strict=True):
        values[slot] = int(value) if metric(name).is_int else float(value)
    start_ns = 0 if asked_s is None else round(asked_s * NS)
    return Batch.of(layout, values, round(at_s * NS), stream or source, complete, start_ns)


def holders(
    at_s: float,
    held: Mapping[str, Sequence[Resource]],
    *,
    exclusive: bool = False,
    node: Resource = NODE,
    **more: object,
) -> Batch:
    """A Pod Resources snapshot: device -> owners; nobody gives a 0 on the node's resource."""
    rows: list[Row] = []
    for device, owners in held.items():
        attrs = {"hw.id": device, "gpu.allocation.source": "pod_resources"}
        rows += [(owner, "gpu.allocated", attrs, 1) for owner in owners] or [(node, "gpu.allocated", attrs, 0)]
        if exclusive:
            rows.append((node, "gpu.allocation.replicas", {"hw.id": device}, 1))
    return message("pod_resources", at_s, rows, node=node, **more)  # type: ignore[arg-type]


def activity(
    at_s: float,
    value: float = 0.5,
    device: str = GPU,
    source: str = "nvml",
    *,
    node: Resource = NODE,
    **more: object,
) -> Batch:
    """One SM activity reading of a device, without an owner."""
    rows: list[Row] = [(node, "gpu.sm.active", {"hw.id": device}, value)]
    return message(source, at_s, rows, node=node, **more)  # type: ignore[arg-type]


def described(at_s: float, *devices: Mapping[str, str], node: Resource = NODE, **more: object) -> Batch:
    """`gpu.device.info` of devices, as somebody who knows them sends it."""
    rows: list[Row] = [(node, "gpu.device.info", dict(each), 1) for each in devices]
    return message("info", at_s, rows, up=None, node=node, **more)  # type: ignore[arg-type]


@dataclass
class Sink:
    """Keeps what comes out, in order."""

    batches: list[Batch] = field(default_factory=list)

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Takes a batch."""
        self.batches.append(batch)

    def points(self, name: str) -> list[tuple[str, str, Value, float]]:
        """(pod or "", device, value, seconds after T0) of every point of a metric, in order."""
        found = []
        for batch in self.batches:
            for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
                if series.metric.name == name and value is not None:
                    at = round(batch.latest_ns() / NS - T0, 3)
                    found.append((resource.text("k8s.pod.name"), series.text("hw.id"), value, at))
        return found

    def reasons(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(pod, device) -> (method, reason) in the newest `gpu.attribution`."""
        newest = next(batch for batch in reversed(self.batches) if batch.stream == "attribution")
        return {
            (resource.text("k8s.pod.name"), series.text("hw.id")): (
                series.text("gpu.attribution.method"),
                series.text("gpu.attribution.reason"),
            )
            for resource, _, series in newest.layout.identities()
        }

    def owner_of_last(self, name: str = "gpu.sm.active") -> str:
        """The pod of the newest point of a metric."""
        return self.points(name)[-1][0]


def processor(sink: Sink, **config: object) -> AttributionProcessor:
    """The processor, feeding `sink`."""
    settings = Settings(
        id=ComponentID("attribution"),
        kind=Kind.PROCESSORS,
        node="node-1",
        clock=VirtualClock(T0 * NS),
        telemetry=Telemetry(),
        log=ComponentLog(),
        report=lambda *_: True,
    )
    return AttributionProcessor(settings, AttributionConfig(**config), sink)


def feed(processor: AttributionProcessor, *batches: Batch) -> None:
    """Sends batches in order."""
    for batch in batches:
        processor.consume(batch, Ack())
