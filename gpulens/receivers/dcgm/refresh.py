"""Learns how often an exporter renews its values, from when they change.

Invariant: what it says is never shorter than the exporter's true refresh as far as the ticks can tell;
until five changes were seen it says 30 s, the exporter's default.
"""

from __future__ import annotations

import math
from typing import Final

DEFAULT_REFRESH_S: Final = 30.0
_CHANGES: Final = 5
_LONGEST_S: Final = 120.0


class RefreshLearner:
    """Feeds on one remark a tick. `interval_s` is the time between ticks; `fixed_s` above 0 is taken
    instead of learning."""

    def __init__(self, interval_s: float, fixed_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._fixed = fixed_s > 0
        self._last_ns: int | None = None
        self._gaps_s: list[float] = []
        self.refresh_s = fixed_s if self._fixed else DEFAULT_REFRESH_S

    def changed(self, now_ns: int) -> None:
        """The values are others than at the tick before."""
        if self._fixed:
            return
        if self._last_ns is not None:
            self._gaps_s = [*self._gaps_s[1 - _CHANGES :], (now_ns - self._last_ns) / 1e9]
        self._last_ns = now_ns
        if len(self._gaps_s) == _CHANGES:
            self.refresh_s = self._estimate()

    def interrupted(self) -> None:
        """A tick was missed, or the page names other series: the time since the last change says nothing."""
        self._last_ns = None

    def _estimate(self) -> float:
        """The mean gap, rounded up to whole ticks: a change is only seen at a tick."""
        mean = sum(self._gaps_s) / len(self._gaps_s)
        ticks = max(1, math.ceil(mean / self._interval_s - 0.05))
        return min(ticks * self._interval_s, max(_LONGEST_S, self._interval_s))
