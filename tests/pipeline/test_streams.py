"""The steady layout of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.data import Block, Layout, Metric, Resource, Scope, Series, Value
from gpulens.pipeline.streams import PATIENCE_TICKS, StreamLayout

METRIC = Metric("m", is_int=True)
SCOPE = Scope("gpulens/test")


def layout(names: str, node: str = "n") -> Layout:
    """One series a letter, on one resource."""
    return Layout([Block(Resource({"node": node}), SCOPE, [Series(METRIC, {"n": name}) for name in names])])


def named(found: tuple[Layout, object]) -> str:
    """The letters of the stream's layout, sorted."""
    return "".join(sorted(series.text("n") for _, _, series in found[0].identities()))


def readings(found: tuple[Layout, object]) -> Mapping[str, Value | None]:
    """The number of each letter."""
    values = found[1]
    assert isinstance(values, list | tuple)
    names = [series.text("n") for _, _, series in found[0].identities()]
    return dict(zip(names, values, strict=True))


def test_the_steady_state_returns_its_arguments() -> None:
    """The same layout gives the same objects back, tick after tick."""
    steady, same, values = StreamLayout(), layout("abc"), [1, 2, 3]
    for _ in range(3):
        found = steady.settle(same, values)
        assert found[0] is same
        assert found[1] is values


def test_an_equal_layout_made_anew_gives_the_first_one_back() -> None:
    """Whoever caches against the layout object finds it again."""
    steady, first = StreamLayout(), layout("abc")
    steady.settle(first, [1, 2, 3])
    assert steady.settle(layout("abc"), [1, 2, 3])[0] is first
    swapped = steady.settle(layout("cab"), [3, 1, 2])
    assert swapped[0] is first
    assert readings(swapped) == {"a": 1, "b": 2, "c": 3}


def test_a_new_series_enters_at_once() -> None:
    """At its first tick it is in the layout with its value; the others stay."""
    steady = StreamLayout()
    steady.settle(layout("ab"), [1, 2])
    assert readings(steady.settle(layout("abc"), [1, 2, 3])) == {"a": 1, "b": 2, "c": 3}


def test_a_series_that_misses_a_tick_is_absent_and_the_layout_stays() -> None:
    """Whether it is missing from the page or blank on it; coming back changes no layout either."""
    steady, both = StreamLayout(), layout("ab")
    first = steady.settle(both, [1, 2])
    missing = steady.settle(layout("a"), [1])
    blank = steady.settle(both, [1, None])
    back = steady.settle(both, [1, 3])
    assert first[0] is missing[0] is blank[0] is back[0]
    assert readings(missing) == readings(blank) == {"a": 1, "b": None}
    assert readings(back) == {"a": 1, "b": 3}


def test_a_series_leaves_after_ten_ticks_without_a_reading() -> None:
    """Nine ticks absent, gone at the tenth; a reading in between starts the count anew."""
    steady, both, one = StreamLayout(), layout("ab"), layout("a")
    steady.settle(both, [1, 2])
    for _ in range(PATIENCE_TICKS - 1):
        assert named(steady.settle(one, [1])) == "ab"
    steady.settle(both, [1, 2])
    seen = [named(steady.settle(one, [1])) for _ in range(PATIENCE_TICKS + 2)]
    assert seen == ["ab"] * (PATIENCE_TICKS - 1) + ["a"] * 3


def test_a_series_that_is_always_blank_stays_out() -> None:
    """A page that lists a field without ever giving a value for it does not bring it in and out again."""
    steady, both = StreamLayout(), layout("ab")
    layouts = {id(steady.settle(both, [1, None])[0]): named(steady.settle(both, [1, None])) for _ in range(30)}
    assert list(layouts.values()) == ["a"]
    assert readings(steady.settle(both, [1, 7])) == {"a": 1, "b": 7}


def test_a_series_that_left_comes_back_with_its_next_reading() -> None:
    """After it left, blanks keep it out and the layout steady; a number brings it in at once."""
    steady, both = StreamLayout(), layout("ab")
    steady.settle(both, [1, 2])
    left = [steady.settle(both, [1, None]) for _ in range(PATIENCE_TICKS)][-1]
    for _ in range(3 * PATIENCE_TICKS):
        assert steady.settle(both, [1, None])[0] is left[0]
    assert readings(steady.settle(both, [1, 5])) == {"a": 1, "b": 5}


def test_blocks_that_do_not_change_stay_the_same_objects_when_a_series_leaves() -> None:
    """A compiled form that hangs on an untouched block is found again."""
    kept = layout("a", "other").blocks[0]
    both = Layout([kept, *layout("bc").blocks])
    steady = StreamLayout()
    steady.settle(both, [1, 2, 3])
    found = [steady.settle(both, [1, None, 3]) for _ in range(PATIENCE_TICKS)][-1]
    assert named(found) == "ac"
    assert found[0].blocks[0] is kept


def test_everything_gone_leaves_the_empty_layout() -> None:
    """A page with nothing on it empties the stream after the patience, and the first new series enters."""
    steady = StreamLayout()
    steady.settle(layout("a"), [1])
    found = [steady.settle(Layout(), []) for _ in range(PATIENCE_TICKS)][-1]
    assert found == (Layout(), [])
    assert readings(steady.settle(layout("b"), [2])) == {"b": 2}


TICK = st.dictionaries(st.sampled_from("abcde"), st.none() | st.integers(0, 9))


@given(st.lists(TICK, max_size=40), st.integers(1, 4))
def test_it_holds_what_was_read_within_the_patience(ticks: list[dict[str, int | None]], patience: int) -> None:
    """After every tick the layout has exactly the series with a reading in the last `patience` ticks, each with this
    tick's value."""
    steady = StreamLayout(patience)
    for index, tick in enumerate(ticks):
        found = readings(steady.settle(layout("".join(tick)), list(tick.values())))
        recent = ticks[max(0, index - patience + 1) : index + 1]
        expected = {name for past in recent for name, value in past.items() if value is not None}
        assert set(found) == expected
        assert all(found[name] == tick.get(name) for name in expected)
