"""Field values, asked for by family.

Invariant: a value counts only if its own return code is success and the driver stamped it: fields that were never
filled come back as a zero with no time.

One call fetches a family; a call that fails as a whole is repeated field by field, because one unknown field makes
some drivers refuse all (DCGM issue 265). Only ids below 251 are used: those from 251 on were renumbered between
driver branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from gpulens.nvml.gateway import Line, Target, reason_of
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.samples import number_of

CALL: Final = "nvmlDeviceGetFieldValues"

Field: TypeAlias = tuple[int, int]
"""(field id, scope id)."""

Value: TypeAlias = "int | float | Failure"

ALL_LINKS: Final = 0xFFFFFFFF
MOST_LINKS: Final = 36

MEMORY_TEMPERATURE: Final = 82
SLOWDOWN_LIMIT: Final = 194
LINK_COUNT: Final = 91
RECOVERY_ACTION: Final = 230

FAMILIES: Final = MappingProxyType(
    {
        "temperature": ((MEMORY_TEMPERATURE, 0),),
        "limit": ((SLOWDOWN_LIMIT, 0),),
        "violation": tuple((number, 0) for number in range(74, 80)),
        "pcie": ((197, 0), (198, 0)),
        "health": ((RECOVERY_ACTION, 0),),
        "links": ((LINK_COUNT, 0),),
        "nvlink_errors": ((38, 0), (45, 0), (52, 0), (59, 0)),
        "nvlink_io": ((138, ALL_LINKS), (139, ALL_LINKS)),
    }
)
"""Fields fetched together."""

NVLINK5: Final = (202, 204, 215, 221)
"""Bytes sent and received, recoveries, symbol errors: of a link, on Blackwell and newer."""


def read(line: Line, on: Target, wanted: Sequence[Field]) -> dict[Field, Value]:
    """Every wanted field's value, or why there is none."""
    found: dict[Field, Value] = {}
    asked = []
    for field in wanted:
        known = line.gateway.capabilities.get(on, _what(field))
        if known is None:
            asked.append(field)
        else:
            found[field] = known
    if asked:
        found |= _fetch(line, on, asked)
    return found


def _fetch(line: Line, on: Target, asked: list[Field]) -> dict[Field, Value]:
    got = _call(line, on, asked)
    if isinstance(got, Failure) and got.reason is Reason.STALE:
        got = line.doubt(on, got)  # some drivers refuse a field that they don't know as an invalid argument
    if not isinstance(got, Failure):
        return {field: _checked(line, on, field, *one) for field, one in zip(asked, got, strict=True)}
    if len(asked) == 1:
        line.gateway.capabilities.put(on, _what(asked[0]), got)
        return {asked[0]: got}
    if got.reason in {Reason.LOST, Reason.DRIVER, Reason.HUNG, Reason.STALE}:
        return dict.fromkeys(asked, got)
    found: dict[Field, Value] = {}
    for field in asked:
        found |= _fetch(line, on, [field])
    return found


def _call(line: Line, on: Target, asked: list[Field]) -> list[tuple[int, int, float | None]] | Failure:
    def take(values: Iterable[Any]) -> list[tuple[int, int, float | None]]:
        return [(int(v.nvmlReturn), int(v.timestamp), number_of(int(v.valueType), v.value)) for v in values]

    return line.ask(take, CALL, on.handle, asked, on=on, remember=False)


def _checked(line: Line, on: Target, field: Field, code: int, stamp: int, value: float | None) -> Value:
    if code:
        failure = Failure(reason_of(code), code, CALL)
        if failure.reason is Reason.STALE:  # of one field: the handle was good for the others
            failure = Failure(Reason.UNSUPPORTED, code, CALL)
        line.gateway.capabilities.put(on, _what(field), failure)
        if failure.reason is not Reason.EMPTY:
            line.fresh.append(failure)
        return failure
    if not stamp or value is None:
        return Failure(Reason.EMPTY, 0, CALL)
    return value


def _what(field: Field) -> str:
    return f"field {field[0]}/{field[1]}"


class LinkSums:
    """Sums over all links of a GPU that answers by link only.

    The links of the first sum are the links of every sum: one that fails later makes the sum unknown, not smaller.
    """

    def __init__(self) -> None:
        self._links: dict[int, frozenset[int]] = {}

    def read(self, line: Line, on: Target, links: int) -> dict[int, Value]:
        """Field id -> sum, for the fields of NVLINK5."""
        links = min(links, MOST_LINKS)
        values = read(line, on, [(number, link) for number in NVLINK5 for link in range(links)])
        return {number: self._sum(number, values, links) for number in NVLINK5}

    def _sum(self, number: int, values: dict[Field, Value], links: int) -> Value:
        here = {link: values[number, link] for link in range(links)}
        good = {link: value for link, value in here.items() if not isinstance(value, Failure)}
        if not good:
            first = next(iter(here.values()), None)
            return first if isinstance(first, Failure) else Failure(Reason.UNSUPPORTED, 0, CALL)
        known = self._links.setdefault(number, frozenset(good))
        missing = next((here[link] for link in known if link not in good and link in here), None)
        if isinstance(missing, Failure):
            return missing
        return sum(good[link] for link in known if link in good)
