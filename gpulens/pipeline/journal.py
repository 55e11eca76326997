"""Structured logs of components: events in the past tense with key=value fields.

Invariant: a line is written when a state changes, not for each point; every line carries the component's id and kind.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

ROOT = "gpulens"
_FIELDS = "gpulens_fields"

Field = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ComponentLog:
    """Writes events of one component. `kind` and `id` are empty for the service itself."""

    kind: str = ""
    id: str = ""

    def debug(self, event: str, /, **fields: Field) -> None:
        """Something for the developer."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Field) -> None:
        """Something changed, as expected."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Field) -> None:
        """Something changed that a person may want to look at."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Field) -> None:
        """Data is lost, or a component does not work."""
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Field]) -> None:
        logger = logging.getLogger(ROOT)
        if logger.isEnabledFor(level):
            named: dict[str, Field] = {}
            if self.id:
                named = {"otelcol.component.kind": self.kind, "otelcol.component.id": self.id}
            logger.log(level, event, extra={_FIELDS: {**named, **fields}})


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        text = "".join(f"\t{key}={_quote(value)}" for key, value in fields.items())
        return f"{_time(record)}\t{_level(record)}\t{record.getMessage()}{text}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {
            "ts": _time(record),
            "level": _level(record),
            "msg": record.getMessage(),
        }
        return json.dumps({**head, **getattr(record, _FIELDS, {})}, default=str)


def _time(record: logging.LogRecord) -> str:
    """The time of a record in UTC, as in 2026-01-05T09:00:00.123Z."""
    return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _level(record: logging.LogRecord) -> str:
    """The level in the words of the configuration."""
    return {"WARNING": "warn"}.get(record.levelname, record.levelname.lower())


def _quote(value: Field) -> str:
    text = str(value)
    return json.dumps(text) if not text.isprintable() or not text or any(c in text for c in " \"'=") else text


def configure(level: str, encoding: str, stream: TextIO | None = None) -> None:
    """Sends gpulens' events to `stream` (stderr), as console lines or JSON; earlier handlers of ours are replaced."""
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if encoding == "json" else _Console())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(getattr(logging, {"warn": "WARNING"}.get(level, level.upper())))
