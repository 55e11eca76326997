"""How a dcgm-exporter number becomes a canonical one: scale, plausible range, and the values that mean 'blank'.

Invariant: a number leaves here in the catalogue's unit or not at all; what is struck out has a reason.

Sources: the blank values and their ranges are DCGM's (dcgm_structs.h: int32 0x7ffffff0, int64 0x7ffffffffffffff0
and double 2^47, each followed by +1 not found, +2 not supported, +3 no permission); scales are those of the
exporter's counter tables and of exporter 4.9's release notes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpulens.pipeline.data import Value

_BLANK_INT32: Final = float(0x7FFFFFF0)
_INT32_BLANKS: Final = frozenset(_BLANK_INT32 + i for i in range(4))
_DOUBLE_BLANKS: Final = frozenset(float(2**47 + i) for i in range(4))
_BLANK_INT64: Final = float(2**62)  # as a double every int64 blank is 2^63; nothing real is above 2^62
_BLANK_DOUBLE: Final = 1.4e14  # just below 2^47; counters of bytes and millijoules may honestly pass it
_BLANK_TEXTS: Final = ("<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>")


class Reason(StrEnum):
    """Why a value was struck out."""

    BLANK = "blank"
    TEXT = "text_value"
    NAN = "nan"
    NEGATIVE = "negative"
    OUT_OF_RANGE = "out_of_range"
    AMBIGUOUS_UNIT = "ambiguous_unit"
    CONTRADICTORY = "contradictory_copies"
    MIG_UNDEFINED = "mig_undefined"
    NO_DEVICE = "no_device"
    TOO_MANY_DEVICES = "too_many_devices"
    TOO_MANY_OWNERS = "too_many_owners"
    UNKNOWN_FAMILY = "unknown_family"


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit on the page.

    - `scale`, `per`: page's number x scale / per = canonical number (dividing by 1000 rounds once, x 0.001 twice).
    - `ceiling`, `floor`: the largest plausible number and the smallest plausible one above zero, on the
      page's scale.
    - `clamp`: the canonical value never exceeds this (a profiling ratio may read 1.0002).
    - `exact`: read as an int64 from its text, never by way of a double.
    - `wide`: may honestly reach the int32 and double blanks (counters of bytes, millijoules, nanoseconds).
    - `mask`: the value is a bit field, and this bit is the reading.
    - `beyond`: why a value outside of floor and ceiling is struck out.
    """

    name: str
    scale: float
    ceiling: float
    floor: float = 0.0
    clamp: float = math.inf
    exact: bool = False
    wide: bool = False
    mask: int = 0
    per: float = 1.0
    beyond: Reason = Reason.OUT_OF_RANGE

    def canonical(self, value: float, token: str) -> Value:
        """The number in the canonical unit. `value` must have passed `refusal`."""
        if self.mask:
            return int(int(value) & self.mask != 0)
        if self.exact:
            return int(min(_integer(token, value) * int(self.scale), self.clamp))
        return min(value * self.scale / self.per, self.clamp)

    def canonical_all(self, values: Sequence[float], tokens: Sequence[str]) -> list[Value] | None:
        """All at once; None when one of them needs a closer look."""
        if not values or not math.isfinite(sum(values)) or min(values) < 0:
            return None
        largest = max(values)
        blank = _BLANK_DOUBLE if self.wide else _BLANK_INT32
        if largest > self.ceiling or largest >= blank or largest * self.scale > self.clamp:
            return None
        if self.floor and any(0 < value < self.floor for value in values):
            return None
        if self.mask:
            mask = self.mask
            return [int(int(value) & mask != 0) for value in values]
        if self.exact:
            return self._integers(values, tokens)
        scale, per = self.scale, self.per
        if per != 1:
            return [value * scale / per for value in values]
        return list(values) if scale == 1 else [value * scale for value in values]

    def _integers(self, values: Sequence[float], tokens: Sequence[str]) -> list[Value]:
        scale = int(self.scale)
        try:
            return [int(token) * scale for token in tokens]
        except ValueError:  # 4.69762048e+08
            return [_integer(token, value) * scale for token, value in zip(tokens, values, strict=True)]

    def refusal(self, value: float, token: str) -> Reason | None:
        """Why this number is no reading; None when it is one."""
        if math.isnan(value):
            return _refusal_of_nan(token)
        if value >= _BLANK_INT64 or value in _DOUBLE_BLANKS:
            return Reason.BLANK
        if not self.wide and (value >= _BLANK_DOUBLE or value in _INT32_BLANKS):
            return Reason.BLANK
        if value < 0:
            return Reason.NEGATIVE
        if value > self.ceiling or 0 < value < self.floor:
            return self.beyond
        return None


def _refusal_of_nan(token: str) -> Reason:
    if token.startswith(_BLANK_TEXTS):
        return Reason.BLANK
    return Reason.NAN if token.lower().lstrip("+-") == "nan" else Reason.TEXT


def _integer(token: str, value: float) -> int:
    """The token as an int64, exactly where it is spelled as one."""
    try:
        return int(token)
    except ValueError:
        return round(value)


@dataclass(frozen=True, slots=True)
class Either:
    """A name that stands for two units, depending on the exporter's version.

    `old` holds up to DCGM 4.6 and `new` from exporter 4.9 on. A number beyond `tell` proves `by_size`;
    without such a number the version label decides, and without that nothing is read but zeros.
    """

    name: str
    old: Unit
    new: Unit
    tell: float
    by_size: Unit


_TOP: Final = 2.0**62

PERCENT: Final = Unit("percent", 1.0, 100, per=100)
RATIO: Final = Unit("ratio", 1.0, 1.1, clamp=1.0)
MEGAHERTZ: Final = Unit("megahertz", 1e6, 1e5)
HERTZ: Final = Unit("hertz", 1.0, 1e11, floor=1e6)
MEBIBYTES: Final = Unit("mebibytes", 2**20, 1e8, exact=True)
BYTES: Final = Unit("bytes", 1, 1e14, floor=4096, exact=True, wide=True)
WATTS: Final = Unit("watts", 1.0, 1e4)
CELSIUS: Final = Unit("celsius", 1.0, 250)
MILLIJOULES: Final = Unit("millijoules", 1.0, _TOP, wide=True, per=1e3)
JOULES: Final = Unit("joules", 1.0, _TOP, wide=True)
NANOSECONDS: Final = Unit("nanoseconds", 1.0, _TOP, wide=True, per=1e9)
COUNT: Final = Unit("count", 1, _TOP, exact=True)
BYTE_COUNT: Final = Unit("byte count", 1, _TOP, exact=True, wide=True)
NUMBER: Final = Unit("number", 1, 1e6, exact=True)
FLAG: Final = Unit("flag", 1, 1e6, clamp=1, exact=True)
SAMPLES: Final = Unit("samples", 1.0, 1e9)
KILOBYTES_PER_SECOND: Final = Unit("kilobytes per second", 1e3, 1e10)
MEGABYTES_PER_SECOND: Final = Unit("megabytes per second", 1e6, 1e7)
BYTES_PER_SECOND: Final = Unit("bytes per second", 1.0, 1e14, wide=True)

UNDECIDED: Final = Unit("undecided", 1.0, 0, beyond=Reason.AMBIGUOUS_UNIT)
"""Zero is zero in any unit; anything else waits until the unit is known."""

UTIL_RATIO: Final = Either("utilisation ratio", PERCENT, RATIO, tell=1.5, by_size=PERCENT)
NVLINK_RATE: Final = Either("NVLink rate", MEGABYTES_PER_SECOND, BYTES_PER_SECOND, tell=1e7, by_size=BYTES_PER_SECOND)


def bit(mask: int) -> Unit:
    """One bit of a bit field, as 0 or 1."""
    return Unit(f"bit {mask:#x}", 1, 2.0**31, mask=mask)
