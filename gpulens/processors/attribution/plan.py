"""What a layout holds for attribution, found once and kept with the layout.

Invariant: a plan depends on identities only; every tick reads a few slots by it and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpulens.pipeline.catalogue import MetricScope, scope_of
from gpulens.pipeline.data import AttributeValue, Batch, Layout, Resource, Series, attributes, bitmap_slots
from gpulens.processors.attribution.devices import DeviceFact
from gpulens.processors.attribution.ownership import NOBODY, STRANGER, Owner, Owners
from gpulens.processors.attribution.pods import HASH_ATTRIBUTE, HINT_KEYS, ContainerFact, Hint, PodFact, Said, whole_id

OWNER_KEYS = ("k8s.container.name", "k8s.namespace.name", "k8s.pod.name", "k8s.pod.uid")
_OWNER_KEYS = frozenset(OWNER_KEYS)
_NOT_HOME = _OWNER_KEYS | HINT_KEYS

PROCESS = "process"
"""The allocation source that goes by the processes that are seen on a device."""


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


def home_of(resource: Resource) -> Resource:
    """The node's part of a resource."""
    if _is_home(resource):
        return resource
    return Resource({key: value for key, value in resource.attributes if key not in _NOT_HOME}, resource.schema_url)


def _is_home(resource: Resource) -> bool:
    return not any(key in _NOT_HOME for key, _ in resource.attributes)


def with_owner(resource: Resource, owner: Owner) -> Resource:
    """A reading's resource with its owner on it."""
    merged: dict[str, AttributeValue] = {**resource.map, **dict(owner)}
    return Resource(attributes(merged), resource.schema_url)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A `gpu.allocated` series: in which slot, which device (by the source's name), whose: by names, or by what a
    process tells."""

    slot: int
    node: str
    source: str
    device: str
    owner: Owner | None
    hint: Hint | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Processes on a device that tell of their owner in ids: where their series go follows from the pods known."""

    node: str
    device: str
    hint: Hint


@dataclass(slots=True)
class PodRows:
    """The slots that describe a node's pods: facts count where the slot holds 1, containers where it holds a time."""

    pods: list[tuple[int, PodFact]] = field(default_factory=list)
    containers: list[tuple[int, ContainerFact]] = field(default_factory=list)
    phases: list[tuple[int, str, str]] = field(default_factory=list)

    _memo: tuple[list[float | int | None], Said] = ([], Said())

    def said(self, read: SlotReader) -> Said:
        """What a batch says by them; the same object while it says the same."""
        slots = (slot for rows in (self.pods, self.containers, self.phases) for slot, *_ in rows)
        values = [read(slot) for slot in slots]
        if values != self._memo[0]:
            said = Said.of(
                (pod for slot, pod in self.pods if read(slot) == 1),
                (box for slot, box in self.containers if read(slot) is not None),
                ((uid, phase) for slot, uid, phase in self.phases if read(slot) == 1),
            )
            self._memo = (values, said)
        return self._memo[1]


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
    pods: dict[str, PodRows] = field(default_factory=dict)
    claims: dict[Claim, int] = field(default_factory=dict)
    claimed: dict[int, int] = field(default_factory=dict)
    """Slot of a process' series -> its claim."""
    strangers: list[tuple[int, str, str]] = field(default_factory=list)
    """(slot, node, device) of processes that tell nothing of their owner: the host's own, or not to be read."""
    visible: list[tuple[int, str]] = field(default_factory=list)
    """(slot, node): not every process of the node is seen when the slot holds 0."""
    holders: tuple[list[object], tuple[Owner | None, ...]] = ([], ())
    """The owners of the claims when they were last looked up, and what they follow from."""

    @classmethod
    def of(cls, layout: Layout) -> Plan:
        """Reads a layout through."""
        plan = cls(layout)
        for slot, (resource, scope, series) in enumerate(layout.identities()):
            node = node_of(resource)
            if node not in plan.nodes or not _is_home(plan.nodes[node]):
                plan.nodes[node] = resource
            plan._fact(slot, node, resource, series)
            device, place = series.text("hw.id"), scope_of(series.metric.name)
            if not device:
                continue
            if place is MetricScope.WORK and owner_of(resource) is None:
                group = Group(node, device, scope.name.removeprefix("gpulens/"))
                number = plan.work[slot] = plan.groups.setdefault(group, len(plan.groups))
                if number == len(plan.members):
                    plan.members.append([])
                plan.members[number].append(slot)
            elif place is MetricScope.OWNER or series.metric.name == "gpu.allocated":
                hint = Hint.of(resource)
                if hint is None and "process.pid" in series.map and owner_of(resource) is None:
                    plan.strangers.append((slot, node, device))
                elif hint is not None:
                    plan.claimed[slot] = plan.claims.setdefault(Claim(node, device, hint), len(plan.claims))
        plan.nodes = {node: home_of(resource) for node, resource in plan.nodes.items()}
        return plan

    def _fact(self, slot: int, node: str, resource: Resource, series: Series) -> None:
        name, device = series.metric.name, series.text("hw.id")
        source = series.text("gpu.source").partition("/")[0]  # `dcgm/b` is one more source of the type `dcgm`
        match name:
            case "gpu.allocated":
                origin = series.text("gpu.allocation.source")
                owner = owner_of(resource)
                self.allocations.append(Allocation(slot, node, origin, device, owner, Hint.of(resource)))
            case "gpu.device.info":
                fact = DeviceFact.of(series.map)
                self.facts.setdefault(node, []).append((slot, fact if node else fact.anywhere()))
            case "gpu.allocation.replicas":
                self.exclusive.append((slot, node, device))
            case "gpu.sharing" if series.text("gpu.sharing.mode") in ("exclusive", "mig"):
                self.exclusive.append((slot, node, device))
            case "gpu.process.visible":
                self.visible.append((slot, node))
            case "k8s.pod.info" | "k8s.pod.phase" | "k8s.container.start_time":
                self._pod(slot, node, resource, series)
            case "gpu.source.up":
                self.up.append((slot, node, source))
            case "gpu.source.interval":
                self.intervals.append((slot, node, source))
            case "gpu.source.window":
                self.windows.append((slot, node, source))
            case _:
                pass

    def _pod(self, slot: int, node: str, resource: Resource, series: Series) -> None:
        rows, uid = self.pods.setdefault(node, PodRows()), resource.text("k8s.pod.uid")
        match series.metric.name:
            case "k8s.pod.info":
                pod = PodFact.of(resource, series.text(HASH_ATTRIBUTE))
                if pod is not None:
                    rows.pods.append((slot, pod))
            case "k8s.pod.phase":
                if uid and (phase := series.text("k8s.pod.phase")):
                    rows.phases.append((slot, uid, phase))
            case _:
                container, name = whole_id(series.text("container.id")), resource.text("k8s.container.name")
                if uid and container and name:
                    rows.containers.append((slot, ContainerFact(container, uid, name)))

    def owners(
        self, read: SlotReader, named: Callable[[str, Hint], Owner | None]
    ) -> Iterator[tuple[str, str, dict[str, Owners]]]:
        """(node, source, owners by device) for each allocation source that the batch speaks for. `named` gives the
        owner on a node for what a process tells."""
        found: dict[tuple[str, str], dict[str, Owners]] = {}
        for each in self.allocations:
            value = read(each.slot)
            if value is None:
                continue
            held = found.setdefault((each.node, each.source), {})
            holders = held.get(each.device, NOBODY)
            owner = each.owner
            if each.hint is not None:
                owner = named(each.node, each.hint) or STRANGER
            elif owner is None and each.source == PROCESS:
                owner = STRANGER
            held[each.device] = holders | {owner} if value >= 1 and owner is not None else holders
        for slot, node, device in self.strangers:
            if read(slot) is not None:
                held = found.setdefault((node, PROCESS), {})
                held[device] = held.get(device, NOBODY) | {STRANGER}
        for (node, source), owners in found.items():
            yield node, source, owners

    def present(self, read: SlotReader) -> dict[str, set[tuple[str, Hint]]]:
        """node -> (device, whose) of the processes that a batch sees."""
        claims = list(self.claims)
        seen: dict[str, set[tuple[str, Hint]]] = {}
        allocated = {each.slot for each in self.allocations}
        for slot, number in self.claimed.items():
            value = read(slot)
            if value is not None and (value >= 1 or slot not in allocated):
                claim = claims[number]
                seen.setdefault(claim.node, set()).add((claim.device, claim.hint))
        return seen


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
