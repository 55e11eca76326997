"""The file on disk: whole lines only, and rotation.

Invariant: after every call, also a failed one, the file ends with a whole line or will before the next one
is written. Runs on the writer's thread; nothing here is shared with the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from gpulens.exporters.file.config import RotationConfig

DAY_NS = 86_400 * 10**9
_STAMP = "%Y-%m-%dT%H-%M-%S"


class OutputFile(Protocol):
    """What is needed of an open file (an unbuffered binary one)."""

    def write(self, data: bytes, /) -> int:
        """Writes some of the bytes and says how many. Raises OSError."""

    def truncate(self, size: int, /) -> int:
        """Cuts the file. Raises OSError."""

    def tell(self) -> int:
        """Where the next byte goes. Raises OSError."""

    def close(self) -> None:
        """Closes the file."""


Opener = Callable[[Path, bool], OutputFile]
"""Opens a file for writing: (path, append). Raises OSError."""


def open_file(path: Path, append: bool) -> OutputFile:
    """Opens a real file, unbuffered."""
    return path.open("ab" if append else "wb", buffering=0)


class LineFile:
    """Writes lines to a path, beginning new files by size.

    Old files are named as lumberjack names them: `out-2026-11-02T10-00-00.000.jsonl`, in UTC or local time.
    """

    def __init__(
        self,
        path: Path,
        append: bool,
        rotation: RotationConfig | None,
        now_ns: Callable[[], int],
        opener: Opener = open_file,
    ) -> None:
        self._path = path
        self._append = append or rotation is not None
        self._rotation = rotation
        self._now_ns = now_ns
        self._opener = opener
        self._file: OutputFile | None = None
        self._size = 0
        self._torn = False

    def open(self) -> None:
        """Opens the file if it is not open. Raises OSError."""
        if self._file is None:
            self._file = self._opener(self._path, self._append)
            self._append = True  # opened again after a failure, it goes on where it was
            self._size = self._position()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, line: bytes) -> None:
        """Writes a line, whole or not at all. Raises OSError (disk full, file gone): nothing of the line is
        kept."""
        self.open()
        if self._rotation is not None and self._size and self._size + len(line) > self._rotation.max_megabytes << 20:
            self._rotate(self._rotation)
        file = self._file
        assert file is not None  # open() has set it or raised
        whole = b"\n" + line if self._torn else line
        written = 0
        try:
            while written < len(whole):
                written += file.write(whole[written:])
        except OSError:
            self._cut(file, written)
            raise
        self._torn = False
        self._size += written

    def _position(self) -> int:
        assert self._file is not None  # only called after opening
        with contextlib.suppress(OSError):  # a pipe has no position, and no size to rotate by
            return self._file.tell()
        return 0

    def _cut(self, file: OutputFile, written: int) -> None:
        """Takes a part of a line off again; where that fails, the next line is set apart by a line end."""
        if written:
            try:
                file.truncate(self._size)
                if self._position() != self._size:  # without O_APPEND the next byte would leave a hole
                    self.close()
            except OSError:
                self._torn = True
                self._size += written

    def _rotate(self, rotation: RotationConfig) -> None:
        """Renames the full file and opens a new one. Raises OSError."""
        self.close()
        self._path.rename(self._backup_name(rotation))
        self.open()
        self._prune(rotation)

    def _backup_name(self, rotation: RotationConfig) -> Path:
        moment = datetime.fromtimestamp(self._now_ns() / 1e9, UTC)
        if rotation.localtime:
            moment = moment.astimezone()
        while True:
            stamp = f"{moment.strftime(_STAMP)}.{moment.microsecond // 1000:03d}"
            name = self._path.with_name(f"{self._path.stem}-{stamp}{self._path.suffix}")
            if not name.exists():
                return name
            moment += timedelta(milliseconds=1)

    def _prune(self, rotation: RotationConfig) -> None:
        """Deletes old files that are too many or too old; one that can't be deleted stays."""
        backups = sorted(self._backups(), reverse=True)
        stale = backups[rotation.max_backups :] if rotation.max_backups else []
        if rotation.max_days:
            oldest_ns = self._now_ns() - rotation.max_days * DAY_NS
            zone = None if rotation.localtime else UTC
            stale += [
                backup for backup in backups if _stamped(backup[0]).replace(tzinfo=zone).timestamp() * 1e9 < oldest_ns
            ]
        for _, path in stale:
            with contextlib.suppress(OSError):
                path.unlink()

    def _backups(self) -> list[tuple[str, Path]]:
        """(stamp, path) of the files that rotation made of this one."""
        found = []
        for path in self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}"):
            stamp = path.name[len(self._path.stem) + 1 : len(path.name) - len(self._path.suffix)]
            with contextlib.suppress(ValueError):
                _stamped(stamp)
                found.append((stamp, path))
        return found


def _stamped(stamp: str) -> datetime:
    return datetime.strptime(stamp, f"{_STAMP}.%f")  # noqa: DTZ007 - the caller knows the zone
