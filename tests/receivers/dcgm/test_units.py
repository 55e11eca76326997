"""Units: blanks never pass as numbers, plausible numbers never pass as blanks, int64 stays exact."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.receivers.dcgm import units as u
from gpulens.receivers.dcgm.units import Reason, Unit

ALL = [unit for unit in vars(u).values() if isinstance(unit, Unit)]
INT32 = [str(0x7FFFFFF0 + i) for i in range(4)]
INT64 = [str(0x7FFFFFFFFFFFFFF0 + i) for i in range(4)] + ["9.223372036854776e+18"]
DOUBLE = [f"{2**47 + i}.000000" for i in range(4)]


@pytest.mark.parametrize("unit", ALL, ids=lambda unit: unit.name)
@pytest.mark.parametrize("token", [*INT64, *DOUBLE])
def test_blank_values_are_struck_out_in_every_unit(unit: Unit, token: str) -> None:
    """The int64 and double sentinels are blanks even where large totals are honest."""
    assert unit.refusal(float(token), token) is Reason.BLANK
    assert unit.canonical_all([float(token)], [token]) is None


@pytest.mark.parametrize("unit", [unit for unit in ALL if not unit.wide], ids=lambda unit: unit.name)
@pytest.mark.parametrize("token", INT32)
def test_int32_blanks_are_struck_out_where_nothing_honest_is_that_large(unit: Unit, token: str) -> None:
    """An int32 sentinel in a percentage or a count is a blank."""
    assert unit.refusal(float(token), token) is Reason.BLANK
    assert unit.canonical_all([float(token)], [token]) is None


@pytest.mark.parametrize("unit", [u.BYTES, u.BYTE_COUNT, u.MILLIJOULES, u.NANOSECONDS])
def test_large_totals_are_not_taken_for_int32_blanks(unit: Unit) -> None:
    """2 GiB less 16 bytes is a memory size, and so are that many millijoules an energy."""
    assert unit.refusal(2147483632.0, "2147483632") is None


@pytest.mark.parametrize("text", ["<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>"])
def test_text_blanks_are_blanks(text: str) -> None:
    """DCGM's string sentinels are blanks, any other text is text."""
    assert u.PERCENT.refusal(math.nan, text) is Reason.BLANK
    assert u.PERCENT.refusal(math.nan, "ERROR - FAILED TO CONVERT TO STRING") is Reason.TEXT
    assert u.PERCENT.refusal(math.nan, "NaN") is Reason.NAN


@pytest.mark.parametrize(
    ("unit", "token", "reason"),
    [
        (u.PERCENT, "101", Reason.OUT_OF_RANGE),
        (u.RATIO, "1.2", Reason.OUT_OF_RANGE),
        (u.RATIO, "-0.1", Reason.NEGATIVE),
        (u.HERTZ, "1980", Reason.OUT_OF_RANGE),
        (u.MEGAHERTZ, "1980000000", Reason.OUT_OF_RANGE),
        (u.BYTES, "12", Reason.OUT_OF_RANGE),
        (u.WATTS, "113611", Reason.OUT_OF_RANGE),
        (u.CELSIUS, "4000", Reason.OUT_OF_RANGE),
        (u.UNDECIDED, "1", Reason.AMBIGUOUS_UNIT),
    ],
)
def test_numbers_that_can_only_be_another_units_are_struck_out(unit: Unit, token: str, reason: Reason) -> None:
    """A scale that is off by a thousand shows in the value, and no such value leaves."""
    assert unit.refusal(float(token), token) is reason
    assert unit.canonical_all([float(token)], [token]) is None


@pytest.mark.parametrize(
    ("unit", "token", "canonical"),
    [
        (u.PERCENT, "57", 0.57),
        (u.RATIO, "1.000231", 1.0),
        (u.MEGAHERTZ, "1980", 1.98e9),
        (u.HERTZ, "1.98e+09", 1.98e9),
        (u.HERTZ, "0", 0.0),
        (u.MEBIBYTES, "15109", 15109 * 2**20),
        (u.BYTES, "8.5520809984e+10", 85520809984),
        (u.MILLIJOULES, "55491669881", 55491669.881),
        (u.NANOSECONDS, "1500000000", 1.5),
        (u.COUNT, "3000000000", 3000000000),
        (u.BYTE_COUNT, "9007199254740993", 9007199254740993),
        (u.MEGABYTES_PER_SECOND, "2", 2e6),
        (u.FLAG, "3", 1),
        (u.bit(0x20), "33", 1),
        (u.bit(0x40), "33", 0),
    ],
)
def test_canonical_numbers(unit: Unit, token: str, canonical: float) -> None:
    """Each unit's scale, one by one and all at once."""
    assert unit.refusal(float(token), token) is None
    single = unit.canonical(float(token), token)
    assert single == canonical
    assert type(single) is type(canonical)
    assert unit.canonical_all([float(token)], [token]) in ([canonical], None)


@given(st.sampled_from(ALL), st.lists(st.floats(allow_nan=True) | st.floats(0, 3e9), max_size=8))
def test_the_quick_way_agrees_with_the_careful_one(unit: Unit, numbers: list[float]) -> None:
    """Whatever `canonical_all` lets through at once, `refusal` and `canonical` let through one by one."""
    tokens = [repr(number) for number in numbers]
    quick = unit.canonical_all(numbers, tokens)
    if quick is not None:
        assert all(unit.refusal(number, token) is None for number, token in zip(numbers, tokens, strict=True))
        assert quick == [unit.canonical(number, token) for number, token in zip(numbers, tokens, strict=True)]
