"""The acknowledgement handle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.ack import Ack


@given(st.lists(st.booleans(), max_size=10))
def test_it_settles_once_when_the_last_share_is_back(errors: list[bool]) -> None:
    """With any number of shares the source hears exactly once, at the end, and of the first error."""
    heard: list[Exception | None] = []
    ack = Ack(heard.append)
    failures = [ValueError(str(i)) if failed else None for i, failed in enumerate(errors)]
    for _ in failures:
        assert ack.share() is ack
    for failure in failures:
        assert not ack.settled
        assert heard == []
        ack.settle(failure)
    ack.settle()
    assert ack.settled
    assert heard == [next((failure for failure in failures if failure is not None), None)]


def test_settling_more_often_than_shared_is_a_defect() -> None:
    """It raises and does not tell the source a second time."""
    heard: list[Exception | None] = []
    ack = Ack(heard.append)
    ack.settle()
    with pytest.raises(RuntimeError, match="more often"):
        ack.settle()
    assert heard == [None]


def test_a_share_can_not_be_taken_after_settling() -> None:
    """Whoever wants to keep data must say so during consume."""
    ack = Ack()
    ack.settle()
    with pytest.raises(RuntimeError, match="during consume"):
        ack.share()
