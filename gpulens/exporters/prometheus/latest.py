"""What each stream said last: the state behind the page.

Invariant: a complete batch replaces everything earlier of its stream and stays until the stream speaks again;
what is followed by partial batches ages out `expiration_s` after its last point. Keeping a batch costs the
same however many series it has, and memory stays within about twice the series that are alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from gpulens.pipeline.data import Batch, Identity, Layout, bitmap, bitmap_slots, build_layout

_FEW = 64  # layouts of one stream; with more of them, small ones are put together


@dataclass(frozen=True, slots=True)
class Held:
    """One batch that is still on the page.

    - `order`: grows with each batch taken; of two readings of one series the higher counts.
    - `seen_s`: when it arrived (monotonic seconds), for all slots or one a slot.
    - `absent`: the batch's absent slots and those that have expired.
    """

    batch: Batch
    order: int
    seen_s: float | Sequence[float]
    absent: bytes


class Latest:
    """The batches that make the page, by stream."""

    def __init__(self, expiration_s: float) -> None:
        self._expiration_s = expiration_s
        self._streams: dict[str, dict[Layout, Held]] = {}
        self._order = count()

    def keep(self, batch: Batch, now_s: float) -> None:
        """Takes a batch that arrived at `now_s`."""
        held = Held(batch, next(self._order), now_s, batch.absent)
        if batch.complete:
            self._streams.pop(batch.stream, None)
            if batch.layout.size:
                self._streams[batch.stream] = {batch.layout: held}
            return
        if not batch.layout.size:
            return
        parts = self._streams.setdefault(batch.stream, {})
        parts[batch.layout] = held
        if len(parts) > _FEW:
            self._gather(batch.stream, parts, now_s)

    def current(self, now_s: float) -> tuple[list[Held], float]:
        """What is on the page, by stream and in an order that does not change while the layouts stay; and
        until when (monotonic seconds) that is true if nothing arrives."""
        found: list[Held] = []
        until_s = float("inf")
        for stream in sorted(self._streams):
            parts = self._streams[stream]
            if _is_last_word(parts):
                found.extend(parts.values())
                continue
            alive, ends_s = self._alive(parts, now_s)
            until_s = min(until_s, ends_s)
            found.extend(alive)
            for layout in parts.keys() - {held.batch.layout for held in alive}:
                del parts[layout]
            if not parts:
                del self._streams[stream]
        return found, until_s

    def _alive(self, parts: dict[Layout, Held], now_s: float) -> tuple[list[Held], float]:
        alive: list[Held] = []
        ends_s = float("inf")
        for held in parts.values():
            seen = held.seen_s
            if isinstance(seen, float | int):
                if now_s - seen < self._expiration_s:
                    alive.append(held)
                    ends_s = min(ends_s, seen + self._expiration_s)
                continue
            fresh = [seen_s for seen_s in seen if now_s - seen_s < self._expiration_s]
            if fresh:
                ends_s = min(ends_s, min(fresh) + self._expiration_s)
                alive.append(held if len(fresh) == len(seen) else self._without_expired(held, seen, now_s))
        return alive, ends_s

    def _without_expired(self, held: Held, seen: Sequence[float], now_s: float) -> Held:
        gone = {slot for slot, seen_s in enumerate(seen) if now_s - seen_s >= self._expiration_s}
        gone.update(bitmap_slots(held.batch.absent))
        return Held(held.batch, held.order, seen, bitmap(sorted(gone)))

    def _gather(self, stream: str, parts: dict[Layout, Held], now_s: float) -> None:
        """Puts a stream's batches together into one, once the small ones weigh as much as the largest: a
        sender whose every message has other series costs a fixed amount a series."""
        sizes = [layout.size for layout in parts]
        if sum(sizes) < 2 * max(sizes):
            return
        alive, _ = self._alive(parts, now_s)
        gathered = _together(sorted(alive, key=lambda held: held.order), stream, next(self._order))
        parts.clear()
        if gathered is not None:
            parts[gathered.batch.layout] = gathered


def _is_last_word(parts: dict[Layout, Held]) -> bool:
    return len(parts) == 1 and next(iter(parts.values())).batch.complete


def _together(parts: list[Held], stream: str, order: int) -> Held | None:
    """The readings of all parts, the later one of each series; None when there are none."""
    last: dict[Identity, tuple[Held, int]] = {}
    for held in parts:
        gone = set(bitmap_slots(held.absent))
        for slot, identity in enumerate(held.batch.layout.identities()):
            if slot in gone:
                last.pop(identity, None)
            else:
                last[identity] = (held, slot)
    if not last:
        return None
    layout, slots = build_layout(last)
    values: list[float | int] = [0] * layout.size
    times, seen = array("Q", bytes(8 * layout.size)), array("d", bytes(8 * layout.size))
    columns = {held.order: (held.batch.numbers(), held.batch.times(), held.seen_s) for held in parts}
    for (held, source), slot in zip(last.values(), slots, strict=True):
        numbers, moments, seen_s = columns[held.order]
        values[slot], times[slot] = numbers[source], moments[source]
        seen[slot] = seen_s if isinstance(seen_s, float | int) else seen_s[source]
    return Held(Batch.of(layout, values, times, stream, complete=False), order, seen, b"")
