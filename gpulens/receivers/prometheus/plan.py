"""A page's layout turned into a stream's: which samples feed which series, worked out once for each page layout.

Invariant: a series has one number a tick. Of several samples that could feed it the plan says how they become one;
copies that do not agree become none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from types import MappingProxyType
from typing import Final

from gpulens.pipeline.data import Identity, Layout, Value, build_layout
from gpulens.pipeline.exposition import Page
from gpulens.receivers.prometheus.schema import Combine
from gpulens.receivers.prometheus.units import AsItIs, Refusal, Rule

OLDEST_S: Final = 300
"""A sample whose own time is further back says nothing of now: Prometheus looks back five minutes, too."""
AHEAD_S: Final = 60
"""A sample from further ahead would make everybody else's readings late."""

_SAME: Final = 1e-9

_JOIN: Final[Mapping[Combine, Callable[[Sequence[Value]], Value]]] = MappingProxyType(
    {Combine.SUM: sum, Combine.MAX: max, Combine.MIN: min, Combine.MEAN: fmean}
)


@dataclass(frozen=True, slots=True)
class Source:
    """Samples that give a series' number together. Each of `groups` is one number: its copies under several owners,
    which must agree. With AGREE there is one group."""

    groups: tuple[tuple[int, ...], ...]
    rule: Rule | AsItIs
    combine: Combine = Combine.AGREE

    @property
    def indices(self) -> tuple[int, ...]:
        """All of the samples."""
        return tuple(chain.from_iterable(self.groups))

    def read(self, page: Page, rejected: Counter[str]) -> Value | None:
        """The number; None when it is struck out (counted in `rejected`)."""
        if self.combine is Combine.AGREE:
            return self._agreed(self.groups[0], page, rejected)
        values = [self._agreed(copies, page, rejected) for copies in self.groups]
        found = [value for value in values if value is not None]
        if not found or (self.combine is Combine.SUM and len(found) < len(values)):
            return None  # a part of a sum is no sum
        joined = _JOIN[self.combine](found)
        return round(joined) if self.rule.whole else joined

    def _agreed(self, copies: Sequence[int], page: Page, rejected: Counter[str]) -> Value | None:
        """What the copies of one number say."""
        found: list[Value] = []
        for index in copies:
            value = self.rule.read(page.values[index])
            if isinstance(value, Refusal):
                rejected[value] += 1
            elif value is not None:
                found.append(value)
        if not found:
            return None
        if any(abs(each - found[0]) > _SAME * max(abs(each), abs(found[0])) for each in found):
            rejected[Refusal.CONTRADICTORY] += 1
            return None
        return found[0]


@dataclass(frozen=True, slots=True)
class Feed:
    """A series and its sources, the preferred one first."""

    identity: Identity
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """What a page says on a plan's layout: a number (or None) a slot, for slots with a time of their own that time in
    ns, and for counters which source the number is from."""

    values: list[Value | None]
    times: Mapping[int, int]
    sources: Mapping[int, int]


class Plan:
    """How to read every page that has one layout.

    - `facts`: series that are 1 by their existence.
    - `dropped`: samples that are struck out whatever their value, by reason.
    - `unmapped`: samples that nothing reads; `strangers` are their metrics.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        facts: Sequence[Identity],
        dropped: Mapping[str, int] = MappingProxyType({}),
        strangers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.layout: Layout
        self.layout, slots = build_layout([*(feed.identity for feed in feeds), *facts])
        self.feeds = tuple(feeds)
        self.dropped = Counter(dropped)
        self.strangers = strangers
        self.unmapped = sum(strangers.values())
        self._slots = slots[: len(feeds)]
        self._facts = slots[len(feeds) :]
        self._read = tuple(index for feed in feeds for source in feed.sources for index in source.indices)

    def said(self, page: Page) -> tuple[str, ...]:
        """The texts of all values that are read."""
        return tuple(page.tokens[index] for index in self._read)

    def read(self, page: Page, now_ns: int, honor_times: bool, rejected: Counter[str]) -> Read:
        """What the page says; what is struck out is counted in `rejected`."""
        rejected.update(self.dropped)
        stamped = page.times_ms if honor_times else {}
        values: list[Value | None] = [None] * self.layout.size
        times: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for slot, feed in zip(self._slots, self.feeds, strict=True):
            for number, source in enumerate(feed.sources):
                value = source.read(page, rejected)
                if value is None:
                    continue
                time_ns = _time(source.indices, stamped) if stamped else 0
                if time_ns and not -OLDEST_S * 10**9 <= time_ns - now_ns <= AHEAD_S * 10**9:
                    rejected[Refusal.BAD_TIME] += 1
                    continue
                values[slot] = value
                if time_ns:
                    times[slot] = time_ns
                if number and feed.identity[2].metric.is_counter:
                    chosen[slot] = number
                break
        for slot in self._facts:
            values[slot] = 1
        return Read(values, times, chosen)


def _time(indices: Sequence[int], times_ms: Mapping[int, int]) -> int:
    """The newest time of some samples, in ns; 0 where one has none."""
    found = [times_ms.get(index, 0) for index in indices]
    return max(found) * 10**6 if all(found) else 0
