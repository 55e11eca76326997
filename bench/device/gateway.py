"""The receiver's own gateway with a stop-watch in it, and the GPUs it finds.

Invariant: calls are made as the receiver makes them; the only difference is that each is timed, whole and inside the
driver's library.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulens.nvml import devices
from gpulens.nvml.containers import Containers
from gpulens.nvml.devices import Instance
from gpulens.nvml.fields import CALL as FIELDS
from gpulens.nvml.gateway import Gateway, Line, Target
from gpulens.nvml.gpm import Windows
from gpulens.nvml.hangs import Hangs
from gpulens.nvml.reason import Failure
from gpulens.nvml.sight import Board, Level, Sight
from gpulens.nvml.table import ROWS, Reading

WINDOW_S = 0.15  # of GPM here: short, so that many calls of it can be timed; NVML's own minimum is 0.1


@dataclass(slots=True)
class Timings:
    """Seconds of one call, by its calls: in all, and in the library."""

    whole: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    said: str = "value"


class _Watched:
    """A function of the library that adds up the time spent in it."""

    def __init__(self, function: Any, clock: list[float]) -> None:  # noqa: ANN401 - a ctypes function
        self.__dict__.update(function=function, clock=clock)

    def __call__(self, *args: object) -> object:
        begin = time.perf_counter()
        try:
            return self.__dict__["function"](*args)
        finally:
            self.__dict__["clock"][0] += time.perf_counter() - begin

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["function"], name, value)


class _Cache(dict[str, object]):
    """The binding's cache of library functions, with watched ones in it."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def __setitem__(self, name: str, function: object) -> None:
        super().__setitem__(name, _Watched(function, self._clock))


class TimedGateway(Gateway):
    """Times every call while `timings` is set."""

    def __init__(self) -> None:
        super().__init__(Hangs(time.monotonic))
        self.timings: defaultdict[str, Timings] | None = None
        self._inside = [0.0]

    def watch_library(self) -> bool:
        """Puts the stop-watch around the library's functions; False where this binding has no place for it."""
        binding = self._binding
        if binding is None or not isinstance(getattr(binding, "_nvmlGetFunctionPointer_cache", None), dict):
            return False
        vars(binding)["_nvmlGetFunctionPointer_cache"] = _Cache(self._inside)
        return True

    def run(self, call: str, args: tuple[object, ...]) -> tuple[Any, Failure | None]:
        """One call, timed."""
        if self.timings is None:
            return super().run(call, args)
        self._inside[0] = 0.0
        begin = time.perf_counter()
        result, failure = super().run(call, args)
        took = time.perf_counter() - begin
        entry = self.timings[_label(call, args)]
        entry.whole.append(took)
        entry.inside.append(self._inside[0])
        entry.said = "value" if failure is None else told(failure)
        return result, failure


def _label(call: str, args: tuple[object, ...]) -> str:
    if call != FIELDS or len(args) < 2 or not isinstance(args[1], list):
        return call
    ids = [str(one[0] if isinstance(one, tuple) else one) for one in args[1]]
    return f"{call} {', '.join(ids[:4])}{f' and {len(ids) - 4} more' if len(ids) > 4 else ''}"


@dataclass(slots=True)
class Gpu:
    """A GPU and its MIG instances. `board` is what the receiver keeps of it between ticks."""

    index: int
    board: Board

    @property
    def target(self) -> Target:
        """The GPU itself."""
        return self.board.here

    def devices(self) -> Iterator[tuple[str, Instance | None]]:
        """(name, instance) of itself and of each of its instances."""
        yield f"GPU {self.index}", None
        for one in self.board.layout.instances:
            yield f"GPU {self.index} gi {one.gi} ({one.profile})", one


@contextmanager
def opened() -> Iterator[tuple[TimedGateway, Line]]:
    """NVML started, and shut down at the end. Raises BindingError, and ConnectionError where the driver says no."""
    gateway = TimedGateway()
    gateway.load()
    line = Line(gateway)
    failure = line.ask(lambda _: None, "nvmlInit", down=True)
    if isinstance(failure, Failure):
        raise ConnectionError(f"NVML can't be started: {told(failure)}")
    gateway.up = True
    try:
        yield gateway, line
    finally:
        line.ask(lambda _: None, "nvmlShutdown", down=True)


def found(line: Line, pids_visible: bool) -> tuple[list[Gpu], list[str]]:
    """Every GPU that can be used, and why the others can't."""
    count = line.ask(int, "nvmlDeviceGetCount")
    if isinstance(count, Failure):
        return [], [f"the number of GPUs: {told(count)}"]
    gpus, lacking = [], []
    for index in range(count):
        handle = line.ask(lambda one: one, "nvmlDeviceGetHandleByIndex", index)
        uuid = handle if isinstance(handle, Failure) else line.ask(str, "nvmlDeviceGetUUID", handle)
        if isinstance(handle, Failure) or isinstance(uuid, Failure):
            lacking.append(f"index {index}: {told(uuid) if isinstance(uuid, Failure) else uuid}")
            continue
        here = Target(uuid, uuid, handle)
        layout = devices.layout(line, here)
        if isinstance(layout, Failure):
            lacking.append(f"index {index}: MIG layout: {told(layout)}")
            layout = devices.Layout()
        board = Board(
            Target(uuid, uuid, handle, layout.fingerprint),
            devices.identify(line, here, index, None),
            Windows(WINDOW_S),
            Containers(Path("/proc")),
            pids_visible,
            layout=layout,
        )
        gpus.append(Gpu(index, board))
    return gpus, lacking


def sees_all_pids() -> bool:
    """Whether this process is in the machine's first PID namespace; NVML hides what is outside the caller's."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]"
    except OSError:
        return False


def read_all(line: Line, gpu: Gpu, instance: Instance | None) -> dict[str, Reading]:
    """Every row of the receiver's table that this kind of device has: its value, or why there is none."""
    sight = Sight(line, gpu.board, instance)
    return {row.key: row.read(sight) for row in ROWS if row.level & sight.level}


def level_of(line: Line, gpu: Gpu, instance: Instance | None) -> Level:
    """What kind of device this is."""
    return Sight(line, gpu.board, instance).level


def told(failure: Failure) -> str:
    """A failure in a few words."""
    code = f" {failure.code}" if failure.code else ""
    call = f" ({failure.call})" if failure.call else ""
    return f"{failure.reason.value}{code}{call}"
