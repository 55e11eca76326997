"""Durations as the Collector writes them: Go's "1h30m", "200ms", "1.5s".

Invariant: `parse(format(x)) == x` for every x that is a whole number of nanoseconds within an int64.
Source of the grammar and the error texts: Go's time.ParseDuration.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS_NS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_MAX_NS = 2**63 - 1
_MAX_TEXT = 200
_TERM = re.compile(r"(?P<whole>[0-9]*)(?P<fraction>\.[0-9]*)?(?P<unit>[^0-9.]*)")


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError with Go's text; a bare "0" is allowed, any other bare number is not."""
    ns = _parse_ns(text)
    return ns / 10**9


def format_duration(seconds: float) -> str:
    """The shortest text in units of h, m, s (or ms, us, ns below a second) that parses back to the same
    value."""
    ns = round(Fraction(seconds) * 10**9)
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    if ns == 0:
        return "0s"
    if ns < 10**9:
        unit = next(unit for unit in ("ms", "us", "ns") if ns >= _UNITS_NS[unit])
        return f"{sign}{_decimal(ns, _UNITS_NS[unit])}{unit}"
    hours, rest = divmod(ns, _UNITS_NS["h"])
    minutes, rest = divmod(rest, _UNITS_NS["m"])
    terms = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else ""]
    terms.append(f"{_decimal(rest, 10**9)}s" if rest else "")
    return sign + "".join(terms)


def _parse_ns(text: str) -> int:
    body = text[1:] if text[:1] in ("-", "+") else text
    if body == "0":
        return 0
    if not body or len(body) > _MAX_TEXT:
        raise ValueError(f'time: invalid duration "{text[:_MAX_TEXT]}"')
    total, at = Fraction(0), 0
    while at < len(body):
        term = _TERM.match(body, at)
        if term is None or not (term["whole"] or len(term["fraction"] or "") > 1):
            raise ValueError(f'time: invalid duration "{text}"')
        if not term["unit"]:
            raise ValueError(f'time: missing unit in duration "{text}"')
        if term["unit"] not in _UNITS_NS:
            raise ValueError(f'time: unknown unit "{term["unit"]}" in duration "{text}"')
        number = Fraction(f"{term['whole'] or '0'}{term['fraction'] or ''}")
        total += int(number * _UNITS_NS[term["unit"]])
        at = term.end()
    if total > _MAX_NS:
        raise ValueError(f'time: invalid duration "{text}"')
    return -int(total) if text[0] == "-" else int(total)


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    return f"{whole}.{str(rest).zfill(len(str(unit)) - 1).rstrip('0')}"
