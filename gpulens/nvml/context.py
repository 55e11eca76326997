"""What the threads of the child share: how they talk, when they stop, and what the receiver asked for.

Invariant: nothing in here calls NVML.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulens.nvml.containers import Containers
from gpulens.nvml.gateway import Gateway
from gpulens.nvml.gpm import SHORTEST_S
from gpulens.nvml.hangs import FIRST_RETRY_S, LONGEST_RETRY_S
from gpulens.nvml.protocol import Json, Message, Say, frame
from gpulens.nvml.reason import Failure

INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The kernel's fixed number of the first pid namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""

_CALL_TIMEOUT_S: Final = 5.0
_QUIET_S: Final = 600.0


class Writer:
    """Frames to the receiver. Safe to use from several threads; a receiver that is gone is no error here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def say(self, what: Say, fields: Mapping[str, Json]) -> None:
        """Writes one frame whole."""
        data = memoryview(frame({"say": str(what), **fields}))
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except OSError:
                    return  # the end of our input will tell


@dataclass(frozen=True, slots=True)
class Wish:
    """What `configure` asks for; see protocol.Do."""

    call_timeout_s: float = _CALL_TIMEOUT_S
    hung: tuple[tuple[str, str], ...] = ()
    proc: str = "/proc"
    host_pid: str = "auto"
    processes: bool = True
    first_retry_s: float = FIRST_RETRY_S
    longest_retry_s: float = LONGEST_RETRY_S
    gpm_window_s: float = SHORTEST_S
    quiet_s: float = _QUIET_S

    @classmethod
    def of(cls, message: Message) -> Wish:
        """The wish in a message; what is missing or no fitting value has its default."""
        pairs = message.get("hung")
        retry = message.get("retry_s")
        first, longest = retry if isinstance(retry, list) and len(retry) == 2 else (None, None)
        return cls(
            call_timeout_s=_seconds(message.get("call_timeout_s"), _CALL_TIMEOUT_S),
            hung=tuple(_pairs(pairs if isinstance(pairs, list) else [])),
            proc=str(message.get("proc") or "/proc"),
            host_pid=str(message.get("host_pid") or "auto"),
            processes=message.get("processes") is not False,
            first_retry_s=_seconds(first, FIRST_RETRY_S),
            longest_retry_s=_seconds(longest, LONGEST_RETRY_S),
            gpm_window_s=_seconds(message.get("gpm_window_s"), SHORTEST_S),
            quiet_s=_seconds(message.get("quiet_s"), _QUIET_S),
        )


def _seconds(value: Json, default: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if good and isinstance(value, int | float) else default


def _pairs(items: list[Json]) -> Iterator[tuple[str, str]]:
    for item in items:
        if isinstance(item, list) and len(item) == 2:
            yield str(item[0]), str(item[1])


def sees_all_pids(host_pid: str) -> bool:
    """Whether every process of the node can be seen: NVML silently leaves out those of other pid namespaces."""
    if host_pid in {"true", "false"}:
        return host_pid == "true"
    try:
        return Path("/proc/self/ns/pid").readlink().name == INITIAL_PID_NAMESPACE
    except OSError:
        return False


@dataclass(slots=True)
class Context:
    """What all threads have. `stopping` is set when the process ends, `leaving` when it should."""

    wish: Wish
    gateway: Gateway
    writer: Writer
    containers: Containers
    pids_visible: bool
    stopping: threading.Event = field(default_factory=threading.Event)
    leaving: threading.Event = field(default_factory=threading.Event)
    driver: str = ""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def number(self) -> int:
        """A number that was not given before: of a shape, or of an epoch of one GPU."""
        return next(self._numbers)

    def say(self, what: Say, **fields: Json) -> None:
        """Tells the receiver."""
        self.writer.say(what, fields)

    def silent(self, tick: int, tier: str, gpu: str, failure: Failure) -> None:
        """Tells the receiver that a GPU can't answer at this tick."""
        self.say(
            Say.SILENT,
            tick=tick,
            tier=tier,
            gpu=gpu,
            call=failure.call,
            reason=str(failure.reason),
            code=failure.code,
        )

    def hung(self, gpu: str, call: str) -> None:
        """Tells everybody that a thread was left behind in a call; `gpu` is empty for calls that are no GPU's."""
        self.say(Say.HUNG, gpu=gpu, call=call)
        self.note(f"{call} of {gpu} hangs" if gpu else f"{call} hangs")

    def note(self, text: str) -> None:
        """One line about a change of state, for the log of the agent."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
