"""A page's layout turned into a stream's: which sample feeds which series, worked out once for each page layout.

Invariant: owner labels end in `gpu.allocated`; a reading stands on the node's resource.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import Identity, Layout, Resource, Scope, Series, Value, build_layout
from gpulens.pipeline.exposition import Page, PageLayout
from gpulens.receivers.gke.families import FAMILIES, NODE_SUFFIX, REQUEST, RESOURCE, Family

SHARED: Final = "unknown"
"""Sharing mode of a GPU that is shared by time-slicing or MPS: the page does not say which."""


COLLECTOR_PODS = ("nvidia-gpu-device-plugin-", "nvidia-metrics-collector-")
COLLECTOR_CONTAINERS = frozenset({"nvidia-gpu-device-plugin", "nvidia-metrics-collector"})
"""The collector itself, which Prometheus puts on series that name no pod: nobody's owner."""


@dataclass(frozen=True, slots=True)
class Feed:
    """A device reading and the sample that carries it."""

    index: int
    family: Family


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read every page that has one layout.

    - `layout`: its slots stand in another order than feeds, the page's age, facts and sharing flags (`order` maps
      them).
    - `facts`: how many series are 1 by their existence.
    - `requests`: where the containers' device counts stand; one that is 0 belongs to a container on a shared GPU.
    - `sharing`: how many sharing flags there are, one for each GPU that no container holds whole: the collector
      leaves shared devices out of the containers' families, so it is one of these.
    - `dropped`: samples that are struck out whatever their value, by reason.
    """

    layout: Layout
    order: tuple[int, ...]
    feeds: tuple[Feed, ...]
    facts: int
    requests: tuple[int, ...]
    sharing: int
    dropped: Counter[str]

    def fill(self, page: Page, rejected: Counter[str]) -> list[Value | None]:
        """One number (or None) a slot of `layout`; what is struck out is counted in `rejected`."""
        rejected.update(self.dropped)
        numbers: list[Value | None] = []
        for feed in self.feeds:
            number = feed.family.read(page.values[feed.index])
            if number is None:
                rejected["out_of_range"] += 1
            numbers.append(number)
        shared = any(page.values[index] == 0 for index in self.requests)
        numbers += [*[1] * self.facts, *[int(shared)] * self.sharing]
        return [numbers[position] for position in self.order]


class Planner:
    """Makes plans for one receiver. `node` is the resource of what nobody owns."""

    def __init__(self, node: Resource, scope: Scope, source: str) -> None:
        self._node = node
        self._scope = scope
        self._source = source

    def plan(self, layout: PageLayout) -> Plan:
        """The plan of a page layout."""
        drops: Counter[str] = Counter()
        feeds: dict[Identity, Feed] = {}
        backup: dict[Identity, Feed] = {}
        allocated: dict[Identity, None] = {}
        models: dict[str, str] = {}
        requests: list[int] = []
        for index, key in enumerate(layout.samples):
            labels = {name: value for name, value in key.labels if value}
            base = key.name.removesuffix(NODE_SUFFIX)
            family = FAMILIES.get(base)
            if key.name == REQUEST and labels.get("resource_name", RESOURCE) == RESOURCE:
                requests.append(index)
            if family is None:
                continue
            uuid = labels.get("accelerator_id", "")
            if not uuid:
                drops["no_device"] += 1  # a build of 2022 names an index, which says nothing off its node
                continue
            models.setdefault(uuid, labels.get("model", ""))
            identity = self._reading(family, uuid, models[uuid])
            if base != key.name:
                feeds.setdefault(identity, Feed(index, family))
            else:
                backup.setdefault(identity, Feed(index, family))
                allocated.update(dict.fromkeys(self._allocation(uuid, labels)))
        facts = [*(self._fact("gpu.device.info", uuid, model) for uuid, model in models.items()), *allocated]
        held = {series.map["hw.id"] for _, _, series in allocated}
        unheld = [uuid for uuid in models if requests and uuid not in held]
        return self._assemble({**backup, **feeds}, facts, unheld, tuple(requests), drops)

    def _reading(self, family: Family, uuid: str, model: str) -> Identity:
        return self._fact(family.metric, uuid, model)

    def _fact(self, name: str, uuid: str, model: str, **attributes: str) -> Identity:
        keys = {"hw.id": uuid, "hw.model": model, **attributes}
        present = {key: value for key, value in keys.items() if value}
        return self._node, self._scope, Series(metric(name), present)

    def _allocation(self, uuid: str, labels: dict[str, str]) -> Iterable[Identity]:
        """The device's holder, where the sample names one."""
        # Prometheus moves the page's own labels aside when its target has the same ones.
        prefix = "exported_" if labels.get("exported_pod") else ""
        namespace, pod, container = (labels.get(prefix + key, "") for key in ("namespace", "pod", "container"))
        if namespace and pod and not (pod.startswith(COLLECTOR_PODS) or container in COLLECTOR_CONTAINERS):
            named = {
                "k8s.namespace.name": namespace,
                "k8s.pod.name": pod,
                "k8s.container.name": container,
            }
            owner = Resource({**self._node.map, **{key: value for key, value in named.items() if value}})
            keys = {"hw.id": uuid, "gpu.allocation.source": self._source}
            yield owner, self._scope, Series(metric("gpu.allocated"), keys)

    def _assemble(
        self,
        feeds: dict[Identity, Feed],
        facts: Sequence[Identity],
        unheld: Sequence[str],
        requests: tuple[int, ...],
        drops: Counter[str],
    ) -> Plan:
        sharing = [
            (self._node, self._scope, Series(metric("gpu.sharing"), {"hw.id": uuid, "gpu.sharing.mode": SHARED}))
            for uuid in unheld
        ]
        layout, slots = build_layout([*feeds, *facts, *sharing])
        order = [0] * len(slots)
        for position, slot in enumerate(slots):
            order[slot] = position
        return Plan(layout, tuple(order), tuple(feeds.values()), len(facts), requests, len(sharing), drops)
