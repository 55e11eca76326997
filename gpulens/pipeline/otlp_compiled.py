"""The OTLP encoder for steady streams: a block is compiled once, then each tick only fills in numbers.

Invariant: the bytes are those of `otlp.encode`, bit by bit; compiling changes the cost and nothing else.

A compiled block is a list of byte pieces, five for each point: what stands before it (headers, the attributes
of the point before), its start time with the tags around it, its time, the value's tag, the value. Every field
that changes is eight bytes wide, so no length ever changes: a tick puts times and values into the list by slice
assignment and joins it. Absent slots and slots without a start time do change lengths; they make variants of
their own in the cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from struct import Struct
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as MetricMessage
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint, Sum
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage

from gpulens.pipeline.data import Batch, Block, Kind, Metric, Series, Times
from gpulens.pipeline.lru import BytesLRU, SecondSight
from gpulens.pipeline.otlp import TEMPORALITIES, encode_block, framed, varint, write_scope
from gpulens.pipeline.otlp_attributes import write_attributes

# Tags of NumberDataPoint's fixed64 fields: field number << 3 | 1.
_START_TAG: Final = b"\x11"
_TIME_TAG: Final = b"\x19"
_DOUBLE_TAG: Final = b"\x21"
_INT_TAG: Final = b"\x31"
_STRIDE: Final = 5
_U64: Final = Struct("<Q")

_NO_STARTS: Final = b""
_ALL_STARTS: Final = b"\x01"

Variant = tuple[Block, int, bytes]
"""A block, the bits of its absent slots, and which slots have a start time (none, all, or one byte a slot)."""


@dataclass(slots=True)
class _Compiled:
    """The pieces of one variant. `present` are the slots of the block with a reading, None when all are."""

    pieces: list[bytes]
    present: Sequence[int] | None
    points: int
    eights: Struct
    size: int
    starts: bytes = b""

    def fill(self, values: bytes, times: bytes, starts: bytes) -> bytes:
        """The framed ResourceMetrics. Each column has 8 bytes a slot of the block; times and starts may be 8 bytes
        for all."""
        pieces = self.pieces
        pieces[2::_STRIDE] = self._column(times)
        pieces[4::_STRIDE] = self._column(values)
        if starts != self.starts:
            self.starts = starts
            pieces[1::_STRIDE] = [
                _TIME_TAG if piece == _TIME_TAG else _START_TAG + start + _TIME_TAG
                for piece, start in zip(pieces[1::_STRIDE], self._column(starts), strict=True)
            ]
        return b"".join(pieces)

    def _column(self, column: bytes) -> Iterable[bytes]:
        if len(column) == 8:
            return [column] * self.points
        if self.present is None:
            return self.eights.unpack(column)
        return [column[8 * slot : 8 * slot + 8] for slot in self.present]


class CompiledEncoder:
    """Encodes batches. What it compiled is bounded in bytes; `cache` tells its size, hits, misses, evictions."""

    def __init__(self, limit_bytes: int = 64 * 2**20) -> None:
        self.cache: BytesLRU[Variant, _Compiled] = BytesLRU("otlp_compiled", limit_bytes, lambda _, entry: entry.size)
        self._seen: SecondSight[Variant] = SecondSight(8192)

    def encode(self, batch: Batch) -> bytes:
        """The batch as an encoded ExportMetricsServiceRequest, opaque parts last: the bytes of `otlp.encode`."""
        return b"".join([*self._blocks(batch), *map(framed, batch.opaque)])

    def _blocks(self, batch: Batch) -> Iterator[bytes]:
        absent = int.from_bytes(batch.absent, "little")
        plain: _PointByPoint | None = None
        for block, first in zip(batch.layout.blocks, batch.layout.offsets, strict=False):
            end = first + len(block)
            missing = absent >> first & ((1 << len(block)) - 1)
            times = _bytes_of(batch.time_ns, first, end)
            having, starts = _starts_of(batch.start_ns, first, end)
            compiled = self._find((block, missing, having)) if times else None
            if compiled is not None:
                yield compiled.fill(batch.values[8 * first : 8 * end], times, starts)
            else:
                plain = plain or _PointByPoint(batch)
                yield plain.encode(block, first, end)

    def _find(self, variant: Variant) -> _Compiled | None:
        compiled = self.cache.get(variant)
        if compiled is None and self._seen.again(variant):
            compiled = _compile(*variant)
            if compiled is not None:
                self.cache.put(variant, compiled)
        return compiled


class _PointByPoint:
    """The plain way, for what is not compiled (yet)."""

    def __init__(self, batch: Batch) -> None:
        self._readings = batch.readings()
        self._times = batch.times()
        self._starts = batch.starts()

    def encode(self, block: Block, first: int, end: int) -> bytes:
        part = slice(first, end)
        message = encode_block(block, self._readings[part], self._times[part], self._starts[part])
        return b"" if message is None else framed(message.SerializeToString())


def _bytes_of(times: Times, first: int, end: int) -> bytes:
    """The times of a block as bytes, one for all where that is so; empty when one is 0 (protobuf leaves it out)."""
    if isinstance(times, int):
        return _U64.pack(times) if times else b""
    part = times[first:end]
    return b"" if 0 in part else _little(part)


def _starts_of(starts: Times, first: int, end: int) -> tuple[bytes, bytes]:
    """Which slots of a block have a start time, and the start times as bytes (empty when none has)."""
    if isinstance(starts, int):
        return (_ALL_STARTS, _U64.pack(starts)) if starts else (_NO_STARTS, b"")
    part = starts[first:end]
    zeros = part.count(0)
    if zeros == len(part):
        return _NO_STARTS, b""
    return (bytes(map(bool, part)) if zeros else _ALL_STARTS), _little(part)


def _little(part: array[int]) -> bytes:
    # An array holds the machine's byte order; every platform that has wheels of our dependencies is little-endian.
    return part.tobytes()


@dataclass(frozen=True, slots=True)
class _Point:
    head: bytes
    start: bytes
    tag: bytes
    attributes: bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.start) + 8 + len(self.tag) + 8 + len(self.attributes)


@dataclass(frozen=True, slots=True)
class _Group:
    """Points of one Metric message: what stands before and behind them."""

    head: bytes
    points: list[_Point]
    tail: bytes


def _compile(block: Block, missing: int, having: bytes) -> _Compiled | None:
    """The pieces of a variant; None when it has no readings."""
    slots = [slot for slot in range(len(block)) if not missing >> slot & 1]
    if not slots:
        return None
    groups = [
        _group(metric, [(block.series[slot], _has_start(having, slot)) for slot in members])
        for metric, members in groupby(slots, key=lambda slot: block.series[slot].metric)
    ]
    resource = ResourceMessage()
    write_attributes(block.resource.attributes, resource)
    scope = InstrumentationScope()
    write_scope(block.scope, scope)
    scope_head = _field(1, scope.SerializeToString())
    scope_tail = _text(3, block.scope.schema_url)
    inner = len(scope_head) + len(scope_tail)
    inner += sum(len(g.head) + sum(p.size for p in g.points) + len(g.tail) for g in groups)
    rm_head = _field(1, resource.SerializeToString()) + b"\x12" + varint(inner) + scope_head
    rm_tail = scope_tail + _text(3, block.resource.schema_url)
    whole = len(rm_head) + len(rm_tail) + inner - len(scope_head) - len(scope_tail)
    pieces: list[bytes] = []
    pending = b"\x0a" + varint(whole) + rm_head
    for group in groups:
        pending += group.head
        for point in group.points:
            pieces += (pending + point.head, point.start, b"", point.tag, b"")
            pending = point.attributes
        pending += group.tail
    pieces.append(pending + rm_tail)
    # An estimate: bytes objects have 33 bytes of overhead, the list and the unpacking struct 8 and 32 an entry.
    size = 1000 + sum(map(len, pieces)) + 100 * len(pieces)
    return _Compiled(pieces, slots if missing else None, len(slots), Struct("8s" * len(slots)), size)


def _has_start(having: bytes, slot: int) -> bool:
    return having == _ALL_STARTS or (having != _NO_STARTS and bool(having[slot]))


def _group(metric: Metric, members: list[tuple[Series, bool]]) -> _Group:
    points = [_point(series, has_start) for series, has_start in members]
    message = MetricMessage(name=metric.name, description=metric.description, unit=metric.unit)
    number, tail = 5, b""
    if metric.kind is Kind.SUM:
        number = 7
        temporality = TEMPORALITIES[metric.temporality]
        tail = Sum(aggregation_temporality=temporality, is_monotonic=metric.monotonic).SerializeToString()
    data = sum(point.size for point in points) + len(tail)
    head = message.SerializeToString() + _tag(number) + varint(data)
    return _Group(_tag(2) + varint(len(head) + data) + head, points, tail)


def _point(series: Series, has_start: bool) -> _Point:
    message = NumberDataPoint()
    write_attributes(series.attributes, message)
    attributes = message.SerializeToString()
    start = _START_TAG + bytes(8) + _TIME_TAG if has_start else _TIME_TAG
    body = len(start) + 8 + 1 + 8 + len(attributes)
    tag = _INT_TAG if series.metric.is_int else _DOUBLE_TAG
    return _Point(b"\x0a" + varint(body), start, tag, attributes)


def _tag(number: int) -> bytes:
    """The tag of a length-delimited field."""
    return bytes((number << 3 | 2,))


def _field(number: int, content: bytes) -> bytes:
    return _tag(number) + varint(len(content)) + content


def _text(number: int, content: str) -> bytes:
    """A string field; protobuf leaves an empty one out."""
    return _field(number, content.encode()) if content else b""
