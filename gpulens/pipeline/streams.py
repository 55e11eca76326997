"""Keeps a stream's layout steady while single readings come and go.

Invariant: a series that misses a tick is absent, not gone; after `patience` ticks without a reading it leaves the
layout. A new series enters at once. The layout object changes only when the set of series does.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulens.pipeline.data import EMPTY_LAYOUT, Layout, Value, build_layout

PATIENCE_TICKS = 10


class StreamLayout:
    """Maps what a receiver read at a tick to the stream's layout.

    `settle(layout, values)` takes the layout of this tick's readings and one number (or None) a slot; it returns the
    stream's layout and the numbers on it. In the steady state it returns its arguments.
    """

    def __init__(self, patience: int = PATIENCE_TICKS) -> None:
        self._patience = patience
        self._layout: Layout = EMPTY_LAYOUT
        self._read: Layout | None = None
        self._positions: list[int] | None = None
        self._missed: list[int] = []

    def settle(self, layout: Layout, values: Sequence[Value | None]) -> tuple[Layout, Sequence[Value | None]]:
        """The stream's layout and the numbers on it."""
        if layout is not self._read:
            self._adopt(layout)
        placed = values
        if self._positions is not None:
            spread: list[Value | None] = [None] * self._layout.size
            for slot, value in zip(self._positions, values, strict=True):
                spread[slot] = value
            placed = spread
        if None not in placed:
            if any(self._missed):
                self._missed = [0] * self._layout.size
            return self._layout, placed
        self._missed = [missed + 1 if value is None else 0 for missed, value in zip(self._missed, placed, strict=True)]
        if max(self._missed) < self._patience:
            return self._layout, placed
        return self._drop(placed)

    def _adopt(self, layout: Layout) -> None:
        """Takes up a tick's layout that is not the last one's."""
        known = self._layout.slots
        if any(identity not in known for identity in layout.identities()):
            ages = dict(zip(self._layout.identities(), self._missed, strict=True))
            kept = [identity for identity in self._layout.identities() if identity not in layout.slots]
            if kept:
                self._layout, _ = build_layout([*layout.identities(), *kept])
            else:
                self._layout = layout
            self._missed = [ages.get(identity, 0) for identity in self._layout.identities()]
        self._read = layout
        same = self._layout is layout or self._layout == layout
        slots = self._layout.slots
        self._positions = None if same else [slots[identity] for identity in layout.identities()]

    def _drop(self, placed: Sequence[Value | None]) -> tuple[Layout, Sequence[Value | None]]:
        """Lets go of the series that missed too many ticks."""
        stay = [slot for slot, missed in enumerate(self._missed) if missed < self._patience]
        self._layout = self._layout.select(stay)
        self._missed = [self._missed[slot] for slot in stay]
        self._read = None
        return self._layout, [placed[slot] for slot in stay]
