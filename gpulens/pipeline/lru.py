"""A cache bounded in bytes that counts what it does; every cache of compiled forms is one of these.

Invariant: the summed cost of what it holds never exceeds `limit_bytes`; a value that costs more is not kept. What
churn leaves behind (the blocks of pods that ended) does not stay until that room is full either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

IDLE_ROUNDS: Final = 100
"""Rounds after which an entry that nobody asked for goes. A round ends when an entry is asked for twice in it: about
one tick of the fastest stream."""


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    cost: int
    round: int


class BytesLRU(Generic[K, V]):
    """Least recently used first out. `cost` gives a value's size in bytes (an estimate is fine)."""

    def __init__(self, name: str, limit_bytes: int, cost: Callable[[K, V], int]) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._cost = cost
        self._round = 0
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, now the most recently used; None (and a miss) when it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        if entry.round == self._round:
            self._round += 1
        entry.round = self._round
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: K, value: V) -> None:
        """Keeps a value, dropping the least recently used ones that no longer fit, or that were idle for long."""
        self.discard(key)
        cost = self._cost(key, value)
        if cost > self.limit_bytes:
            self.evictions += 1
            return
        self._entries[key] = _Entry(value, cost, self._round)
        self.bytes += cost
        while self.bytes > self.limit_bytes or self._oldest_is_idle():
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.cost
            self.evictions += 1

    def discard(self, key: K) -> None:
        """Forgets a value, if it is there; no eviction is counted."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.cost

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self.bytes = 0

    def _oldest_is_idle(self) -> bool:
        return next(iter(self._entries.values())).round < self._round - IDLE_ROUNDS


class SecondSight(Generic[K]):
    """Says whether a key was seen before, remembering the last `size` keys: something is worth compiling only when
    it comes back."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._seen: OrderedDict[int, None] = OrderedDict()

    def again(self, key: K) -> bool:
        """True when this key (by its hash) was asked about before and not forgotten since."""
        mark = hash(key)
        if mark in self._seen:
            self._seen.move_to_end(mark)
            return True
        self._seen[mark] = None
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return False
