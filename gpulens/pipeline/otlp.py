"""OTLP protobuf both ways: batches to messages, messages to batches.

Invariant: what travels as columns comes back as it was (int64 exact, doubles bit by bit, times, start times,
absence), and equal content comes back on the *same* layout object. What has no columns (histograms, exponential
histograms, summaries) travels in `Batch.opaque`, encoded.

Decisions that a reader may question:
- Points stand in slot order; a new Metric message begins where the metric changes. Regrouping would change the
  order of slots on the way back.
- Exemplars are left out and counted (`Decoder.dropped_exemplars`): they name single requests, and a GPU reading
  has none. A metric's `metadata` map and the dropped-attribute counters are left out as well.
- Field numbers and rules: opentelemetry-proto 1.x, metrics/v1/metrics.proto.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError as ProtobufDecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint, ResourceMetrics, ScopeMetrics

from gpulens.pipeline.data import (
    EMPTY_LAYOUT,
    Batch,
    Block,
    Kind,
    Layout,
    Metric,
    Resource,
    Scope,
    Series,
    Temporality,
    Times,
    Value,
)
from gpulens.pipeline.errors import DecodeError
from gpulens.pipeline.lru import BytesLRU
from gpulens.pipeline.otlp_attributes import read_attributes, write_attributes

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    PointList = RepeatedCompositeFieldContainer[NumberDataPoint]

STREAM_KEY: Final = "gpulens.stream"
COMPLETE_KEY: Final = "gpulens.complete"
NO_RECORDED_VALUE: Final = int(metrics_pb2.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK)
TEMPORALITIES: Final = {
    Temporality.UNSPECIFIED: metrics_pb2.AGGREGATION_TEMPORALITY_UNSPECIFIED,
    Temporality.DELTA: metrics_pb2.AGGREGATION_TEMPORALITY_DELTA,
    Temporality.CUMULATIVE: metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE,
}
_TEMPORALITY_OF: Final = {number: temporality for temporality, number in TEMPORALITIES.items()}


# --- batches to messages


def encode(batch: Batch) -> bytes:
    """The batch as an encoded ExportMetricsServiceRequest, opaque parts last; empty when it says nothing.

    Encoded requests concatenate: the bytes of two requests are the request of both.
    """
    pieces = [framed(message.SerializeToString()) for message in encode_resource_metrics(batch)]
    return b"".join([*pieces, *map(framed, batch.opaque)])


def encode_request(batch: Batch) -> ExportMetricsServiceRequest:
    """As `encode`, as a message. Raises DecodeError when an opaque part is not a ResourceMetrics."""
    request = ExportMetricsServiceRequest(resource_metrics=encode_resource_metrics(batch))
    request.resource_metrics.extend(_parse_resource_metrics(part) for part in batch.opaque)
    return request


def record_request(batch: Batch) -> ExportMetricsServiceRequest:
    """The batch as it goes into a recording: every scope names stream and completeness, and nothing is lost.

    An absent slot becomes a NO_RECORDED_VALUE point with a zero of the series' type, so that the layout reads
    back as it was; departed series (no value at all) are told apart by that. An empty batch becomes one scope
    without metrics. Raises DecodeError when an opaque part is not a ResourceMetrics.
    """
    request = ExportMetricsServiceRequest(resource_metrics=encode_resource_metrics(batch, absent_points=True))
    request.resource_metrics.extend(_parse_resource_metrics(part) for part in batch.opaque)
    if not request.resource_metrics:
        message = request.resource_metrics.add()
        message.resource.SetInParent()
        message.scope_metrics.add()
    for message in request.resource_metrics:
        for scope_metrics in message.scope_metrics:
            scope = scope_metrics.scope
            kept = [pair for pair in scope.attributes if pair.key not in (STREAM_KEY, COMPLETE_KEY)]
            del scope.attributes[:]
            scope.attributes.extend(kept)
            scope.attributes.add(key=COMPLETE_KEY).value.bool_value = batch.complete
            scope.attributes.add(key=STREAM_KEY).value.string_value = batch.stream
    return request


def encode_resource_metrics(batch: Batch, absent_points: bool = False) -> Iterator[ResourceMetrics]:
    """One message a block with readings; blocks without any are left out.

    `absent_points` writes absent slots too (for recordings).
    """
    readings, times, starts = batch.readings(), batch.times(), batch.starts()
    for block, first in zip(batch.layout.blocks, batch.layout.offsets, strict=False):
        part = slice(first, first + len(block))
        message = encode_block(block, readings[part], times[part], starts[part], absent_points)
        if message is not None:
            yield message


def encode_block(
    block: Block,
    readings: Sequence[Value | None],
    times: Sequence[int],
    starts: Sequence[int],
    absent_points: bool = False,
) -> ResourceMetrics | None:
    """One block point by point; None when no reading is present. A start of 0 is not written."""
    message = ResourceMetrics(schema_url=block.resource.schema_url)
    write_attributes(block.resource.attributes, message.resource)
    message.resource.SetInParent()
    scope_metrics = message.scope_metrics.add(schema_url=block.scope.schema_url)
    write_scope(block.scope, scope_metrics.scope)
    scope_metrics.scope.SetInParent()
    current: Metric | None = None
    points = None
    for series, reading, time_ns, start_ns in zip(block.series, readings, times, starts, strict=True):
        if reading is None and not absent_points:
            continue
        metric = series.metric
        if points is None or metric != current:
            points = _open_metric(scope_metrics, metric)
            current = metric
        point = points.add(time_unix_nano=time_ns, start_time_unix_nano=start_ns)
        if metric.is_int:
            point.as_int = 0 if reading is None else int(reading)
        else:
            point.as_double = 0.0 if reading is None else reading
        if reading is None:
            point.flags = NO_RECORDED_VALUE
        write_attributes(series.attributes, point)
    return None if points is None else message


def encode_departed(block: Block, time_ns: int) -> ResourceMetrics:
    """One NO_RECORDED_VALUE point without a value for each series of the block."""
    zeros = [0] * len(block)
    message = encode_block(block, zeros, [time_ns] * len(block), zeros)
    assert message is not None  # a block has at least one series
    for metric in message.scope_metrics[0].metrics:
        for point in metric.sum.data_points if metric.HasField("sum") else metric.gauge.data_points:
            point.ClearField("value")
            point.flags = NO_RECORDED_VALUE
    return message


def _open_metric(scope_metrics: ScopeMetrics, metric: Metric) -> PointList:
    message = scope_metrics.metrics.add(name=metric.name, unit=metric.unit, description=metric.description)
    if metric.kind is Kind.GAUGE:
        message.gauge.SetInParent()
        return message.gauge.data_points
    message.sum.is_monotonic = metric.monotonic
    message.sum.aggregation_temporality = TEMPORALITIES[metric.temporality]
    return message.sum.data_points


def write_scope(scope: Scope, target: InstrumentationScope) -> None:
    """Fills an InstrumentationScope."""
    target.name = scope.name
    target.version = scope.version
    write_attributes(scope.attributes, target)


def framed(resource_metrics: bytes) -> bytes:
    """An encoded ResourceMetrics as a piece of a request: field 1, length, bytes."""
    return b"\x0a" + varint(len(resource_metrics)) + resource_metrics


def varint(number: int) -> bytes:
    """A non-negative number in protobuf's base-128 form."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# --- messages to batches


def decode_request(message: ExportMetricsServiceRequest, stream: str) -> list[Batch]:
    """One message as batches, without a memory of earlier ones; see `Decoder.decode`."""
    return Decoder().decode(message, stream)


def parse_request(data: bytes) -> ExportMetricsServiceRequest:
    """Encoded bytes as a message. Raises DecodeError."""
    try:
        return ExportMetricsServiceRequest.FromString(data)
    except ProtobufDecodeError as error:
        raise DecodeError(f"not an OTLP ExportMetricsServiceRequest ({len(data)} bytes): {error}") from error


def _parse_resource_metrics(data: bytes) -> ResourceMetrics:
    try:
        return ResourceMetrics.FromString(data)
    except ProtobufDecodeError as error:
        raise DecodeError(f"not an OTLP ResourceMetrics ({len(data)} bytes): {error}") from error


@dataclass(slots=True)
class _Section:
    """The columns of one resource and scope; the lists run side by side."""

    resource: Resource
    scope: Scope
    series: list[Series] = field(default_factory=list)
    values: list[Value | None] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """What one message says of one stream."""

    stream: str
    complete: bool
    recorded: bool
    sections: list[_Section] = field(default_factory=list)
    opaque: list[bytes] = field(default_factory=list)
    opaque_ns: int = 0


class Decoder:
    """Reads messages; equal content comes back as the same Block and Layout while the caches hold them."""

    def __init__(self, limit_bytes: int = 32 * 2**20) -> None:
        self.blocks: BytesLRU[Block, Block] = BytesLRU("otlp_decoded_blocks", limit_bytes // 2, _block_cost)
        self.layouts: BytesLRU[tuple[Block, ...], Layout] = BytesLRU(
            "otlp_decoded_layouts", limit_bytes // 2, lambda _, layout: 200 + 150 * layout.size
        )
        self.dropped_exemplars = 0

    def decode_bytes(self, data: bytes, stream: str) -> list[Batch]:
        """As `decode`, from encoded bytes. Raises DecodeError."""
        return self.decode(parse_request(data), stream)

    def decode(self, message: ExportMetricsServiceRequest, stream: str) -> list[Batch]:
        """The message as batches, oldest first.

        Scopes that carry `gpulens.stream` and `gpulens.complete` (recordings) say stream and completeness
        themselves; all else gets `stream` and is partial. Several points of one series become several batches,
        each of them partial. A point without a value, or one that says NO_RECORDED_VALUE, is absent; in a
        recording a NO_RECORDED_VALUE point without a value is a departure that completeness says already, and
        is skipped.
        """
        groups: dict[tuple[str, bool, bool], _Group] = {}
        for resource_metrics in message.resource_metrics:
            attrs = read_attributes(resource_metrics.resource.attributes)
            resource = Resource(attrs, resource_metrics.schema_url)
            for scope_metrics in resource_metrics.scope_metrics:
                scope, key = _read_scope(scope_metrics, stream)
                group = groups.setdefault(key, _Group(*key))
                section = _Section(resource, scope)
                group.sections.append(section)
                self._read_metrics(resource_metrics, scope_metrics, group, section)
        return [batch for group in groups.values() for batch in self._batches(group)]

    def _read_metrics(
        self, resource_metrics: ResourceMetrics, scope_metrics: ScopeMetrics, group: _Group, section: _Section
    ) -> None:
        opaque: list[metrics_pb2.Metric] = []
        for message in scope_metrics.metrics:
            kind = message.WhichOneof("data")
            if kind == "gauge":
                metric = Metric(message.name, message.unit, message.description)
                self._read_points(message.gauge.data_points, metric, group.recorded, section)
            elif kind == "sum":
                metric = Metric(
                    message.name,
                    message.unit,
                    message.description,
                    Kind.SUM,
                    _TEMPORALITY_OF.get(message.sum.aggregation_temporality, Temporality.UNSPECIFIED),
                    message.sum.is_monotonic,
                )
                self._read_points(message.sum.data_points, metric, group.recorded, section)
            elif kind is not None:
                opaque.append(message)
        if opaque:
            group.opaque.append(_opaque_part(resource_metrics, scope_metrics, section.scope, opaque))
            group.opaque_ns = max(group.opaque_ns, *map(_latest_ns, opaque))

    def _read_points(self, points: PointList, metric: Metric, recorded: bool, section: _Section) -> None:
        typed: dict[str, Metric] = {"as_double": metric}
        # A point without a value has no type: it gets that of the metric's first point that has one.
        untyped = next(filter(None, (point.WhichOneof("value") for point in points)), "as_double")
        for point in points:
            kind = point.WhichOneof("value")
            no_value = bool(point.flags & NO_RECORDED_VALUE)
            if recorded and no_value and kind is None:
                continue
            if point.exemplars:
                self.dropped_exemplars += len(point.exemplars)
            named = kind or untyped
            if named not in typed:
                typed[named] = replace(metric, is_int=True)
            section.series.append(Series(typed[named], read_attributes(point.attributes)))
            section.values.append(None if no_value or kind is None else getattr(point, kind))
            section.times.append(point.time_unix_nano)
            section.starts.append(point.start_time_unix_nano)

    def _batches(self, group: _Group) -> list[Batch]:
        if not any(section.series for section in group.sections):
            if not group.opaque and not (group.recorded and group.complete):
                return []
            empty = Batch(EMPTY_LAYOUT, b"", group.opaque_ns, group.stream, group.complete)
            return [_with_opaque(empty, group)]
        try:
            batches = [self._batch(group, group.sections, group.complete)]
        except ValueError:  # a series stands in it more than once
            batches = [self._batch(group, part, False) for part in _oldest_first(group.sections)]
        batches[-1] = _with_opaque(batches[-1], group)
        return batches

    def _batch(self, group: _Group, sections: Sequence[_Section], complete: bool) -> Batch:
        filled = [section for section in sections if section.series]
        blocks = tuple(self._block(Block(section.resource, section.scope, section.series)) for section in filled)
        layout = self.layouts.get(blocks)
        if layout is None:
            layout = Layout(blocks)
            self.layouts.put(blocks, layout)
        values, absent = layout.pack([value for section in sections for value in section.values])
        times = _column([time for section in sections for time in section.times])
        starts = _column([start for section in sections for start in section.starts])
        return Batch(layout, values, times, group.stream, complete, starts, absent)

    def _block(self, block: Block) -> Block:
        known = self.blocks.get(block)
        if known is None:
            self.blocks.put(block, block)
            return block
        return known


def _oldest_first(sections: Sequence[_Section]) -> Iterator[list[_Section]]:
    """Walks all points in time order and begins a new part whenever a series would stand in the current one
    twice; within a part, points keep the message's order."""
    points = sorted(
        (time_ns, number, index)
        for number, section in enumerate(sections)
        for index, time_ns in enumerate(section.times)
    )
    seen: set[tuple[Resource, Scope, Series]] = set()
    part: list[tuple[int, int]] = []
    for _, number, index in points:
        section = sections[number]
        identity = (section.resource, section.scope, section.series[index])
        if identity in seen:
            yield _gather(sections, part)
            seen, part = set(), []
        seen.add(identity)
        part.append((number, index))
    yield _gather(sections, part)


def _gather(sections: Sequence[_Section], points: list[tuple[int, int]]) -> list[_Section]:
    gathered: dict[int, _Section] = {}
    for number, index in sorted(points):
        source = sections[number]
        target = gathered.setdefault(number, _Section(source.resource, source.scope))
        target.series.append(source.series[index])
        target.values.append(source.values[index])
        target.times.append(source.times[index])
        target.starts.append(source.starts[index])
    return list(gathered.values())


def _with_opaque(batch: Batch, group: _Group) -> Batch:
    return replace(batch, opaque=tuple(group.opaque)) if group.opaque else batch


def _column(times: list[int]) -> Times:
    first = times[0]
    return first if times.count(first) == len(times) else array("Q", times)


def _block_cost(_: Block, block: Block) -> int:
    # Estimate: a Series with six short attributes takes about 1.2 kB.
    return 1000 + 1200 * len(block)


def _read_scope(scope_metrics: ScopeMetrics, stream: str) -> tuple[Scope, tuple[str, bool, bool]]:
    """The scope, and (stream, complete, recorded). Marks of a recording are taken off the scope."""
    message = scope_metrics.scope
    pairs = read_attributes(message.attributes)
    found = dict(pairs)
    named, complete = found.get(STREAM_KEY), found.get(COMPLETE_KEY)
    recorded = isinstance(named, str) and isinstance(complete, bool)
    if recorded:
        pairs = tuple(pair for pair in pairs if pair[0] not in (STREAM_KEY, COMPLETE_KEY))
    scope = Scope(message.name, message.version, pairs, scope_metrics.schema_url)
    if isinstance(named, str) and isinstance(complete, bool):
        return scope, (named, complete, True)
    return scope, (stream, False, False)


def _opaque_part(
    resource_metrics: ResourceMetrics,
    scope_metrics: ScopeMetrics,
    scope: Scope,
    metrics: list[metrics_pb2.Metric],
) -> bytes:
    part = ResourceMetrics(resource=resource_metrics.resource, schema_url=resource_metrics.schema_url)
    target = part.scope_metrics.add(schema_url=scope_metrics.schema_url, metrics=metrics)
    write_scope(scope, target.scope)
    target.scope.SetInParent()
    return part.SerializeToString(deterministic=True)


def _latest_ns(message: metrics_pb2.Metric) -> int:
    """The newest time of a metric that does not travel as columns."""
    times: Iterator[int]
    if message.HasField("histogram"):
        times = (point.time_unix_nano for point in message.histogram.data_points)
    elif message.HasField("exponential_histogram"):
        times = (point.time_unix_nano for point in message.exponential_histogram.data_points)
    else:
        times = (point.time_unix_nano for point in message.summary.data_points)
    return max(times, default=0)
