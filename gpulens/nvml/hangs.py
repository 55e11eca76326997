"""Which calls of which GPU hung, and when each may be tried again.

Invariant: a call that hung is not made again before its back-off is over, in this process or in the one after it. The
back-off doubles each time the call hangs again and is forgotten when it answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

FIRST_RETRY_S: Final = 30.0
LONGEST_RETRY_S: Final = 600.0


@dataclass(slots=True)
class _Mark:
    retry_at: float
    pause_s: float


class Hangs:
    """The marks, by (gpu, call); `gpu` is "" for calls that are no GPU's. Safe to use from several threads."""

    def __init__(
        self, clock: Callable[[], float], *, first_s: float = FIRST_RETRY_S, longest_s: float = LONGEST_RETRY_S
    ) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._marks: dict[tuple[str, str], _Mark] = {}
        self._lock = threading.Lock()

    def mark(self, gpu: str, call: str) -> float:
        """The call hung (again). Returns when it may be tried again."""
        with self._lock:
            before = self._marks.get((gpu, call))
            pause = self._first_s if before is None else min(before.pause_s * 2, self._longest_s)
            self._marks[gpu, call] = _Mark(self._clock() + pause, pause)
            return self._clock() + pause

    def inherit(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Calls that hung in the process before this one."""
        for gpu, call in pairs:
            self.mark(gpu, call)

    def is_hung(self, gpu: str, call: str) -> bool:
        """Whether the call must not be made now."""
        if not self._marks:
            return False
        with self._lock:
            mark = self._marks.get((gpu, call))
            return mark is not None and self._clock() < mark.retry_at

    def of(self, gpu: str) -> str | None:
        """A call of this GPU that hung and has not answered since; None when all answer."""
        if not self._marks:
            return None
        with self._lock:
            return next((call for known, call in self._marks if known == gpu), None)

    def retry_at(self, gpu: str) -> float:
        """When every call of this GPU may be tried again; minus infinity when none hung."""
        with self._lock:
            return max((m.retry_at for (known, _), m in self._marks.items() if known == gpu), default=float("-inf"))

    def ready(self, gpu: str) -> None:
        """The call that was waited for came back after all: try at once, if it is the first that did so. One that comes
        back too late each time is not to be made without a pause."""
        with self._lock:
            for (known, _), mark in self._marks.items():
                if known == gpu:
                    mark.retry_at = min(mark.retry_at, self._clock() + mark.pause_s - self._first_s)

    def answered(self, gpu: str, call: str) -> None:
        """The call came back, whatever it said."""
        if not self._marks:
            return
        with self._lock:
            self._marks.pop((gpu, call), None)

    def clear(self, gpu: str) -> None:
        """Everything of this GPU was asked and came back."""
        with self._lock:
            for key in [key for key in self._marks if key[0] == gpu]:
                del self._marks[key]
