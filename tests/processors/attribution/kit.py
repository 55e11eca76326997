"""Builds what receivers would send, and collects what attribution passes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

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
UID_A, UID_B = "aaaaaaaa-0000-0000-0000-000000000000", "bbbbbbbb-0000-0000-0000-000000000000"
BOX_A, BOX_B, BOX_C = "a" * 64, "b" * 64, "c" * 64
HASH = "0123456789abcdef0123456789abcdef"
MEMORY, BUSY = "gpu.process.memory.usage", "gpu.process.utilization"


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


@dataclass(frozen=True)
class Known:
    """A pod as `k8s_pods` describes it; `containers`: runtime's id -> name."""

    name: str
    uid: str
    containers: Mapping[str, str] = field(default_factory=dict)
    phase: str = "Running"
    namespace: str = "ml"
    config_hash: str = ""


def pods(at_s: float, *known: Known, node: Resource = NODE, **more: object) -> Batch:
    """What `k8s_pods` says of the node's pods."""
    rows: list[Row] = []
    for each in known:
        names = {"k8s.namespace.name": each.namespace, "k8s.pod.name": each.name, "k8s.pod.uid": each.uid}
        resource = Resource({**node.map, **names})
        attrs = {"k8s.pod.start_time": "2023-11-14T22:13:20Z"}
        if each.config_hash:
            attrs["k8s.pod.annotation.kubernetes.io/config.hash"] = each.config_hash
        rows.append((resource, "k8s.pod.info", attrs, 1))
        if each.phase:
            rows.append((resource, "k8s.pod.phase", {"k8s.pod.phase": each.phase}, 1))
        for container, name in each.containers.items():
            inner = Resource({**resource.map, "k8s.container.name": name})
            rows.append((inner, "k8s.container.start_time", {"container.id": container}, 1.0))
    return message("k8s_pods", at_s, rows, node=node, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Proc:
    """A process on a device, with what its cgroup tells."""

    pid: int
    uid: str = ""
    container: str = ""
    device: str = GPU
    memory: int = 100
    busy: float | None = 0.5


def processes(at_s: float, *seen: Proc, node: Resource = NODE, allocate: bool = True, **more: object) -> Batch:
    """What `nvml` says of processes, in its own stream."""
    rows: list[Row] = [(node, "gpu.process.visible", {"gpu.source": "nvml"}, 1)]
    holding: set[tuple[Resource, str]] = set()
    for each in seen:
        hints = {"k8s.pod.uid": each.uid, "container.id": each.container}
        resource = Resource({**node.map, **{key: value for key, value in hints.items() if value}})
        attrs = {"hw.id": each.device, "process.pid": cast(str, each.pid)}  # a number, as the receiver sends it
        rows.append((resource, "gpu.process.memory.usage", attrs, each.memory))
        if each.busy is not None:
            rows.append((resource, "gpu.process.utilization", attrs, each.busy))
        if allocate and (resource, each.device) not in holding:
            holding.add((resource, each.device))
            claim = {"hw.id": each.device, "gpu.allocation.source": "process"}
            rows.append((resource, "gpu.allocated", claim, 1))
    options: dict[str, object] = {"stream": "nvml/processes", "interval_s": 15, **more}
    return message("nvml", at_s, rows, node=node, **options)  # type: ignore[arg-type]


A = Known("a", UID_A, {BOX_A: "main"})
B = Known("b", UID_B, {BOX_B: "main"})

Place = tuple[dict[str, str], str, str]


def places(sink: Sink, name: str = MEMORY, newest: bool = True) -> list[Place]:
    """(resource without the node, device, pid) of the points of the newest batch with such a metric, or of all."""
    found: list[list[Place]] = []
    for batch in sink.batches:
        rows = [
            (
                {key: str(value) for key, value in resource.attributes if key != "k8s.node.name"},
                series.text("hw.id"),
                str(series.map.get("process.pid", "")),
            )
            for resource, _, series in batch.layout.identities()
            if series.metric.name == name
        ]
        if rows:
            found.append(rows)
    return found[-1] if newest else [place for rows in found for place in rows]


def names(name: str, container: str = "main") -> dict[str, str]:
    """An owner's resource without the node."""
    full = {"k8s.namespace.name": "ml", "k8s.pod.name": name, "k8s.container.name": container}
    return {key: value for key, value in full.items() if value}
