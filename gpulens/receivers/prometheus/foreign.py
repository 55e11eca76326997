"""A page without a mapping: every sample under its own name.

Invariant: nothing is renamed and nothing is guessed. A counter becomes a cumulative sum, everything else a gauge; the
series of a histogram or summary stay the single series that they are on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from gpulens.pipeline.data import Identity, Kind, Metric, Resource, Scope, Series, Temporality
from gpulens.pipeline.exposition import Family, PageLayout
from gpulens.receivers.prometheus.plan import Feed, Plan, Source
from gpulens.receivers.prometheus.units import AsItIs

Keeps = Callable[[str], bool]
"""Whether a metric of this name is read at all."""

_COUNTER_SUFFIXES: Final = ("_total", "_created")
_AS_IT_IS: Final = AsItIs()
_UNITS: Final[Mapping[str, str]] = {
    "bytes": "By",
    "seconds": "s",
    "celsius": "Cel",
    "joules": "J",
    "watts": "W",
    "hertz": "Hz",
    "volts": "V",
    "amperes": "A",
    "meters": "m",
    "grams": "g",
    "ratio": "1",
}
"""What OpenMetrics' `# UNIT` says, in UCUM."""


class ForeignPlanner:
    """Makes plans. `keeps` tells the metrics to read, `labels_drop` the labels to leave off (names or with `*`)."""

    def __init__(self, node: Resource, scope: Scope, keeps: Keeps, labels_drop: tuple[str, ...]) -> None:
        self._node = node
        self._scope = scope
        self._keeps = keeps
        self._labels_drop = labels_drop
        self._dropped_labels: dict[str, bool] = {}

    def plan(self, layout: PageLayout) -> Plan:
        """The plan of a page layout. Of samples that can't be told apart the first one counts."""
        feeds: dict[Identity, Feed] = {}
        drops: Counter[str] = Counter()
        strangers: Counter[str] = Counter()
        metrics: dict[str, Metric] = {}
        for index, key in enumerate(layout.samples):
            if not self._keeps(key.name):
                strangers[key.name] += 1
                continue
            metric = metrics.get(key.name)
            if metric is None:
                metric = metrics[key.name] = _metric(key.name, layout.families)
            labels = {name: value for name, value in key.labels if value and not self._drops(name)}
            identity = self._node, self._scope, Series(metric, labels)
            if identity in feeds:
                drops["duplicate"] += 1
            else:
                feeds[identity] = Feed(identity, (Source(((index,),), _AS_IT_IS),))
        return Plan(list(feeds.values()), [], drops, strangers)

    def _drops(self, label: str) -> bool:
        known = self._dropped_labels.get(label)
        if known is None:
            known = any(fnmatchcase(label, pattern) for pattern in self._labels_drop)
            if len(self._dropped_labels) < 4096:  # a hostile page may have any number of names
                self._dropped_labels[label] = known
        return known


def _metric(name: str, families: Mapping[str, Family]) -> Metric:
    family = families.get(name)
    if family is None:  # OpenMetrics names a counter's family without what its samples end in
        base = next((name.removesuffix(end) for end in _COUNTER_SUFFIXES if name.endswith(end)), name)
        family = families.get(base, Family())
        if family.type != "counter" or name.endswith("_created"):
            family = Family("", family.help, family.unit)
    unit = _UNITS.get(family.unit, "")
    if family.type == "counter":
        return Metric(name, unit, family.help, Kind.SUM, Temporality.CUMULATIVE, monotonic=True)
    return Metric(name, unit, family.help)
