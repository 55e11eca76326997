"""Processor time of a 5,000-line dcgm-exporter page: parsed cold, warm, changed and reordered, and converted.

Run: python bench/parse.py     (with prometheus_client installed its parser is measured too)
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.scrape_client import Body, PageReader, Reading
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper

GPUS = 200  # 25 fields x 200 entities = 5,000 lines
FIELDS = (
    "DEV_SM_CLOCK",
    "DEV_MEM_CLOCK",
    "DEV_MEMORY_TEMP",
    "DEV_GPU_TEMP",
    "DEV_POWER_USAGE",
    "DEV_TOTAL_ENERGY_CONSUMPTION",
    "DEV_PCIE_REPLAY_COUNTER",
    "DEV_GPU_UTIL",
    "DEV_MEM_COPY_UTIL",
    "DEV_ENC_UTIL",
    "DEV_DEC_UTIL",
    "DEV_XID_ERRORS",
    "DEV_FB_FREE",
    "DEV_FB_USED",
    "DEV_FB_RESERVED",
    "DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DEV_CORRECTABLE_REMAPPED_ROWS",
    "DEV_ROW_REMAP_FAILURE",
    "DEV_NVLINK_BANDWIDTH_TOTAL",
    "PROF_GR_ENGINE_ACTIVE",
    "PROF_PIPE_TENSOR_ACTIVE",
    "PROF_DRAM_ACTIVE",
    "PROF_PCIE_TX_BYTES",
    "PROF_PCIE_RX_BYTES",
    "PROF_SM_ACTIVE",
)
ROUNDS = 40


def page(tick: int, pod: str = "0") -> bytes:
    """The page at one tick; `pod` names the pod of the first GPU."""
    return ("\n".join(_lines(tick, pod)) + "\n").encode()


def _lines(tick: int, pod: str) -> Iterator[str]:
    for field in FIELDS:
        yield f"# HELP DCGM_FI_{field} What the exporter says about it.\n# TYPE DCGM_FI_{field} gauge"
        for gpu in range(GPUS):
            number: object = (gpu * 7 + tick * 3) % 100
            if field.endswith("ACTIVE"):
                number = f"{(gpu * 7 + tick * 3) % 100 / 100:.6f}"
            elif field.endswith("CONSUMPTION"):
                number = 1_000_000_000 + 1_000 * tick + gpu
            elif field.endswith("FAILURE"):
                number = 0
            owner = pod if gpu == 0 else str(gpu)
            yield (
                f'DCGM_FI_{field}{{gpu="{gpu}",UUID="GPU-00000000-0000-4000-8000-{gpu:012d}",'
                f'pci_bus_id="00000000:53:00.0",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",'
                f'Hostname="gpu-node-1",DCGM_FI_DRIVER_VERSION="580.105.08",container="main",'
                f'namespace="inference",pod="worker-{owner}",pod_uid=""}} {number}'
            )


class NoPages:
    """The pages are handed in."""

    async def fetch(self) -> Body:
        """Is never asked."""
        raise AssertionError("no page is fetched here")

    async def close(self) -> None:
        """Nothing to close."""


def best(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds of processor time of the quickest round."""
    spent = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return 1e3 * min(spent)


def measure() -> dict[str, float]:
    """What each way of meeting the page costs, in ms."""
    bodies = cycle([page(tick) for tick in range(8)])
    warm = PageParser()
    warm.parse(next(bodies))
    result = {
        "cold": best(lambda: PageParser().parse(next(bodies)), 5),
        "warm: new values only": best(lambda: warm.parse(next(bodies)), ROUNDS),
    }
    pods = iter(range(1_000_000))
    changed = [page(0, f"other-{next(pods)}") for _ in range(10)]
    result["one pod changed (25 lines)"] = best(lambda: warm.parse(changed.pop()), 10)
    lines = page(0).split(b"\n")[:-1]
    orders = [b"\n".join(random.Random(seed).sample(lines, len(lines))) + b"\n" for seed in range(10)]
    result["lines in another order"] = best(lambda: warm.parse(orders.pop()), 10)
    scraper = DcgmScraper(
        PageReader(NoPages(), warm), DcgmConfig(endpoint="http://127.0.0.1:9400"), "n", "dcgm", ComponentLog()
    )
    pages = cycle([warm.parse(page(tick)) for tick in range(8)])
    ticks = iter(range(1, 1_000_000))

    def convert() -> None:
        scraper.convert(Reading(next(pages), 0.0, ""), 10**18 + next(ticks) * 10**10)

    convert()
    result["into a batch of canonical series"] = best(convert, ROUNDS)
    return result


def peer() -> float | None:
    """prometheus_client's parser on the same page, in ms; None where it is not installed."""
    try:
        parser = importlib.import_module("prometheus_client.parser")
    except ImportError:
        return None
    text = page(0).decode()
    return best(lambda: [*parser.text_string_to_metric_families(text)], 3)


def main() -> None:
    """Prints the table."""
    body = page(0)
    print(f"A page of {len(FIELDS) * GPUS} samples, {len(body) / 1e6:.1f} MB\n")
    costs = measure()
    warm = costs["warm: new values only"]
    other = peer()
    if other is not None:
        costs["prometheus_client's parser"] = other
    print("| what | ms | x warm |\n| --- | --- | --- |")
    for what, cost in costs.items():
        print(f"| {what} | {cost:.2f} | {cost / warm:.1f} |")
    if other is None:
        print("\nprometheus_client is not installed, so it was not measured.")


if __name__ == "__main__":
    main()
