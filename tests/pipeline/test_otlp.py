from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from gpulens.pipeline.data import (
    Batch,
    Block,
    KeyValues,
    Kind,
    Layout,
    Metric,
    Resource,
    Scope,
    Series,
    Temporality,
    attributes,
)
from gpulens.pipeline.errors import DecodeError
from gpulens.pipeline.otlp import (
    NO_RECORDED_VALUE,
    Decoder,
    decode_request,
    encode,
    encode_departed,
    encode_request,
    record_request,
)
from tests.pipeline.otlp_batches import batches, same_batch

GAUGE = Metric("hw.power", "W", "Power drawn.")
COUNTER = Metric("hw.errors", "{error}", "", Kind.SUM, Temporality.CUMULATIVE, monotonic=True, is_int=True)
NODE = Resource({"k8s.node.name": "n1"}, "https://opentelemetry.io/schemas/1.30.0")
SCOPE = Scope("gpulens", "1", {"a": "b"}, "https://example.com/scope")
T = 1_700_000_000_000_000_000


def _message(text_points: list[tuple[str, int, float]]) -> ExportMetricsServiceRequest:
    """A foreign message: gauge points of (gpu, time, value)."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    for gpu, time_ns, value in text_points:
        point = metric.gauge.data_points.add(time_unix_nano=time_ns, as_double=value)
        point.attributes.add(key="gpu").value.string_value = gpu
    return request


@given(batches())
def test_a_recording_reads_back_as_it_was(batch: Batch) -> None:
    """Values, times, starts, absence, layout, stream and completeness of any batch survive a recording bit by bit."""
    [back] = decode_request(record_request(batch), "other")
    assert same_batch(back, batch)
    assert (back.stream, back.complete) == (batch.stream, batch.complete)


@given(batches())
def test_live_bytes_hold_every_present_reading_and_no_absent_one(batch: Batch) -> None:
    """What goes to a live peer reads back as the batch without its absent series, as a partial batch."""
    present = replace(batch.present(), complete=False, stream="x")
    back = decode_request(ExportMetricsServiceRequest.FromString(encode(batch)), "x")
    if present.layout.size == 0:
        assert back == []
    else:
        assert len(back) == 1
        assert same_batch(back[0], present)


@given(batches())
def test_bytes_and_message_forms_agree(batch: Batch) -> None:
    """`encode` gives the serialised form of `encode_request`."""
    assert encode(batch) == encode_request(batch).SerializeToString()


def test_int64_limits_are_exact() -> None:
    """The extremes of int64 pass through without a double in between."""
    values = [2**63 - 1, -(2**63), 2**53 + 1]
    layout = Layout([Block(NODE, SCOPE, [Series(COUNTER, {"i": str(i)}) for i in range(3)])])
    [back] = decode_request(encode_request(Batch.of(layout, values, T, "s")), "s")
    assert list(back.numbers()) == values


def test_every_attribute_type_comes_back_with_its_type() -> None:
    """Strings, booleans, ints, doubles, bytes, lists, maps and unset values keep type and content."""
    attrs = attributes(
        {
            "text": "x",
            "yes": True,
            "one": 1,
            "float": 1.0,
            "bytes": b"\x00\xff",
            "list": ("a", 1, True, None, (2.5,)),
            "empty": (),
            "map": KeyValues(attributes({"k": KeyValues(()), "b": False})),
            "unset": None,
        }
    )
    layout = Layout([Block(Resource(attrs), Scope("s", "", attrs), [Series(GAUGE, attrs)])])
    [back] = decode_request(encode_request(Batch.of(layout, [1.0], T, "s")), "s")
    block = back.layout.blocks[0]
    for found in (block.resource.attributes, block.scope.attributes, block.series[0].attributes):
        assert repr(found) == repr(attrs)


def test_attributes_that_only_python_takes_for_equal_stay_apart() -> None:
    """A series with the attribute 1 and one with true are two series, on the wire and in the decoder's memory."""
    decoder = Decoder()
    layouts = []
    for value in (True, 1, 1.0):
        batch = Batch.of(Layout([Block(NODE, SCOPE, [Series(GAUGE, {"a": value})])]), [1.0], T, "s")
        [back] = decoder.decode(encode_request(batch), "s")
        layouts.append(back.layout)
        assert repr(back.layout.blocks[0].series[0].attributes) == repr((("a", value),))
    assert len(set(layouts)) == 3


def test_equal_content_comes_back_on_the_same_layout() -> None:
    """A second message with other numbers gets the very same layout object."""
    decoder = Decoder()
    [first] = decoder.decode(_message([("a", T, 1.0), ("b", T, 2.0)]), "s")
    [second] = decoder.decode(_message([("a", T + 1, 3.0), ("b", T + 1, 4.0)]), "s")
    [other] = decoder.decode(_message([("a", T + 2, 3.0)]), "s")
    assert second.layout is first.layout
    assert other.layout is not first.layout
    assert second.numbers() == (3.0, 4.0)


def test_the_decoders_memory_is_bounded() -> None:
    """Ever new content is forgotten again; the caches stay below their limit."""
    decoder = Decoder(limit_bytes=200_000)
    for index in range(500):
        decoder.decode(_message([(str(index), T, 1.0)]), "s")
    assert decoder.blocks.bytes + decoder.layouts.bytes <= 200_000
    assert decoder.blocks.evictions > 0


def test_several_points_of_a_series_become_batches_oldest_first() -> None:
    """Points of one series leave in time order whatever their order in the message; others ride along in time."""
    message = _message([("a", T + 2, 3.0), ("a", T, 1.0), ("b", T + 2, 9.0), ("a", T + 1, 2.0)])
    parts = decode_request(message, "s")
    read = [
        [(s.text("gpu"), v) for (_, _, s), v in zip(b.layout.identities(), b.readings(), strict=True)] for b in parts
    ]
    assert read == [[("a", 1.0)], [("a", 2.0)], [("a", 3.0), ("b", 9.0)]]
    assert [batch.latest_ns() for batch in parts] == [T, T + 1, T + 2]
    assert not any(batch.complete for batch in parts)


def test_points_with_the_same_time_and_identity_are_kept_in_message_order() -> None:
    """Two readings of one series at one instant are two batches, not an error."""
    parts = decode_request(_message([("a", T, 1.0), ("a", T, 2.0)]), "s")
    assert [batch.readings() for batch in parts] == [[1.0], [2.0]]


def test_a_point_without_a_value_is_absent_and_typed_like_its_metric() -> None:
    """No value is no zero: the slot is absent, and typed by the metric's other points."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    metric.gauge.data_points.add(time_unix_nano=T).attributes.add(key="gpu").value.string_value = "a"
    metric.gauge.data_points.add(time_unix_nano=T, as_int=0).attributes.add(key="gpu").value.string_value = "b"
    [batch] = decode_request(request, "s")
    assert batch.readings() == [None, 0]
    assert batch.layout.is_int == (True, True)


def test_no_recorded_value_is_absent_in_foreign_scopes() -> None:
    """A NO_RECORDED_VALUE point of a foreign sender is an absent slot, also when it carries a number."""
    request = ExportMetricsServiceRequest()
    points = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m").gauge.data_points
    points.add(time_unix_nano=T, as_double=0.0, flags=NO_RECORDED_VALUE)
    [batch] = decode_request(request, "s")
    assert batch.readings() == [None]


def test_departures_in_a_recording_are_not_read_back() -> None:
    """Completeness says already what left, so departed series neither come back nor disturb the layout."""
    gone = Block(NODE, SCOPE, [Series(GAUGE, {"gpu": "gone"})])
    batch = Batch.of(Layout([Block(NODE, SCOPE, [Series(GAUGE, {"gpu": "a"})])]), [1.0], T, "dcgm")
    extended = replace(batch, opaque=(encode_departed(gone, T).SerializeToString(),))
    [back] = decode_request(record_request(extended), "other")
    assert same_batch(back, batch)


def test_an_empty_complete_batch_survives_a_recording() -> None:
    """A stream that has nothing to say is one scope without metrics, and reads back as an empty complete batch."""
    request = record_request(Batch.of(Layout(), [], T, "dcgm", complete=True))
    assert len(request.resource_metrics) == 1
    [back] = decode_request(request, "other")
    assert (back.layout.size, back.stream, back.complete) == (0, "dcgm", True)


def test_an_empty_batch_sends_nothing_live() -> None:
    """A batch without readings is no bytes."""
    assert encode(Batch.of(Layout(), [], T, "s")) == b""


def test_mixed_number_types_of_one_metric_are_series_of_their_own_type() -> None:
    """A sender that mixes ints and doubles in one metric loses neither."""
    request = ExportMetricsServiceRequest()
    points = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m").gauge.data_points
    points.add(as_int=2**60 + 1, time_unix_nano=T).attributes.add(key="k").value.string_value = "i"
    points.add(as_double=0.5, time_unix_nano=T).attributes.add(key="k").value.string_value = "d"
    [batch] = decode_request(request, "s")
    assert batch.readings() == [2**60 + 1, 0.5]


def test_histograms_and_summaries_pass_unread() -> None:
    """What has no columns travels encoded beside them, with its resource and scope, and leaves as it came."""
    request = _message([("a", T, 1.0)])
    resource_metrics = request.resource_metrics[0]
    resource_metrics.resource.attributes.add(key="host.id").value.string_value = "h"
    metrics = resource_metrics.scope_metrics[0].metrics
    metrics.add(name="h").histogram.data_points.add(time_unix_nano=T, count=3, bucket_counts=[1, 2])
    metrics.add(name="e").exponential_histogram.data_points.add(time_unix_nano=T, scale=3)
    metrics.add(name="s").summary.data_points.add(time_unix_nano=T, sum=1.5)
    [batch] = decode_request(request, "s")
    assert batch.readings() == [1.0]
    opaque = ResourceMetrics.FromString(batch.opaque[0])
    assert [m.name for m in opaque.scope_metrics[0].metrics] == ["h", "e", "s"]
    assert opaque.resource == resource_metrics.resource
    sent = ExportMetricsServiceRequest.FromString(encode(batch))
    assert [list(m.scope_metrics[0].metrics) for m in sent.resource_metrics] == [list(metrics[:1]), list(metrics[1:])]


def test_a_message_of_histograms_only_is_a_batch_with_their_time() -> None:
    """Without columns the batch's time is that of its newest opaque point."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="h")
    metric.histogram.data_points.add(time_unix_nano=T)
    metric.histogram.data_points.add(time_unix_nano=T + 5)
    [batch] = decode_request(request, "s")
    assert (batch.layout.size, batch.latest_ns(), len(batch.opaque)) == (0, T + 5, 1)


def test_exemplars_are_counted_not_lost_in_silence() -> None:
    """Exemplars do not travel; the decoder says how many it left out."""
    request = _message([("a", T, 1.0)])
    point = request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]
    point.exemplars.add(as_double=1.0)
    point.exemplars.add(as_double=2.0)
    decoder = Decoder()
    decoder.decode(request, "s")
    assert decoder.dropped_exemplars == 2


def test_delta_sums_and_gauge_starts_are_kept() -> None:
    """Temporality, monotonicity and start times (also on gauges) come back."""
    delta = Metric("d", kind=Kind.SUM, temporality=Temporality.DELTA, monotonic=True)
    updown = Metric("u", kind=Kind.SUM, temporality=Temporality.CUMULATIVE)
    layout = Layout([Block(NODE, SCOPE, [Series(delta), Series(updown), Series(GAUGE)])])
    batch = Batch.of(layout, [1.0, 2.0, 3.0], T, "s", start_ns=T - 10)
    [back] = decode_request(encode_request(batch), "s")
    assert back.layout == layout
    assert back.start_ns == T - 10


def test_nan_payloads_survive() -> None:
    """A NaN keeps its bits (Prometheus' stale marker is one)."""
    stale = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
    layout = Layout([Block(NODE, SCOPE, [Series(GAUGE)])])
    [back] = decode_request(encode_request(Batch.of(layout, [stale], T, "s")), "s")
    assert back.values == struct.pack("<Q", 0x7FF0000000000002)


def test_streams_in_one_message_become_batches_of_their_own() -> None:
    """Two recorded streams in one message are told apart by their scopes, and foreign data gets the given name."""
    layout = Layout([Block(NODE, SCOPE, [Series(GAUGE)])])
    request = record_request(Batch.of(layout, [1.0], T, "fast", complete=True))
    request.MergeFrom(record_request(Batch.of(layout, [2.0], T, "slow", complete=False)))
    request.MergeFrom(_message([("a", T, 3.0)]))
    back = decode_request(request, "otlp")
    assert [(b.stream, b.complete, b.readings()) for b in back] == [
        ("fast", True, [1.0]),
        ("slow", False, [2.0]),
        ("otlp", False, [3.0]),
    ]


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x02\x0a\x05", b"not protobuf", b"\x0a\x05\x0a\x03\x0a\x01"])
def test_bad_bytes_are_a_decode_error(data: bytes) -> None:
    """Bytes that are no request raise DecodeError and nothing else."""
    with pytest.raises(DecodeError, match="not an OTLP"):
        Decoder().decode_bytes(data, "s")


def test_a_bad_opaque_part_is_a_decode_error() -> None:
    """An opaque part that is no ResourceMetrics is named as such."""
    batch = replace(Batch.of(Layout(), [], T, "s"), opaque=(b"\xff\xff",))
    with pytest.raises(DecodeError, match="ResourceMetrics"):
        encode_request(batch)
