"""The fake NVML as fixtures, for every folder of tests that asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulens.simulator.nvml.build import BuildError, build
from gpulens.simulator.nvml.state import FakeNvml


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's one compiled library is; without a compiler the tests are skipped."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    folder = tmp_path_factory.mktemp("fake-nvml")
    try:
        build(folder / "probe", cache=folder)
    except BuildError as error:
        pytest.skip(f"needs the fake NVML: {error}")
    return folder


@pytest.fixture
def fake(cache: Path, tmp_path: Path) -> FakeNvml:
    """An empty machine whose clock stands still at second 1000."""
    made = FakeNvml(tmp_path / "nvml", clock_s=1000.0)
    made.install(cache=cache)
    return made
