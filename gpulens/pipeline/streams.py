"""Keeps a stream's layout steady while single readings come and go.

Invariant: a series enters with its first reading; one that misses a tick is absent, not gone; after `patience` ticks
without a reading it leaves the layout until it has one again. The layout object changes only when the set of series
does.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulens.pipeline.data import EMPTY_LAYOUT, Layout, Value, build_layout

PATIENCE_TICKS = 10

_OUTSIDE = -1


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
        self._outside: list[int] = []
        self._missed: list[int] = []

    def settle(self, layout: Layout, values: Sequence[Value | None]) -> tuple[Layout, Sequence[Value | None]]:
        """The stream's layout and the numbers on it."""
        if layout is not self._read or any(values[slot] is not None for slot in self._outside):
            self._adopt(layout, values)
        placed = self._place(values)
        if None not in placed:
            if any(self._missed):
                self._missed = [0] * self._layout.size
            return self._layout, placed
        self._missed = [missed + 1 if value is None else 0 for missed, value in zip(self._missed, placed, strict=True)]
        if max(self._missed) < self._patience:
            return self._layout, placed
        return self._drop(layout, placed)

    def _place(self, values: Sequence[Value | None]) -> Sequence[Value | None]:
        if self._positions is None:
            return values
        spread: list[Value | None] = [None] * self._layout.size
        for slot, value in zip(self._positions, values, strict=True):
            if slot != _OUTSIDE:
                spread[slot] = value
        return spread

    def _adopt(self, layout: Layout, values: Sequence[Value | None]) -> None:
        """Takes up a tick's layout that is not the last one's, or that has a reading where it had none."""
        known = self._layout.slots
        inside = [
            identity
            for identity, value in zip(layout.identities(), values, strict=True)
            if value is not None or identity in known
        ]
        if any(identity not in known for identity in inside):
            ages = dict(zip(self._layout.identities(), self._missed, strict=True))
            kept = [identity for identity in self._layout.identities() if identity not in layout.slots]
            if kept or len(inside) < layout.size:
                self._layout, _ = build_layout([*inside, *kept])
            else:
                self._layout = layout
            self._missed = [ages.get(identity, 0) for identity in self._layout.identities()]
        self._locate(layout)

    def _locate(self, layout: Layout) -> None:
        """Works out where each reading of a tick's layout stands in the stream's."""
        self._read = layout
        slots = self._layout.slots
        positions = [slots.get(identity, _OUTSIDE) for identity in layout.identities()]
        self._outside = [slot for slot, position in enumerate(positions) if position == _OUTSIDE]
        same = self._layout is layout or self._layout == layout
        self._positions = None if same else positions

    def _drop(self, layout: Layout, placed: Sequence[Value | None]) -> tuple[Layout, Sequence[Value | None]]:
        """Lets go of the series that missed too many ticks."""
        stay = [slot for slot, missed in enumerate(self._missed) if missed < self._patience]
        self._layout = self._layout.select(stay)
        self._missed = [self._missed[slot] for slot in stay]
        self._locate(layout)
        return self._layout, [placed[slot] for slot in stay]
