"""Processor time of a steady tick of 5,000 series beside I/O: attributed and encoded, over more and more devices;
then with the page read and converted too.

Run: python bench/tick.py     (the baseline is the first tick, in which nothing is known yet)
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parse import GPUS, NoPages, page
from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import CATALOGUE, MetricScope, metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Resource, Scope, Series, build_layout
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.otlp_compiled import CompiledEncoder
from gpulens.pipeline.scrape_client import PageReader, Reading
from gpulens.pipeline.telemetry import Telemetry
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.join import AttributionProcessor
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper

SERIES = 5_000
TICKS = 60
NS = 10**9
START_NS = 1_700_000_000 * NS
STEPS = ("parse the page", "convert to series", "attribute", "encode as OTLP")


def uuid(gpu: int) -> str:
    """A GPU's UUID, as on the page."""
    return f"GPU-00000000-0000-4000-8000-{gpu:012d}"


def allocations(gpus: int, time_ns: int) -> Batch:
    """A Pod Resources snapshot: every GPU has its own pod."""
    scope, allocated = Scope("gpulens/pod_resources"), metric("gpu.allocated")
    rows = []
    for gpu in range(gpus):
        resource = Resource(
            {
                "k8s.node.name": "n",
                "k8s.namespace.name": "inference",
                "k8s.pod.name": f"worker-{gpu}",
                "k8s.container.name": "main",
            }
        )
        attrs = {"hw.id": uuid(gpu), "gpu.allocation.source": "pod_resources"}
        rows.append((resource, scope, Series(allocated, attrs)))
    layout, _ = build_layout(rows)
    return Batch.of(layout, [1] * layout.size, time_ns, "pod_resources")


class Sink:
    """Encodes what comes out and measures it."""

    def __init__(self) -> None:
        self.encoder = CompiledEncoder()
        self.spent = 0.0

    def consume(self, data: Batch, ack: Ack) -> None:
        """Encodes a batch."""
        begin = time.process_time()
        self.encoder.encode(data)
        self.spent += time.process_time() - begin


def readings(gpus: int, time_ns: int) -> Batch:
    """5,000 readings of work and device metrics over some devices."""
    names = [name for name, entry in CATALOGUE.items() if entry.scope in (MetricScope.WORK, MetricScope.DEVICE)]
    node, scope = Resource({"k8s.node.name": "n"}), Scope("gpulens/nvml")
    rows = [
        (node, scope, Series(metric(names[row % len(names)]), {"hw.id": uuid(gpu), "gpu.pipe": str(row)}))
        for gpu in range(gpus)
        for row in range(SERIES // gpus)
    ]
    layout, _ = build_layout(rows)
    return Batch.of(layout, [1] * layout.size, time_ns, "nvml")


def processor(sink: Sink) -> AttributionProcessor:
    """Attribution with its defaults."""
    settings = Settings(
        ComponentID("attribution"), Kind.PROCESSORS, "n", VirtualClock(), Telemetry(), ComponentLog(), lambda *_: True
    )
    return AttributionProcessor(settings, AttributionConfig(), sink)


def engine(gpus: int) -> tuple[float, float]:
    """(steady, first) ms of a tick from readings and a snapshot to OTLP bytes."""
    sink = Sink()
    join = processor(sink)
    held, read = allocations(gpus, START_NS), readings(gpus, START_NS)
    spent = []
    for tick in range(TICKS):
        now_ns = START_NS + tick * 10 * NS
        begin = time.process_time()
        join.consume(replace(read, time_ns=now_ns), Ack())
        join.consume(replace(held, time_ns=now_ns + NS), Ack())
        spent.append(1e3 * (time.process_time() - begin))
    return sorted(spent[10:])[len(spent[10:]) // 2], spent[1]


def measure() -> tuple[int, dict[str, list[float]]]:
    """Series of a tick, and seconds of each step for each tick."""
    config = DcgmConfig(endpoint="http://127.0.0.1:9400")
    parser, sink = PageParser(), Sink()
    scraper = DcgmScraper(PageReader(NoPages(), parser), config, "n", "dcgm", ComponentLog())
    join = processor(sink)
    spent: dict[str, list[float]] = defaultdict(list)
    held = allocations(GPUS, START_NS)
    series = 0
    for tick in range(TICKS):
        now_ns = START_NS + (tick + 1) * 10 * NS
        body = page(tick)
        marks = [time.process_time()]
        read = parser.parse(body)
        marks.append(time.process_time())
        batch = scraper.convert(Reading(read, 0.0, ""), now_ns).batch
        marks.append(time.process_time())
        sink.spent = 0.0
        join.consume(batch, Ack())
        join.consume(Batch(held.layout, held.values, now_ns + NS, held.stream, True), Ack())
        marks.append(time.process_time() - sink.spent)
        series = batch.layout.size
        for step, begin, end in zip(STEPS, marks, marks[1:], strict=False):
            spent[step].append(end - begin)
        spent[STEPS[-1]].append(sink.spent)
    return series, spent


def main() -> None:
    """Prints the tables."""
    print(f"| {SERIES} series on | steady tick, ms | first, ms | first / steady |\n| --- | --- | --- | --- |")
    for gpus in (8, 56, 200):
        quick, slow = engine(gpus)
        print(f"| {gpus} devices of {gpus} pods | {quick:.2f} | {slow:.1f} | {slow / quick:.0f} |")
    print()
    series, spent = measure()
    steady = {step: 1e3 * sorted(times[10:])[len(times[10:]) // 2] for step, times in spent.items()}
    first = {step: 1e3 * times[0] for step, times in spent.items()}
    print(f"| step of a tick ({series} series) | steady, ms | first, ms | first / steady |\n| --- | --- | --- | --- |")
    for step in STEPS:
        print(f"| {step} | {steady[step]:.2f} | {first[step]:.1f} | {first[step] / max(steady[step], 1e-6):.0f} |")
    total, total_first = sum(steady.values()), sum(first.values())
    print(f"| all | {total:.2f} | {total_first:.1f} | {total_first / total:.0f} |")


if __name__ == "__main__":
    main()
