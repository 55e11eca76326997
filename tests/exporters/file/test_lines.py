from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from gpulens.exporters.file.lines import LineEncoder
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Metric, Resource, Scope, Series
from gpulens.pipeline.otlp import decode_request, record_request
from gpulens.pipeline.otlp_json import decode_json, encode_json, marked_time
from tests.pipeline.otlp_batches import batches, layouts, same_batch


def plain(batch: Batch) -> bytes:
    """The line, made message by message."""
    return encode_json(record_request(batch)) + b"\n"


@given(st.data())
def test_compiled_lines_are_the_plain_ones(data: st.DataObject) -> None:
    """First, second and later sight of a layout all give the bytes of the plain way, whatever the numbers."""
    layout = data.draw(layouts())
    encoder = LineEncoder()
    for _ in range(4):
        batch = data.draw(batches(layout))
        assert encoder.encode(batch) == plain(batch)


@given(batches())
def test_a_line_reads_back_as_the_batch(batch: Batch) -> None:
    """Identity, numbers, times, starts, absence, stream and completeness come back; only a NaN loses its
    payload."""
    encoder = LineEncoder()
    for _ in range(3):
        (back,) = decode_request(decode_json(encoder.encode(batch)), "other")
        assert same_batch(back, batch)
        assert (back.stream, back.complete) == (batch.stream, batch.complete)


def test_a_layout_that_comes_back_is_compiled() -> None:
    """The third line of one layout is filled in, not built."""
    block = Block(Resource({"k8s.node.name": "a"}), Scope("s"), [Series(Metric("m"), {"hw.id": "0"})])
    encoder = LineEncoder()
    for value in (1.0, 2.0, 3.0):
        encoder.encode(Batch.of(Layout([block]), [value], 5, "dcgm"))
    assert (len(encoder.templates), encoder.templates.hits) == (1, 1)


def test_text_that_looks_like_a_point_stays_text() -> None:
    """Attributes that imitate the encoder's own marks change nothing."""
    odd = f'"timeUnixNano":"{2**64 - 1}","asDouble":0.0'
    series = [Series(Metric("m", description='"flags":1}'), {"a": odd, "b": ',"flags":1}'}), Series(Metric(odd))]
    layout = Layout([Block(Resource({odd: odd}), Scope(odd), series)])
    encoder = LineEncoder()
    for values in ([1.0, None], [None, 2.0], [3.0, 4.0]):
        batch = Batch.of(layout, values, 5, "dcgm")
        assert encoder.encode(batch) == plain(batch)


def test_opaque_parts_and_empty_batches_are_lines_too() -> None:
    """What has no columns goes along, and a complete batch without anything still says that."""
    block = Block(Resource({"r": "1"}), Scope("s"), [Series(Metric("m"))])
    request = record_request(Batch.of(Layout([block]), [1.0], 5, "x"))
    part = request.resource_metrics[0].SerializeToString()
    batch = replace(Batch.of(Layout([block]), [2.0], 7, "x"), opaque=(part,))
    encoder = LineEncoder()
    assert encoder.encode(batch) == plain(batch)
    histogram = ResourceMetrics()
    histogram.scope_metrics.add().metrics.add(name="h").histogram.data_points.add(time_unix_nano=3, count=1)
    opaque = (histogram.SerializeToString(),)
    for each in (Batch(EMPTY_LAYOUT, b"", 7, "x", True), Batch(EMPTY_LAYOUT, b"", 7, "x", True, opaque=opaque)):
        request = decode_json(encoder.encode(each))
        assert marked_time(request) == 7
        (back,) = decode_request(request, "other")
        assert (back.stream, back.complete, back.layout.size) == ("x", True, 0)
        assert len(back.opaque) == len(each.opaque)


def test_sharing_pods_and_two_gpus_of_a_pod_are_told_apart() -> None:
    """Two pods of one namespace on one GPU, one of them with a second one: three series on the line and back."""
    held = {"a": ("GPU-0", "GPU-1"), "b": ("GPU-0",)}
    blocks = [
        Block(
            Resource({"k8s.namespace.name": "ml", "k8s.pod.name": pod}),
            Scope("gpulens"),
            [Series(Metric("gpu.allocated", is_int=True), {"hw.id": gpu}) for gpu in gpus],
        )
        for pod, gpus in held.items()
    ]
    (back,) = decode_request(decode_json(LineEncoder().encode(Batch.of(Layout(blocks), [1, 1, 1], 10**18, "s"))), "s")
    seen = {(resource.text("k8s.pod.name"), series.text("hw.id")) for resource, _, series in back.layout.identities()}
    assert seen == {("a", "GPU-0"), ("a", "GPU-1"), ("b", "GPU-0")}
