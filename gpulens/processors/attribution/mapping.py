"""Layout to layout: where each series stands once the owners of its device are known.

Invariant: a point of the input stands on exactly one resource of the output; no two series of the output are the
same. The mapping depends on identities and verdicts only, so it is built once and then only moves numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpulens.pipeline.catalogue import MetricScope, scope_of
from gpulens.pipeline.data import Identity, Projection, Resource, Scope, Series, build_layout
from gpulens.processors.attribution.devices import DeviceMap
from gpulens.processors.attribution.ownership import Owner
from gpulens.processors.attribution.plan import PROCESS, Plan, home_of, node_of, owner_of, with_owner
from gpulens.processors.attribution.words import VENDOR

OWN = Scope("gpulens")
"""The scope of what attribution says itself."""


@dataclass(frozen=True, slots=True)
class View:
    """What the mapping of one batch depends on, besides its layout.

    - `owners`: for each group of the plan, the one owner or None.
    - `holders`: for each claim of the plan, the owner of the processes or None.
    - `elected`: node -> the allocation source whose word counts.
    - `versions`: node -> version of its device map.
    - `disputed`: (node, device key) with several owners although known to be exclusive.
    - `paged`: (node, device key) for which a vendor's page stands in for the elected source.
    - `ended`: (node, owner) that the elected source names although the pod has ended.
    """

    owners: tuple[Owner | None, ...]
    holders: tuple[Owner | None, ...]
    elected: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, int], ...]
    disputed: frozenset[tuple[str, str]]
    paged: frozenset[tuple[str, str]]
    ended: frozenset[tuple[str, Owner]]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A projection, and how many input series it merged away as duplicates."""

    projection: Projection
    duplicates: int


def build(plan: Plan, view: View, devices: Mapping[str, DeviceMap]) -> Mapped:
    """The mapping for a plan under a view."""
    targets = _Targets(plan, view, devices)
    slots_of: dict[Identity, int] = {}
    duplicates = 0
    for slot, identity in enumerate(plan.layout.identities()):
        for target in targets.of(slot, identity):
            if target in slots_of and slot in plan.claimed and identity[2].metric.name != "gpu.allocated":
                target = identity  # two processes are two series, whatever their containers are called
            if target in slots_of:
                duplicates += 1
            else:
                slots_of[target] = slot
    layout, places = build_layout(slots_of)
    slots = [0] * layout.size
    for place, slot in zip(places, slots_of.values(), strict=True):
        slots[place] = slot
    return Mapped(Projection(layout, slots), duplicates)


class _Targets:
    """Where each series of a layout goes; equal resources and series are made once."""

    def __init__(self, plan: Plan, view: View, devices: Mapping[str, DeviceMap]) -> None:
        self._plan = plan
        self._view = view
        self._devices = devices
        self._elected = dict(view.elected)
        self._resources: dict[tuple[Resource, Owner], Resource] = {}
        self._series: dict[tuple[Series, str], Series] = {}

    def of(self, slot: int, identity: Identity) -> Iterator[Identity]:
        """The output identities of a slot: one as a rule, none for an allocation whose word does not count."""
        resource, scope, series = identity
        known = self._devices.get(node_of(resource))
        device = series.text("hw.id")
        place = scope_of(series.metric.name)
        if known is None or not device or place in (None, MetricScope.DEVICE):
            # A physical GPU goes by its UUID already: nothing about it depends on who knows what.
            yield identity
            return
        keys = known.resolve(device)
        if series.metric.name == "gpu.allocated":
            # Which source counts may change while the allocation lasts: the series is attribution's own word.
            owned = self._owned(slot, resource)
            if owned is resource and (slot in self._plan.claimed or series.text("gpu.allocation.source") == PROCESS):
                return  # an allocation counts by names; this one's are not known yet, or it is a host process's
            if (node_of(resource), owner_of(resource)) in self._view.ended:
                return
            yield from ((owned, OWN, self._named(series, key, known)) for key in self._granted(identity, keys))
        elif len(keys) != 1:
            yield identity
        else:
            yield self._owned(slot, resource), scope, self._named(series, keys[0], known)

    def _granted(self, identity: Identity, keys: tuple[str, ...]) -> Iterator[str]:
        """The devices for which an allocation counts: said by the source whose word counts there, and not in
        dispute."""
        resource, _, series = identity
        node = node_of(resource)
        source = series.text("gpu.allocation.source")
        for key in keys:
            paged = (node, key) in self._view.paged
            if source == (VENDOR if paged else self._elected.get(node, "")) and (node, key) not in self._view.disputed:
                yield key

    def _named(self, series: Series, key: str, known: DeviceMap) -> Series:
        """The series under the device's public id. The source of an allocation is left out: it may change while the
        allocation lasts, and `gpu.attribution` tells it."""
        mark = (series, key)
        if mark not in self._series:
            attrs = {name: value for name, value in series.attributes if name != "gpu.allocation.source"}
            attrs["hw.id"] = known.hw_id(key)
            if parent := known.parent(key):
                attrs["hw.parent"] = parent
            named = Series(series.metric, attrs)
            self._series[mark] = series if named == series else named
        return self._series[mark]

    def _owned(self, slot: int, resource: Resource) -> Resource:
        group, claim = self._plan.work.get(slot), self._plan.claimed.get(slot)
        owner = None
        if group is not None:
            owner = self._view.owners[group]
        elif claim is not None:
            owner = self._view.holders[claim]
        if owner is None:
            return resource
        mark = (resource, owner)
        if mark not in self._resources:
            self._resources[mark] = with_owner(resource if claim is None else home_of(resource), owner)
        return self._resources[mark]
