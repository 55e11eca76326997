"""Numbers as Go programs print them.

Invariant: what `shortest` prints reads back as the same number.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache


def fixed(value: float) -> str:
    """C's %f: what dcgm-exporter prints for doubles up to 4.8."""
    return f"{value:.6f}"


@lru_cache(maxsize=4096)
def shortest(value: float) -> str:
    """Go's FormatFloat(v, 'g', -1, 64), as Prometheus' Go client prints: 448 MiB is 4.69762048e+08.

    The fewest digits that read back the same; an exponent of at least two digits below 1e-4 and from 1e6 on.
    Raises ValueError for what is not finite.
    """
    if value == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"{value} is not a finite number")
    power = len(digits) + exponent - 1
    if -4 <= power < 6:
        return format(Decimal((sign, digits, exponent)), "f")
    text = "".join(map(str, digits))
    mantissa = text[0] + (f".{text[1:]}" if len(text) > 1 else "")
    return f"{'-' if sign else ''}{mantissa}e{'-' if power < 0 else '+'}{abs(power):02d}"
