from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.data import Batch, Block, Layout, Metric, Resource, Scope, Series
from gpulens.pipeline.otlp import encode
from gpulens.pipeline.otlp_compiled import CompiledEncoder
from tests.pipeline.otlp_batches import batches, layouts

T = 1_700_000_000_000_000_000


def _layout(pod: str, size: int = 4) -> Layout:
    series = [Series(Metric("hw.power", "W"), {"hw.id": str(i)}) for i in range(size)]
    return Layout([Block(Resource({"k8s.pod.name": pod}), Scope("gpulens"), series)])


@given(batches())
def test_compiled_bytes_are_the_plain_bytes(batch: Batch) -> None:
    """First sight, second sight (compiled) and third (patched) all give the bytes of the plain encoder."""
    encoder, expected = CompiledEncoder(), encode(batch)
    assert [encoder.encode(batch) for _ in range(3)] == [expected] * 3


@given(st.data())
def test_patching_one_layout_with_other_numbers_gives_the_plain_bytes(data: st.DataObject) -> None:
    """Ticks of one layout with changing values, times, starts and absences never leave anything behind."""
    layout, encoder = data.draw(layouts()), CompiledEncoder()
    for batch in data.draw(st.lists(batches(layout), min_size=2, max_size=6)):
        assert encoder.encode(batch) == encode(batch)


def test_second_sight_compiles_and_later_ticks_hit() -> None:
    """The first tick compiles nothing, the second does, the third is a hit."""
    encoder, layout = CompiledEncoder(), _layout("a")
    sizes = []
    for tick in range(4):
        encoder.encode(Batch.of(layout, [1.0, 2.0, 3.0, 4.0], T + tick, "s"))
        sizes.append(len(encoder.cache))
    assert sizes == [0, 1, 1, 1]
    assert (encoder.cache.hits, encoder.cache.misses) == (2, 2)


def test_a_changed_pod_recompiles_its_own_block_only() -> None:
    """Blocks are compiled one by one: the unchanged block keeps its compiled form when its neighbour goes."""
    encoder = CompiledEncoder()
    [a], [b], [c] = (_layout(pod).blocks for pod in "abc")
    for blocks in ([a, b], [a, b], [a, c], [a, c]):
        encoder.encode(Batch.of(Layout(blocks), [0.0] * 8, T, "s"))
    assert len(encoder.cache) == 3
    assert encoder.cache.hits == 2


def test_a_block_that_loses_readings_has_a_variant_for_it() -> None:
    """An absent slot changes the message's lengths and still gives the plain bytes, compiled or not."""
    encoder, layout = CompiledEncoder(), _layout("a")
    for readings in ([1.0, None, 3.0, 4.0], [1.0, None, 3.0, 4.0], [5.0, None, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]):
        batch = Batch.of(layout, readings, T, "s")
        assert encoder.encode(batch) == encode(batch)
    assert len(encoder.cache) == 1


def test_a_block_without_any_reading_sends_nothing() -> None:
    """All absent is no message, also when seen often."""
    encoder = CompiledEncoder()
    batch = Batch.of(_layout("a"), [None] * 4, T, "s")
    assert [encoder.encode(batch) for _ in range(3)] == [b""] * 3


def test_starts_that_move_each_tick_stay_compiled() -> None:
    """Delta sums move their start every tick; that is patching, not another variant."""
    encoder, layout = CompiledEncoder(), _layout("a")
    for tick in range(5):
        starts = array("Q", [T + tick, 0, T + 2 * tick, T])
        batch = replace(Batch.of(layout, [1.0] * 4, T + tick + 1, "s"), start_ns=starts)
        assert encoder.encode(batch) == encode(batch)
    assert len(encoder.cache) == 1


def test_memory_is_bounded_under_churn() -> None:
    """Pods that come and go never make the cache larger than its limit."""
    encoder = CompiledEncoder(limit_bytes=50_000)
    for pod in range(100):
        for _ in range(2):
            encoder.encode(Batch.of(_layout(str(pod)), [1.0] * 4, T, "s"))
    assert encoder.cache.bytes <= 50_000
    assert encoder.cache.evictions > 0


def test_opaque_parts_come_last() -> None:
    """Histograms that ride along are framed and put behind the columns."""
    encoder = CompiledEncoder()
    batch = replace(Batch.of(_layout("a"), [1.0] * 4, T, "s"), opaque=(b"\x1a\x01x", b""))
    make: Callable[[Batch], bytes] = encoder.encode
    assert make(batch) == encode(batch)
    assert make(batch).endswith(b"\x0a\x03\x1a\x01x\x0a\x00")
