"""Event time: the watermark and the grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline import grid as grid_module
from gpulens.pipeline.grid import NS, Grid, Watermark


def test_the_watermark_follows_the_newest_event_at_a_distance() -> None:
    """It moves with newer events only and never back; before the first event it is 0."""
    mark = Watermark(2 * NS)
    assert mark.ns == 0
    assert [mark.observe(t * NS) for t in (10, 9, 10, 12)] == [True, False, False, True]
    assert (mark.latest_ns, mark.ns) == (12 * NS, 10 * NS)


def test_late_is_older_than_the_watermark() -> None:
    """A point at the watermark is still in time."""
    mark = Watermark(2 * NS)
    mark.observe(12 * NS)
    assert [mark.is_late(t) for t in (10 * NS - 1, 10 * NS, 11 * NS)] == [True, False, False]


def test_an_event_before_the_lateness_gives_no_negative_watermark() -> None:
    """Times near 1970 stay at 0."""
    mark = Watermark(2 * NS)
    mark.observe(NS)
    assert mark.ns == 0


@given(st.lists(st.integers(-30, 200), min_size=1, max_size=50), st.integers(1, 7))
def test_each_instant_is_handed_out_once_and_in_order(moves: list[int], step: int) -> None:
    """However the watermark moves, the instants are the multiples of the step from the first event to the watermark,
    each once, ascending."""
    grid = Grid(step, limit=10_000)
    first = 1000
    grid.start(first)
    mark, highest = first, 0
    seen: list[int] = []
    for move in moves:
        mark += move
        highest = max(highest, mark)
        seen.extend(grid.due(mark))
    begin = -(-first // step) * step
    assert seen == list(range(begin, highest + 1, step))
    assert grid.skipped == 0


def test_nothing_is_due_before_the_first_event() -> None:
    """Without an event there is no grid, and later starts do not move it."""
    grid = Grid(10)
    assert list(grid.due(10**6)) == []
    grid.start(95)
    grid.start(5)
    assert list(grid.due(120)) == [100, 110, 120]


def test_an_event_on_the_grid_is_its_first_instant() -> None:
    """The grid is aligned to the epoch, and an instant that the first event hits counts."""
    grid = Grid(10)
    grid.start(100)
    assert list(grid.due(100)) == [100]
    assert list(grid.due(109)) == []


def test_a_jump_hands_out_only_the_last_instants() -> None:
    """A hole of ten years costs `limit` instants, and the others are counted."""
    grid = Grid(10, limit=3)
    grid.start(0)
    assert list(grid.due(10**12)) == [10**12 - 20, 10**12 - 10, 10**12]
    assert grid.skipped == 10**11 + 1 - 3
    assert list(grid.due(10**12 + 10)) == [10**12 + 10]


@pytest.mark.parametrize("step", [0, -10])
def test_a_step_must_be_above_zero(step: int) -> None:
    """A grid without a step would never end."""
    with pytest.raises(ValueError, match="above 0"):
        Grid(step)


def test_event_time_knows_no_clock() -> None:
    """The module has no way to look at a clock: replays must pass the same instants at the same places."""
    assert not {"time", "datetime", "asyncio", "Clock"} & set(vars(grid_module))
