"""How long the `prometheus` exporter takes for a page of 5,000 series whose numbers are new at each tick."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from gpulens.exporters.prometheus.latest import Held
from gpulens.exporters.prometheus.page import PageWriter
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.prometheus_names import LabelRules

PODS, SERIES = 50, 100
ROUNDS = 30


def build_layout(churned: int = -1) -> Layout:
    """5,000 series in 50 blocks; `churned` is the pod that has another name."""
    names = ("hw.gpu.utilization", "hw.gpu.memory.usage", "gpu.sm.active", "gpu.pipe.active", "hw.power")
    blocks = []
    for pod in range(PODS):
        name = f"pod-{pod}-new" if pod == churned else f"pod-{pod}"
        resource = Resource({"k8s.namespace.name": "ml", "k8s.pod.name": name, "k8s.node.name": "node"})
        series = [
            Series(
                metric(names[i % len(names)]),
                {"hw.id": f"GPU-{pod}-{i // len(names)}", "hw.model": "NVIDIA H100"},
            )
            for i in range(SERIES)
        ]
        blocks.append(Block(resource, Scope("gpulens"), series))
    return Layout(blocks)


def tick(layout: Layout, order: int) -> Held:
    """New numbers on a layout."""
    values = [random.getrandbits(34) if is_int else random.random() for is_int in layout.is_int]
    return Held(Batch.of(layout, values, 10**18 + order, "bench"), order, 0.0, b"")


def measured(held: Callable[[int], Held], writer: Callable[[], PageWriter], open_metrics: bool) -> tuple[float, int]:
    """The median time of a page in ms and its size in bytes."""
    times, size = [], 0
    for order in range(ROUNDS):
        part, pages = held(order), writer()
        begin = time.perf_counter()
        text = pages.write([part], open_metrics).text
        times.append(time.perf_counter() - begin)
        size = len(text)
    return statistics.median(times) * 1000, size


def main() -> None:
    """Prints the table."""
    rules = LabelRules()
    layout = build_layout()
    steady, churning = PageWriter("", rules, False), PageWriter("", rules, False)
    churned = [build_layout(pod) for pod in range(ROUNDS)]
    steady.write([tick(layout, 0)], False)
    steady.write([tick(layout, 0)], True)
    churning.write([tick(layout, 0)], False)
    cases = {
        "steady, text": measured(lambda n: tick(layout, n), lambda: steady, False),
        "steady, OpenMetrics": measured(lambda n: tick(layout, n), lambda: steady, True),
        "one pod of 50 changes": measured(lambda n: tick(churned[n], n), lambda: churning, False),
        "all new": measured(lambda n: tick(layout, n), lambda: PageWriter("", rules, False), False),
    }
    print(f"| page of {layout.size} series | ms (median of {ROUNDS}) | KiB |\n| --- | --- | --- |")
    for name, (ms, size) in cases.items():
        print(f"| {name} | {ms:.1f} | {size / 1024:.0f} |")


if __name__ == "__main__":
    main()
