"""XIDs and MIG changes as the driver tells them, on a thread of their own.

Invariant: an event is told once, under the UUID of the GPU that it is of. While a GPU is lost the driver answers every
wait with that at once: then the set is given up and made anew, ever more slowly.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from gpulens.nvml.context import Context
from gpulens.nvml.control import Control, address
from gpulens.nvml.devices import instance_id
from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.posts import Post
from gpulens.nvml.protocol import Say
from gpulens.nvml.reason import Failure, Reason

XID: Final = 0x8
MIG: Final = 0x100

WAIT_MS: Final = 500
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_STEP_S: Final = 0.1
_WAIT: Final = "nvmlEventSetWait_v2"


class Events:
    """The event thread. `quiet` is set while it is in no call of the library."""

    def __init__(self, context: Context, control: Control, quiet: threading.Event) -> None:
        self._context = context
        self._control = control
        self._quiet = quiet
        self._pause_s = _FIRST_PAUSE_S
        self._listing = 0
        self._refused: set[str] = set()
        hangs, clock = context.gateway.hangs, context.gateway.clock
        self.post = Post(
            "events",
            context.gateway,
            self._work,
            hung=self._left,
            free=lambda: clock() >= hangs.retry_at(""),
        )

    def _left(self, gpu: str, call: str) -> None:
        self._context.hung(gpu, call)
        self._quiet.set()

    def _work(self, line: Line, again: bool) -> None:
        stopping = self._context.stopping
        while not stopping.is_set():
            if self._context.gateway.up and self._control.workers:
                self._quiet.clear()
                good = self._listen(line)
                self._quiet.set()
                self._pause_s = _FIRST_PAUSE_S if good else min(self._pause_s * 2, _LONGEST_PAUSE_S)
                self._rest(0.0 if good else self._pause_s)
            else:
                stopping.wait(_STEP_S)

    def _rest(self, pause_s: float) -> None:
        """Waits, but not longer than until the GPUs are others."""
        while pause_s > 0 and self._control.listing == self._listing and not self._context.stopping.is_set():
            self._context.stopping.wait(min(_STEP_S, pause_s))
            pause_s -= _STEP_S

    def _listen(self, line: Line) -> bool:
        """Waits with one event set until the GPUs are others; False when it was no use."""
        if self._listing != self._control.listing:
            self._refused.clear()
        self._listing, epoch = self._control.listing, self._control.epoch
        events = line.ask(_same, "nvmlEventSetCreate")
        if isinstance(events, Failure):
            return False
        names = self._register(line, events)
        good = bool(names) and self._wait(line, events, names, epoch)
        line.ask(lambda _: None, "nvmlEventSetFree", events)
        line.fresh.clear()
        return good

    def _register(self, line: Line, events: object) -> dict[int | None, str]:
        """Handle's number -> UUID of those whose events are told; nobody, where a refusal spoiled the set."""
        names: dict[int | None, str] = {}
        for worker in self._control.workers:
            hung = self._context.gateway.hangs.of(worker.uuid) is not None
            if worker.lost is not None or worker.wants_handle or hung or worker.uuid in self._refused:
                continue
            on = Target(worker.uuid, worker.uuid, worker.place.handle)
            supported = line.ask(int, "nvmlDeviceGetSupportedEventTypes", on.handle, on=on, remember=False)
            if isinstance(supported, Failure) or not supported & (XID | MIG):
                continue
            done = line.ask(
                lambda _: None,
                "nvmlDeviceRegisterEvents",
                on.handle,
                supported & (XID | MIG),
                events,
                on=on,
                remember=False,
            )
            if not isinstance(done, Failure):
                names[address(on.handle)] = worker.uuid
            elif done.reason is Reason.ERROR:  # the header asks to free the set then; the next one goes without
                self._refused.add(worker.uuid)
                return {}
        return names

    def _wait(self, line: Line, events: object, names: dict[int | None, str], epoch: int) -> bool:
        while not self._context.stopping.is_set() and self._context.gateway.up:
            if self._control.listing != self._listing:
                return True
            found = line.ask(_same, _WAIT, events, WAIT_MS, allowed_s=WAIT_MS / 1000)
            if not isinstance(found, Failure):
                self._pause_s = _FIRST_PAUSE_S
                self._tell(line, found, names)
            elif found.reason is not Reason.EMPTY:
                self._control.trouble(epoch, found.reason is Reason.DRIVER)
                return False
        return True

    def _tell(self, line: Line, data: Any, names: dict[int | None, str]) -> None:  # noqa: ANN401 - a ctypes structure
        uuid = names.get(address(data.device)) or self._ask_name(line, data.device)
        if uuid is None:
            return
        kind = int(data.eventType)
        if kind & XID:
            self._context.say(
                Say.EVENT,
                gpu=uuid,
                kind="xid",
                code=int(data.eventData),
                gi=instance_id(int(data.gpuInstanceId)),
                ci=instance_id(int(data.computeInstanceId)),
            )
        if kind & MIG:
            worker = self._control.worker(uuid)
            if worker is not None:
                worker.refresh()

    def _ask_name(self, line: Line, handle: object) -> str | None:
        if not handle:
            return None
        uuid = line.ask(str, "nvmlDeviceGetUUID", handle, gpu="")
        return None if isinstance(uuid, Failure) else uuid


def _same(result: object) -> object:
    return result
