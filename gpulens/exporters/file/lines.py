"""A batch as one line of OTLP JSON, compiled once for each block.

Invariant: the line is, byte for byte, `encode_json(record_request(batch))`; only a batch without points has
its time on a scope besides. A block that comes back has its
names and attributes as ready text, between which only the numbers are set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Projection, Value, bitmap, bitmap_slots
from gpulens.pipeline.lru import BytesLRU, SecondSight
from gpulens.pipeline.otlp import record_request
from gpulens.pipeline.otlp_json import encode_json, json_double, mark_time

_HEAD: Final = '{"resourceMetrics":['
_TAIL: Final = "]}"
# No text can hold this: inside a JSON string the quotes would be escaped.
_MARK: Final = (1 << 64) - 1
_POINT: Final = re.compile(rf'"timeUnixNano":"{_MARK}",(?:"asDouble":0\.0|"asInt":"0")', re.ASCII)
_FLAG: Final = ',"flags":1'
_FLAGGED_END: Final = re.compile(r',"flags":1\}', re.ASCII)

_Key = tuple[Block, str, bool]


@dataclass(frozen=True, slots=True)
class _Template:
    """A block's text around its numbers: `texts[i]` follows number i - 1; `flagged` says the same of absent
    ones."""

    texts: tuple[str, ...]
    flagged: tuple[str, ...]

    def fill(self, numbers: Sequence[str], absent: Sequence[int]) -> str:
        """The block's text with these numbers."""
        parts = [""] * (2 * len(numbers) + 1)
        parts[0::2] = self.texts
        parts[1::2] = numbers
        for index in absent:
            parts[2 * index + 2] = self.flagged[index + 1]
        return "".join(parts)


class LineEncoder:
    """Makes lines; keeps the texts of blocks that came back, in at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = 32 << 20) -> None:
        self.templates: BytesLRU[_Key, _Template] = BytesLRU("file_lines", limit_bytes, _template_cost)
        self._seen: SecondSight[_Key] = SecondSight(8192)

    def encode(self, batch: Batch) -> bytes:
        """The line with its end. Raises DecodeError when an opaque part is not a ResourceMetrics."""
        texts = [self._block(batch, number) for number in range(len(batch.layout.blocks))]
        if not texts:
            texts.append(_empty(batch))
        if batch.opaque:
            texts.append(_inner(replace(_without_points(batch), opaque=batch.opaque)))
        return f"{_HEAD}{','.join(texts)}{_TAIL}\n".encode("ascii")

    def _block(self, batch: Batch, number: int) -> str:
        block = batch.layout.blocks[number]
        first = batch.layout.offsets[number]
        slots = range(first, first + len(block))
        key = (block, batch.stream, batch.complete)
        template = self.templates.get(key)
        if template is None:
            if not self._seen.again(key):
                return _inner(replace(Projection(Layout([block]), slots).apply(batch), opaque=()))
            template = _compile(block, batch.stream, batch.complete)
            self.templates.put(key, template)
        return self._fill(template, batch, slots)

    @staticmethod
    def _fill(template: _Template, batch: Batch, slots: range) -> str:
        part = slice(slots.start, slots.stop)
        heads: list[str] | repeat[str]
        if isinstance(batch.time_ns, int) and isinstance(batch.start_ns, int):
            heads = repeat(_times(batch.start_ns, batch.time_ns), len(slots))
        else:
            heads = list(map(_times, batch.starts()[part], batch.times()[part]))
        values = list(map(_number, batch.numbers()[part], batch.layout.is_int[part]))
        absent: list[int] = []
        if batch.absent:
            absent = [slot - slots.start for slot in bitmap_slots(batch.absent) if slot in slots]
            for index in absent:
                values[index] = _number(0, batch.layout.is_int[slots.start + index])
        return template.fill([head + value for head, value in zip(heads, values, strict=True)], absent)


def _times(start_ns: int, time_ns: int) -> str:
    start = f'"startTimeUnixNano":"{start_ns}",' if start_ns else ""
    return f'{start}"timeUnixNano":"{time_ns}",' if time_ns else start


def _number(value: Value, is_int: bool) -> str:
    return f'"asInt":"{value}"' if is_int else f'"asDouble":{json_double(float(value))}'


def _inner(batch: Batch) -> str:
    """The ResourceMetrics of a batch as text, without the request around them."""
    return _unwrapped(record_request(batch))


def _unwrapped(request: ExportMetricsServiceRequest) -> str:
    return encode_json(request).decode("ascii")[len(_HEAD) : -len(_TAIL)]


def _without_points(batch: Batch) -> Batch:
    return Batch(EMPTY_LAYOUT, b"", batch.latest_ns(), batch.stream, batch.complete)


def _empty(batch: Batch) -> str:
    """A scope that says of which stream there is nothing, whether that is all, and when: no point says it."""
    request = record_request(_without_points(batch))
    mark_time(request, batch.latest_ns())
    return _unwrapped(request)


def _compile(block: Block, stream: str, complete: bool) -> _Template:
    """Writes the block with every slot absent and a time that nothing else holds, and cuts the text at its
    points."""
    size = len(block)
    marked = Batch(Layout([block]), bytes(8 * size), _MARK, stream, complete, absent=bitmap(range(size)))
    flagged = _POINT.split(_inner(marked))
    present = [flagged[0], *(_FLAGGED_END.sub("}", text, count=1) for text in flagged[1:])]
    return _Template(tuple(present), tuple(flagged))


def _template_cost(_: _Key, template: _Template) -> int:
    texts = sum(map(len, template.texts)) + sum(map(len, template.flagged))
    return texts + 120 * (len(template.texts) + len(template.flagged))
