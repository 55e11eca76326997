"""One device at one tick: every question is put to NVML once, however many rows need its answer.

Invariant: an answer is what NVML said at this tick, or a Failure; nothing is carried over from another tick, except by
the windows, whose values cover the time between two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, Final, TypeVar

from gpulens.nvml import fields, processes
from gpulens.nvml.containers import Container, Containers
from gpulens.nvml.devices import Identity, Instance, Layout
from gpulens.nvml.fields import FAMILIES, LINK_COUNT, Field, LinkSums, Value
from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.gpm import Windows
from gpulens.nvml.processes import BusyWindow, Process
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.samples import SampleWindow, Spread

T = TypeVar("T")

_MEMORY_V2: Final = 0x02000028
"""The version word of nvmlMemory_v2_t: 40 bytes, version 2."""


class Level(Flag):
    """What kind of device a row is of."""

    WHOLE = auto()  # a GPU that is not partitioned
    PARENT = auto()  # a GPU with MIG on
    INSTANCE = auto()  # a MIG instance
    GPU = WHOLE | PARENT
    WORKER = WHOLE | INSTANCE  # what processes run on
    ANY = WHOLE | PARENT | INSTANCE


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `used` is what was allocated where `reserved` is known; by older drivers it holds the driver's share."""

    total: int
    used: int
    reserved: int | None


@dataclass(slots=True)
class Board:
    """What is kept of one GPU between ticks. For its thread."""

    here: Target
    identity: Identity
    windows: Windows
    containers: Containers
    pids_visible: bool
    driver: str = ""
    layout: Layout = field(default_factory=Layout)
    samples: SampleWindow = field(default_factory=SampleWindow)
    links: LinkSums = field(default_factory=LinkSums)
    busy: BusyWindow = field(default_factory=BusyWindow)
    ran: dict[str, set[int]] = field(default_factory=dict)
    """By device: the processes that were seen to run since they are listed."""


class Sight:
    """The GPU itself (`instance` None) or an instance of it."""

    def __init__(self, line: Line, board: Board, instance: Instance | None = None) -> None:
        self.line = line
        self.board = board
        self.instance = instance
        self.on = board.here if instance is None else instance.target
        self._known: dict[str, Any] = {}

    @property
    def level(self) -> Level:
        """What kind of device this is."""
        if self.instance is not None:
            return Level.INSTANCE
        return Level.PARENT if self.board.layout.partitioned else Level.WHOLE

    def _once(self, what: str, ask: Callable[[], T]) -> T:
        if what not in self._known:
            self._known[what] = ask()
        found: T = self._known[what]
        return found

    def number(self, call: str, *args: int) -> int | Failure:
        """A call that answers with one integer."""
        return self._once(f"{call}{args}", lambda: self.line.ask(int, call, self.on.handle, *args, on=self.on))

    def first_of_pair(self, call: str) -> int | Failure:
        """A call that answers with (value, period)."""
        return self._once(call, lambda: self.line.ask(_first, call, self.on.handle, on=self.on))

    def rates(self) -> tuple[int, int] | Failure:
        """Percent of time with a kernel resident, and with the memory controller busy."""
        call = "nvmlDeviceGetUtilizationRates"
        return self._once(call, lambda: self.line.ask(_rates, call, self.on.handle, on=self.on))

    def memory(self) -> Memory | Failure:
        """Device memory."""
        return self._once("memory", self._memory)

    def _memory(self) -> Memory | Failure:
        call = "nvmlDeviceGetMemoryInfo"
        new = self.line.ask(_memory_v2, call, self.on.handle, _MEMORY_V2, on=self.on)
        if not isinstance(new, Failure) or new.reason is not Reason.UNSUPPORTED:
            return new
        return self.line.ask(_memory_v1, call, self.on.handle, on=self.on)

    def spread(self) -> Spread | Failure:
        """Kernel residency over the driver's samples since the last reading; percent."""
        return self._once("spread", lambda: self.board.samples.read(self.line, self.on))

    def gpm(self, metric: int) -> float | Failure:
        """A GPM metric over the window since the last reading; percent."""
        found = self._once("gpm", self._gpm)
        return found if isinstance(found, Failure) else found[metric]

    def _gpm(self) -> dict[int, float | Failure] | Failure:
        one = self.instance
        if one is not None and one.shared:
            # GPM measures GPU instances: what several compute instances did is no figure of one of them
            return Failure(Reason.UNSUPPORTED, 0, "nvmlGpmMigSampleGet")
        return self.board.windows.read(self.line, self.board.here, self.on, None if one is None else one.gi)

    def field(self, family: str, number: int, scope: int = 0) -> Value:
        """A field value; its family is fetched with it."""
        found = self._once(f"fields {family}", lambda: fields.read(self.line, self.on, FAMILIES[family]))
        asked: Field = (number, scope)
        return found[asked]

    def link_sum(self, number: int) -> Value:
        """A field of NVLink 5 over all links."""
        found = self._once("link sums", self._link_sums)
        return found if isinstance(found, Failure) else found[number]

    def _link_sums(self) -> dict[int, Value] | Failure:
        count = self.field("links", LINK_COUNT)
        if isinstance(count, Failure):
            return count
        if not count:
            return Failure(Reason.UNSUPPORTED, 0, fields.CALL)
        return self.board.links.read(self.line, self.on, int(count))

    def remapped_rows(self) -> tuple[int, int, int, int] | Failure:
        """(corrected, uncorrected, pending, failed)."""
        call = "nvmlDeviceGetRemappedRows"
        return self._once(call, lambda: self.line.ask(_four, call, self.on.handle, on=self.on))

    def retired_pages(self, cause: int) -> int | Failure:
        """Pages retired for single-bit (0) or double-bit (1) errors."""
        call = "nvmlDeviceGetRetiredPages"
        return self._once(f"{call} {cause}", lambda: self.line.ask(len, call, self.on.handle, cause, on=self.on))

    def violation_ns(self, number: int, policy: int) -> int | float | Failure:
        """Nanoseconds with clocks held back: by field, or by the call that it replaced."""
        by_field = self.field("violation", number)
        if not isinstance(by_field, Failure) or by_field.reason is not Reason.UNSUPPORTED:
            return by_field
        call = "nvmlDeviceGetViolationStatus"
        return self._once(
            f"{call} {policy}", lambda: self.line.ask(_violation, call, self.on.handle, policy, on=self.on)
        )

    def listed(self, kind: str) -> list[Process] | Failure:
        """The processes of one list."""
        return self._once(f"processes {kind}", lambda: processes.listed(self.line, self.on, kind))

    def holders(self) -> dict[int, int | None] | Failure:
        """pid -> bytes of every process with a context; a Failure when not even the compute list can be read."""
        lists = [self.listed(kind) for kind in processes.LISTS]
        if isinstance(lists[0], Failure):
            return lists[0]
        return processes.merged(one for one in lists if not isinstance(one, Failure))

    def busy(self) -> dict[int, float | Failure] | Failure:
        """pid -> share of time in which its kernels ran since the last reading, of those that ever ran.

        The driver has samples of those that ran only; that there is none says that it can't tell, not zero.
        """
        return self._once("busy", self._busy)

    def _busy(self) -> dict[int, float | Failure] | Failure:
        alive = self.holders()
        if isinstance(alive, Failure):
            return alive
        newest_us = self.board.samples.newest_us
        found = self.board.busy.read(self.line, self.on, alive, newest_us) if alive else {}
        if isinstance(found, Failure):
            if found.reason is not Reason.EMPTY:
                return found
            found = {}
        ran = (self.board.ran.get(self.on.uuid, set()) | set(found)) & set(alive)
        self.board.ran[self.on.uuid] = ran
        none = Failure(Reason.EMPTY, 0, processes.UTILIZATION)
        return {pid: found.get(pid, none) for pid in sorted(ran)}

    def container(self, pid: int) -> Container | None:
        """Where a process runs; None where that can't be told. A pid of another namespace names another process in
        the host's /proc: without sight of all pids nobody is named."""
        return self.board.containers.find(pid) if self.board.pids_visible else None


def _first(pair: list[int]) -> int:
    return int(pair[0])


def _four(found: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return found


def _rates(found: Any) -> tuple[int, int]:  # noqa: ANN401 - a ctypes structure of the binding
    return int(found.gpu), int(found.memory)


def _memory_v2(found: Any) -> Memory:  # noqa: ANN401 - a ctypes structure of the binding
    return Memory(int(found.total), int(found.used), int(found.reserved))


def _memory_v1(found: Any) -> Memory:  # noqa: ANN401 - a ctypes structure of the binding
    return Memory(int(found.total), int(found.used), None)


def _violation(found: Any) -> int:  # noqa: ANN401 - a ctypes structure of the binding
    return int(found.violationTime)
