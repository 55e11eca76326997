"""Counters: no step back under one start, resets, changes of source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.counters import RESET_GAP_NS, CounterPoint, CounterStarts
from gpulens.pipeline.data import Value

MS = 1_000_000
S = 1_000_000_000


def observe(
    starts: CounterStarts[str], raw: Value, time_s: float, source: str = "", start_s: float | None = None
) -> CounterPoint | None:
    """One observation of the key "k", in seconds."""
    return starts.observe("k", raw, round(time_s * S), None if start_s is None else round(start_s * S), source)


def taken(point: CounterPoint | None) -> CounterPoint:
    """The point of an observation that was not refused."""
    assert point is not None
    return point


@dataclass(frozen=True)
class Step:
    raw: Value
    gap_ns: int
    source: str


def steps(raw: st.SearchStrategy[Value]) -> st.SearchStrategy[list[Step]]:
    """Histories of one counter: any totals, any gaps (also none, backwards and within a reset's gap), two sources."""
    gaps = st.sampled_from([-S, 0, 1, MS - 1, MS, MS + 1, S, 10 * S])
    return st.lists(st.builds(Step, raw, gaps, st.sampled_from(["a", "a", "a", "b"])), max_size=40)


def play(history: list[Step]) -> list[CounterPoint]:
    """What a history gives, without what was refused."""
    starts: CounterStarts[str] = CounterStarts()
    now = 1000 * S
    points = []
    for step in history:
        now += step.gap_ns
        point = starts.observe("k", step.raw, now, None, step.source)
        if point is not None:
            assert point.time_ns == now
            points.append(point)
    return points


INTS = st.integers(0, 2**63 - 1) | st.integers(0, 3)
FLOATS = st.floats(0, allow_nan=False, allow_infinity=False, max_value=1e300) | st.sampled_from([0.0, 0.1, 0.2, 0.3])


@given(steps(INTS))
def test_integer_counters_never_step_back_under_one_start(history: list[Step]) -> None:
    """Value and since_first only grow while the start stays; ints stay ints; times and starts are ordered."""
    check(play(history))


@given(steps(FLOATS))
def test_real_counters_never_step_back_under_one_start(history: list[Step]) -> None:
    """As with ints, rounding included."""
    check(play(history))


def check(points: list[CounterPoint]) -> None:
    """What holds of every output sequence of one counter."""
    for point in points:
        assert point.start_ns <= point.time_ns
        assert point.since_first >= 0
        assert type(point.value) is type(points[0].value)
    for before, after in pairwise(points):
        assert after.time_ns > before.time_ns
        if after.start_ns == before.start_ns:
            assert after.value >= before.value
            assert after.since_first >= before.since_first
            scale = max(1, abs(after.value))
            assert after.since_first - before.since_first == pytest.approx(after.value - before.value, abs=1e-9 * scale)
        else:
            assert before.time_ns + RESET_GAP_NS == after.start_ns < after.time_ns
            assert after.since_first == after.value


@given(st.lists(INTS, min_size=1, max_size=20) | st.lists(FLOATS, min_size=1, max_size=20))
def test_raw_totals_of_one_source_pass_as_they_are_read(raws: list[Value]) -> None:
    """With one source the value is always the raw total, to the last bit, after resets too; ints stay ints."""
    points = play([Step(raw, S, "a") for raw in raws])
    assert [point.value for point in points] == raws
    assert all(type(point.value) is type(raw) for point, raw in zip(points, raws, strict=True))
    assert isinstance(raws[0], float) or all(type(point.since_first) is int for point in points)


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from("ab")), min_size=1, max_size=30))
def test_sources_that_only_grow_share_one_start(grown: list[tuple[int, str]]) -> None:
    """While no source falls there is one start, and the value is the first total plus the growth seen within runs of
    one source."""
    totals = {"a": 500, "b": 70_000}
    history, expected, last = [], [], ""
    value = 0
    for step, source in grown:
        totals[source] += step
        history.append(Step(totals[source], S, source))
        if not last:
            value = totals[source]
        elif source == last:
            value += step
        expected.append(value)
        last = source
    points = play(history)
    assert [point.value for point in points] == expected
    assert len({point.start_ns for point in points}) == 1


def test_the_start_is_the_sources_own_where_it_is_known() -> None:
    """A known start is taken, an unknown one is the time of first sight and marked; no start lies after the point."""
    known = taken(observe(CounterStarts(), 5, 100, start_s=40))
    assert (known.start_ns, known.start_known) == (40 * S, True)
    unknown = taken(observe(CounterStarts(), 5, 100))
    assert (unknown.start_ns, unknown.start_known) == (100 * S, False)
    assert taken(observe(CounterStarts(), 5, 100, start_s=200)).start_ns == 100 * S


def test_a_fall_is_a_reset_one_millisecond_after_the_last_point() -> None:
    """The new start is known, and what was counted since is the whole new total."""
    starts: CounterStarts[str] = CounterStarts()
    observe(starts, 100, 10)
    observe(starts, 130, 20)
    point = taken(observe(starts, 4, 30))
    assert (point.value, point.start_ns, point.start_known, point.since_first) == (4, 20 * S + MS, True, 4)
    assert taken(observe(starts, 6, 40)).since_first == 6


def test_since_first_leaves_out_what_was_counted_before_the_first_sight() -> None:
    """It is the total less the first raw value seen."""
    starts: CounterStarts[str] = CounterStarts()
    assert [taken(observe(starts, raw, t)).since_first for t, raw in enumerate((1000, 1000, 1007), 1)] == [0, 0, 7]


def test_a_refused_reset_changes_nothing() -> None:
    """A fall within a millisecond of the last point can't be placed: it is refused, and what follows is as if it had
    not been there."""
    starts: CounterStarts[str] = CounterStarts()
    observe(starts, 100, 10)
    assert observe(starts, 5, 10.0005) is None
    point = taken(observe(starts, 150, 20))
    assert (point.value, point.since_first, point.start_ns) == (150, 50, 10 * S)


def test_a_point_that_is_not_newer_is_refused() -> None:
    """Equal and older times give nothing and leave the state alone."""
    starts: CounterStarts[str] = CounterStarts()
    observe(starts, 100, 10)
    assert observe(starts, 999, 10) is None
    assert observe(starts, 1, 9, source="b") is None
    assert taken(observe(starts, 101, 11)).value == 101


def test_another_source_goes_on_by_increments() -> None:
    """The switch itself adds nothing; then the new source's growth counts, under the same start."""
    starts: CounterStarts[str] = CounterStarts()
    observe(starts, 100, 10, "nvml")
    switched = taken(observe(starts, 7, 20, "dcgm"))
    grown = taken(observe(starts, 9, 30, "dcgm"))
    back = taken(observe(starts, 500, 40, "nvml"))
    assert [point.value for point in (switched, grown, back)] == [100, 102, 102]
    assert {point.start_ns for point in (switched, grown, back)} == {10 * S}
    assert grown.since_first == 2


def test_a_fall_after_a_change_of_source_is_a_reset_of_that_source() -> None:
    """The raw totals of the new source decide, not the continued value."""
    starts: CounterStarts[str] = CounterStarts()
    observe(starts, 10, 10, "a")
    observe(starts, 1000, 20, "b")
    point = taken(observe(starts, 400, 30, "b"))
    assert (point.value, point.start_ns) == (400, 20 * S + MS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_refused_and_forgotten(bad: float) -> None:
    """A NaN or an infinity neither starts a counter nor stays in its total."""
    starts: CounterStarts[str] = CounterStarts()
    assert observe(starts, bad, 1) is None
    observe(starts, 1.5, 2)
    assert observe(starts, bad, 3) is None
    assert taken(observe(starts, 2.5, 4)).value == 2.5


def test_keys_do_not_touch_each_other_and_can_be_forgotten() -> None:
    """Each key has its own state; a forgotten one starts anew."""
    starts: CounterStarts[str] = CounterStarts()
    for key in ("a", "b", "c"):
        starts.observe(key, 5, S)
    starts.forget("a")
    starts.forget("not there")
    starts.retain({"b", "never seen"})
    assert len(starts) == 1
    assert taken(starts.observe("c", 5, 2 * S)).start_ns == 2 * S
    assert taken(starts.observe("b", 6, 2 * S)).start_ns == S


def test_a_known_start_after_the_last_point_is_a_reset_even_when_the_total_is_higher() -> None:
    """A driver that was loaded anew and drew more than before: not an increment of the old total."""
    starts: CounterStarts[str] = CounterStarts()
    starts.observe("k", 100, 10 * 10**9, start_ns=5 * 10**9)
    point = starts.observe("k", 150, 30 * 10**9, start_ns=20 * 10**9)
    assert point is not None
    assert (point.value, point.start_ns, point.since_first) == (150, 10 * 10**9 + 1_000_000, 150)


def test_a_clock_that_is_set_back_begins_a_new_start() -> None:
    """Points of the past are refused while they can be late ones; beyond a minute the clock was set."""
    starts: CounterStarts[str] = CounterStarts()
    starts.observe("k", 100, 10**18)
    assert starts.observe("k", 101, 10**18 - 59 * 10**9) is None
    point = starts.observe("k", 102, 10**18 - 61 * 10**9)
    assert point is not None
    assert (point.value, point.start_ns, point.start_known) == (102, 10**18 - 61 * 10**9, False)
