"""What was learned survives a restart, and never turns into a wrong owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.component import Stateful
from gpulens.pipeline.data import Batch
from gpulens.pipeline.otlp import record_request
from gpulens.processors.attribution.join import AttributionProcessor
from gpulens.processors.attribution.state import VERSION
from tests.processors.attribution.kit import (
    BOX_A,
    GPU,
    OTHER,
    UID_A,
    A,
    Proc,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    pod,
    pods,
    processes,
    processor,
)


def history(join: AttributionProcessor, until_s: int, owner: str = "a") -> None:
    """Snapshots every 10 s, with the map of a GKE id."""
    feed(
        join,
        described(at(0), {"hw.id": GPU, "gpu.minor": "0"}),
        pods(at(0), A),
        processes(at(0), Proc(7, UID_A, BOX_A)),
    )
    for second in range(0, until_s, 10):
        feed(join, holders(at(second), {"nvidia0": [pod(owner)], OTHER: []}, exclusive=True))


def restarted(join: AttributionProcessor, sink: Sink) -> AttributionProcessor:
    """A new processor with the state of another."""
    fresh = processor(sink)
    assert isinstance(join, Stateful)
    assert fresh.load_state(*join.save_state())
    return fresh


def encoded(batches: list[Batch]) -> list[bytes]:
    """The bytes of what came out."""
    return [record_request(batch).SerializeToString(deterministic=True) for batch in batches]


def test_a_restart_within_the_gap_goes_on_as_if_nothing_had_been() -> None:
    """The same readings and snapshots give the same bytes with the old processor and with the new one."""
    before, after = Sink(), Sink()
    join = processor(before)
    history(join, 60)
    fresh = restarted(join, after)
    mark = len(before.batches)
    for each in (join, fresh):
        for second in range(60, 120, 10):
            feed(each, activity(at(second - 5), source="dcgm"), holders(at(second), {"nvidia0": [pod("a")], OTHER: []}))
    live = [batch for batch in before.batches[mark:] if batch.stream == "dcgm"]
    assert encoded(live) == encoded([batch for batch in after.batches if batch.stream == "dcgm"])
    assert {owner for owner, *_ in after.points("gpu.sm.active")} == {"a"}


def test_a_longer_gap_leaves_readings_unowned() -> None:
    """Nobody vouches for the time in which nothing was seen."""
    sink = Sink()
    join = processor(Sink())
    history(join, 60)
    fresh = restarted(join, sink)
    feed(fresh, activity(at(150)), holders(at(155), {"nvidia0": [pod("a")]}))
    assert sink.owner_of_last() == ""


def test_an_owner_that_changed_meanwhile_is_not_named() -> None:
    """The saved snapshot and the first new one disagree."""
    sink = Sink()
    join = processor(Sink())
    history(join, 60)
    fresh = restarted(join, sink)
    feed(fresh, activity(at(55)), holders(at(65), {"nvidia0": [pod("b")]}))
    assert sink.owner_of_last() == ""


@pytest.mark.parametrize("saved", [b"", b"{", b"[1]", b'[{"name": 3}]', b"null", b"\xff", b'[{"name": "n"}]'])
def test_a_state_that_cannot_be_read_changes_nothing(saved: bytes) -> None:
    """It is refused whole, and the processor works without it."""
    sink = Sink()
    join = processor(sink)
    assert not join.load_state(VERSION, saved)
    history(join, 20)
    feed(join, activity(at(12)), holders(at(20), {"nvidia0": [pod("a")]}))
    assert sink.owner_of_last() == "a"


def test_another_version_is_refused() -> None:
    """A state of a format that this version does not know is not guessed at."""
    join = processor(Sink())
    version, saved = join.save_state()
    assert not processor(Sink()).load_state(version + 1, saved)


@given(cut=st.integers(0, 4000), flip=st.binary(min_size=1, max_size=4))
def test_damaged_states_never_raise(cut: int, flip: bytes) -> None:
    """Torn or overwritten bytes are refused or read, never a crash."""
    join = processor(Sink())
    history(join, 30)
    version, saved = join.save_state()
    place = cut % len(saved)
    for damaged in (saved[:place], saved[:place] + flip + saved[place + len(flip) :]):
        fresh = processor(Sink())
        fresh.load_state(version, damaged)
        feed(fresh, activity(at(40)), holders(at(45), {"nvidia0": [pod("a")]}))
