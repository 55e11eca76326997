"""Reads pages in Prometheus' text format (and OpenMetrics') without ever losing a whole page to one bad line.

Invariant: `PageParser.parse` never raises on what a page says. A line that can't be read is counted by
reason and every other line still counts; and while a page names the same series, in whatever order, the
very same `PageLayout` object comes back, so that everything derived from it is worked out once.

How it stays cheap: a page repeats itself but for its numbers. What stands before each number is kept; the
next page is compared with it line by line, and only the text behind it is read. Facts about the formats:
Prometheus' exposition formats page and the OpenMetrics text format; facts about raw, unescaped label
values: dcgm-exporter prints labels through templates that insert the text as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from gpulens.pipeline.exposition_line import MAX_EXCERPT, MAX_NUMBER, SampleKey, parse_sample_head, read_tail, unescape

DEFAULT_MAX_SERIES: Final = 50_000
DEFAULT_MAX_LINE: Final = 64 * 1024
# One page has several orders of lines: dcgm-exporter's entity groups come in random order (a Go map).
_ARRANGEMENTS: Final = 4
# Characters of all remembered pages together. A page of 20,000 lines has some 6 million; a longer one than this is
# read afresh each time.
_MAX_REMEMBERED: Final = 8 * 2**20
_MAX_EXAMPLES: Final = 5

_COMMENT_STARTS: Final = ("#", " ", "\t")


@dataclass(frozen=True, slots=True)
class Family:
    """What `# TYPE`, `# HELP` and `# UNIT` say about a metric; empty where they say nothing."""

    type: str = ""
    help: str = ""
    unit: str = ""


class PageLayout:
    """The series of a page. Compared by identity: it is the same object as long as nothing in it changes.

    `samples[i]` is what the page's i-th token and value belong to. One key may stand in it twice, as it
    does on the page.
    """

    __slots__ = ("families", "samples")

    def __init__(self, samples: Sequence[SampleKey], families: Mapping[str, Family]) -> None:
        self.samples: tuple[SampleKey, ...] = tuple(samples)
        self.families: Mapping[str, Family] = families

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class LineError:
    """One line that could not be read: its number on the page (from 1), why, and how it starts."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """One page, read.

    - `tokens[i]`: the text of the value of `layout.samples[i]`, so that an int64 can be read exactly.
    - `values[i]`: the same as a float; NaN where the page says NaN and where the text is no number (then
      counted).
    - `times_ms`: index -> milliseconds since 1970, only for the samples that carry a time.
    - `errors`: reason -> lines; the reasons are those of `REASONS`.
    - `examples`: the first few of those lines.
    """

    layout: PageLayout
    tokens: Sequence[str]
    values: Sequence[float]
    times_ms: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[LineError, ...] = ()


REASONS: Final[Mapping[str, str]] = {
    "bad_value": "the value is no number; the sample is kept with NaN",
    "bad_labels": "the label block can't be read",
    "bad_name": "the line does not start with a metric name",
    "no_value": "there is nothing behind the labels",
    "bad_time": "the time behind the value is no whole number; the sample is kept without it",
    "truncated": "the last line has no line feed, so it may be cut",
    "line_too_long": "the line is longer than the limit",
    "too_many_series": "the page has more series than the limit",
    "duplicate_label": "a label stands twice in one line; the last one counts, the sample is kept",
    "invalid_utf8": "the line is no UTF-8; it is kept with replacement characters",
    "after_eof": "the line stands behind `# EOF`",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A head seen before (the text up to the value), what it names, and whether a label stands in it
    twice."""

    head: str
    key: SampleKey
    doubled: bool


LOST_LINES: Final = ("bad_labels", "bad_name", "no_value", "truncated", "line_too_long", "too_many_series")
"""The reasons for which a line's sample is not on the page; with the others it is."""


class _Errors:
    """Counts lines by reason and keeps the first few."""

    __slots__ = ("counts", "examples")

    def __init__(self, counts: Mapping[str, int] | None = None, examples: Sequence[LineError] = ()) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self.examples = list(examples)

    def add(self, line: int, reason: str, text: str) -> None:
        self.counts[reason] += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(LineError(line, reason, text[:MAX_EXCERPT]))


class _Arrangement:
    """One order of lines in which a layout was seen, and how to read the next page that has it.

    `heads[i]` is what line i starts with: for a sample all that stands before its value, for any other line
    the whole of it. `lines[k]` is the line of the layout's k-th sample.
    """

    __slots__ = ("examples", "fixed", "heads", "ids", "layout", "lengths", "lines", "pick", "static")

    def __init__(self, layout: PageLayout, heads: list[str], lines: list[int], errors: _Errors, ids: list[int]) -> None:
        self.layout = layout
        self.heads = heads
        self.lengths = [len(head) for head in heads]
        self.lines = lines
        wanted = set(lines)
        self.fixed = [i for i in range(len(heads)) if i not in wanted]
        self.pick = _picker(lines)
        self.static = dict(errors.counts)
        self.examples = tuple(errors.examples)
        self.ids = ids

    def tails(self, lines: list[str]) -> list[str] | None:
        """What stands behind each head, None when this is another page."""
        heads = self.heads
        if len(lines) != len(heads) or not all(map(str.startswith, lines, heads)):
            return None
        tails = [line[length:] for line, length in zip(lines, self.lengths, strict=True)]
        return None if any(tails[i] for i in self.fixed) else tails


class PageParser:
    """Reads the pages of one source, remembering what repeats. One parser serves one source.

    - `max_series`: samples of one page that are kept; the rest is counted as `too_many_series`.
    - `max_line`: characters; a longer line is counted as `line_too_long`.

    Memory: the text of the last two different pages and up to four orders of lines, of large pages fewer.
    """

    def __init__(self, max_series: int = DEFAULT_MAX_SERIES, max_line: int = DEFAULT_MAX_LINE) -> None:
        self._max_series = max_series
        self._max_line = max_line
        self._known: dict[str, _Entry] = {}
        self._older: dict[str, _Entry] = {}
        self._arrangements: list[_Arrangement] = []  # the one used last stands last

    def parse(self, data: bytes) -> Page:
        """The page; never raises. What could not be read is in `errors`."""
        text = data.decode("utf-8", "replace")
        if text.startswith("\ufeff"):
            text = text[1:]
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        for arrangement in reversed(self._arrangements):
            tails = arrangement.tails(lines)
            if tails is not None:
                self._arrangements.remove(arrangement)
                self._arrangements.append(arrangement)
                return _fill(arrangement, tails)
        return self._parse_new(lines, len(text))

    def _parse_new(self, lines: list[str], size: int) -> Page:
        reading = _Reading(self._known, self._older, self._max_series, self._max_line)
        reading.read(lines)
        arrangement = self._arrange(reading)
        if size <= _MAX_REMEMBERED:
            self._older = self._known if 2 * size <= _MAX_REMEMBERED else {}
            self._known = reading.known
            self._arrangements.append(arrangement)
            del self._arrangements[: -min(_ARRANGEMENTS, max(1, _MAX_REMEMBERED // max(1, size)))]
        tails = [line[length:] for line, length in zip(lines, arrangement.lengths, strict=True)]
        return _fill(arrangement, tails)

    def _arrange(self, reading: _Reading) -> _Arrangement:
        """The reading as an arrangement, of a layout seen before where it names the same series."""
        ids = sorted(map(id, reading.samples))
        layout = PageLayout(reading.samples, reading.families)
        lines = reading.lines
        for arrangement in reversed(self._arrangements):
            if arrangement.ids == ids and arrangement.layout.families == reading.families:
                layout = arrangement.layout
                lines = _reorder(layout, reading)
                break
        return _Arrangement(layout, reading.heads, lines, reading.errors, ids)


class _Reading:
    """One pass over a page that is not like the last ones: which line is what."""

    def __init__(
        self, known: Mapping[str, _Entry], older: Mapping[str, _Entry], max_series: int, max_line: int
    ) -> None:
        self._sources = (known, older)
        self._max_series = max_series
        self._max_line = max_line
        self.known: dict[str, _Entry] = {}
        self.heads: list[str] = []
        self.lines: list[int] = []
        self.samples: list[SampleKey] = []
        self.families: dict[str, Family] = {}
        self.errors = _Errors()

    def read(self, lines: list[str]) -> None:
        """Fills the lists; afterwards there is one head for each line."""
        last = len(lines) - 1
        ended = False
        for number, line in enumerate(lines):
            head = line
            if ended:
                self._note_if(bool(line.strip()), number, "after_eof", line)
            elif len(line) > self._max_line:
                self.errors.add(number + 1, "line_too_long", line)
            elif line[:1] in _COMMENT_STARTS and line.lstrip().startswith("#"):
                ended = self._comment(line)
            elif number == last and line.strip():
                self.errors.add(number + 1, "truncated", line)
            elif line and not line.isspace():
                head = self._sample(number, line)
            self.heads.append(head)

    def _note_if(self, bad: bool, number: int, reason: str, line: str) -> None:
        """Counts the line when `bad`; whether it is kept is the caller's affair."""
        if bad:
            self.errors.add(number + 1, reason, line)

    def _sample(self, number: int, line: str) -> str:
        """Notes the sample of a line; returns what stands before its value (all of it when it is none)."""
        entry = self._find(line)
        if entry is None:
            parsed = parse_sample_head(line)
            if isinstance(parsed, str):
                self.errors.add(number + 1, parsed, line)
                return line
            end, key, doubled = parsed
            if end == len(line):
                self.errors.add(number + 1, "no_value", line)
                return line
            entry = _Entry(line[:end], key, doubled)
        if len(self.samples) >= self._max_series:
            self.errors.add(number + 1, "too_many_series", line)
            return line
        self._note_if(entry.doubled, number, "duplicate_label", line)
        self._note_if("\ufffd" in entry.head, number, "invalid_utf8", line)
        self.known[entry.head] = entry
        self.samples.append(entry.key)
        self.lines.append(number)
        return entry.head

    def _find(self, line: str) -> _Entry | None:
        """The sample of a line whose head was seen before: up to its last blank, or the one before (a
        time)."""
        cut = line.rfind(" ") + 1
        for _ in range(2):
            if cut == 0:
                return None
            head = line[:cut]
            for source in (self.known, *self._sources):
                entry = source.get(head)
                if entry is not None:
                    return entry
            cut = line.rfind(" ", 0, cut - 1) + 1
        return None

    def _comment(self, line: str) -> bool:
        """Notes TYPE, HELP and UNIT; True when it is OpenMetrics' end of the page."""
        words = line.split(None, 3)
        if words[:2] == ["#", "EOF"] and len(words) == 2:
            return True
        if len(words) < 3 or words[0] != "#" or words[1] not in ("TYPE", "HELP", "UNIT"):
            return False
        name = sys.intern(words[2])
        rest = words[3].strip() if len(words) > 3 else ""
        family = self.families.get(name, Family())
        if words[1] == "TYPE":
            family = Family(rest, family.help, family.unit)
        elif words[1] == "HELP":
            family = Family(family.type, unescape(rest), family.unit)
        else:
            family = Family(family.type, family.help, rest)
        if name in self.families or len(self.families) < self._max_series:
            self.families[name] = family
        return False


def _reorder(layout: PageLayout, reading: _Reading) -> list[int]:
    """The line of each sample of `layout` on a page that has the same samples in another order."""
    found: dict[int, list[int]] = {}
    for key, line in zip(reversed(reading.samples), reversed(reading.lines), strict=True):
        found.setdefault(id(key), []).append(line)
    return [found[id(key)].pop() for key in layout.samples]


def _picker(lines: list[int]) -> Callable[[Sequence[str]], Sequence[str]] | None:
    """Takes the texts of `lines` in one call; None where itemgetter would not give a tuple."""
    return itemgetter(*lines) if len(lines) > 1 else None


def _fill(arrangement: _Arrangement, tails: list[str]) -> Page:
    """The numbers of a page whose arrangement is known."""
    pick = arrangement.pick
    tokens: Sequence[str] = pick(tails) if pick else [tails[line] for line in arrangement.lines]
    if _is_plain(tokens):
        try:
            values = list(map(float, tokens))
        except ValueError:
            return _fill_carefully(arrangement, tokens)
        return Page(arrangement.layout, tokens, values, {}, arrangement.static, arrangement.examples)
    return _fill_carefully(arrangement, tokens)


def _is_plain(tokens: Sequence[str]) -> bool:
    """No blank, underscore, foreign digit or overlong text: every token is a number as the format spells it, or is
    none for float() either."""
    if max(map(len, tokens), default=0) > MAX_NUMBER:
        return False
    joined = "".join(tokens)
    return joined.isascii() and "_" not in joined and joined.split() == [joined]


def _fill_carefully(arrangement: _Arrangement, tails: Sequence[str]) -> Page:
    """As `_fill`, for a page on which some values carry a time or are no numbers."""
    errors = _Errors(arrangement.static, arrangement.examples)
    tokens: list[str] = []
    values: list[float] = []
    times: dict[int, int] = {}
    for index, text in enumerate(tails):
        tail = read_tail(text)
        tokens.append(tail.token)
        values.append(tail.value)
        if tail.time_ms is not None:
            times[index] = tail.time_ms
        if tail.reason:
            key = arrangement.layout.samples[index]
            errors.add(arrangement.lines[index] + 1, tail.reason, f"{key.name} {text}")
    return Page(arrangement.layout, tokens, values, times, errors.counts, tuple(errors.examples))
