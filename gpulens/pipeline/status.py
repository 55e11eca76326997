"""Component status: what the host knows of each component's health.

Invariant: only the transitions of the table happen; anything else is ignored, so a late report can't wake the dead.
The states and transitions are the Collector's (otelcol service/internal/status).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Status(StrEnum):
    """The state of a component."""

    NONE = "None"
    STARTING = "Starting"
    OK = "OK"
    RECOVERABLE = "RecoverableError"
    PERMANENT = "PermanentError"
    FATAL = "FatalError"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


_RUNNING = frozenset({Status.OK, Status.RECOVERABLE, Status.PERMANENT, Status.FATAL, Status.STOPPING})
_NEXT: Mapping[Status, frozenset[Status]] = MappingProxyType(
    {
        Status.NONE: frozenset({Status.STARTING, Status.STOPPING}),
        Status.STARTING: _RUNNING,
        Status.OK: _RUNNING,
        Status.RECOVERABLE: _RUNNING,
        Status.PERMANENT: frozenset({Status.STOPPING}),
        Status.FATAL: frozenset(),
        Status.STOPPING: frozenset({Status.RECOVERABLE, Status.PERMANENT, Status.FATAL, Status.STOPPED}),
        Status.STOPPED: frozenset({Status.STARTING}),
    }
)


@dataclass(frozen=True, slots=True)
class StatusEvent:
    """A state, why, and since when (ns since 1970)."""

    status: Status
    reason: str = ""
    time_ns: int = 0


Report = Callable[[Status, str], bool]
"""What a component calls when its state changes: (status, reason); True when that was a change."""


class StatusBoard:
    """The latest state of each component, by a key such as "receivers/dcgm"."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._events: dict[str, StatusEvent] = {}
        self._watchers: list[Callable[[str, StatusEvent], None]] = []

    def watch(self, watcher: Callable[[str, StatusEvent], None]) -> None:
        """Calls `watcher(key, event)` at every change from now on."""
        self._watchers.append(watcher)

    def set(self, key: str, status: Status, reason: str = "") -> bool:
        """Moves a component to a state; False when the table does not allow it or nothing changed."""
        current = self._events.get(key, StatusEvent(Status.NONE))
        if status not in _NEXT[current.status] or (status, reason) == (current.status, current.reason):
            return False
        event = StatusEvent(status, reason, self._now_ns())
        self._events[key] = event
        for watcher in self._watchers:
            watcher(key, event)
        return True

    def get(self, key: str) -> StatusEvent:
        """A component's state."""
        return self._events.get(key, StatusEvent(Status.NONE))

    def all(self) -> Mapping[str, StatusEvent]:
        """Every component's state."""
        return MappingProxyType(self._events)
