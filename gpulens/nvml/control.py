"""Starts the library, finds the GPUs, and does both again when they are gone.

Invariant: a GPU is known by its UUID from the first time it is seen; while its index answers 'lost' or anything else
but a handle it is kept, when the driver does not list it any more it goes.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

from gpulens.nvml.context import Context
from gpulens.nvml.gateway import BindingError, Line, Target
from gpulens.nvml.posts import Post
from gpulens.nvml.protocol import Json, Say
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.worker import Place, Worker

LOST_RETRY_S: Final = 2.0
"""How often a lost GPU is looked for."""

_FIRST_START_S: Final = 1.0
_LONGEST_START_S: Final = 30.0
_QUIET_S: Final = 2.0
_MISMATCH: Final = 18
_MISMATCH_TRIES: Final = 3
_NO_LIBRARY: Final = 12
_NO_BINDING: Final = "import pynvml"


class Control:
    """The library's life and the list of workers. `workers` is replaced whole, so any thread may walk it.

    `listing` rises with every change of who is there or what their handles are.
    """

    def __init__(self, context: Context, quiet: threading.Event) -> None:
        self.workers: tuple[Worker, ...] = ()
        self.listing = 0
        self._listed: tuple[object, ...] | None = None
        self.epoch = 0
        self._context = context
        self._quiet = quiet
        self._kick = threading.Event()
        self._reload_of = 0
        self._pause_s = _FIRST_START_S
        self._down: Failure | None = None
        self._told: dict[str, Json] = {}
        self._by_index: dict[int, str] = {}
        self._unreachable: dict[int, Failure] = {}
        self._nvml = ""
        self._mismatches = 0
        hangs, clock = context.gateway.hangs, context.gateway.clock
        self.post = Post(
            "control",
            context.gateway,
            self._work,
            hung=self._left,
            free=lambda: clock() >= hangs.retry_at(""),
        )

    # ---- from other threads ----

    def kick(self) -> None:
        """Look again now."""
        self._kick.set()

    def trouble(self, epoch: int, reload: bool) -> None:
        """A call said that the driver of this epoch is gone (`reload`), or that a handle is."""
        if reload:
            self._reload_of = epoch
        self._kick.set()

    def worker(self, uuid: str) -> Worker | None:
        """The worker of a GPU."""
        return next((one for one in self.workers if one.uuid == uuid), None)

    def _left(self, gpu: str, call: str) -> None:
        self._context.hung(gpu, call)
        if not gpu and not self._context.gateway.up:
            self._say_down(Failure(Reason.HUNG, 0, call), "the driver's library does not answer")

    # ---- the thread ----

    def _work(self, line: Line, again: bool) -> None:
        while not self._context.stopping.is_set():
            self._kick.clear()
            self._kick.wait(self._step(line))

    def _step(self, line: Line) -> float | None:
        """Does what is to be done now; how long to wait for the next (None: until something happens)."""
        gateway = self._context.gateway
        line.fresh.clear()  # nobody asks for them here
        if gateway.up and self._reload_of == self.epoch:
            self._stop(line)
        if not gateway.up and not self._start(line):
            wait, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_START_S)
            return wait
        failure = self._enumerate(line)
        if failure is not None:
            if failure.reason is Reason.DRIVER:
                self._reload_of = self.epoch
            return self._pause_s
        self._pause_s = _FIRST_START_S
        self._say_up()
        waits = any(one.lost is not None or one.wants_handle for one in self.workers) or any(
            why.reason is Reason.LOST for why in self._unreachable.values()
        )
        return LOST_RETRY_S if waits else None

    def _start(self, line: Line) -> bool:
        gateway = self._context.gateway
        try:
            gateway.load()
        except BindingError as error:
            self._say_down(Failure(Reason.DRIVER, 0, _NO_BINDING), str(error))
            return False
        started = line.ask(lambda _: None, "nvmlInit", down=True)
        if isinstance(started, Failure):
            self._mismatches = self._mismatches + 1 if started.code == _MISMATCH else 0
            if self._mismatches == _MISMATCH_TRIES:
                # a library that is mapped stays so: only another process can load the one that fits
                self._context.note("the library in this process does not fit the driver any more: another must load it")
                self._context.leaving.set()
            text = _TEXTS.get(started.code, f"NVML does not start (code {started.code})")
            says = gateway.loader_says() if started.code == _NO_LIBRARY else ""
            self._say_down(started, says or text)
            return False
        gateway.up = True
        self.epoch += 1
        version = line.ask(str, "nvmlSystemGetDriverVersion")
        nvml = line.ask(str, "nvmlSystemGetNVMLVersion")
        self._context.driver = gateway.capabilities.driver = "" if isinstance(version, Failure) else version
        self._nvml = "" if isinstance(nvml, Failure) else nvml
        return True

    def _stop(self, line: Line) -> None:
        """Ends the library's life: nobody may be in it, except who hangs."""
        self._context.gateway.up = False
        self._say_down(Failure(Reason.DRIVER, 1, ""), "the driver was unloaded, or loaded anew")
        until = self._context.gateway.clock() + _QUIET_S
        busy = [*(one.post for one in self.workers)]
        while any(post.busy for post in busy) and self._context.gateway.clock() < until:
            self._context.stopping.wait(0.01)
        self._quiet.wait(_QUIET_S)
        line.ask(lambda _: None, "nvmlShutdown", down=True)

    # ---- who is there ----

    def _enumerate(self, line: Line) -> Failure | None:
        version = line.ask(str, "nvmlSystemGetDriverVersion")
        if isinstance(version, Failure) and version.reason is Reason.DRIVER:
            return version
        count = line.ask(int, "nvmlDeviceGetCount")
        if isinstance(count, Failure):
            return count
        found: dict[str, Place] = {}
        failed: dict[int, Failure] = {}
        for index in range(count):
            one = self._look(line, index)
            if isinstance(one, Failure):
                if one.reason is Reason.DRIVER:
                    return one
                failed[index] = one
            else:
                found[one[0]] = one[1]
        self._take(found, failed)
        return None

    def _look(self, line: Line, index: int) -> tuple[str, Place] | Failure:
        known = self._by_index.get(index, f"index:{index}")
        handle = line.ask(_same, "nvmlDeviceGetHandleByIndex", index, gpu=known)
        if isinstance(handle, Failure):
            return handle
        unnamed = Target(known, known, handle)
        uuid = line.ask(str, "nvmlDeviceGetUUID", handle, on=unnamed, remember=False)
        return uuid if isinstance(uuid, Failure) else (uuid, Place(handle, index, self.epoch))

    def _take(self, found: dict[str, Place], failed: dict[int, Failure]) -> None:
        before = {one.uuid: one for one in self.workers}
        kept = {self._by_index[index]: why for index, why in failed.items() if index in self._by_index}
        workers: list[Worker] = []
        listed_anew = self._listed is None
        for uuid, place in found.items():
            worker = before.pop(uuid, None)
            if worker is None:
                worker = Worker(uuid, place, self._context, self.trouble)
                worker.post.start()
                listed_anew = True
            elif worker.lost is not None or worker.wants_handle or not _same_place(worker.place, place):
                worker.adopt(place)
            elif worker.place.index != place.index:
                worker.place = place
            workers.append(worker)
        for uuid, worker in before.items():
            why = kept.get(uuid)
            if why is None:
                worker.end()
                listed_anew = True
                self._context.note(f"{uuid} is not listed any more")
                continue
            if why.reason is Reason.LOST:
                worker.lose(why)
            workers.append(worker)
        self._by_index = {place.index: uuid for uuid, place in found.items()} | {
            index: self._by_index[index] for index in failed if index in self._by_index
        }
        self._note_unreachable({index: why for index, why in failed.items() if index not in self._by_index})
        self.workers = tuple(workers)
        listed = tuple((one.uuid, address(one.place.handle), one.lives, one.lost is None) for one in workers)
        if listed != self._listed:
            self._listed = listed
            self.listing += 1
        if listed_anew:
            self._say_up()
            self._context.say(Say.CHANGED, gpu=None)

    def _note_unreachable(self, failed: dict[int, Failure]) -> None:
        for index, why in failed.items():
            if self._unreachable.get(index) != why:
                self._context.note(f"the GPU of index {index} can't be reached: {why.reason} (code {why.code})")
        self._unreachable = failed

    # ---- what the receiver is told ----

    def _say_up(self) -> None:
        fields: dict[str, Json] = {
            "up": True,
            "driver": self._context.driver,
            "nvml": self._nvml,
            "epoch": self.epoch,
            "pids": self._context.pids_visible,
            "unreachable": [[i, str(why.reason), why.code] for i, why in sorted(self._unreachable.items())],
        }
        if fields != self._told:
            version = self._context.driver or "of unknown version"
            self._context.note(f"driver {version} is up, {_gpus(len(self.workers))}")
        self._say_driver(fields)
        self._down = None

    def _say_down(self, failure: Failure, text: str) -> None:
        if self._down is None or (self._down.reason, self._down.code) != (failure.reason, failure.code):
            self._context.note(f"driver is down: {text} ({failure.reason}, code {failure.code})")
        self._down = failure
        self._say_driver({"up": False, "reason": str(failure.reason), "code": failure.code, "text": text})

    def _say_driver(self, fields: dict[str, Json]) -> None:
        if fields != self._told:
            self._told = fields
            self._context.say(Say.DRIVER, **fields)


_TEXTS: Final = {
    4: "no permission to use the driver: the container needs /dev/nvidiactl and /dev/nvidia0 ...",
    9: "the driver is not loaded",
    12: "libnvidia-ml.so.1 was not found by the loader",
    18: "the library does not fit the loaded driver: the driver was upgraded without a reboot or a reload",
    999: "NVML does not start (unknown error): often the container lost its device cgroup; it must be started again",
}


def _gpus(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"


def _same(result: object) -> object:
    return result


def _same_place(a: Place, b: Place) -> bool:
    return a.epoch == b.epoch and address(a.handle) == address(b.handle)


def address(handle: object) -> int | None:
    """The number behind a handle, of which the binding makes a new pointer object at each call; None for NULL."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]
    except (TypeError, ctypes.ArgumentError):
        return id(handle)
