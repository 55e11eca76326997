"""Places at which one thread works, where a thread that hangs is left behind and replaced.

Invariant: a call past its deadline costs the thread that made it and nothing else. At most two such threads are left
behind at one post; then it stays empty until one of their calls comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from gpulens.nvml.gateway import AbandonedError, Gateway, Line

MOST_ABANDONED: Final = 2


class Post:
    """A thread's place. `work` is what the thread does, with its line into NVML, until it returns.

    `hung` is told (gpu, call) of a call that was given up, `died` that a thread ended by a mistake of ours (its
    traceback is on standard error). A new thread begins once `free` says so, and its work is told that it is not the
    first.
    """

    def __init__(
        self,
        name: str,
        gateway: Gateway,
        work: Callable[[Line, bool], None],
        *,
        hung: Callable[[str, str], None],
        free: Callable[[], bool],
        died: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._gateway = gateway
        self._work = work
        self._hung = hung
        self._free = free
        self._died = died
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._lock = threading.Lock()
        self._ended = False
        self._calls: dict[str, list[float]] = {}

    def start(self, again: bool = False) -> None:
        """Puts a thread to work."""
        line = Line(self._gateway, returned=self._returned)
        self._line = line
        self._thread = threading.Thread(target=self._run, args=(line, again), name=self.name, daemon=True)
        self._thread.start()

    def look(self, limit_s: float) -> None:
        """Leaves a hanging thread behind, or puts a new one in the place of one that was."""
        line, thread = self._line, self._thread
        if line is not None and thread is not None:
            given_up = line.give_up(self._gateway.clock(), limit_s)
            if given_up is None and (thread.is_alive() or self._ended):
                return
            self._keep(line)
            self._line = None
            if given_up is None:
                self._died()
                return
            with self._lock:
                self._lost += 1
            self._gateway.hangs.mark(*given_up)
            self._hung(*given_up)
        if not self._ended and self._lost < MOST_ABANDONED and self._free():
            self.start(again=True)

    def end(self) -> None:
        """No new thread from now on."""
        self._ended = True

    def join(self, timeout_s: float) -> None:
        """Waits for the thread at work."""
        if self._thread is not None and self._line is not None:
            self._thread.join(timeout_s)

    @property
    def busy(self) -> tuple[str, str] | None:
        """(gpu, call) of the call that the thread at work is in."""
        line = self._line
        return None if line is None else line.busy

    def calls(self) -> dict[str, list[float]]:
        """{call: [count, total seconds, longest seconds]} since the last time."""
        line = self._line
        if line is not None:
            self._keep(line)
        taken, self._calls = self._calls, {}
        return taken

    def _keep(self, line: Line) -> None:
        taken, line.stats = line.stats, {}
        add_calls(self._calls, taken)

    def _run(self, line: Line, again: bool) -> None:
        try:
            self._work(line, again)
        except AbandonedError:
            return

    def _returned(self, _line: Line) -> None:
        with self._lock:
            self._lost -= 1


def add_calls(total: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    """Adds one set of call statistics to another."""
    for call, (count, seconds, longest) in list(more.items()):
        known = total.setdefault(call, [0, 0.0, 0.0])
        known[0] += count
        known[1] += seconds
        known[2] = max(known[2], longest)
