"""Rules for the value of one key."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, ValidationError, field_validator

from gpulens.config.ranges import NON_NEGATIVE, POSITIVE, positive, require
from gpulens.config.types import Block, Duration


class Times(Block):
    interval: Duration = 1.0
    delay: Annotated[Duration, NON_NEGATIVE] = 0.0
    factor: Annotated[float, POSITIVE] = 1.0
    share: Annotated[float, AfterValidator(require(lambda value: value <= 1, "`{key}` is {value:g}s, not <= 1"))] = 0.5

    _check_interval = field_validator("interval")(positive)


class Longer(Times):
    interval: Duration = 5.0


def _errors(model: type[Block], **keys: object) -> dict[str, str]:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(keys)
    return {str(error["loc"][0]): error["msg"].removeprefix("Value error, ") for error in raised.value.errors()}


def test_every_wrong_key_is_named_by_its_own_rule() -> None:
    """All keys of a block are checked, whatever is wrong with the others."""
    assert _errors(Times, interval="0s", delay="-1ms", factor=0, share=2) == {
        "interval": "'interval' must be positive",
        "delay": "'delay' must be non-negative",
        "factor": "'factor' must be positive",
        "share": "`share` is 2s, not <= 1",
    }


def test_a_rule_is_inherited_by_a_field_that_is_declared_anew() -> None:
    """A subclass that only changes a default keeps the rule."""
    assert _errors(Longer, interval="-5s") == {"interval": "'interval' must be positive"}
    assert Longer().interval == 5.0


def test_a_wrong_type_is_told_before_the_range() -> None:
    """A rule sees values of the right type only."""
    assert _errors(Times, factor="x") == {"factor": "Input should be a valid number"}


@given(st.floats())
def test_numbers_are_taken_if_and_only_if_the_rule_holds(value: float) -> None:
    """Not-a-number is in no range."""
    if value > 0:
        assert Times.model_validate({"factor": value}).factor == value
    else:
        assert math.isnan(value) or value <= 0
        assert "factor" in _errors(Times, factor=value)
