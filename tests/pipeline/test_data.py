"""The data model: what is equal, what is exact, what is absent."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.data import (
    EMPTY_LAYOUT,
    Attributes,
    AttributeValue,
    Batch,
    Block,
    Identity,
    KeyValues,
    Layout,
    Metric,
    Projection,
    Resource,
    Scope,
    Series,
    Value,
    attributes,
    bitmap,
    bitmap_slots,
    build_layout,
    concatenate_on,
)

INT = Metric("count", is_int=True)
REAL = Metric("level")
NODE = Resource({"k8s.node.name": "node-1"})
POD = Resource({"k8s.pod.name": "pod-1"})
SCOPE = Scope("gpulens/test")

INT64 = st.integers(-(2**63), 2**63 - 1)
DOUBLE_BITS = st.integers(0, 2**64 - 1)


def numbered(metric: Metric, count: int, resource: Resource = NODE) -> Block:
    """A block with `count` series of one metric, told apart by `n`."""
    return Block(resource, SCOPE, [Series(metric, {"n": str(i)}) for i in range(count)])


def mixed_layout(kinds: Sequence[bool]) -> Layout:
    """A layout with one series a flag: int64 where it is True, double where not."""
    series = [Series(INT if kind else REAL, {"n": str(i)}) for i, kind in enumerate(kinds)]
    return Layout([Block(NODE, SCOPE, series)])


def double(bits: int) -> float:
    """The double with these bits."""
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


@given(st.lists(INT64, max_size=20))
def test_int64_values_are_exact(values: list[int]) -> None:
    """Every int64 comes back as the same int, also where a double could not hold it."""
    batch = Batch.of(mixed_layout([True] * len(values)), values, 1, "s")
    assert list(batch.numbers()) == values
    assert all(type(number) is int for number in batch.numbers())


@given(st.lists(DOUBLE_BITS, max_size=20))
def test_doubles_keep_their_bits(bits: list[int]) -> None:
    """Every double, infinities, signed zeros and NaN payloads included, keeps its 64 bits through a batch."""
    expected = b"".join(each.to_bytes(8, "little") for each in bits)
    batch = Batch(mixed_layout([False] * len(bits)), expected, 1, "s", True)
    projected = Projection(batch.layout, range(len(bits))).apply(batch)
    assert projected.values == expected
    quiet = [each for each in bits if not math.isnan(double(each))]
    packed, _ = mixed_layout([False] * len(quiet)).pack([double(each) for each in quiet])
    assert packed == b"".join(each.to_bytes(8, "little") for each in quiet)


READING = st.one_of(st.tuples(st.just(True), st.none() | INT64), st.tuples(st.just(False), st.none() | st.floats()))


@given(st.lists(READING, max_size=40))
def test_readings_come_back_with_absence_kept_apart_from_zero(given_: list[tuple[bool, Value | None]]) -> None:
    """None stays None and a zero stays a zero, whatever stands around it and in any mix of types."""
    values = [value for _, value in given_]
    batch = Batch.of(mixed_layout([kind for kind, _ in given_]), values, 1, "s")
    assert repr(batch.readings()) == repr(values)
    assert bool(batch.absent) == (None in values)


def test_absent_and_zero_differ() -> None:
    """An absent slot and a zero have the same bytes and are told apart by the bitmap alone."""
    layout = mixed_layout([True, False])
    zero, absent = Batch.of(layout, [0, 0.0], 1, "s"), Batch.of(layout, [None, None], 1, "s")
    assert zero.values == absent.values
    assert (zero.absent, absent.absent) == (b"", b"\x03")
    assert (zero.readings(), absent.readings()) == ([0, 0.0], [None, None])


@pytest.mark.parametrize("values", [[1.5], [2**63], [-(2**63) - 1], ["1"], [], [1, 2]])
def test_what_does_not_fit_an_int64_slot_is_an_error(values: list[Value | None]) -> None:
    """A fraction, a number out of range, a text or a wrong count is refused and never rounded or cut."""
    with pytest.raises(struct.error):
        mixed_layout([True]).pack(values)


@pytest.mark.parametrize(
    ("values", "time_ns", "start_ns", "complaint"),
    [
        (b"", 1, 0, "2 series need 16 bytes of values, not 0"),
        (bytes(17), 1, 0, "not 17"),
        (bytes(16), array("Q", [1]), 0, "time_ns has 1 entries for 2 series"),
        (bytes(16), 1, array("Q", [1, 2, 3]), "start_ns has 3 entries for 2 series"),
    ],
)
def test_a_batch_whose_columns_do_not_fit_its_layout_is_refused(
    values: bytes, time_ns: int, start_ns: int, complaint: str
) -> None:
    """Values and times must have one entry a series; the message says how many there are."""
    with pytest.raises(ValueError, match=complaint):
        Batch(mixed_layout([True, True]), values, time_ns, "s", True, start_ns)


class Colour(StrEnum):
    RED = "red"


NAN = float("nan")
VALUES: list[AttributeValue] = [
    True, False, 1, 0, 1.0, 0.0, -0.0, NAN, "1", "", b"1", b"", None, "None", "True", (), (1,), (True,), (1.0,), ("1",),
    KeyValues(()), KeyValues((("a", 1),)), KeyValues((("a", True),)), KeyValues((("a", 1.0),)), 2**53, float(2**53),
]  # fmt: skip


@pytest.mark.parametrize("left", range(len(VALUES)))
def test_attribute_values_of_other_types_make_other_series(left: int) -> None:
    """True, 1, 1.0 and "1" are four different values, also inside lists and maps; each equals itself, NaN too."""
    for right, other in enumerate(VALUES):
        for make in (
            lambda value: Series(REAL, {"a": value, "b": "x"}),
            lambda value: Resource({"a": value}),
            lambda value: Scope("s", attrs={"a": value}),
        ):
            one, two = make(VALUES[left]), make(other)
            assert (one == two) is (left == right), (VALUES[left], other)
            if left == right:
                assert hash(one) == hash(two)


def test_an_enumerated_text_equals_the_text() -> None:
    """A StrEnum member as an attribute value makes the series that its plain text makes, beside numbers too."""
    assert Series(REAL, {"a": Colour.RED}) == Series(REAL, {"a": "red"})
    assert Series(REAL, {"a": Colour.RED, "b": 1}) == Series(REAL, {"a": "red", "b": 1})


def test_a_layout_tells_attribute_types_apart() -> None:
    """Series that differ only in an attribute's type stand in one layout side by side."""
    layout = Layout([Block(NODE, SCOPE, [Series(REAL, {"a": value}) for value in VALUES])])
    assert len(layout) == len(layout.slots) == len(VALUES)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=6), st.randoms())
def test_attributes_in_any_order_are_equal(pairs: dict[str, AttributeValue], random: object) -> None:
    """The order in which attributes are given makes no difference; they are kept sorted by key."""
    items = list(pairs.items())
    backwards: Attributes = tuple(reversed(items))
    assert Series(REAL, pairs) == Series(REAL, backwards)
    assert list(attributes(pairs)) == sorted(items, key=lambda item: item[0])


def test_the_last_of_equal_keys_wins() -> None:
    """A key that is given twice has its last value."""
    assert attributes([("a", "1"), ("b", 2), ("a", None)]) == (("a", None), ("b", 2))


@pytest.mark.parametrize("attribute", ["resource", "scope", "series", "order", "split"])
def test_blocks_and_layouts_are_equal_by_content_and_order(attribute: str) -> None:
    """Equal content made twice is equal with an equal hash; another resource, scope, series, order or division is
    not."""

    def make(change: str = "") -> Layout:
        series = [Series(REAL, {"n": "0"}), Series(REAL, {"n": "9" if change == "series" else "1"})]
        if change == "order":
            series.reverse()
        resource = POD if change == "resource" else Resource({"k8s.node.name": "node-1"})
        scope = Scope("other" if change == "scope" else "gpulens/test")
        if change == "split":
            return Layout([Block(resource, scope, series[:1]), Block(resource, scope, series[1:])])
        return Layout([Block(resource, scope, series)])

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make().blocks[0] == make().blocks[0]
    assert make() != make(attribute)


def test_objects_of_different_classes_are_never_equal() -> None:
    """A resource and a scope with the same content, or a layout and its blocks, are different things."""
    assert Resource() != Scope()
    assert Resource() != ()
    block = numbered(REAL, 1)
    assert Layout([block]) != (block,)


def test_schema_urls_and_metric_definitions_are_identity() -> None:
    """Schema URLs, unit, kind and number type tell series apart."""
    assert Resource({}, "https://a") != Resource({}, "https://b")
    assert Scope("s", schema_url="a") != Scope("s", schema_url="b")
    assert Series(Metric("m", "By")) != Series(Metric("m", "s"))
    assert Series(Metric("m", is_int=True)) != Series(Metric("m"))


def test_a_series_twice_in_one_layout_is_refused() -> None:
    """The same series in one block or in two blocks of one resource and scope is an error."""
    series = Series(REAL, {"n": "0"})
    with pytest.raises(ValueError, match="stands twice"):
        Layout([Block(NODE, SCOPE, [series, Series(REAL, {"n": "0"})])])
    with pytest.raises(ValueError, match="stands twice"):
        Layout([Block(NODE, SCOPE, [series]), Block(Resource({"k8s.node.name": "node-1"}), SCOPE, [series])])


def test_one_series_object_may_stand_on_several_resources() -> None:
    """Blocks of other resources, and several blocks of one resource with other series, share a layout."""
    layout = Layout([numbered(REAL, 2), numbered(REAL, 2, POD), Block(NODE, SCOPE, [Series(INT)])])
    assert layout.offsets == (0, 2, 4, 5)
    assert [layout.slots[identity] for identity in layout.identities()] == [0, 1, 2, 3, 4]
    assert layout.is_int == (False, False, False, False, True)


def test_empty_blocks_leave_no_trace() -> None:
    """A layout of empty blocks is the empty layout, and an empty batch packs to nothing."""
    assert Layout([Block(NODE, SCOPE, [])]) == EMPTY_LAYOUT
    batch = Batch.of(EMPTY_LAYOUT, [], 5, "s")
    assert (batch.values, batch.readings(), list(batch.times()), batch.present()) == (b"", [], [], batch)
    assert Projection(EMPTY_LAYOUT, []).apply(batch).values == b""


IDENTITIES = st.lists(
    st.tuples(st.sampled_from([NODE, POD]), st.sampled_from([SCOPE, Scope("b")]), st.integers(0, 4).map(str)),
    max_size=25,
)


@given(IDENTITIES)
def test_build_layout_places_every_identity(given_: list[tuple[Resource, Scope, str]]) -> None:
    """Each identity stands where the slots say, equal ones share a slot, one block a resource and scope."""
    identities: list[Identity] = [(resource, scope, Series(REAL, {"n": n})) for resource, scope, n in given_]
    layout, slots = build_layout(identities)
    placed = list(layout.identities())
    assert [placed[slot] for slot in slots] == identities
    assert set(slots) == set(range(layout.size))
    assert len({(block.resource, block.scope) for block in layout.blocks}) == len(layout.blocks)


@given(st.sets(st.integers(0, 300)))
def test_bitmaps_name_their_slots(slots: set[int]) -> None:
    """A bitmap gives back its slots in order and has no trailing zero bytes."""
    bits = bitmap(slots)
    assert bitmap_slots(bits) == sorted(slots)
    assert not bits.endswith(b"\0")


@given(st.lists(READING, max_size=20).flatmap(lambda r: st.tuples(st.just(r), st.permutations(range(len(r))))))
def test_a_projection_moves_values_times_starts_and_absence(
    drawn: tuple[list[tuple[bool, Value | None]], list[int]],
) -> None:
    """Slot i of the new layout has the value, time, start and absence of its source slot."""
    readings, order = drawn
    layout = mixed_layout([kind for kind, _ in readings])
    identities = list(layout.identities())
    times, starts = array("Q", range(100, 100 + len(order))), array("Q", range(len(order)))
    batch = Batch.of(layout, [value for _, value in readings], times, "s", start_ns=starts)
    target, _ = build_layout(identities[slot] for slot in order)
    moved = Projection(target, order).apply(batch)
    assert repr(moved.readings()) == repr([readings[slot][1] for slot in order])
    assert list(moved.times()) == [100 + slot for slot in order]
    assert list(moved.starts()) == order


def test_a_projection_keeps_everything_else() -> None:
    """One time for all, stream, completeness, events and opaque parts pass unchanged."""
    layout = mixed_layout([True, True])
    batch = Batch(layout, bytes(16), 7, "s", False, 3, b"", (b"event",), (b"opaque",))
    moved = Projection(layout.select([1]), [1]).apply(batch)
    assert (moved.time_ns, moved.start_ns, moved.stream, moved.complete) == (7, 3, "s", False)
    assert (moved.events, moved.opaque) == ((b"event",), (b"opaque",))


def test_a_projection_that_does_not_fill_its_layout_is_refused() -> None:
    """The number of slots must be the layout's."""
    with pytest.raises(ValueError, match="1 series can't be filled from 2 slots"):
        Projection(mixed_layout([True]), [0, 1])


@given(st.lists(READING, max_size=30))
def test_present_leaves_out_what_is_absent(readings: list[tuple[bool, Value | None]]) -> None:
    """What remains are the readings there were, in order, on their own series; a full batch is itself."""
    layout = mixed_layout([kind for kind, _ in readings])
    values = [value for _, value in readings]
    batch = Batch.of(layout, values, array("Q", range(len(values))), "s")
    present = batch.present()
    kept = [slot for slot, value in enumerate(values) if value is not None]
    identities = list(layout.identities())
    assert repr(present.readings()) == repr([values[slot] for slot in kept])
    assert list(present.layout.identities()) == [identities[slot] for slot in kept]
    assert list(present.times()) == kept
    assert not present.absent
    if None not in values:
        assert present is batch


def test_select_reuses_blocks_that_stay_whole() -> None:
    """A block of which nothing is left out is the same object, so its compiled form is found again."""
    layout = Layout([numbered(REAL, 2), numbered(REAL, 2, POD)])
    selected = layout.select([0, 1, 3])
    assert selected.blocks[0] is layout.blocks[0]
    assert [series.text("n") for series in selected.blocks[1].series] == ["1"]


PART = st.tuples(st.lists(READING, max_size=10), st.booleans(), st.integers(1, 3), st.integers(0, 2))


@given(PART, PART)
def test_concatenation_keeps_every_slot_of_both(
    first: tuple[list[tuple[bool, Value | None]], bool, int, int],
    second: tuple[list[tuple[bool, Value | None]], bool, int, int],
) -> None:
    """Readings, times and starts of both follow each other, whether times are one number or a column."""

    def make(part: tuple[list[tuple[bool, Value | None]], bool, int, int], scope: str, complete: bool) -> Batch:
        readings, column, time_ns, start_ns = part
        size = len(readings)
        series = [Series(INT if kind else REAL, {"n": str(i)}) for i, (kind, _) in enumerate(readings)]
        return Batch.of(
            Layout([Block(NODE, Scope(scope), series)]),
            [value for _, value in readings],
            array("Q", [time_ns] * size) if column else time_ns,
            scope,
            complete,
            array("Q", [start_ns] * size) if column else start_ns,
        )

    a, b = make(first, "a", True), make(second, "b", False)
    both = concatenate_on(Layout((*a.layout.blocks, *b.layout.blocks)), a, b)
    assert repr(both.readings()) == repr([*a.readings(), *b.readings()])
    assert list(both.times()) == [*a.times(), *b.times()]
    assert list(both.starts()) == [*a.starts(), *b.starts()]
    assert (both.stream, both.complete) == ("b", False)
    again = concatenate_on(both.layout, a, b)  # the next tick
    assert again.layout is both.layout
    assert again.values == both.values


def test_concatenation_of_the_same_series_is_refused() -> None:
    """Two batches that both report a series can't be one."""
    batch = Batch.of(mixed_layout([True]), [1], 1, "s")
    with pytest.raises(ValueError, match="stands twice"):
        Layout((*batch.layout.blocks, *batch.layout.blocks))


def test_the_newest_event_time_is_found() -> None:
    """With a column it is the newest of it, else the one time."""
    layout = mixed_layout([True, True])
    assert Batch.of(layout, [1, 2], array("Q", [9, 4]), "s").latest_ns() == 9
    assert Batch.of(layout, [1, 2], 5, "s").latest_ns() == 5
    assert Batch(EMPTY_LAYOUT, b"", array("Q"), "s", True).latest_ns() == 0


def test_text_of_an_attribute_is_empty_where_it_is_no_text() -> None:
    """`text` never fails: a missing key or a number gives the empty text."""
    series = Series(REAL, {"a": "x", "b": 1})
    assert [series.text(key) for key in "abc"] == ["x", "", ""]
    assert [Resource({"a": "x", "b": 1}).text(key) for key in "abc"] == ["x", "", ""]


def test_a_counter_is_a_cumulative_monotonic_sum() -> None:
    """Gauges, deltas and up-down sums are no counters."""
    from gpulens.pipeline.data import Kind, Temporality

    assert Metric("m", kind=Kind.SUM, temporality=Temporality.CUMULATIVE, monotonic=True).is_counter
    assert not Metric("m", kind=Kind.SUM, temporality=Temporality.CUMULATIVE).is_counter
    assert not Metric("m", kind=Kind.SUM, temporality=Temporality.DELTA, monotonic=True).is_counter
    assert not Metric("m", monotonic=True, temporality=Temporality.CUMULATIVE).is_counter
