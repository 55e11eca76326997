"""Event time for processors: a watermark that follows the data, and an epoch-aligned grid that it passes.

Invariant: nothing here looks at a clock. The same batches in the same order pass the same grid instants at the same
places, live or replayed.
"""

from __future__ import annotations

from collections.abc import Iterator

NS = 10**9


class Watermark:
    """Latest event time seen on a pipeline minus `lateness_ns`."""

    def __init__(self, lateness_ns: int = 2 * NS) -> None:
        self.lateness_ns = lateness_ns
        self._latest_ns = 0

    @property
    def latest_ns(self) -> int:
        """The latest event time seen; 0 before the first."""
        return self._latest_ns

    @property
    def ns(self) -> int:
        """No point older than this is expected any more; 0 before the first event."""
        return max(0, self._latest_ns - self.lateness_ns)

    def observe(self, time_ns: int) -> bool:
        """Takes an event time in; True when the watermark moved."""
        if time_ns <= self._latest_ns:
            return False
        self._latest_ns = time_ns
        return True

    def is_late(self, time_ns: int) -> bool:
        """The point came after the watermark had passed it."""
        return time_ns < self.ns


class Grid:
    """The instants k * step since the epoch, each handed out once, in order, when the watermark has passed it.

    The first call sets where the grid starts: instants before the first event are never due. A jump of more than
    `limit` steps (a source whose clock was wrong, a recording with a hole) hands out only the last `limit` instants
    and counts the others in `skipped`.
    """

    def __init__(self, step_ns: int = 10 * NS, limit: int = 1000) -> None:
        if step_ns <= 0:
            raise ValueError("a grid's step must be above 0")
        self.step_ns = step_ns
        self.limit = limit
        self.skipped = 0
        self._next: int | None = None

    def start(self, event_ns: int) -> None:
        """Sets the first instant: the one at or after this event."""
        if self._next is None:
            self._next = -(-event_ns // self.step_ns)

    def due(self, watermark_ns: int) -> Iterator[int]:
        """The instants (ns) at or before the watermark that were not handed out yet."""
        if self._next is None:
            return
        last = watermark_ns // self.step_ns
        if last - self._next + 1 > self.limit:
            self.skipped += last - self._next + 1 - self.limit
            self._next = last - self.limit + 1
        while self._next <= last:
            instant = self._next * self.step_ns
            self._next += 1
            yield instant
