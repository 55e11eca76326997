"""The status board."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.status import Status, StatusBoard, StatusEvent


def board() -> StatusBoard:
    """A board whose clock stands at 7."""
    return StatusBoard(lambda: 7)


def moved(*states: Status) -> list[bool]:
    """Which of these moves of one component were taken."""
    at = board()
    return [at.set("c", state) for state in states]


def test_a_life_without_trouble() -> None:
    """Starting, OK, stopping, stopped, and starting again after a reload."""
    life = (Status.STARTING, Status.OK, Status.STOPPING, Status.STOPPED, Status.STARTING)
    assert moved(*life) == [True] * 5


def test_a_recoverable_error_comes_and_goes() -> None:
    """OK and recoverable may alternate, and the reason may change."""
    at = board()
    at.set("c", Status.STARTING)
    taken = [
        at.set("c", Status.RECOVERABLE, "no answer"),
        at.set("c", Status.RECOVERABLE, "no answer"),
        at.set("c", Status.RECOVERABLE, "refused"),
        at.set("c", Status.OK),
        at.set("c", Status.OK),
    ]
    assert taken == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Status.PERMANENT, Status.OK),
        (Status.PERMANENT, Status.RECOVERABLE),
        (Status.FATAL, Status.OK),
        (Status.FATAL, Status.STOPPING),
        (Status.STOPPED, Status.OK),
        (Status.STOPPED, Status.STOPPING),
        (Status.STOPPING, Status.OK),
        (Status.OK, Status.STARTING),
        (Status.OK, Status.STOPPED),
    ],
)
def test_a_late_report_can_not_wake_the_dead(before: Status, after: Status) -> None:
    """A move that the table does not have is ignored and the state stays."""
    at = board()
    for state in (Status.STARTING, Status.OK, Status.STOPPING, Status.STOPPED):
        if before in (Status.PERMANENT, Status.FATAL) and state is Status.STOPPING:
            at.set("c", before)
            break
        at.set("c", state)
        if state is before:
            break
    assert at.get("c").status is before
    assert not at.set("c", after)
    assert at.get("c").status is before


@given(st.lists(st.sampled_from([state for state in Status if state is not Status.NONE])))
def test_only_stopping_leads_to_the_end(states: list[Status]) -> None:
    """Whatever is reported in whatever order: stopped follows stopping alone, and nothing follows fatal."""
    at = board()
    seen = [Status.NONE]
    at.watch(lambda _, event: seen.append(event.status))
    for state in states:
        at.set("c", state)
    for before, after in pairwise(seen):
        assert after is not Status.STOPPED or before is Status.STOPPING
        assert before is not Status.FATAL
        assert before is not Status.PERMANENT or after is Status.STOPPING


def test_watchers_hear_of_changes_only() -> None:
    """Each change once, with its reason and time; nothing for what was ignored."""
    at = board()
    heard: list[tuple[str, StatusEvent]] = []
    at.watch(lambda key, event: heard.append((key, event)))
    at.set("c", Status.STARTING)
    at.set("c", Status.STARTING)
    at.set("c", Status.RECOVERABLE, "why")
    assert heard == [("c", StatusEvent(Status.STARTING, "", 7)), ("c", StatusEvent(Status.RECOVERABLE, "why", 7))]


def test_components_do_not_touch_each_other() -> None:
    """Each key has its own state, one never reported is None, and the view of all can't be changed."""
    at = board()
    at.set("a", Status.STARTING)
    assert at.get("b") == StatusEvent(Status.NONE)
    assert list(at.all()) == ["a"]
    with pytest.raises(TypeError):
        at.all()["b"] = StatusEvent(Status.OK)  # type: ignore[index]


def test_every_state_can_be_reached() -> None:
    """No state of the table is dead."""
    reached = {Status.NONE}
    for path in product(Status, repeat=4):
        at = board()
        reached |= {state for state in path if at.set("c", state)}
    assert reached == set(Status)
