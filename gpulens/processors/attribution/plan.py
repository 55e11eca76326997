"""What a layout holds for attribution, found once and kept with the layout.

Invariant: a plan depends on identities only; every tick reads a few slots by it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpulens.pipeline.catalogue import MetricScope, scope_of
from gpulens.pipeline.data import AttributeValue, Batch, Layout, Resource, Series, attributes, bitmap_slots
from gpulens.processors.attribution.devices import DeviceFact
from gpulens.processors.attribution.ownership import NOBODY, Owner, Owners

OWNER_KEYS = ("k8s.container.name", "k8s.namespace.name", "k8s.pod.name", "k8s.pod.uid")
_OWNER_KEYS = frozenset(OWNER_KEYS)


def node_of(resource: Resource) -> str:
    """The node that scopes join keys: k8s.node.name, else host.id, else the sender's service.instance.id."""
    for key in ("k8s.node.name", "host.id", "service.instance.id"):
        if value := resource.text(key):
            return value
    return ""


def owner_of(resource: Resource) -> Owner | None:
    """The owner part of a resource; None when it names no pod."""
    if not resource.text("k8s.pod.name"):
        return None
    return tuple((key, value) for key, value in resource.attributes if key in _OWNER_KEYS and value != "")


def with_owner(resource: Resource, owner: Owner) -> Resource:
    """A reading's resource with its owner on it."""
    merged: dict[str, AttributeValue] = {**resource.map, **dict(owner)}
    return Resource(attributes(merged), resource.schema_url)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A `gpu.allocated` series: in which slot, which device (by the source's name), whose."""

    slot: int
    node: str
    source: str
    device: str
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class Group:
    """The readings of one device by one kind of source: they share a verdict."""

    node: str
    device: str
    witness: str


@dataclass(slots=True)
class Plan:
    """What attribution needs to know of a layout."""

    layout: Layout
    nodes: dict[str, Resource] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    exclusive: list[tuple[int, str, str]] = field(default_factory=list)
    """(slot, node, device): the device is not shared when the slot holds 1."""
    facts: dict[str, list[tuple[int, DeviceFact]]] = field(default_factory=dict)
    up: list[tuple[int, str, str]] = field(default_factory=list)
    intervals: list[tuple[int, str, str]] = field(default_factory=list)
    windows: list[tuple[int, str, str]] = field(default_factory=list)
    groups: dict[Group, int] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)
    """Slot of a work reading -> its group."""
    members: list[list[int]] = field(default_factory=list)
    """The slots of each group."""

    @classmethod
    def of(cls, layout: Layout) -> Plan:
        """Reads a layout through."""
        plan = cls(layout)
        for slot, (resource, scope, series) in enumerate(layout.identities()):
            node = node_of(resource)
            if node not in plan.nodes or owner_of(plan.nodes[node]) is not None:
                plan.nodes[node] = resource
            plan._fact(slot, node, resource, series)
            if scope_of(series.metric.name) is MetricScope.WORK and owner_of(resource) is None:
                device = series.text("hw.id")
                if device:
                    group = Group(node, device, scope.name.removeprefix("gpulens/"))
                    number = plan.work[slot] = plan.groups.setdefault(group, len(plan.groups))
                    if number == len(plan.members):
                        plan.members.append([])
                    plan.members[number].append(slot)
        return plan

    def _fact(self, slot: int, node: str, resource: Resource, series: Series) -> None:
        name, device = series.metric.name, series.text("hw.id")
        source = series.text("gpu.source").partition("/")[0]  # `dcgm/b` is one more source of the type `dcgm`
        match name:
            case "gpu.allocated":
                origin = series.text("gpu.allocation.source")
                self.allocations.append(Allocation(slot, node, origin, device, owner_of(resource)))
            case "gpu.device.info":
                fact = DeviceFact.of(series.map)
                self.facts.setdefault(node, []).append((slot, fact if node else fact.anywhere()))
            case "gpu.allocation.replicas":
                self.exclusive.append((slot, node, device))
            case "gpu.sharing" if series.text("gpu.sharing.mode") in ("exclusive", "mig"):
                self.exclusive.append((slot, node, device))
            case "gpu.source.up":
                self.up.append((slot, node, source))
            case "gpu.source.interval":
                self.intervals.append((slot, node, source))
            case "gpu.source.window":
                self.windows.append((slot, node, source))
            case _:
                pass

    def owners(self, read: SlotReader) -> Iterator[tuple[str, str, dict[str, Owners]]]:
        """(node, source, owners by device) for each allocation source that the batch speaks for."""
        found: dict[tuple[str, str], dict[str, Owners]] = {}
        for each in self.allocations:
            value = read(each.slot)
            if value is None:
                continue
            held = found.setdefault((each.node, each.source), {})
            holders = held.get(each.device, NOBODY)
            held[each.device] = holders | {each.owner} if value >= 1 and each.owner is not None else holders
        for (node, source), owners in found.items():
            yield node, source, owners


class SlotReader:
    """Reads a few slots of a batch without unpacking the rest."""

    def __init__(self, batch: Batch) -> None:
        view = memoryview(batch.values)
        self._ints = view.cast("q")
        self._doubles = view.cast("d")
        self._is_int = batch.layout.is_int
        self._absent = frozenset(bitmap_slots(batch.absent)) if batch.absent else frozenset()

    @property
    def absent(self) -> frozenset[int]:
        """The slots without a reading."""
        return self._absent

    def __call__(self, slot: int) -> float | int | None:
        """The number in a slot; None when it is absent."""
        if slot in self._absent:
            return None
        return self._ints[slot] if self._is_int[slot] else self._doubles[slot]
