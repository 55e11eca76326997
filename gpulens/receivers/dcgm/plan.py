"""A page's layout turned into a stream's: which sample feeds which series, worked out once for each page
layout.

Invariant: a plan depends on the page's names and labels only, and on the UIDs that its pods had before; `fill`
moves numbers. Copies of one device's value (MIG rows, time-slicing rows, repeated lines) feed one series and
never several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Final, TypeVar

from gpulens.pipeline.catalogue import MetricScope, metric, scope_of
from gpulens.pipeline.data import Identity, Layout, Resource, Scope, Series, Value, build_layout
from gpulens.pipeline.exposition import Page, PageLayout
from gpulens.receivers.dcgm.field import Field, Level, Named
from gpulens.receivers.dcgm.fields import find, is_dcgm_name
from gpulens.receivers.dcgm.pod_uids import PodKey, PodUids, Sightings, sightings, with_uid
from gpulens.receivers.dcgm.rows import Devices, Entity, Facts, Owner, Owners, RowLabels, is_new_exporter, row_labels
from gpulens.receivers.dcgm.units import Either, Reason, Unit

ResolveUnit = Callable[[Either, Sequence[float]], Unit]
T = TypeVar("T")
_MOST_SERIES: Final = 15_000
"""Made series that are kept for the next plan, some 1 kB each; twice what a page of 5,000 lines makes."""
_MOST_DEVICES: Final = 1024
_MOST_HOLDINGS: Final = 8192
"""GPUs with their MIG instances, and holders of them, that one page may name; the largest node has 16 x 8 and some
hundreds. A page of 16 MiB in which every line names another device would make 150,000 series (0.5 GiB)."""
_SAME: Final = 1e-3  # two units' rounding of one number
_EXPORTER_LABELS: Final = ("hostname", "instance")
"""Labels that tell exporters apart on a page of several."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that may feed a series: its place on the page and its unit."""

    index: int
    unit: Unit | Either


def picker(indexes: Sequence[int]) -> Callable[[Sequence[T]], Sequence[T]]:
    """Takes what stands at `indexes`, in one call where there are several."""
    if len(indexes) > 1:
        return itemgetter(*indexes)
    return lambda items: tuple(items[index] for index in indexes)


class Group:
    """Series whose first candidates share a unit, so that they are read in one go."""

    def __init__(self, unit: Unit | Either, slots: Sequence[Sequence[Candidate]]) -> None:
        self._unit = unit
        self._slots = slots
        self._first = picker([candidates[0].index for candidates in slots])
        self._copied = [slot for slot, candidates in enumerate(slots) if len(candidates) > 1]
        pairs = [(slots[slot][0], other) for slot in self._copied for other in slots[slot][1:]]
        self._same_unit = all(first.unit is other.unit for first, other in pairs)
        self._originals = picker([first.index for first, _ in pairs])
        self._copies = picker([other.index for _, other in pairs])

    def fill(self, page: Page, resolve: ResolveUnit, rejected: Counter[str]) -> list[Value | None]:
        """One number a series, None where every candidate is struck out."""
        values = self._first(page.values)
        unit = resolve(self._unit, values) if isinstance(self._unit, Either) else self._unit
        quick = unit.canonical_all(values, self._first(page.tokens) if unit.exact else ())
        if quick is None:
            return [self._choose(slot, page, resolve, rejected) for slot in range(len(self._slots))]
        readings: list[Value | None] = [*quick]
        if not self._copies_agree(page):
            for slot in self._copied:
                readings[slot] = self._choose(slot, page, resolve, rejected)
        return readings

    def _copies_agree(self, page: Page) -> bool:
        """All candidates of every series print the same text in the same unit."""
        return self._same_unit and self._originals(page.tokens) == self._copies(page.tokens)

    def _choose(self, slot: int, page: Page, resolve: ResolveUnit, rejected: Counter[str]) -> Value | None:
        """The number on which all valid candidates agree."""
        chosen: Value | None = None
        for candidate in self._slots[slot]:
            value, token = page.values[candidate.index], page.tokens[candidate.index]
            unit = candidate.unit
            if isinstance(unit, Either):
                unit = resolve(unit, (value,))
            refusal = unit.refusal(value, token)
            if refusal is not None:
                rejected[refusal] += 1
                continue
            reading = unit.canonical(value, token)
            if chosen is not None and abs(reading - chosen) > _SAME * max(abs(reading), abs(chosen)):
                rejected[Reason.CONTRADICTORY] += 1
                return None
            chosen = reading if chosen is None else chosen
        return chosen


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read every page that has one layout.

    - `layout`: the stream's layout; its slots stand in another order than the groups' (`order` maps them).
    - `facts`: how many series after the groups' are 1 by their existence.
    - `dropped`: rows that are struck out whatever their value, by reason.
    - `unknown`: names that claim to be DCGM's and are not known.
    - `work`: the samples that feed what is charged to owners, by family (and node, on a page of several).
    - `pods`, `uids`: the UIDs with which the page names its pods, and what was settled on.
    - `new_names`: the page's version label is that of exporter 4.9 and later; None when it has none.
    """

    layout: Layout
    groups: tuple[Group, ...]
    order: Callable[[Sequence[Value | None]], Sequence[Value | None]]
    facts: int
    dropped: Counter[str]
    unknown: frozenset[str]
    new_names: bool | None
    devices: int
    work: Mapping[str, Callable[[Sequence[str]], Sequence[str]]]
    pods: Sightings
    uids: Mapping[PodKey, str]

    def work_tokens(self, page: Page) -> dict[str, Sequence[str]]:
        """The texts of the values that feed what is charged to owners, by family."""
        return {family: pick(page.tokens) for family, pick in self.work.items()}

    def fill(self, page: Page, resolve: ResolveUnit, rejected: Counter[str]) -> Sequence[Value | None]:
        """One number (or None) a slot of `layout`; what is struck out is counted in `rejected`."""
        rejected.update(self.dropped)
        numbers: list[Value | None] = []
        for group in self.groups:
            numbers += group.fill(page, resolve, rejected)
        numbers += [1] * self.facts
        return self.order(numbers)


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    named: Named
    labels: RowLabels
    entity: Entity
    owner: Owner | None
    shared: bool


class Planner:
    """Makes plans for one receiver. `node` is the resource of what nobody owns."""

    def __init__(self, node: Resource, scope: Scope, source: str) -> None:
        self._node = node
        self._scope = scope
        self._source = source
        self._made: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._uids = PodUids()

    def _series(self, name: str, attributes: dict[str, str]) -> Series:
        """The series, the same object each time: comparing layouts is then a matter of identity."""
        key = (name, tuple(attributes.items()))
        series = self._made.get(key)
        if series is None:
            if len(self._made) >= _MOST_SERIES:
                self._made.clear()
            series = self._made[key] = Series(metric(name), attributes)
        return series

    def takes_up(self, plan: Plan) -> bool:
        """Goes on with an earlier plan; False when its owners would now have other identities."""
        if self._uids.settle(plan.pods) != plan.uids:
            return False
        if plan.devices:  # a page that says nothing about GPUs does not say either that the pods are gone
            self._uids.keep(plan.uids)
        return True

    def plan(self, layout: PageLayout) -> Plan:
        """The plan of a page layout, which now is the page's."""
        drops: Counter[str] = Counter()
        unknown: set[str] = set()
        named = self._named(layout, unknown)
        labels = [row_labels(layout.samples[index]) for index, _ in named]
        devices, owners = Devices(labels), Owners(labels)
        named_owners = [owners.owner(row) for row in labels]
        pods = sightings(named_owners, _MOST_HOLDINGS)
        uids = self._uids.settle(pods)
        facts_of = dict(islice(devices.facts.items(), _MOST_DEVICES))
        rows: list[_Row] = []
        holdings: set[tuple[Entity, Owner]] = set()
        for (index, name), row, named_owner in zip(named, labels, named_owners, strict=True):
            entity, owner = devices.entity(row), with_uid(named_owner, uids)
            if entity is None:
                drops[Reason.NO_DEVICE] += 1
                continue
            if entity not in facts_of or entity.parent not in facts_of:
                drops[Reason.TOO_MANY_DEVICES] += 1
                continue
            if owner is not None and (entity, owner) not in holdings:
                if len(holdings) == _MOST_HOLDINGS:
                    drops[Reason.TOO_MANY_OWNERS] += 1
                    owner = None
                else:
                    holdings.add((entity, owner))
            if entity.gi and name.field.level is Level.WHOLE_GPU_ONLY:
                drops[Reason.MIG_UNDEFINED] += 1
            else:
                rows.append(_Row(index, name, row, entity, owner, "vgpu" in row))
        series = self._feeds(rows, facts_of)
        facts = [*self._device_facts(facts_of), *self._allocations(holdings)]
        groups, slots_of = _grouped(series, facts)
        if facts_of:
            self._uids.keep(uids)
        return Plan(
            layout=slots_of.layout,
            groups=groups,
            order=slots_of.order,
            facts=len(facts),
            dropped=drops,
            unknown=frozenset(unknown),
            new_names=is_new_exporter(labels),
            devices=len(facts_of),
            work=_work(series, layout),
            pods=pods,
            uids=uids,
        )

    @staticmethod
    def _named(layout: PageLayout, unknown: set[str]) -> list[tuple[int, Named]]:
        """The samples whose names are known, with their places; notes the names that should be and are
        not."""
        known: dict[str, Named | None] = {}
        found: list[tuple[int, Named]] = []
        for index, key in enumerate(layout.samples):
            if key.name not in known:
                known[key.name] = find(key.name)
                if known[key.name] is None and is_dcgm_name(key.name):
                    unknown.add(key.name)
            named = known[key.name]
            if named is not None:
                found.append((index, named))
        return found

    def _feeds(self, rows: Sequence[_Row], facts: dict[Entity, Facts]) -> dict[Identity, list[Candidate]]:
        """The candidates of each series, in the page's order."""
        feeds: dict[Identity, list[Candidate]] = {}
        whole = {_place(row) for row in rows if not row.shared and row.owner is None}
        for row in rows:
            field = row.named.field
            if row.shared and field.process_metric and _place(row) in whole:
                if row.owner is not None:  # one share of the device, and no copy of its value
                    identity = self._process_identity(field, row.entity, row.owner)
                    feeds.setdefault(identity, []).append(Candidate(row.index, row.named.unit))
                continue
            entity = row.entity if field.level is Level.INSTANCE else row.entity.parent
            extra = _label_attributes(field, row.labels)
            for reading in field.readings:
                attributes = {**_device_keys(entity, facts[entity]), **dict(reading.attributes), **extra}
                identity = (self._node, self._scope, self._series(reading.metric, attributes))
                unit = reading.unit or row.named.unit
                feeds.setdefault(identity, []).append(Candidate(row.index, unit))
        return feeds

    def _process_identity(self, field: Field, entity: Entity, owner: Owner) -> Identity:
        return self._resource(owner), self._scope, self._series(field.process_metric, {"hw.id": entity.hw_id})

    def _resource(self, owner: Owner) -> Resource:
        named = {
            "k8s.namespace.name": owner.namespace,
            "k8s.pod.name": owner.pod,
            "k8s.container.name": owner.container,
            "k8s.pod.uid": owner.uid,
        }
        return Resource({**self._node.map, **{key: value for key, value in named.items() if value}})

    def _device_facts(self, facts: dict[Entity, Facts]) -> Iterable[Identity]:
        for entity in sorted(facts):
            known = facts[entity]
            joins = {
                "gpu.pci.address": known.pci,
                "gpu.serial": known.serial,
                "gpu.driver.version": known.driver,
                "gpu.minor": known.minor,
            }
            keys = _device_keys(entity, known)
            identity = {"gpu.mig.gi": entity.gi, **joins}
            yield self._fact("gpu.device.info", {**keys, **_present(identity)})
            if not entity.gi:
                yield self._fact("gpu.info", {**keys, **_present({"gpu.index": known.index, **joins})})

    def _allocations(self, holdings: Iterable[tuple[Entity, Owner]]) -> Iterable[Identity]:
        for entity, owner in sorted(holdings):
            keys = {"hw.id": entity.hw_id, "gpu.allocation.source": self._source}
            if entity.gi:
                keys["hw.parent"] = entity.gpu
            yield self._resource(owner), self._scope, self._series("gpu.allocated", keys)

    def _fact(self, name: str, attributes: dict[str, str]) -> Identity:
        return self._node, self._scope, self._series(name, attributes)


@dataclass(frozen=True, slots=True)
class _Slots:
    layout: Layout
    order: Callable[[Sequence[Value | None]], Sequence[Value | None]]


def _grouped(feeds: dict[Identity, list[Candidate]], facts: Sequence[Identity]) -> tuple[tuple[Group, ...], _Slots]:
    """Groups the series by unit, and notes where each of them stands in the layout."""
    by_unit: dict[Unit | Either, list[tuple[Identity, list[Candidate]]]] = {}
    for identity, candidates in feeds.items():
        by_unit.setdefault(candidates[0].unit, []).append((identity, candidates))
    groups = tuple(Group(unit, [candidates for _, candidates in each]) for unit, each in by_unit.items())
    flat = [identity for each in by_unit.values() for identity, _ in each]
    layout, slots = build_layout([*flat, *facts])
    return groups, _Slots(layout, _permutation(slots))


def _work(
    feeds: dict[Identity, list[Candidate]], layout: PageLayout
) -> dict[str, Callable[[Sequence[str]], Sequence[str]]]:
    """The samples of each family that feeds what is charged to owners. A page of several nodes comes from several
    exporters, each with a pace of its own."""
    families: dict[str, list[int]] = {}
    for (_, _, series), candidates in feeds.items():
        if scope_of(series.metric.name) is not MetricScope.WORK:
            continue
        for candidate in candidates:
            key = layout.samples[candidate.index]
            exporter = [value for name, value in key.labels if name.lower() in _EXPORTER_LABELS]
            families.setdefault("@".join((key.name, *exporter)), []).append(candidate.index)
    return {family: picker(indexes) for family, indexes in families.items()}


def _place(row: _Row) -> tuple[int, Entity]:
    return row.named.field.number, row.entity


def _permutation(slots: Sequence[int]) -> Callable[[Sequence[Value | None]], Sequence[Value | None]]:
    """Puts number i at `slots[i]`, which must name each slot once."""
    order = [0] * len(slots)
    for position, slot in enumerate(slots):
        order[slot] = position
    return picker(order)


def _device_keys(entity: Entity, facts: Facts) -> dict[str, str]:
    keys = {"hw.id": entity.hw_id, "hw.parent": entity.gpu if entity.gi else ""}
    return _present({**keys, "hw.name": facts.name, "hw.model": facts.model, "gpu.mig.profile": facts.profile})


def _label_attributes(field: Field, labels: RowLabels) -> dict[str, str]:
    found = {attribute: labels.get(label, "") for label, attribute in field.label_attributes}
    window = found.get("gpu.window", "")
    if window.isdecimal():
        found["gpu.window"] = f"{int(window) / 1000:g}s"
    return _present(found)


def _present(attributes: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in attributes.items() if value}
