"""The agent's own counters: what was taken, sent, dropped and refused, by component and reason.

Invariant: counting never fails and never allocates per point; names are the Collector's where it has one
(`otelcol_exporter_sent_metric_points` and so on), so existing dashboards find them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

LabelSet = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Telemetry:
    """Counters and gauges by (name, labels). Gauges are read when asked."""

    counters: Counter[tuple[str, LabelSet]] = field(default_factory=Counter)
    gauges: dict[tuple[str, LabelSet], Callable[[], float]] = field(default_factory=dict)

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Adds to a counter."""
        self.counters[name, tuple(sorted(labels.items()))] += amount

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Registers a gauge; a later one of the same name and labels replaces it."""
        self.gauges[name, tuple(sorted(labels.items()))] = read

    def value(self, name: str, **labels: str) -> int:
        """A counter's value, summed over the labels that are not given."""
        wanted = set(labels.items())
        return sum(n for (key, have), n in self.counters.items() if key == name and wanted <= set(have))

    def read(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Everything, as (name, labels, value)."""
        for (name, labels), count in self.counters.items():
            yield name, dict(labels), count
        for (name, labels), gauge in self.gauges.items():
            yield name, dict(labels), gauge()
