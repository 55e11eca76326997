"""A report in Markdown whose sections fail one by one."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_UUID = re.compile(r"\b(GPU|MIG)-([0-9a-f]{4})[0-9a-f]{4}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def short(text: str) -> str:
    """The text with UUIDs cut to four digits."""
    return _UUID.sub(r"\1-\2…", text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; every cell as text, pipes escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


class Report:
    """Collects sections; what goes wrong in one is said in its place and ends no other.

    With `path` the file is complete after each section, so that a run that hangs leaves what it had.
    """

    def __init__(self, title: str, path: Path | None) -> None:
        self._parts = [f"# {title}"]
        self._path = path

    def section(self, title: str, make: Callable[[], str]) -> None:
        """Adds a section."""
        begin = time.monotonic()
        print(f"{title} ...", file=sys.stderr, flush=True)
        try:
            body = make()
        except Exception as error:  # noqa: BLE001 - a report with a hole is better than none
            body = f"Not done: {type(error).__name__}: {error}"
        self._parts.append(f"## {title}\n\n{body}\n\nTook {time.monotonic() - begin:.1f} s.")
        if self._path is not None:
            self._path.write_text(self._text(), "utf-8")

    def close(self, last: str) -> None:
        """Adds the last line, and prints the report where it goes into no file."""
        self._parts.append(last)
        if self._path is None:
            print(self._text())
        else:
            self._path.write_text(self._text(), "utf-8")

    def _text(self) -> str:
        return short("\n\n".join(self._parts)) + "\n"
