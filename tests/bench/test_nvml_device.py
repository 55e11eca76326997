"""The report of a GPU machine, made on the fake NVML."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.state import FakeNvml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "nvml_device.py"
QUICK = ("--seconds", "0.3", "--rounds", "2", "--pause", "0.15")


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """An H100 at work, and an A100 in two MIG instances."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    made = FakeNvml(tmp_path / "nvml")
    try:
        made.install()
    except BuildError as error:
        pytest.skip(f"needs the fake NVML: {error}")
    gpu = made.add_gpu("H100", serial="1320099990001")
    made.gpm(gpu, {2: 50, 3: 25, 12: 46})
    made.set_mig(made.add_gpu("A100"), ["3g.20gb", "1g.5gb"])
    return made


def started(*args: str) -> subprocess.CompletedProcess[str]:
    """The script, run to its end."""
    command = [sys.executable, str(SCRIPT), *QUICK, *args]
    env = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def report(*args: str) -> str:
    """What the script prints when all goes well."""
    done = started(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_section_is_there(fake: FakeNvml) -> None:
    """Without CUDA the load is missing with its reason; everything else is told, no serial number and no whole UUID."""
    text = report("--library-path", str(fake.folder), "--no-load")
    assert "Not done" not in text
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert len(titles) == 9
    assert "| name | `nvmlDeviceGetName` | NVIDIA H100 80GB HBM3 | NVIDIA A100-SXM4-40GB |" in text
    assert "| `sm` | `gpu.sm.active` | none: unsupported (nvmlGpmQueryDeviceSupport) |" in text  # the instances
    assert re.search(r"\| `sm` \| `gpu\.sm\.active` \| 0\.(5|49999)", text)
    assert re.search(r"`hw\.power\{hw\.id=GPU-[0-9a-f]{4}…", text)
    assert "registered" in text
    assert "1320099990001" not in text
    assert not re.search(r"(GPU|MIG)-[0-9a-f]{8}-", text)


def test_loads_are_held_against_what_they_must_give(fake: FakeNvml, cuda_library: Path) -> None:
    """With half of the SMs at work and GPM saying so the row agrees; with all of them at work it does not."""
    shutil.copy(cuda_library / "libcuda.so.1", fake.folder)
    target = fake.folder / "report.md"
    text = report("--library-path", str(fake.folder), "--output", str(target)) or target.read_text()
    rows = {row.split(" | ")[0].strip("| "): row for row in text.splitlines() if " SMs | " in row}
    half = rows["FP32 multiply-adds on 66 of 132 SMs"]
    assert "50.0 (50.0)" in half
    assert "25.0 (25.0)" in half
    assert "NO: SM active, occupancy" in rows["FP32 multiply-adds on 132 of 132 SMs"]
    assert "GB/s of 3352 GB/s" in text or "reads of a buffer" in text
    assert "the load's among them" in text


def test_a_folder_without_a_library_is_a_mistake(tmp_path: Path) -> None:
    """A folder that was named and holds no library is told in one line, and the script fails."""
    done = started("--library-path", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"--library-path {tmp_path}: there is no libnvidia-ml.so.1 in it\n"


def test_no_driver_is_no_failure() -> None:
    """On a machine without the library the script says so and ends well."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    text = report()
    if "skipped" not in text:
        pytest.skip("this machine has an NVIDIA driver")
    assert "NVML can't be started: driver 12" in text
