"""Who a GPU is, and how it is partitioned.

Invariant: a device is its UUID; the index and the handle are where it is to be found now. A MIG layout has a
fingerprint of every (GPU instance, compute instance, UUID) in it: what was learned under one fingerprint does not
hold under another, for instance ids and handles are given again after a re-partition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.reason import Failure, Reason

NO_MIG: Final = "off"
_NONE: Final = 0xFFFFFFFF
_PROFILE: Final = re.compile(r"\bMIG (?P<profile>\S+)$")
_BUS: Final = re.compile(r"(?P<domain>[0-9a-f]{4,8}):(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")

_ABSENT_SLOT: Final = frozenset({Reason.EMPTY, Reason.STALE, Reason.UNSUPPORTED})
"""Slots are sparse: an empty one says 'not found' or 'invalid argument'."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts of a GPU that stay; "" or None where the driver does not tell."""

    uuid: str
    index: int
    name: str = ""
    minor: int | None = None
    serial: str = ""
    pci: str = ""
    architecture: int | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG device: a compute instance `ci` in the GPU instance `gi`. `shared` when its GPU instance has several."""

    target: Target
    gi: int
    ci: int
    profile: str
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a GPU is partitioned. `fingerprint` is NO_MIG where it is not."""

    fingerprint: str = NO_MIG
    instances: tuple[Instance, ...] = field(default=())

    @property
    def partitioned(self) -> bool:
        """Whether MIG is on (maybe with no instance yet)."""
        return self.fingerprint != NO_MIG


def sysfs_address(text: str) -> str:
    """A PCI address as the kernel writes it: lower case, a domain of four digits where that is enough.

    NVML pads the domain to eight ("00000000:3B:00.0"); text that is no address is given back as it is.
    """
    lower = text.strip().lower()
    match = _BUS.fullmatch(lower)
    if match is None:
        return lower
    domain = match["domain"]
    return f"{domain[4:] if len(domain) == 8 and domain.startswith('0000') else domain}:{match['rest']}"


def identify(line: Line, on: Target, index: int, before: Identity | None) -> Identity:
    """Asks a GPU who it is. What it does not tell now stays as it was known."""
    name = line.ask(str, "nvmlDeviceGetName", on.handle, on=on)
    minor = line.ask(int, "nvmlDeviceGetMinorNumber", on.handle, on=on)
    serial = line.ask(str, "nvmlDeviceGetSerial", on.handle, on=on)
    pci = line.ask(_bus_id, "nvmlDeviceGetPciInfo", on.handle, on=on)
    architecture = line.ask(int, "nvmlDeviceGetArchitecture", on.handle, on=on)
    old = before or Identity(on.uuid, index)
    return Identity(
        on.uuid,
        index,
        old.name if isinstance(name, Failure) else name,
        old.minor if isinstance(minor, Failure) else minor,
        old.serial if isinstance(serial, Failure) else serial,
        old.pci if isinstance(pci, Failure) else pci,
        old.architecture if isinstance(architecture, Failure) else architecture,
    )


def _bus_id(info: Any) -> str:  # noqa: ANN401 - a ctypes structure of the binding
    bus = info.busId
    return sysfs_address(bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus))


def layout(line: Line, on: Target) -> Layout | Failure:
    """The instances of a GPU as they are now; a Failure where that can't be told."""
    # a card that has no MIG is remembered; whether one that has it uses it is asked each time
    mode = line.ask(_current, "nvmlDeviceGetMigMode", on.handle, on=on)
    if isinstance(mode, Failure):
        return Layout() if mode.reason in {Reason.UNSUPPORTED, Reason.PERMISSION} else mode
    if not mode:
        return Layout()
    most = line.ask(int, "nvmlDeviceGetMaxMigDeviceCount", on.handle, on=on)
    if isinstance(most, Failure):
        return most
    found: list[Instance] = []
    hidden = False
    for slot in range(most):
        one = _instance(line, on, slot)
        if isinstance(one, Instance):
            found.append(one)
        elif one is not None and one.reason is Reason.PERMISSION:
            hidden = True  # an instance that this container was not given is no reason to leave out the others
        elif one is not None:
            return one
    fingerprint = ";".join(sorted(f"{one.gi}/{one.ci}/{one.target.uuid}" for one in found)) or "empty"
    return Layout(fingerprint, tuple(_stamped(one, found, fingerprint, hidden) for one in found))


def _current(modes: list[int]) -> int:
    return modes[0]


def _stamped(one: Instance, all_of_them: list[Instance], fingerprint: str, hidden: bool) -> Instance:
    """With `hidden`, instances beside these may not be seen: one that has a part of its GPU instance ("1c.3g.40gb")
    may share it with them."""
    target = Target(one.target.uuid, one.target.gpu, one.target.handle, fingerprint)
    shared = sum(other.gi == one.gi for other in all_of_them) > 1 or (hidden and "c." in one.profile)
    return Instance(target, one.gi, one.ci, one.profile, shared)


def _instance(line: Line, on: Target, slot: int) -> Instance | Failure | None:
    handle = line.ask(
        lambda found: found, "nvmlDeviceGetMigDeviceHandleByIndex", on.handle, slot, on=on, remember=False
    )
    if isinstance(handle, Failure):
        return None if handle.reason in _ABSENT_SLOT else handle
    unnamed = Target(on.uuid, on.gpu, handle, on.mig)
    uuid = line.ask(str, "nvmlDeviceGetUUID", handle, on=unnamed, remember=False)
    gi = line.ask(int, "nvmlDeviceGetGpuInstanceId", handle, on=unnamed, remember=False)
    ci = line.ask(int, "nvmlDeviceGetComputeInstanceId", handle, on=unnamed, remember=False)
    name = line.ask(str, "nvmlDeviceGetName", handle, on=unnamed, remember=False)
    for asked in (uuid, gi, ci):
        if isinstance(asked, Failure):
            return None if asked.reason in _ABSENT_SLOT else asked  # destroyed between two calls
    if isinstance(uuid, Failure) or isinstance(gi, Failure) or isinstance(ci, Failure):
        return None
    profile = "" if isinstance(name, Failure) else mig_profile(name)
    return Instance(Target(uuid, on.gpu, handle), gi, ci, profile)


def mig_profile(name: str) -> str:
    """The profile in a MIG device's name ("NVIDIA H100 80GB HBM3 MIG 1g.10gb" -> "1g.10gb"); "" without one."""
    match = _PROFILE.search(name)
    return match["profile"] if match else ""


def instance_id(number: int) -> int | None:
    """A GPU-instance or compute-instance id of an event or a process; None for NVML's 'no instance'."""
    return None if number == _NONE else number
