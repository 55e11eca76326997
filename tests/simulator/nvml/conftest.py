from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gpulens.simulator.nvml.state import FakeNvml
from tests.simulator.nvml.child import Child
from tests.simulator.nvml.fixtures import cache, fake

__all__ = ["cache", "fake", "started"]


@pytest.fixture
def started(fake: FakeNvml) -> Iterator[Callable[[], Child]]:
    """Starts a child on the fake, with the library started and handles named."""
    with ExitStack() as stack:

        def start() -> Child:
            child = stack.enter_context(Child(stack.enter_context(fake)))
            child.start()
            return child

        yield start
