"""The table against the catalogue, and the child's weight."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gpulens.nvml.protocol import Tier
from gpulens.nvml.sight import Level
from gpulens.nvml.table import BY_KEY, BY_TIER, ROWS, Presence
from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.nvml.child import REPO, Child

_MEBIBYTE_KB = 1024


def test_every_row_is_a_catalogued_series_and_stands_once() -> None:
    """Metric and attributes are the catalogue's; no two rows are one series of a device."""
    for row in ROWS:
        assert row.metric in CATALOGUE, row.key
        assert {key for key, _ in row.attributes} <= set(CATALOGUE[row.metric].attributes), row.key
    assert max(Counter((row.metric, row.attributes) for row in ROWS).values()) == 1
    assert len(BY_KEY) == len(ROWS)
    assert sum(len(rows) for rows in BY_TIER.values()) == len(ROWS)
    assert set(BY_TIER) == set(Tier)


def test_work_is_never_a_parents() -> None:
    """What the catalogue calls work is of a whole GPU or of instances; memory alone is told of a parent too."""
    for row in ROWS:
        if CATALOGUE[row.metric].scope.value == "work" and "memory" not in row.key:
            assert not row.level & Level.PARENT, row.key


def test_what_comes_with_its_first_number_goes_again_unless_it_counts() -> None:
    """Sparse counters stay for good, sparse flags and gauges do not; only counters can be kept on the card."""
    for row in ROWS:
        counter = CATALOGUE[row.metric].metric.is_counter
        assert not row.sparse or (row.presence is Presence.COUNTED) == counter, row.key
        assert counter or not row.lasting, row.key
    assert {row.key for row in ROWS if row.lasting} == {
        "errors.ecc_aggregate.corrected", "errors.ecc_aggregate.uncorrected", "rows.corrected", "rows.uncorrected",
        "pages.corrected", "pages.uncorrected",
    }  # fmt: skip


def test_idle_is_no_throttling() -> None:
    """Bit 1 of the clock reasons is normal and has no row."""
    reasons = {value for row in ROWS for key, value in row.attributes if key == "gpu.clock.reason"}
    assert reasons == {"application_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal",
                       "hw_power_brake", "display_clock"}  # fmt: skip


def test_importing_the_child_loads_no_binding_and_nothing_heavy() -> None:
    """The parent imports the table without nvidia-ml-py; the child needs neither the pipeline nor a loop."""
    code = (
        "import sys, gpulens.nvml.table, gpulens.nvml.agent;"
        "print([n for n in ('pynvml', 'asyncio', 'pydantic', 'logging', 'aiohttp', 'gpulens.pipeline')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "[]"


def test_the_child_is_small(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """With eight H100s read in every tier the child's own memory stays below 20 MiB."""
    gpus = [fake.add_gpu("H100") for _ in range(8)]
    for gpu in gpus:
        fake.processes(gpu, [FakeProcess(4000 + n, 1 << 30, sm=10) for n in range(4)])
    child = start()
    for _ in range(3):
        fake.advance(2)
        for tier in Tier:
            child.read(tier)
    lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    assert (sizes["Private_Clean"] + sizes["Private_Dirty"]) <= 20 * _MEBIBYTE_KB
