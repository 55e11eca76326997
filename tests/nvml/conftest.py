from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gpulens.nvml.protocol import Json
from gpulens.simulator.nvml.state import FakeNvml
from tests.nvml.child import Child
from tests.simulator.nvml.fixtures import cache, fake

__all__ = ["cache", "fake", "start"]


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
