"""Learns how often an exporter renews its values, from when they change.

Invariant: what it says is never shorter than the true refresh of any family that is charged to owners, as far
as the ticks can tell. An exporter may watch each field at its own pace, so that each family is learned by
itself and the slowest counts; below 30 s (the exporter's default) it goes only once every one of them has shown
its pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

DEFAULT_REFRESH_S: Final = 30.0
_CHANGES: Final = 5
_LONGEST_S: Final = 120.0
_MOST_FAMILIES: Final = 4096


class FamilyRefresh:
    """What the changes of one family show. A family's series share one pace, but not always one moment (several
    groups of devices), so that a gap lies between two changes of one series."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._tokens: Sequence[str] = ()
        self._changed_ns: list[int | None] = []
        self._gaps_s: list[float] = []
        self._shown_s = 0.0

    @property
    def refresh_s(self) -> float:
        """Seconds; at least the default until five gaps were seen since the page was away last."""
        if len(self._gaps_s) < _CHANGES:
            return max(DEFAULT_REFRESH_S, self._shown_s)
        return self._shown_s

    def interrupted(self) -> None:
        """Other series stand here now: the time since the last change says nothing."""
        self._tokens = ()

    def forget(self) -> None:
        """The exporter may be another one: what was shown holds only as far as it is slower than the default."""
        self._tokens = ()
        self._gaps_s = []

    def observe(self, tokens: Sequence[str], now_ns: int) -> None:
        """The family's values at one tick, always in the same order."""
        last, self._tokens = self._tokens, tokens
        if len(last) != len(tokens):
            self._changed_ns = [None] * len(tokens)
            return
        if last == tokens:
            return
        gaps: list[int] = []
        for index, (before, after) in enumerate(zip(last, tokens, strict=True)):
            if before != after:
                changed_ns, self._changed_ns[index] = self._changed_ns[index], now_ns
                if changed_ns is not None:
                    gaps.append(now_ns - changed_ns)
        if gaps:
            # the shortest: a series that stood still for a while is no sign of a slow exporter
            self._gaps_s = [*self._gaps_s[1 - _CHANGES :], min(gaps) / 1e9]
        if len(self._gaps_s) == _CHANGES:
            self._shown_s = self._estimate()

    def _estimate(self) -> float:
        """The mean gap, rounded up to whole ticks: a change is only seen at a tick. Slower than the default counts
        only when the gaps are alike: values that change now and then, as memory does, are no slow exporter."""
        mean = sum(self._gaps_s) / len(self._gaps_s)
        ticks = max(1, math.ceil(mean / self._interval_s - 0.05))
        pace = min(ticks * self._interval_s, max(_LONGEST_S, self._interval_s))
        alike = max(self._gaps_s) - min(self._gaps_s) <= 1.05 * self._interval_s
        return pace if alike else min(pace, DEFAULT_REFRESH_S)


class RefreshLearner:
    """Feeds on the families of each page. `interval_s` is the time between ticks; `fixed_s` above 0 is taken
    instead of learning."""

    def __init__(self, interval_s: float, fixed_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._fixed = fixed_s > 0
        self._families: dict[str, FamilyRefresh] = {}
        self.refresh_s = fixed_s if self._fixed else DEFAULT_REFRESH_S

    def observe(self, families: Mapping[str, Sequence[str]], now_ns: int) -> None:
        """One page: the texts of the values of each family that is charged to owners, in the layout's order."""
        if self._fixed:
            return
        for name in self._families.keys() - families.keys():
            self._families[name].forget()  # it may come back, and then not be quicker than it was
        if len(self._families) > _MOST_FAMILIES:
            self._families = {name: each for name, each in self._families.items() if name in families}
        for name, tokens in families.items():
            if name not in self._families:
                self._families[name] = FamilyRefresh(self._interval_s)
            self._families[name].observe(tokens, now_ns)
        self.refresh_s = max((self._families[name].refresh_s for name in families), default=DEFAULT_REFRESH_S)

    def interrupted(self) -> None:
        """The page names other series than at the tick before."""
        for family in self._families.values():
            family.interrupted()

    def forget(self) -> None:
        """The page was away: the exporter may have come back with another pace."""
        for family in self._families.values():
            family.forget()
