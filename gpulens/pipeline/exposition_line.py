"""One line of Prometheus' text format: what it names, and what stands behind that.

Invariant: pure functions that never raise on text, however hostile, and take time in proportion to its
length.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Final

Labels = tuple[tuple[str, str], ...]

MAX_NUMBER: Final = 64
"""Characters of a number: an int64 takes 20, a double 24."""
MAX_EXCERPT: Final = 120
"""Characters of a line that are shown as an example."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*(,|(?=\}))', re.DOTALL)
_RAW_LABEL = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"(.*?)"(?=\s*,\s*[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"|\s*,?\s*\Z)\s*,?', re.DOTALL
)
_ESCAPE = re.compile(r'\\([\\"n])')
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What one line names: the metric and its labels, in the page's order, each label name once."""

    name: str
    labels: Labels


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind the labels."""

    token: str
    value: float
    time_ms: int | None
    reason: str


def read_number(token: str) -> float | None:
    """The number that a token spells, None when it is none. Takes NaN, Inf, +Inf and -Inf in any case."""
    # float() also takes 1_000, other scripts' digits and any length; the format knows none of them
    if len(token) > MAX_NUMBER or "_" in token or not token.isascii():
        return None
    try:
        return float(token)
    except ValueError:
        return None


def read_tail(text: str) -> Tail:
    """What stands behind the labels: a value, perhaps a time in ms, perhaps an exemplar (left out)."""
    rest = text.strip()
    words = rest[: 4 * MAX_NUMBER].split()
    value = read_number(words[0]) if words else None
    if value is None:
        return Tail(rest[:MAX_EXCERPT], math.nan, None, "bad_value")
    if len(words) == 1 or words[1].startswith("#"):
        return Tail(words[0], value, None, "")
    if len(words) > 2 and not words[2].startswith("#"):
        return Tail(rest[:MAX_EXCERPT], math.nan, None, "bad_value")
    return _with_time(words[0], value, words[1])


def _with_time(token: str, value: float, text: str) -> Tail:
    """A value with its time: whole milliseconds, or OpenMetrics' seconds with a fraction."""
    number = read_number(text)
    if number is None or not math.isfinite(number) or abs(number) > 1e16:
        return Tail(token, value, None, "bad_time")
    milliseconds = number * 1000 if "." in text else number
    return Tail(token, value, round(milliseconds), "")


def parse_sample_head(line: str) -> tuple[int, SampleKey, bool] | str:
    """Where the value of a sample line begins, what the line names, and whether a label stands in it twice.

    Returns the reason (`bad_name`, `bad_labels`) when the line can't be read.
    """
    start = _skip_blanks(line, 0)
    match = _NAME.match(line, start)
    if match is None:
        return "bad_name"
    name = sys.intern(match.group())
    end = match.end()
    brace = _skip_blanks(line, end)
    if line[brace : brace + 1] != "{":
        if brace == end and end < len(line):
            return "bad_name"
        return brace, SampleKey(name, ()), False
    block = _labels(line, brace + 1)
    if block is None:
        return "bad_labels"
    end, pairs = block
    unique = dict(pairs)
    return _skip_blanks(line, end), SampleKey(name, tuple(unique.items())), len(unique) != len(pairs)


def _skip_blanks(line: str, at: int) -> int:
    match = _BLANKS.match(line, at)
    return match.end() if match else at


def _labels(line: str, start: int) -> tuple[int, list[tuple[str, str]]] | None:
    """The labels of a block that opens before `start`, and where it ends (behind the brace)."""
    pairs: list[tuple[str, str]] = []
    at = start
    while True:
        match = _LABEL.match(line, at)
        if match is None:
            break
        pairs.append((sys.intern(match.group(1)), sys.intern(unescape(match.group(2)))))
        at = match.end()
    at = _skip_blanks(line, at)
    if line[at : at + 1] == "}":
        return at + 1, pairs
    return _raw_labels(line, start)


def _raw_labels(line: str, start: int) -> tuple[int, list[tuple[str, str]]] | None:
    """As `_labels` for values with bare quotes in them: a quote ends a value only before the next label or
    the end.

    The block then ends at the line's last brace.
    """
    stop = line.rfind("}")
    if stop < start:
        return None
    block = line[start:stop]
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < len(block):
        match = _RAW_LABEL.match(block, at)
        if match is None:
            return None
        pairs.append((sys.intern(match.group(1)), sys.intern(unescape(match.group(2)))))
        at = match.end()
    return (stop + 1, pairs) if pairs else None


def unescape(text: str) -> str:
    r"""`\\`, `\"` and `\n` as they are meant; any other backslash is a raw one and stays."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), text)
