"""The 'did you mean'."""

from __future__ import annotations

from gpulens.config.suggest import closest


def test_case_and_separators_come_before_likeness() -> None:
    """What differs only in case, `-` or `_` is the first guess."""
    assert closest("Send-Batch", ["send_batchx", "send_batch"]) == "send_batch"


def test_nothing_near_is_no_suggestion() -> None:
    """A far word, an absurdly long one, or no candidates give nothing."""
    assert closest("zzz", ["receivers"]) == ""
    assert closest("x" * 10_000, ["x" * 9_999]) == ""
    assert closest("a", []) == ""
