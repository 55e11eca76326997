"""A compiled fake CUDA driver for the tests of the known load."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpulens.simulator.nvml.build import compiler


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fake libcuda.so.1; without a compiler the tests are skipped."""
    program = compiler()
    if program is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    command = [program, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return folder
