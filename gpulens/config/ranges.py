"""Rules for the value of one key, told in the Collector's words.

Invariant: a rule looks at one value and names its key, so that every wrong key of a block is reported, each at its
own value. What relates two keys is a validator of the model or, where the later key must be written for it to
matter, of that key.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import AfterValidator, ValidationInfo

Check = Callable[[float, ValidationInfo], float]


def require(holds: Callable[[float], bool], text: str) -> Check:
    """A validator for numbers and durations: gives the value back, or raises ValueError with `text`, in which `{key}`
    and `{value}` (in seconds for a duration) are filled in."""

    def check(value: float, info: ValidationInfo) -> float:
        if not holds(value):
            raise ValueError(text.format(key=info.field_name, value=value))
        return value

    return check


positive = require(lambda value: value > 0, "'{key}' must be positive")
non_negative = require(lambda value: value >= 0, "'{key}' must be non-negative")

POSITIVE = AfterValidator(positive)
"""In a field's annotation. A field that subclasses declare anew takes `field_validator("key")(positive)` instead,
which they inherit."""
NON_NEGATIVE = AfterValidator(non_negative)
