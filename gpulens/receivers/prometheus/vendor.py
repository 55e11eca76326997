"""A page read by a mapping: canonical series, devices and allocations.

Invariant: a reading stands on the node's resource and carries its device; owner labels end in `gpu.allocated`, and
what the mapping does not name is counted and left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpulens.pipeline.catalogue import MetricScope, metric
from gpulens.pipeline.data import AttributeValue, Identity, Metric, Resource, Scope, Series
from gpulens.pipeline.exposition import PageLayout
from gpulens.receivers.prometheus.foreign import Keeps
from gpulens.receivers.prometheus.mapping import Labels, Owner, Part, Row, VendorMapping
from gpulens.receivers.prometheus.plan import Feed, Plan, Source
from gpulens.receivers.prometheus.schema import Combine
from gpulens.receivers.prometheus.templates import first

MOST_DEVICES: Final = 1024
"""Devices and parts of one page; 64 GPUs in eight parts each are half of it."""
MOST_OWNERS: Final = 4096
SOURCE: Final = "prometheus"

_WHOLE_NUMBERS: Final = frozenset({"process.pid"})
"""Attributes that the semantic conventions type as int."""

Wanted = tuple[str, Metric, tuple[tuple[str, AttributeValue], ...]]
"""A series before its device is described: `hw.id`, the metric, its attributes."""

Copied = tuple[tuple[str, str], ...]
"""What samples have in common that are copies of one number under several owners."""


@dataclass(slots=True)
class _Draft:
    """What is gathered in one pass over a page's samples."""

    devices: dict[str, Part] = field(default_factory=dict)
    described: dict[str, dict[str, str]] = field(default_factory=dict)
    wanted: dict[Wanted, dict[tuple[int, int], dict[Copied, list[int]]]] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    owners: dict[tuple[str, Owner], None] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)
    strangers: Counter[str] = field(default_factory=Counter)


class VendorPlanner:
    """Makes plans by one mapping."""

    def __init__(self, node: Resource, scope: Scope, keeps: Keeps, mapping: VendorMapping) -> None:
        self._node = node
        self._scope = scope
        self._keeps = keeps
        self._mapping = mapping
        self._described: dict[str, dict[str, str]] = {}

    def plan(self, layout: PageLayout) -> Plan:
        """The plan of a page layout."""
        draft = _Draft()
        for index, key in enumerate(layout.samples):
            bare, rows = self._mapping.rows(key.name) if self._keeps(key.name) else (key.name, [])
            labels = self._mapping.labels(key.labels) if rows else {}
            rows = [row for row in rows if row.where.holds(labels)]
            if rows:
                self._take(draft, index, bare, rows, labels)
            else:
                draft.strangers[key.name] += 1
        self._remember(draft)
        return Plan(list(self._feeds(draft)), list(self._facts(draft)), draft.drops, draft.strangers)

    def _take(self, draft: _Draft, index: int, name: str, rows: list[Row], labels: Labels) -> None:
        """Takes one sample into the draft."""
        part = self._mapping.part(labels)
        if part is None:
            draft.drops["no_device"] += 1
            return
        if not self._admit(draft, part, labels):
            return
        owner = self._mapping.owner(labels) if any(row.owners for row in rows) else None
        if owner is not None and (part.id, owner) not in draft.owners:
            if len(draft.owners) >= MOST_OWNERS:
                draft.drops["too_many_owners"] += 1
            else:
                draft.owners[part.id, owner] = None
        for row in rows:
            self._want(draft, index, name, row, part, labels)

    def _admit(self, draft: _Draft, part: Part, labels: Labels) -> bool:
        """Notes the sample's device, and what the sample says of it."""
        about = [(part, bool(part.parent)), *([(Part(part.parent), False)] if part.parent else [])]
        new = [each for each, _ in about if each.id not in draft.devices]
        if len(draft.devices) + len(new) > MOST_DEVICES:
            draft.drops["too_many_devices"] += 1
            return False
        for each, is_part in about:
            draft.devices.setdefault(each.id, each)
            known = draft.described.setdefault(each.id, {})
            for key, text in self._mapping.describe(labels, is_part).items():
                known.setdefault(key, text)
        return True

    def _remember(self, draft: _Draft) -> None:
        """Completes what the page says of devices by what it said before: while one metric is away for a tick, the
        series of all others must not change their names."""
        if len(self._described) > MOST_DEVICES:
            self._described.clear()
        for device, described in draft.described.items():
            known = self._described[device] = {**self._described.get(device, {}), **described}
            draft.described[device] = known

    def _want(self, draft: _Draft, index: int, name: str, row: Row, part: Part, labels: Labels) -> None:
        if row.metric is None:
            return
        device = part.id
        if part.parent and row.scope is MetricScope.DEVICE and part.speaks_for_whole is not None:
            if not part.speaks_for_whole:
                return
            device = part.parent
        attributes = _attributes(row, labels)
        if attributes is None:
            draft.strangers[name] += 1  # a row about nothing: npu_chip_info_process_info without a process
            return
        # Copies of one name must agree; of several names the first that has a value counts.
        agree = row.combine is Combine.AGREE
        rank = row.names.index(name) if agree else 0
        copied = () if agree else (("", name), *self._mapping.unowned(labels))
        draft.rows[row.order] = row
        sources = draft.wanted.setdefault((device, row.metric, attributes), {})
        sources.setdefault((row.order, rank), {}).setdefault(copied, []).append(index)

    def _feeds(self, draft: _Draft) -> Iterator[Feed]:
        for (device, kind, attributes), found in draft.wanted.items():
            keys = {**dict(attributes), **self._keys(draft, device)}
            sources = [
                Source(tuple(map(tuple, found[key].values())), draft.rows[key[0]].rule, draft.rows[key[0]].combine)
                for key in sorted(found)
            ]
            yield Feed((self._node, self._scope, Series(kind, keys)), tuple(sources))

    def _facts(self, draft: _Draft) -> Iterator[Identity]:
        info, allocated = metric("gpu.device.info"), metric("gpu.allocated")
        for device in draft.devices:
            keys = {**draft.described[device], **self._keys(draft, device)}
            yield self._node, self._scope, Series(info, keys)
        for device, owner in draft.owners:
            named = {
                "k8s.namespace.name": owner.namespace,
                "k8s.pod.name": owner.pod,
                "k8s.container.name": owner.container,
            }
            resource = Resource({**self._node.map, **{key: text for key, text in named.items() if text}})
            keys = {"hw.id": device, "gpu.allocation.source": SOURCE}
            yield resource, self._scope, Series(allocated, keys)

    def _keys(self, draft: _Draft, device: str) -> Mapping[str, str]:
        """The attributes that say which device a series is about."""
        described = draft.described[device]
        keys = {
            "hw.id": device,
            "hw.parent": draft.devices[device].parent,
            "hw.name": described.get("hw.name", ""),
            "hw.model": described.get("hw.model", ""),
        }
        return {key: text for key, text in keys.items() if text}


def _attributes(row: Row, labels: Labels) -> tuple[tuple[str, AttributeValue], ...] | None:
    """The attributes that a row gives a sample; None when one can't be filled in."""
    found: list[tuple[str, AttributeValue]] = []
    for key, templates in row.attributes:
        text = first(templates, labels)
        if not text:
            return None
        if key not in _WHOLE_NUMBERS:
            found.append((key, text))
        elif text.isascii() and text.isdigit() and len(text) <= 18:
            found.append((key, int(text)))
        else:
            return None
    return tuple(found)
