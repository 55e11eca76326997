"""Lines of files, in order: sorted by path, each file from front to back.

Invariant: memory is bounded by one line's limit, whatever the files hold; a file that can't be read harms
no other. Blocking: everything here runs on the receiver's thread.

A file is known by device and inode, so one that rotation has renamed is not read again.
"""

from __future__ import annotations

import glob
import gzip
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

LINE_LIMIT: Final = 64 << 20
GZIP_LIMIT: Final = 4 << 30
CHUNK: Final = 1 << 20

_Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end, or what is wrong with it (then `text` is empty). `number` counts from 1; 0
    stands for the whole file."""

    path: Path
    number: int
    text: bytes
    problem: str = ""


@dataclass(slots=True)
class _File:
    """How far a file was read. `size` is what it had when it was last looked into; `ended`: it is not read
    again."""

    path: Path
    position: int = 0
    number: int = 0
    size: int = -1
    ended: bool = False


class _Stream(Protocol):
    """An open file, plain or unpacked."""

    def readline(self, size: int, /) -> bytes:
        """The next line, at most `size` bytes of it."""


class Tail:
    """Reads the files that match. `once`: each is read to its end a single time, its last line also without
    an end."""

    def __init__(
        self,
        include: Sequence[str],
        exclude: Sequence[str],
        from_end: bool,
        once: bool,
        line_limit: int = LINE_LIMIT,
        gzip_limit: int = GZIP_LIMIT,
    ) -> None:
        self._include = include
        self._exclude = exclude
        self._from_end = from_end
        self._once = once
        self._line_limit = line_limit
        self._gzip_limit = gzip_limit
        self._files: dict[_Inode, _File] = {}
        self._lines: Iterator[Line] | None = None

    def read(self) -> list[Line]:
        """The next lines, about 1 MiB of them; empty when there is nothing new now."""
        if self._lines is None:
            self._lines = self._pass()
        lines: list[Line] = []
        size = 0
        for line in self._lines:
            lines.append(line)
            size += len(line.text)
            if size >= CHUNK:
                return lines
        self._lines = None
        return lines

    def _pass(self) -> Iterator[Line]:
        """What is new in every file."""
        for file, size in self._matching():
            if file.ended or file.size == size:
                continue
            if size < file.position:  # truncated: it begins anew
                file.position = file.number = 0
            file.size = size
            packed = file.path.suffix == ".gz"
            file.ended = self._once or packed  # a gzip file comes whole
            try:
                yield from self._gzip_lines(file) if packed else self._plain_lines(file)
            except (OSError, EOFError, zlib.error) as error:
                yield Line(file.path, 0, b"", f"can't be read: {error}")

    def _matching(self) -> list[tuple[_File, int]]:
        """The files there are now, in order, with their sizes; those that are gone are forgotten."""
        found: dict[_Inode, tuple[_File, int]] = {}
        for path in sorted(_matches(self._include) - _matches(self._exclude)):
            try:
                state = path.stat()
            except OSError:
                continue
            inode = (state.st_dev, state.st_ino)
            if inode in found or not stat.S_ISREG(state.st_mode):
                continue
            file = self._files.get(inode) or _File(path, state.st_size if self._from_end else 0)
            file.path = path
            found[inode] = file, state.st_size
        self._files = {inode: file for inode, (file, _) in found.items()}
        self._from_end = False  # files that appear later are new from their first line on
        return list(found.values())

    def _plain_lines(self, file: _File) -> Iterator[Line]:
        with file.path.open("rb") as stream:
            stream.seek(file.position)
            for line, length, whole in self._split(stream, file):
                if not whole and not self._once:
                    file.number -= 1  # it is still being written
                    return
                file.position += length
                yield line

    def _gzip_lines(self, file: _File) -> Iterator[Line]:
        total = 0
        with gzip.open(file.path, "rb") as stream:
            for line, length, _ in self._split(stream, file):
                total += length
                if total > self._gzip_limit:
                    yield Line(file.path, 0, b"", f"holds more than {self._gzip_limit} bytes; the rest is not read")
                    return
                yield line

    def _split(self, stream: _Stream, file: _File) -> Iterator[tuple[Line, int, bool]]:
        """(line, bytes that it took, whether it has its end). Lines over the limit are passed over piece by
        piece."""
        while text := stream.readline(self._line_limit + 1):
            file.number += 1
            length = len(text)
            if length <= self._line_limit:
                yield Line(file.path, file.number, text.rstrip(b"\r\n")), length, text.endswith(b"\n")
                continue
            while text and not text.endswith(b"\n"):
                text = stream.readline(CHUNK)
                length += len(text)
            yield Line(file.path, file.number, b"", f"is longer than {self._line_limit} bytes"), length, bool(text)


def _matches(patterns: Sequence[str]) -> set[Path]:
    # Path.glob refuses absolute patterns.
    return {Path(name) for pattern in patterns for name in glob.iglob(pattern, recursive=True)}  # noqa: PTH207
