from __future__ import annotations

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.departures import Departures
from gpulens.pipeline.otlp import NO_RECORDED_VALUE

T = 1_700_000_000_000_000_000
S = 10**9
SCOPE = Scope("gpulens")
POWER, MEMORY, ALLOCATED = metric("hw.power"), metric("hw.gpu.memory.usage"), metric("gpu.allocated")

Said = tuple[str, str, float | None, int]


def _pod(name: str, *series: Series) -> Block:
    return Block(Resource({"k8s.pod.name": name}), SCOPE, series)


def _tick(second: int, *blocks: Block, complete: bool = True, stream: str = "dcgm") -> Batch:
    layout = Layout(blocks)
    return Batch.of(layout, [1] * layout.size, T + second * S, stream, complete)


def _said(batch: Batch) -> list[Said]:
    """What the opaque parts say: (pod, metric, value or None for NO_RECORDED_VALUE, second)."""
    found: list[Said] = []
    for part in batch.opaque:
        message = ResourceMetrics.FromString(part)
        pod = message.resource.attributes[0].value.string_value
        for scope_metrics in message.scope_metrics:
            assert scope_metrics.scope.name == "gpulens"
            for each in scope_metrics.metrics:
                points = each.sum.data_points if each.HasField("sum") else each.gauge.data_points
                for point in points:
                    kind = point.WhichOneof("value")
                    assert (point.flags == NO_RECORDED_VALUE) == (kind is None)
                    value = None if kind is None else getattr(point, kind)
                    found.append((pod, each.name, value, (point.time_unix_nano - T) // S))
    return found


def test_an_owner_change_ends_the_old_owners_series() -> None:
    """When a device's readings move to another pod, the old pod's series get one NO_RECORDED_VALUE each."""
    departures, gpu = Departures(), Series(POWER, {"hw.id": "GPU-1"})
    assert _said(departures.extend(_tick(0, _pod("a", gpu)))) == []
    assert _said(departures.extend(_tick(10, _pod("b", gpu)))) == [("a", "hw.power", None, 10)]
    assert _said(departures.extend(_tick(20, _pod("b", gpu)))) == []


def test_the_end_of_the_last_pod_is_said_by_an_empty_batch() -> None:
    """A complete batch with nothing in it ends everything of its stream."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(POWER), Series(MEMORY)), _pod("b", Series(POWER))))
    empty = Batch.of(EMPTY_LAYOUT, [], T + 10 * S, "dcgm", complete=True)
    assert _said(departures.extend(empty)) == [
        ("a", "hw.power", None, 10),
        ("a", "hw.gpu.memory.usage", None, 10),
        ("b", "hw.power", None, 10),
    ]


def test_a_binary_series_ends_with_a_zero_before_it_goes() -> None:
    """A 0/1 series gets a final 0 at the tick it leaves, and its NO_RECORDED_VALUE one tick later."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(ALLOCATED), Series(POWER)), _pod("b", Series(POWER))))
    rest = _pod("b", Series(POWER))
    assert _said(departures.extend(_tick(10, rest))) == [
        ("a", "gpu.allocated", 0, 10),
        ("a", "hw.power", None, 10),
    ]
    assert _said(departures.extend(_tick(20, rest))) == [("a", "gpu.allocated", None, 20)]
    assert _said(departures.extend(_tick(30, rest))) == []


def test_a_binary_series_that_returns_is_not_ended() -> None:
    """A 0/1 series that comes back after its final 0 owes no NO_RECORDED_VALUE any more."""
    departures, both = Departures(), (_pod("a", Series(ALLOCATED)), _pod("b", Series(POWER)))
    departures.extend(_tick(0, *both))
    assert len(_said(departures.extend(_tick(10, both[1])))) == 1
    assert _said(departures.extend(_tick(20, *both))) == []
    assert _said(departures.extend(_tick(30, *both))) == []


def test_a_binary_series_that_returns_in_a_partial_batch_is_not_ended() -> None:
    """The same when it is a partial batch that brings it back; it leaves anew with the next complete one."""
    departures, a, b = Departures(), _pod("a", Series(ALLOCATED)), _pod("b", Series(POWER))
    departures.extend(_tick(0, a, b))
    departures.extend(_tick(10, b))
    assert _said(departures.extend(_tick(15, a, complete=False))) == []
    assert _said(departures.extend(_tick(20, b))) == [("a", "gpu.allocated", 0, 20)]
    assert _said(departures.extend(_tick(30, b))) == [("a", "gpu.allocated", None, 30)]


def test_partial_batches_end_nothing() -> None:
    """A partial batch lacks what it lacks; nothing leaves for it, not even the empty one."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(POWER)), _pod("b", Series(POWER))))
    for batch in (_tick(10, _pod("a", Series(POWER)), complete=False), _tick(20, complete=False)):
        assert departures.extend(batch) is batch


def test_streams_that_are_never_complete_are_not_remembered() -> None:
    """Foreign streams promise nothing, so nothing is kept of them."""
    departures = Departures()
    for second in range(5):
        departures.extend(_tick(second, _pod(str(second), Series(POWER)), complete=False, stream="otlp"))
    assert len(departures.streams) == 0


def test_what_partial_batches_added_leaves_with_the_next_complete_one() -> None:
    """A series that only a partial batch brought is part of the stream until a complete batch lacks it."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(POWER))))
    departures.extend(_tick(5, _pod("b", Series(POWER)), complete=False))
    assert _said(departures.extend(_tick(10, _pod("a", Series(POWER))))) == [("b", "hw.power", None, 10)]


def test_streams_do_not_end_each_others_series() -> None:
    """A complete batch speaks for its own stream only."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(POWER)), stream="dcgm"))
    assert _said(departures.extend(_tick(0, _pod("b", Series(MEMORY)), stream="gke"))) == []
    assert _said(departures.extend(_tick(10, _pod("b", Series(MEMORY)), stream="gke"))) == []


def test_one_lost_series_leaves_its_neighbours_alone() -> None:
    """Only what is gone is said to be gone, also when its block was rebuilt."""
    departures = Departures()
    departures.extend(_tick(0, _pod("a", Series(POWER), Series(MEMORY))))
    assert _said(departures.extend(_tick(10, _pod("a", Series(POWER))))) == [("a", "hw.gpu.memory.usage", None, 10)]


def test_an_absent_reading_is_not_a_departure() -> None:
    """A series that misses a tick stays in the layout, so nothing is said."""
    departures, layout = Departures(), Layout([_pod("a", Series(POWER))])
    departures.extend(Batch.of(layout, [1.0], T, "dcgm"))
    batch = Batch.of(layout, [None], T + S, "dcgm")
    assert departures.extend(batch) is batch


def test_the_steady_state_returns_the_batch_itself() -> None:
    """Nothing is copied while nothing leaves."""
    departures, layout = Departures(), Layout([_pod("a", Series(POWER))])
    for second in range(3):
        batch = Batch.of(layout, [1.0], T + second * S, "dcgm")
        assert departures.extend(batch) is batch


def test_memory_is_bounded_when_streams_end() -> None:
    """Ten thousand streams that come once and stop leave no more than the limit behind."""
    departures = Departures(limit_bytes=100_000)
    for number in range(10_000):
        departures.extend(_tick(0, _pod("a", Series(POWER)), stream=str(number)))
    assert departures.streams.bytes <= 100_000
    assert departures.streams.evictions > 0
