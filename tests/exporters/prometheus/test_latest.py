"""What stays on the page, and for how long."""

from __future__ import annotations

from gpulens.exporters.prometheus.latest import Held, Latest
from gpulens.pipeline.data import Batch, Block, Layout, Metric, Resource, Scope, Series, bitmap_slots

SCOPE = Scope("app")


def batch(values: dict[str, float | None], stream: str = "otlp", complete: bool = False) -> Batch:
    """A batch of one gauge a name."""
    layout = Layout([Block(Resource(), SCOPE, [Series(Metric(name)) for name in values])])
    return Batch.of(layout, list(values.values()), 10**9, stream, complete)


def shown(held: list[Held]) -> dict[str, float]:
    """The newest reading of each series that is not absent."""
    found: dict[str, float] = {}
    for part in sorted(held, key=lambda part: part.order):
        gone = set(bitmap_slots(part.absent))
        for slot, ((_, _, series), value) in enumerate(
            zip(part.batch.layout.identities(), part.batch.numbers(), strict=True)
        ):
            if slot not in gone:
                found[series.metric.name] = value
    return found


def test_a_complete_batch_replaces_its_stream_and_no_other() -> None:
    """What a complete batch no longer names is gone; other streams are untouched."""
    latest = Latest(300)
    latest.keep(batch({"a": 1, "b": 1}, "dcgm", complete=True), 0)
    latest.keep(batch({"c": 1}, "gke", complete=True), 0)
    latest.keep(batch({"a": 2}, "dcgm", complete=True), 10)
    assert shown(latest.current(10)[0]) == {"a": 2, "c": 1}


def test_an_empty_complete_batch_ends_its_stream() -> None:
    """A stream that has nothing to say leaves nothing behind."""
    latest = Latest(300)
    latest.keep(batch({"a": 1}, complete=True), 0)
    latest.keep(batch({}, complete=True), 1)
    assert latest.current(1) == ([], float("inf"))


def test_a_complete_batch_stays_while_it_is_the_last_word() -> None:
    """A slow source (interval longer than the expiration) does not vanish between two of its batches."""
    latest = Latest(300)
    latest.keep(batch({"a": 1}, complete=True), 0)
    held, until = latest.current(10_000)
    assert (shown(held), until) == ({"a": 1}, float("inf"))


def test_a_partial_batch_adds_and_each_part_expires_after_its_last_point() -> None:
    """Series of partial batches age one by one, the complete batch before them too."""
    latest = Latest(300)
    latest.keep(batch({"a": 1, "b": 1}, complete=True), 0)
    latest.keep(batch({"a": 2}), 100)
    held, until = latest.current(100)
    assert (shown(held), until) == ({"a": 2, "b": 1}, 300)
    held, until = latest.current(300)
    assert (shown(held), until) == ({"a": 2}, 400)
    assert latest.current(400) == ([], float("inf"))


def test_the_same_layout_replaces_its_former_batch_in_place() -> None:
    """While layouts repeat, the order of the parts does not change."""
    latest = Latest(300)
    for round_s in (0, 10, 20):
        latest.keep(batch({"a": round_s}), round_s)
        latest.keep(batch({"b": round_s}), round_s)
    held, until = latest.current(20)
    assert [next(part.batch.layout.identities())[2].metric.name for part in held] == ["a", "b"]
    assert (shown(held), until) == ({"a": 20, "b": 20}, 320)


def test_many_layouts_are_gathered_and_still_age_one_by_one() -> None:
    """A sender whose every message names other series costs one batch, and each series still has its own
    age."""
    latest = Latest(300)
    for i in range(200):
        latest.keep(batch({f"s{i}": i, "same": i}), i)
    held, until = latest.current(199)
    assert len(held) <= 65
    assert shown(held) == {**{f"s{i}": i for i in range(200)}, "same": 199}
    assert until == 300
    held, _ = latest.current(349.5)
    assert shown(held) == {**{f"s{i}": i for i in range(50, 200)}, "same": 199}
    assert latest.current(1000) == ([], float("inf"))


def test_gathering_forgets_what_ended() -> None:
    """A reading that a later batch names as absent does not come back when batches are gathered."""
    latest = Latest(300)
    latest.keep(batch({"ended": 1}), 0)
    latest.keep(batch({"ended": None, "x": 1}), 1)
    for i in range(200):
        latest.keep(batch({f"s{i}": i}), 2)
    assert "ended" not in shown(latest.current(2)[0])


def test_memory_is_bounded_while_nobody_asks() -> None:
    """Series that expired are dropped as new ones come, also when no page is ever written."""
    latest = Latest(300)
    for i in range(3000):
        latest.keep(batch({f"s{i}": i}), float(i))
    held = list(latest._streams["otlp"].values())
    assert sum(part.batch.layout.size for part in held) <= 2 * 300 + 65
