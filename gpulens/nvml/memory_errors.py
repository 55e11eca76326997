"""Uncorrected memory errors since the driver was loaded: of a GPU all of them, of a MIG instance those in its SRAM.

Invariant: an instance is asked, never computed from its GPU; places of which one can't be read give no sum.

NVML's header (nvmlDeviceGetMemoryErrorCounter): by instance only volatile uncorrected errors outside DRAM are told, by
place in the chip, and of a partitioned GPU's own handle they are not.
"""

from __future__ import annotations

from typing import Final

from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.sight import Sight

_TOTAL: Final = "nvmlDeviceGetTotalEccErrors"
_BY_PLACE: Final = "nvmlDeviceGetMemoryErrorCounter"
_UNCORRECTED, _VOLATILE = 1, 0
_SRAM: Final = 7
_SRAM_PLACES: Final = (0, 1, 3, 4, 5, 6)
"""L1, L2, registers, texture, shared memory of textures, CBU; a card that knows 'SRAM' sums them up there."""


def uncorrected(s: Sight) -> int | Failure:
    """The total where the device tells one; of an instance else what it tells by place."""
    total = s.number(_TOTAL, _UNCORRECTED, _VOLATILE)
    if s.instance is None or not _is_unsupported(total):
        return total
    sram = _at(s, _SRAM)
    if not _is_unsupported(sram):
        return sram
    told = [found for place in _SRAM_PLACES if not _is_unsupported(found := _at(s, place))]
    counts = [one for one in told if not isinstance(one, Failure)]
    if told and len(counts) == len(told):
        return sum(counts)
    return next((one for one in told if isinstance(one, Failure)), sram)


def _at(s: Sight, place: int) -> int | Failure:
    return s.number(_BY_PLACE, _UNCORRECTED, _VOLATILE, place)


def _is_unsupported(value: int | Failure) -> bool:
    return isinstance(value, Failure) and value.reason is Reason.UNSUPPORTED
