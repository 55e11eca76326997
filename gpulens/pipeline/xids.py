"""What an XID code is about.

Invariant: a table only. `application` is the workload's own fault and says nothing of the GPU; a code that is not in
the table is `unknown`, never harmless.

Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors: what each code stands for and what is to be done),
and the codes that NVIDIA's device plugin leaves out of its health check because they are the application's (13, 31, 43,
45, 68, 109).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class XidClass(StrEnum):
    """Whose fault an XID is."""

    APPLICATION = "application"
    HARDWARE = "hardware"
    DRIVER = "driver"
    LINK = "link"
    UNKNOWN = "unknown"


_CODES: Final[Mapping[XidClass, tuple[int, ...]]] = {
    # engine exceptions, page faults, illegal commands and timeouts that a program causes, and the clean-up after one
    XidClass.APPLICATION: (8, 13, 31, 32, 43, 45, 68, 69, 109),
    # memory (48, 63, 64, 92, 94, 95, 140, 160), repairs (156, 157), off the bus (79), power, the memory's interface,
    # micro-controllers
    XidClass.HARDWARE: (46, 48, 54, 57, 58, 59, 61, 62, 63, 64, 79, 92, 93, 94, 95, 110, 140, 143, 156, 157, 158, 160),
    # the driver and its firmware (38, 119, 120: GSP)
    XidClass.DRIVER: (9, 12, 16, 38, 56, 66, 80, 119, 120, 154),
    # NVLink (74, 136, 137, 144-150, 155) and the chip-to-chip link (121)
    XidClass.LINK: (74, 121, 136, 137, 144, 145, 146, 147, 148, 149, 150, 155),
}

XID_CLASSES: Final[Mapping[int, XidClass]] = MappingProxyType(
    {code: kind for kind, codes in _CODES.items() for code in codes}
)
"""Class by code."""

COUNTED_FROM_START: Final = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140)
"""Codes whose counters exist from the start at 0, so that the first event is an increase to everybody."""


def xid_class(code: int) -> XidClass:
    """The class of a code."""
    return XID_CLASSES.get(code, XidClass.UNKNOWN)
