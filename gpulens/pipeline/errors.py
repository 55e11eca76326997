"""Every error that gpulens raises on purpose, in one tree.

Invariant: a message says what is wrong, where, and what to do next; nothing outside this tree is raised
on purpose, and nothing inside it ever ends the process after start-up.

    GpulensError
    ├── ConfigError            the configuration can't be used; carries every problem found, with positions
    ├── StartError             a component could not start (port in use, missing extra); ends the start-up
    ├── DecodeError            bytes from outside that are not what they should be
    ├── ScrapeError            a source could not be read at this tick
    └── ExportError            a destination did not take the data
        ├── PermanentError     sending it again can't help: drop and count
        ├── RetryableError     the same bytes may be taken later, not before `delay_s`
        └── RefusedError       nothing was changed: the door (admission) or a full queue said no
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class GpulensError(Exception):
    """Root of all errors raised on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a configuration.

    `source` is the file (or `--set`, `env:X`, ...) as the user named it; `line` and `column` count from 1 and are
    0 where the source has no lines. `path` is the key path joined by `::`, empty for the whole document.
    """

    source: str
    line: int
    column: int
    path: str
    message: str
    suggestion: str = ""

    def __str__(self) -> str:
        where = self.source or "config"
        if self.line:
            where = f"{where}:{self.line}:{self.column}"
        path = f" {self.path}:" if self.path else ""
        hint = f" (did you mean '{self.suggestion}'?)" if self.suggestion else ""
        return f"{where}:{path} {self.message}{hint}"


class ConfigError(GpulensError):
    """A configuration can't be used; `problems` holds all that was found, in document order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class StartError(GpulensError):
    """A component could not start; the message names the component and what to do."""


class DecodeError(GpulensError):
    """Bytes from outside could not be read as what they claim to be."""


class ScrapeError(GpulensError):
    """A source could not be read at this tick. `reason` is a short word for counters and status."""

    def __init__(self, message: str, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class ExportError(GpulensError):
    """A destination did not take the data. `reason` is a short word for counters."""

    def __init__(self, message: str, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class PermanentError(ExportError):
    """Sending the same data again can't help: it is dropped and counted."""


class RetryableError(ExportError):
    """The same data may be taken later, not before `delay_s` seconds (None = the back-off decides)."""

    def __init__(self, message: str, reason: str = "unavailable", delay_s: float | None = None) -> None:
        super().__init__(message, reason)
        self.delay_s = delay_s


class RefusedError(ExportError):
    """A batch was refused whole with nothing changed: memory limit, or a queue that is full."""
