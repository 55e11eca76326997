"""A small reader of pages for these tests, on purpose not the product's own parser."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')


@dataclass(frozen=True)
class Sample:
    """One line of a page."""

    name: str
    labels: dict[str, str]
    value: float
    text: str


def read_page(page: str) -> list[Sample]:
    """All samples; fails on any line that is neither a comment nor a sample."""
    out = []
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.match(line)
        assert match, f"unreadable line: {line}"
        labels = _LABEL.findall(match[2])
        assert len(dict(labels)) == len(labels), f"a label stands twice: {line}"
        out.append(Sample(match[1], dict(labels), float(match[3]), match[3]))
    return out


def pick(page: str, name: str, **labels: str) -> list[Sample]:
    """The samples of a family that carry these labels."""
    return [s for s in read_page(page) if s.name == name and labels.items() <= s.labels.items()]


def one(page: str, name: str, **labels: str) -> Sample:
    """The only such sample."""
    found = pick(page, name, **labels)
    assert len(found) == 1, found
    return found[0]
