"""What reading eight H100s by NVML costs: the agent, the child process that owns NVML, and how fast it answers.

Run: python bench/nvml.py     (on the fake NVML library, which needs a C compiler and nvidia-ml-py)
The measures are what else could be done with the same GPUs in the same run: the bare calls by a loop over pynvml, and
the parse of a dcgm-exporter page.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device import nvml_child, receiver
from bench.parse import NoPages, page
from gpulens.nvml.protocol import Tier
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scrape_client import PageReader, Reading
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper
from gpulens.simulator.nvml.build import LIBRARY, BuildError
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess

GPUS = 8
CHILD_TICKS = 8
CHILD_PAUSE_S = 1.05  # longer than the shortest GPM window
AGENT_TICKS = 40
AGENT_INTERVAL_S = 0.2
WARM_TICKS = 5
PEER_ROUNDS = 30
PEER_PAUSE_S = 0.12  # GPM has no shorter window than 0.1 s; and every row here is measured after a rest
MEMORY_V2 = 0x02000028
SUPPORT = "nvmlGpmQueryDeviceSupport"
CALLS: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetMigMode",),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetEncoderUtilization",),
    ("nvmlDeviceGetDecoderUtilization",),
    ("nvmlDeviceGetJpgUtilization",),
    ("nvmlDeviceGetOfaUtilization",),
    ("nvmlDeviceGetMemoryInfo", MEMORY_V2),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetEnforcedPowerLimit",),
    ("nvmlDeviceGetTotalEnergyConsumption",),
    ("nvmlDeviceGetTemperatureV", 0),
    ("nvmlDeviceGetFieldValues", [82]),
    ("nvmlDeviceGetMarginTemperature",),
    ("nvmlDeviceGetClockInfo", 1),
    ("nvmlDeviceGetClockInfo", 2),
    ("nvmlDeviceGetClockInfo", 3),
    ("nvmlDeviceGetFieldValues", [74, 75, 76, 77, 78, 79]),
    ("nvmlDeviceGetCurrentClocksEventReasons",),
)
GPM_METRICS = (1, 2, 3, 5, 10, 11, 12, 13)


def node(folder: Path) -> FakeNvml:
    """Eight H100s at work, a process on each. Raises BuildError."""
    fake = FakeNvml(folder)
    fake.install()
    with fake.batch():
        for minor in range(GPUS):
            gpu = fake.add_gpu("H100", minor=minor)
            fake.set(gpu, {"utilization.gpu": 97, "utilization.memory": 40, "memory.used": 2**36})
            fake.count(gpu, {"energy_mj": 500_000, "violation.0": 1e6})
            fake.gpm(gpu, {1: 97, 2: 62, 3: 21, 5: 33, 10: 40, 12: 4})
            fake.processes(gpu, [FakeProcess(os.getpid(), 2**36, sm=97)])
    return fake


class Bare:
    """A loop over pynvml that asks what the fast tier asks (`calls`), and throws the answers away."""

    def __init__(self, library: Path, calls: Iterable[str]) -> None:
        asked = {name.partition("_v")[0] for name in calls}
        self._calls = [(name, args) for name, *args in CALLS if name in asked]
        self._asks_support = SUPPORT in asked
        ctypes.CDLL(str(library))  # the loader gives this one to whoever asks by its name
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(self._nvml.nvmlDeviceGetCount())]
        self._samples = [[self._nvml.nvmlGpmSampleAlloc(), self._nvml.nvmlGpmSampleAlloc()] for _ in self._gpus]
        self._newest_us = [0] * len(self._gpus)
        self._window = self._nvml.c_nvmlGpmMetricsGet_t()
        for gpu, (sample, _) in zip(self._gpus, self._samples, strict=True):
            self._nvml.nvmlGpmSampleGet(gpu, sample)

    def round(self) -> None:
        """One reading of every GPU."""
        for place, gpu in enumerate(self._gpus):
            for name, args in self._calls:
                getattr(self._nvml, name)(gpu, *args)
            self._newest_us[place] = _history(self._nvml, gpu, self._newest_us[place])
            self._measure(gpu, *self._samples[place])
            self._samples[place].reverse()

    def _measure(self, gpu: object, first: object, second: object) -> None:
        nvml, window = self._nvml, self._window
        if self._asks_support and not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            return
        nvml.nvmlGpmSampleGet(gpu, second)
        window.version, window.numMetrics = 1, len(GPM_METRICS)
        window.sample1, window.sample2 = first, second
        for place, metric in enumerate(GPM_METRICS):
            window.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(window)

    def close(self) -> None:
        """Shuts NVML down in this process."""
        for pair in self._samples:
            for sample in pair:
                self._nvml.nvmlGpmSampleFree(sample)
        self._nvml.nvmlShutdown()


def _history(nvml: ModuleType, gpu: object, newest_us: int) -> int:
    try:
        _, samples = nvml.nvmlDeviceGetSamples(gpu, 1, newest_us)
    except nvml.NVMLError:
        return newest_us  # none newer
    return max((int(sample.timeStamp) for sample in samples), default=newest_us)


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds of processor time of the median round."""
    spent = []
    for _ in range(rounds):
        time.sleep(PEER_PAUSE_S)
        begin = time.process_time_ns()
        work()
        spent.append(time.process_time_ns() - begin)
    return statistics.median(spent) / 1e6


def exporter_page() -> Callable[[], object]:
    """Reads and converts a dcgm-exporter page of as many GPUs, known from before; other values each time."""
    parser = PageParser()
    config = DcgmConfig(endpoint="http://127.0.0.1:9400")
    scraper = DcgmScraper(PageReader(NoPages(), parser), config, "n", "dcgm", ComponentLog())
    wanted = tuple(f'gpu="{gpu}",'.encode() for gpu in range(GPUS))
    pages = [
        b"".join(
            row for row in page(tick).splitlines(keepends=True) if row[:1] == b"#" or any(w in row for w in wanted)
        )
        for tick in range(8)
    ]
    ticks = iter(range(1, 1_000_000))

    def read() -> None:
        tick = next(ticks)
        scraper.convert(Reading(parser.parse(pages[tick % len(pages)]), 0.0, ""), 10**18 + tick * 10**10)

    read()
    return read


def calls_of_a_tick(fake: FakeNvml) -> Counter[str]:
    """What the child asks the library for in one steady reading of the fast tier."""
    with fake as environment, nvml_child.running(environment) as child:
        for _ in range(2):
            child.read(Tier.FAST)
            time.sleep(CHILD_PAUSE_S)
        before = Counter(name for _, _, name, _ in fake.calls())
        child.read(Tier.FAST)
        after = Counter(name for _, _, name, _ in fake.calls())
    after.subtract(before)
    return Counter({name: count for name, count in after.items() if count > 0 and "EventSet" not in name})


def child_costs(fake: FakeNvml) -> tuple[float, list[nvml_child.Cost]]:
    """(ms of CPU a second while nobody asks, each tier), without the call log, which would cost more than the calls."""
    with fake as environment:
        quiet = {key: value for key, value in environment.items() if key != "FAKE_NVML_LOG"}
        with nvml_child.running(quiet) as child:
            idle_ms = nvml_child.idle_cpu_ms(child, 2.0)
            others = [nvml_child.measure(child, tier, 5, 0.1) for tier in Tier if tier is not Tier.FAST]
            return idle_ms, [nvml_child.measure(child, Tier.FAST, CHILD_TICKS, CHILD_PAUSE_S), *others]


def main() -> None:
    """Prints the tables."""
    if importlib.util.find_spec("pynvml") is None:
        print("skipped: nvidia-ml-py is not installed (pip install '.[nvidia]')")
        return
    with tempfile.TemporaryDirectory(prefix="gpulens-bench-") as name:
        try:
            fake = node(Path(name))
        except BuildError as error:
            print(f"skipped: {error}")
            return
        measure(fake)


def measure(fake: FakeNvml) -> None:
    """Everything on this node."""
    calls = calls_of_a_tick(fake)
    idle_ms, costs = child_costs(fake)
    found = receiver.collect(AGENT_TICKS, AGENT_INTERVAL_S, all_tiers=False, folder=str(fake.folder))
    agent_ms = found.cpu_ms(WARM_TICKS)
    bare = Bare(fake.folder / LIBRARY, calls)
    try:
        bare_ms = cpu_ms(bare.round, PEER_ROUNDS)
    finally:
        bare.close()
    page_ms = cpu_ms(exporter_page(), PEER_ROUNDS)
    fast = costs[0]
    points = found.batches["nvml"][-1].layout.size
    rows = (
        (f"the agent: {points} series from the child's answers, emitted", agent_ms, "2 ms"),
        (
            f"the child: {sum(calls.values())} calls of the library, {fast.series} values told",
            fast.cpu_ms - idle_ms * CHILD_PAUSE_S,
            "",
        ),
        ("the calls alone, by a loop over pynvml", bare_ms, ""),
        (f"a dcgm-exporter page of {GPUS} GPUs, parsed and converted by the agent", page_ms, ""),
    )
    print(f"A reading of the fast tier of {GPUS} H100s (fake NVML), processor time\n")
    print("| what | ms | x bare calls | bar |\n| --- | --- | --- | --- |")
    for what, cost, bar in rows:
        print(f"| {what} | {cost:.2f} | {cost / bare_ms:.1f} | {bar} |")
    print("\n| tier | values | median answer, ms | slowest, ms |\n| --- | --- | --- | --- |")
    for tier in costs:
        print(f"| {tier.tier} | {tier.values} | {tier.median_ms:.1f} | {tier.worst_ms:.1f} |")
    heaviest = max(tier.private_bytes for tier in costs)
    print(f"\nThe child's private memory: {heaviest / 2**20:.1f} MiB (bar: 20 MiB).")
    print(f"Taken off above: {idle_ms:.1f} ms of processor time a second in which nobody asks. Nearly all of it is the")
    print("fake's, which looks at its state file while events are waited for.")


if __name__ == "__main__":
    main()
