from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulens.nvml.protocol import Json
from gpulens.simulator.nvml.build import BuildError, build
from gpulens.simulator.nvml.state import FakeNvml
from tests.nvml.child import Child


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's compiled library is; without a compiler the tests are skipped."""
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
def start(fake: FakeNvml) -> Iterator[Callable[..., Child]]:
    """Starts a child on the fake and waits until it knows the GPUs. GPM windows are as short as they can be."""
    with ExitStack() as stack:

        def begin(*, wait: bool = True, **configure: Json) -> Child:
            settings: dict[str, Json] = {"gpm_window_s": 0.001, **configure}
            child = stack.enter_context(Child(stack.enter_context(fake), **settings))
            if wait:
                child.up()
                child.read("inventory")  # behind it every GPU has its first samples
            return child

        yield begin
