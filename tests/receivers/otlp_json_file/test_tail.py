from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from gpulens.receivers.otlp_json_file.tail import CHUNK, Line, Tail


def tail(
    *include: Path | str,
    exclude: tuple[str, ...] = (),
    from_end: bool = False,
    once: bool = True,
    line_limit: int = 1 << 20,
    gzip_limit: int = 1 << 20,
) -> Tail:
    """A tail of these paths."""
    return Tail([str(path) for path in include], exclude, from_end, once, line_limit, gzip_limit)


def rows(lines: list[Line]) -> list[tuple[str, int, bytes]]:
    """(file, number, text) of each line."""
    return [(line.path.name, line.number, line.text) for line in lines]


def test_files_are_read_in_order_and_once(tmp_path: Path) -> None:
    """Sorted by path, front to back, the last line also without its end; then nothing more."""
    (tmp_path / "b.jsonl").write_bytes(b"3\n4")
    (tmp_path / "a.jsonl").write_bytes(b"1\r\n2\n")
    (tmp_path / "c.txt").write_bytes(b"no\n")
    (tmp_path / "d.jsonl").write_bytes(b"no\n")
    reader = tail(tmp_path / "*.jsonl", tmp_path / "a.jsonl", exclude=(str(tmp_path / "d*"),))
    assert rows(reader.read()) == [
        ("a.jsonl", 1, b"1"),
        ("a.jsonl", 2, b"2"),
        ("b.jsonl", 1, b"3"),
        ("b.jsonl", 2, b"4"),
    ]
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"later\n")
    assert reader.read() == []


def test_what_is_appended_is_read_when_its_line_ends(tmp_path: Path) -> None:
    """A line that is still being written waits for its end and keeps its number."""
    path = tmp_path / "a"
    path.write_bytes(b"1\n2")
    reader = tail(path, once=False)
    assert rows(reader.read()) == [("a", 1, b"1")]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"2\n3\n")
    assert rows(reader.read()) == [("a", 2, b"22"), ("a", 3, b"3")]


def test_reading_may_begin_at_the_end(tmp_path: Path) -> None:
    """What is there is passed over; what comes later, in old and new files, is read."""
    path = tmp_path / "a"
    path.write_bytes(b"old\n")
    reader = tail(tmp_path / "*", from_end=True, once=False)
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"new\n")
    (tmp_path / "b").write_bytes(b"whole\n")
    assert [line.text for line in reader.read()] == [b"new", b"whole"]


def test_a_rotated_file_is_not_read_again(tmp_path: Path) -> None:
    """Renamed, it is still the same file; the new one of its name is another."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n")
    reader = tail(tmp_path / "*.jsonl", once=False)
    assert len(reader.read()) == 1
    with path.open("ab") as file:
        file.write(b"2\n")
    path.rename(tmp_path / "a-old.jsonl")
    path.write_bytes(b"3\n")
    assert rows(reader.read()) == [("a-old.jsonl", 2, b"2"), ("a.jsonl", 1, b"3")]


def test_a_truncated_file_begins_anew(tmp_path: Path) -> None:
    """A file that became shorter is read from its first line."""
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n")
    reader = tail(path, once=False)
    reader.read()
    path.write_bytes(b"x\n")
    assert rows(reader.read()) == [("a", 1, b"x")]


def test_endless_lines_are_passed_over(tmp_path: Path) -> None:
    """A line over the limit is one bad line, whatever its size; its neighbours are read."""
    path = tmp_path / "a"
    path.write_bytes(b"1\n" + b"x" * (3 * CHUNK) + b"\n3\n" + b"y" * 100)
    lines = tail(path, line_limit=10).read()
    assert [(line.number, line.text, bool(line.problem)) for line in lines] == [
        (1, b"1", False),
        (2, b"", True),
        (3, b"3", False),
        (4, b"", True),
    ]
    assert lines[1].problem == "is longer than 10 bytes"


def test_long_files_come_in_pieces(tmp_path: Path) -> None:
    """A read returns about 1 MiB; the next one goes on from there."""
    path = tmp_path / "a"
    line = b"x" * (CHUNK // 2)
    path.write_bytes((line + b"\n") * 5)
    reader = tail(path)
    assert [len(reader.read()) for _ in range(4)] == [2, 2, 1, 0]


def test_gzip_files_are_read_too(tmp_path: Path) -> None:
    """A packed recording is read whole, once."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n2"))
    for once in (True, False):
        reader = tail(path, once=once)
        assert [line.text for line in reader.read()] == [b"1", b"2"]
        assert reader.read() == []


def test_a_gzip_bomb_ends_at_the_limit(tmp_path: Path) -> None:
    """What unpacks to more than the limit is cut off and reported."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"1\n" * 1000))
    lines = tail(path, gzip_limit=100).read()
    assert len(lines) == 51
    assert lines[-1] == Line(path, 0, b"", "holds more than 100 bytes; the rest is not read")


@pytest.mark.parametrize("data", [b"no gzip at all", gzip.compress(b"1\n" * 9000)[:40]], ids=["other", "torn"])
def test_a_broken_gzip_file_harms_no_other(tmp_path: Path, data: bytes) -> None:
    """It is reported as a whole, and the next file is read."""
    (tmp_path / "a.gz").write_bytes(data)
    (tmp_path / "b").write_bytes(b"fine\n")
    lines = tail(tmp_path / "*").read()
    assert lines[-1].text == b"fine"
    assert "can't be read" in lines[-2].problem


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """Directories, pipes and dead links that match are no recordings."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "*").read() == []
