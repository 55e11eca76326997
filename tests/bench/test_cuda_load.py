"""The known load under a fake CUDA driver: what it asks for, and what it says when CUDA says no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.device.cuda_load import FMA, FMA_ROUNDS, KINDS, STREAM, TENSOR

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "device" / "cuda_load.py"

Run = Callable[..., list[dict[str, object]]]


@pytest.fixture
def run(cuda_library: Path, tmp_path: Path) -> Run:
    """Runs the load and gives what it printed."""

    def start(*args: str, **environment: str) -> list[dict[str, object]]:
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(cuda_library),
            "FAKE_CUDA_LOG": str(tmp_path / "log"),
            **environment,
        }
        command = [sys.executable, str(SCRIPT), *args]
        done = subprocess.run(
            command, env=env, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=30, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return start


def calls(tmp_path: Path, name: str) -> list[list[str]]:
    """The arguments of each call of this name."""
    rows = (line.split() for line in (tmp_path / "log").read_text().splitlines())
    return [row[1:] for row in rows if row[0] == name]


@pytest.mark.parametrize(("share", "blocks"), [("1", 132), ("0.5", 66), ("0", 1)])
def test_a_share_is_so_many_blocks(run: Run, tmp_path: Path, share: str, blocks: int) -> None:
    """Half of 132 SMs are 66 blocks of 1,024 threads, none is one block; the kernel is told its rounds."""
    ready, done = run("--kind", "fma", "--share", share, "--seconds", "0")
    assert ready["event"] == "ready"
    assert (ready["multiprocessors"], ready["blocks"], ready["threads_per_multiprocessor"]) == (132, blocks, 2048)
    assert calls(tmp_path, "cuModuleGetFunction") == [["fma"]]
    assert calls(tmp_path, "cuLaunchKernel")[0] == [str(blocks), "1024", str(FMA_ROUNDS)]
    assert done["event"] == "done"
    assert len(calls(tmp_path, "cuDevicePrimaryCtxRelease_v2")) == 1


def test_work_is_counted(run: Run, tmp_path: Path) -> None:
    """Every launch but the first is in the sums: threads x rounds x 64 operations."""
    _, done = run("--kind", "fma", "--seconds", "0.05")
    launches = len(calls(tmp_path, "cuLaunchKernel")) - 1
    assert done["launches"] == launches
    assert done["operations"] == launches * 132 * 1024 * FMA_ROUNDS * 64


def test_the_stream_reads_all_of_its_buffer(run: Run, tmp_path: Path) -> None:
    """1 GiB where enough is free; the kernel gets its address and its length in vectors of 16 bytes."""
    _, done = run("--kind", "stream", "--seconds", "0.05")
    assert calls(tmp_path, "cuMemAlloc_v2") == [["256"], [str(2**30)]]
    assert calls(tmp_path, "cuMemsetD32_v2") == [["1", str(2**28)]]
    assert calls(tmp_path, "cuLaunchKernel")[0] == ["264", "1024", "7f0000100000", str(2**26)]
    launches = done["launches"]
    assert isinstance(launches, int)
    assert launches > 0
    assert done["bytes"] == launches * 2**30


def test_a_refusal_is_said_and_the_context_let_go(run: Run, tmp_path: Path) -> None:
    """A kernel that can't be compiled ends in a reason by CUDA's own words."""
    (only,) = run("--kind", "tensor", FAKE_CUDA_FAIL="cuModuleLoadData")
    assert only["event"] == "none"
    assert "cuModuleLoadData failed with 218: a PTX JIT compilation failed" in str(only["reason"])
    assert len(calls(tmp_path, "cuDevicePrimaryCtxRelease_v2")) == 1


def test_no_cuda_is_no_error(run: Run, tmp_path: Path) -> None:
    """Without the library the load says so."""
    (only,) = run("--seconds", "0", LD_LIBRARY_PATH=str(tmp_path))
    if only["event"] == "ready":
        pytest.skip("this machine has CUDA")
    assert "libcuda.so.1" in str(only["reason"])


def test_the_end_of_its_input_ends_it(run: Run) -> None:
    """A load whose parent is gone does not go on."""
    _, done = run("--kind", "fma", "--seconds", "20", "--until-eof")
    assert isinstance(done["seconds"], float)
    assert done["seconds"] < 10


@pytest.mark.parametrize(
    ("kind", "text", "multiplies"), [("fma", FMA, 32), ("stream", STREAM, 0), ("tensor", TENSOR, 4)]
)
def test_the_kernels_are_whole(kind: str, text: str, multiplies: int) -> None:
    """Each has its entry, its braces close, every label that it jumps to is there, and it works as much as is said."""
    assert kind in KINDS
    assert f".visible .entry {kind}(" in text
    assert text.count("{") == text.count("}")
    for label in {line.split("bra ")[1].rstrip(";") for line in text.splitlines() if "bra " in line}:
        assert f"{label}:" in text
    assert text.count("fma.rn.f32 ") + text.count("mma.sync") == multiplies
