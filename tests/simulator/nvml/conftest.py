from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulens.simulator.nvml.build import BuildError, build
from gpulens.simulator.nvml.state import FakeNvml
from tests.simulator.nvml.child import Child


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


@pytest.fixture
def started(fake: FakeNvml) -> Iterator[Callable[[], Child]]:
    """Starts a child on the fake, with the library started and handles named."""
    with ExitStack() as stack:

        def start() -> Child:
            child = stack.enter_context(Child(stack.enter_context(fake)))
            child.start()
            return child

        yield start
