"""Go durations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.config.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("-0", 0.0),
        ("5s", 5.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("5.s", 5.0),
        ("200ms", 0.2),
        ("1us2µs3μs", 6e-6),
        ("-2s", -2.0),
        ("+1h", 3600.0),
        ("9223372036854775807ns", 9223372036.854775807),
    ],
)
def test_durations_are_read_as_go_reads_them(text: str, seconds: float) -> None:
    """All of Go's units, fractions, signs and sums."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        ("abc", 'time: invalid duration "abc"'),
        (".s", 'time: invalid duration ".s"'),
        ("5", 'time: missing unit in duration "5"'),
        ("1h5", 'time: missing unit in duration "1h5"'),
        ("5d", 'time: unknown unit "d" in duration "5d"'),
        ("5 s", 'time: unknown unit " s" in duration "5 s"'),
        ("٣s", 'time: invalid duration "٣s"'),
        ("3000000h", 'time: invalid duration "3000000h"'),
    ],
)
def test_bad_durations_are_refused_in_gos_words(text: str, message: str) -> None:
    """Each refusal says which part is wrong."""
    with pytest.raises(ValueError, match="time") as raised:
        parse_duration(text)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (90.0, "1m30s"), (3600.0, "1h"), (0.2, "200ms"), (1.5, "1.5s"), (-2.0, "-2s"), (1e-9, "1ns")],
)
def test_durations_are_written_shortly(seconds: float, text: str) -> None:
    """No zero units, no needless digits."""
    assert format_duration(seconds) == text


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_a_written_duration_reads_back_the_same(nanoseconds: int) -> None:
    """`parse(format(x)) == x` for every number of nanoseconds."""
    seconds = nanoseconds / 10**9
    if abs(seconds) < 2**63 / 10**9:
        assert parse_duration(format_duration(seconds)) == seconds


@given(st.text(max_size=300))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    """Nothing but ValueError is raised, and what is read can be written."""
    with contextlib.suppress(ValueError):
        assert parse_duration(format_duration(parse_duration(text))) == parse_duration(text)
