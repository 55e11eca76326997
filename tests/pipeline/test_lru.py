"""The bounded cache and the second sight."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.lru import IDLE_ROUNDS, BytesLRU, SecondSight

LIMIT = 100


def cache() -> BytesLRU[int, int]:
    """A cache of 100 bytes whose values are their own cost."""
    return BytesLRU("test", LIMIT, lambda _, value: value)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "discard"]), st.integers(0, 6), st.integers(0, 120)), max_size=IDLE_ROUNDS
)


@given(OPERATIONS)
def test_it_behaves_like_its_model(operations: list[tuple[str, int, int]]) -> None:
    """Against a plain ordered dictionary: the same content, never over the limit, each hit, miss and eviction
    counted."""
    lru, model = cache(), OrderedDict[int, int]()
    hits = misses = evictions = 0
    for name, key, value in operations:
        if name == "get":
            assert lru.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
                hits += 1
            else:
                misses += 1
        elif name == "discard":
            lru.discard(key)
            model.pop(key, None)
        else:
            lru.put(key, value)
            model.pop(key, None)
            model[key] = value
            if value > LIMIT:
                del model[key]
                evictions += 1
            while sum(model.values()) > LIMIT:
                model.popitem(last=False)
                evictions += 1
        assert lru.bytes == sum(model.values()) <= LIMIT
        assert len(lru) == len(model)
    assert (lru.hits, lru.misses, lru.evictions) == (hits, misses, evictions)


def test_the_least_recently_used_goes_first() -> None:
    """Reading a value keeps it; the one that was not read makes room."""
    lru = cache()
    for key in (1, 2):
        lru.put(key, 50)
    lru.get(1)
    lru.put(3, 50)
    assert [lru.get(key) for key in (1, 2, 3)] == [50, None, 50]


def test_a_value_over_the_limit_is_not_kept() -> None:
    """It takes its older value with it, harms no other, and is counted."""
    lru = cache()
    lru.put(1, 60)
    lru.put(2, 10)
    lru.put(2, LIMIT + 1)
    assert (lru.get(1), lru.get(2), lru.bytes, lru.evictions) == (60, None, 60, 1)


def test_clear_forgets_everything() -> None:
    """Nothing is left, and nothing counts as an eviction."""
    lru = cache()
    lru.put(1, 60)
    lru.clear()
    assert (len(lru), lru.bytes, lru.evictions) == (0, 0, 0)


def test_something_is_known_at_its_second_sight() -> None:
    """The first time says no, then yes; memory is bounded, and asking keeps a key."""
    sight: SecondSight[str] = SecondSight(size=2)
    assert [sight.again(key) for key in ("a", "a", "b", "a", "c", "a", "b")] == [
        False, True, False, True, False, True, False,
    ]  # fmt: skip


def test_what_nobody_asks_for_any_more_does_not_stay_until_the_room_is_full() -> None:
    """An entry that was idle for a hundred rounds goes at the next change; those in use stay, however seldom."""
    lru = cache()
    for key in (1, 2, 3):
        lru.put(key, 10)
    for _ in range(IDLE_ROUNDS):
        lru.get(2)
    lru.get(3)
    lru.put(4, 10)
    assert [lru.get(key) for key in (1, 3, 4)] == [10, 10, 10]
    for _ in range(IDLE_ROUNDS + 2):
        lru.get(2)
    lru.put(5, 10)
    assert [lru.get(key) for key in (1, 2, 3, 4, 5)] == [None, 10, None, None, 10]
    assert (lru.bytes, lru.evictions) == (20, 3)
