"""Cumulative counters: start times, resets and changes of source.

Invariant: under one start time a series never steps back; a fall of the raw value is a reset, and the new start is
1 ms after the last point's end.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import isfinite
from typing import Generic, TypeVar

from gpulens.pipeline.data import Value

K = TypeVar("K", bound=Hashable)

RESET_GAP_NS = 1_000_000
CLOCK_STEP_NS = 60 * 10**9
"""A point that is older than the last one by more than this is no late point: the clock was set back."""


@dataclass(frozen=True, slots=True)
class CounterPoint:
    """A counter's output: the total, its start and whether that start is only the time of first sight.

    `since_first` is the total less the first raw value under this start: what exporters send that take the start
    time literally (Google's).
    """

    value: Value
    start_ns: int
    time_ns: int
    start_known: bool
    since_first: Value


@dataclass(slots=True)
class _State:
    raw: Value
    source: str
    point: CounterPoint
    first: Value


class CounterStarts(Generic[K]):
    """Tracks counters by key. State is one small record a key; `forget` drops those that are gone."""

    def __init__(self) -> None:
        self._states: dict[K, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def observe(
        self, key: K, raw: Value, time_ns: int, start_ns: int | None = None, source: str = ""
    ) -> CounterPoint | None:
        """Takes a raw total in; None for a point that is not newer than the last one, or that is no finite number
        (drop and count it): one NaN would stay in the total for ever.

        `start_ns` is the start when the source knows it (driver load), None when it does not. Another `source` than
        before goes on from the last output by increments, under the same start.
        """
        if not isfinite(raw):
            return None
        state = self._states.get(key)
        if state is None:
            start = time_ns if start_ns is None else min(start_ns, time_ns)
            point = CounterPoint(raw, start, time_ns, start_ns is not None, 0)
            self._states[key] = _State(raw, source, point, raw)
            return point
        last = state.point
        if time_ns < last.time_ns - CLOCK_STEP_NS:
            # The clock was set back: waiting for the old time would drop every point for as long as the step.
            self.forget(key)
            return self.observe(key, raw, time_ns, start_ns, source)
        if time_ns <= last.time_ns:
            return None
        restarted = start_ns is not None and last.time_ns < start_ns <= time_ns
        if source != state.source:
            point = CounterPoint(last.value, last.start_ns, time_ns, last.start_known, last.since_first)
        elif restarted or raw < state.raw:
            # A known start after our last point is a reset even where the new total has passed the old one.
            point = CounterPoint(raw, last.time_ns + RESET_GAP_NS, time_ns, True, raw)
            if point.start_ns >= time_ns:
                return None
            state.first = 0
        else:
            grown = raw - state.raw
            value = raw if last.value == state.raw else last.value + grown
            since = value - state.first
            point = CounterPoint(value, last.start_ns, time_ns, last.start_known, since)
        state.raw, state.source, state.point = raw, source, point
        return point

    def forget(self, key: K) -> None:
        """The series is gone; when it comes back it starts anew."""
        self._states.pop(key, None)

    def retain(self, keys: set[K]) -> None:
        """Forgets every key that is not among these."""
        for key in self._states.keys() - keys:
            del self._states[key]
