"""Says when series leave: one NO_RECORDED_VALUE point for each that a complete batch no longer has.

Invariant: only a complete batch makes a series leave, each departure is said once, and what is remembered of streams
is bounded in bytes (a stream that just stops is forgotten in time, without a word).

A 0/1 series of the catalogue gets a final 0 first, so that queries over a window see it end at 0, and its
NO_RECORDED_VALUE with the stream's next complete batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.pipeline.data import Batch, Block, Identity, Layout, Series
from gpulens.pipeline.lru import BytesLRU
from gpulens.pipeline.otlp import encode_block, encode_departed

_SERIES_BYTES = 250  # an estimate of what keeping one identity costs; the layout itself is mostly shared


@dataclass(slots=True)
class _Stream:
    """What a stream has out: its last complete layout, what partial batches added since, and 0/1 series that had
    their final 0 and still owe their NO_RECORDED_VALUE."""

    layout: Layout
    added: dict[Identity, None] = field(default_factory=dict)
    owing: dict[Identity, None] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        return 1000 + _SERIES_BYTES * (self.layout.size + len(self.added) + len(self.owing))


class Departures:
    """Watches one exporter's batches; `streams` tells what is remembered and how much room it takes."""

    def __init__(self, limit_bytes: int = 32 * 2**20) -> None:
        self.streams: BytesLRU[str, _Stream] = BytesLRU("departures", limit_bytes, lambda _, stream: stream.cost)

    def extend(self, batch: Batch) -> Batch:
        """The batch with one more encoded ResourceMetrics in `opaque` for each block that lost series.

        In the steady state it returns its argument.
        """
        stream = self.streams.get(batch.stream)
        if not batch.complete:
            if stream is not None:
                self._add(batch, stream)
            return batch
        if stream is None:
            self.streams.put(batch.stream, _Stream(batch.layout))
            return batch
        if stream.layout is batch.layout and not stream.added and not stream.owing:
            return batch
        gone = _missing(stream, batch.layout)
        owed = [identity for identity in stream.owing if identity not in batch.layout.slots]
        binary = [identity for identity in gone if _is_binary(identity[2])]
        ended = [*owed, *(identity for identity in gone if not _is_binary(identity[2]))]
        self.streams.put(batch.stream, _Stream(batch.layout, owing=dict.fromkeys(binary)))
        time_ns = batch.latest_ns()
        parts = [_final_zero(block, time_ns) for block in _blocks(binary)]
        parts += [encode_departed(block, time_ns).SerializeToString() for block in _blocks(ended)]
        return replace(batch, opaque=(*batch.opaque, *parts)) if parts else batch

    def _add(self, batch: Batch, stream: _Stream) -> None:
        """A partial batch adds to its stream, and brings back what was about to leave."""
        if batch.layout is stream.layout:
            return
        known = stream.layout.slots
        added = {identity: None for identity in batch.layout.identities() if identity not in known}
        if added.keys() <= stream.added.keys():
            return
        stream.added |= added
        for identity in added:
            stream.owing.pop(identity, None)
        self.streams.put(batch.stream, stream)


def _missing(stream: _Stream, now: Layout) -> list[Identity]:
    """The stream's series that `now` does not have. Blocks that both have are not looked into."""
    kept = set(now.blocks)
    before: list[Identity] = [
        (block.resource, block.scope, series)
        for block in stream.layout.blocks
        if block not in kept
        for series in block.series
    ]
    return [identity for identity in (*before, *stream.added) if identity not in now.slots]


def _is_binary(series: Series) -> bool:
    entry = CATALOGUE.get(series.metric.name)
    return entry is not None and entry.binary and series.metric.is_int


def _blocks(identities: Iterable[Identity]) -> list[Block]:
    groups: dict[tuple[object, object], list[Identity]] = {}
    for identity in identities:
        groups.setdefault(identity[:2], []).append(identity)
    return [Block(group[0][0], group[0][1], [series for _, _, series in group]) for group in groups.values()]


def _final_zero(block: Block, time_ns: int) -> bytes:
    zeros = [0] * len(block)
    message = encode_block(block, zeros, [time_ns] * len(block), zeros)
    assert message is not None  # a block has at least one series
    return message.SerializeToString()
