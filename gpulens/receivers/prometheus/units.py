"""What the numbers on a page are measured in, and what a mapping row makes of them.

Invariant: a number leaves here in the catalogue's unit or not at all, and what is struck out has a reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from gpulens.pipeline.data import Value

_INT64: Final = float(2**63)

UNITS: Final[Mapping[str, tuple[str, float, float]]] = MappingProxyType(
    {
        "percent": ("1", 1, 100), "ratio": ("1", 1, 1),
        "By": ("By", 1, 1), "KB": ("By", 1e3, 1), "MB": ("By", 1e6, 1), "GB": ("By", 1e9, 1),
        "KiB": ("By", 2**10, 1), "MiB": ("By", 2**20, 1), "GiB": ("By", 2**30, 1),
        "By/s": ("By/s", 1, 1), "KB/s": ("By/s", 1e3, 1), "MB/s": ("By/s", 1e6, 1), "KiB/s": ("By/s", 2**10, 1),
        "MiB/s": ("By/s", 2**20, 1), "Mbit/s": ("By/s", 1e6, 8),
        "W": ("W", 1, 1), "mW": ("W", 1, 1e3), "uW": ("W", 1, 1e6),
        "J": ("J", 1, 1), "mJ": ("J", 1, 1e3), "uJ": ("J", 1, 1e6), "Wh": ("J", 3600, 1),
        "Hz": ("Hz", 1, 1), "kHz": ("Hz", 1e3, 1), "MHz": ("Hz", 1e6, 1), "GHz": ("Hz", 1e9, 1),
        "s": ("s", 1, 1), "ms": ("s", 1, 1e3), "us": ("s", 1, 1e6), "ns": ("s", 1, 1e9),
        "Cel": ("Cel", 1, 1), "mCel": ("Cel", 1, 1e3),
    }
)  # fmt: skip
"""A page's unit -> (the catalogue's, what to multiply by, what to divide by: 57 / 100 is 0.57, 57 * 0.01 is not)."""


class Refusal(StrEnum):
    """Why a number is struck out."""

    BLANK = "blank"  # a value that the vendor writes for 'not available', or no number at all
    OUT_OF_RANGE = "out_of_range"
    CONTRADICTORY = "contradictory"  # copies of one reading that do not agree
    BAD_TIME = "bad_time"  # the sample's own time lies in the future, or so far back that it says nothing of now


@dataclass(frozen=True, slots=True)
class Rule:
    """How a row reads a number. `low` and `high` are in the page's unit; `cases` gives the result by the number, for
    flags; `above` makes a flag of a number. `whole` and `flag` say what the metric takes."""

    scale: float = 1.0
    divide: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    blank: Collection[float] = ()
    cases: Mapping[float, int] | None = None
    above: float | None = None
    whole: bool = False
    flag: bool = False

    def read(self, number: float) -> Value | Refusal | None:
        """The number in the catalogue's unit, or why there is none; None is no reading and no fault either."""
        if math.isnan(number) or number in self.blank:
            return Refusal.BLANK
        if not self.low <= number <= self.high or math.isinf(number):
            return Refusal.OUT_OF_RANGE
        if self.cases is not None:
            return self.cases.get(number, Refusal.OUT_OF_RANGE)
        if self.above is not None:
            return int(number > self.above)
        return self._fit(number * self.scale / self.divide)

    def _fit(self, number: float) -> Value | Refusal:
        if not self.whole:
            return number if math.isfinite(number) else Refusal.OUT_OF_RANGE
        if abs(number) >= _INT64 or (self.flag and number not in (0, 1)):
            return Refusal.OUT_OF_RANGE
        return round(number)


@dataclass(frozen=True, slots=True)
class AsItIs:
    """Takes any number. Not-a-number is no reading: a summary's quantile is NaN while nothing was observed."""

    whole: bool = False

    def read(self, number: float) -> Value | Refusal | None:
        """The number itself."""
        return None if math.isnan(number) else number
