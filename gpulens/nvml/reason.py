"""Why a value could not be read.

Invariant: a call gives a value or a Failure, never a number that stands for 'could not read'.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why there is no value."""

    UNSUPPORTED = "unsupported"  # this device, driver or mode has no such figure; remembered
    PERMISSION = "permission"
    LOST = "lost"  # the GPU fell off the bus
    STALE = "stale"  # the handle no longer names what it did (MIG was re-partitioned)
    EMPTY = "empty"  # nothing to report now
    HUNG = "hung"  # the call did not come back in time, or is not tried for now because it did not
    DRIVER = "driver"  # the driver or its library is not there, or they do not fit each other
    ERROR = "error"  # any other NVML error; the code tells which


@dataclass(frozen=True, slots=True)
class Failure:
    """No value: why, NVML's code (0 where none), and the call."""

    reason: Reason
    code: int = 0
    call: str = ""
