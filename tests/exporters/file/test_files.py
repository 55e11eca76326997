from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpulens.exporters.file.config import FileConfig, RotationConfig
from gpulens.exporters.file.files import DAY_NS, LineFile, OutputFile, open_file

START_NS = 1_793_620_800 * 10**9  # 2026-11-02T12:00:00 UTC
MIB = 1 << 20


class Disk:
    """Opens real files that take at most `room` more bytes, or refuse to be cut."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.cuts = True

    def open(self, path: Path, append: bool) -> OutputFile:
        """Opens a real file behind this disk."""
        return _DiskFile(self, open_file(path, append))


class _DiskFile:
    def __init__(self, disk: Disk, file: OutputFile) -> None:
        self._disk = disk
        self._file = file

    def write(self, data: bytes, /) -> int:
        if self._disk.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self._disk.room])
        self._disk.room -= taken
        return taken

    def truncate(self, size: int, /) -> int:
        if not self._disk.cuts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._file.truncate(size)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ns = START_NS

    def __call__(self) -> int:
        return self.ns


def test_lines_are_appended_or_replace_what_was_there(tmp_path: Path) -> None:
    """Without `append` the file begins empty; with it, or with rotation, it goes on."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")
    for append, rotation, expected in (
        (True, None, b"old\nnew\n"),
        (False, RotationConfig(), b"old\nnew\nnew\n"),
        (False, None, b"new\n"),
    ):
        file = LineFile(path, append, rotation, Now())
        file.write(b"new\n")
        file.close()
        assert path.read_bytes() == expected


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("cuts", [True, False])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, append: bool, cuts: bool) -> None:
    """A line that does not fit fails, what follows begins on a line of its own, and no line is torn but
    that one."""
    path, disk = tmp_path / "out.jsonl", Disk()
    disk.cuts = cuts
    file = LineFile(path, append, None, Now(), disk.open)
    file.write(b"first\n")
    disk.room = 3
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    disk.room = 100
    file.write(b"third\n")
    file.write(b"fourth\n")
    file.close()
    assert path.read_bytes() == (b"first\n" if cuts else b"first\nsec\n") + b"third\nfourth\n"


def test_rotation_begins_a_new_file_by_size(tmp_path: Path) -> None:
    """A line that would pass the limit goes to a new file; the old one has its time in its name."""
    path, now = tmp_path / "out.jsonl", Now()
    file = LineFile(path, False, RotationConfig(max_megabytes=1), now)
    line = b"x" * (MIB // 2) + b"\n"
    for _ in range(3):
        file.write(line)
        now.ns += 10**9
    file.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "out-2026-11-02T12-00-01.000.jsonl",
        "out-2026-11-02T12-00-02.000.jsonl",
        "out.jsonl",
    ]


def test_a_line_over_the_limit_is_still_one_line(tmp_path: Path) -> None:
    """Lines are never cut: one that is bigger than the limit has a file of its own."""
    path = tmp_path / "out.jsonl"
    file = LineFile(path, False, RotationConfig(max_megabytes=1), Now())
    big = b"x" * (2 * MIB) + b"\n"
    file.write(big)
    file.write(b"small\n")
    file.close()
    assert path.read_bytes() == b"small\n"
    assert (tmp_path / "out-2026-11-02T12-00-00.000.jsonl").read_bytes() == big


def test_two_rotations_in_one_moment_keep_both(tmp_path: Path) -> None:
    """Equal times give different names: nothing is written over."""
    file = LineFile(tmp_path / "out.jsonl", False, RotationConfig(max_megabytes=1), Now())
    for _ in range(3):
        file.write(b"x" * MIB + b"\n")
    file.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_old_files_go_by_number_and_age(tmp_path: Path) -> None:
    """Only so many backups stay, none older than the limit, and files of other names are left alone."""
    (tmp_path / "out-notes.jsonl").touch()
    (tmp_path / "out-2020-01-01T00-00-00.000.txt").touch()
    now = Now()
    file = LineFile(tmp_path / "out.jsonl", False, RotationConfig(max_megabytes=1, max_backups=2, max_days=10), now)
    for _ in range(5):
        file.write(b"x" * MIB + b"\n")
        now.ns += DAY_NS
    names = {each.name for each in tmp_path.iterdir()}
    assert {"out-2026-11-05T12-00-00.000.jsonl", "out-2026-11-06T12-00-00.000.jsonl"} <= names
    assert "out-2026-11-04T12-00-00.000.jsonl" not in names
    now.ns += 30 * DAY_NS
    file.write(b"x" * MIB + b"\n")
    file.close()
    names = {each.name for each in tmp_path.iterdir()}
    assert names >= {"out-notes.jsonl", "out-2020-01-01T00-00-00.000.txt", "out.jsonl"}
    assert [name for name in names if name.startswith("out-2026-11")] == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"path": ""}, "must not be empty"),
        ({"path": "x", "format": "proto"}, "json"),
        ({"path": "x", "compression": "zstd"}, "none"),
        ({"path": "x", "flush_interval": "0s"}, "greater than 0"),
        ({"path": "x", "rotation": {"max_megabytes": 0}}, "greater than or equal to 1"),
        ({"path": "x", "rotation": {"max_backups": -1}}, "greater than or equal to 0"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, object], text: str) -> None:
    """A setting that can't work is refused with what would."""
    with pytest.raises(ValidationError, match=text):
        FileConfig.model_validate(config)
