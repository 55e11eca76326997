from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gpulens.pipeline.data import Batch
from gpulens.pipeline.otlp import decode_request, encode, parse_request
from gpulens.pipeline.otlp_split import count_points, split_request
from tests.pipeline.otlp_batches import batches


def _readings(data: bytes) -> list[str]:
    return [
        f"{resource}{scope}{series.metric}{series!r}{value!r}"
        for batch in decode_request(parse_request(data), "s")
        for (resource, scope, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
    ]


@given(batches(), st.integers(1, 5))
def test_every_point_is_in_exactly_one_part(batch: Batch, limit: int) -> None:
    """Parts hold at most `limit` points each, and together what the request held, in order."""
    data = encode(batch)
    parts = split_request(data, lambda _, points: points <= limit)
    assert all(points <= limit for _, points in parts)
    assert [count_points(parse_request(part)) for part, _ in parts] == [points for _, points in parts]
    assert [text for part, _ in parts for text in _readings(part)] == _readings(data)


def test_a_single_point_is_never_cut() -> None:
    """A point that does not fit goes as it is, rather than round in circles."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m" * 100)
    metric.gauge.data_points.add(as_int=1)
    metric.gauge.data_points.add(as_int=2)
    parts = split_request(request.SerializeToString(), lambda size, _: size <= 10)
    assert [points for _, points in parts] == [1, 1]


def test_histograms_and_scopes_are_split_too() -> None:
    """Every kind of point counts, and a cut between scopes keeps the resource on both sides."""
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add(schema_url="u")
    for name in "ab":
        scope = resource.scope_metrics.add(schema_url=name)
        points = scope.metrics.add(name=name).histogram.data_points
        for _ in range(3):
            points.add(count=1)
    parts = split_request(request.SerializeToString(), lambda _, points: points <= 2)
    parsed = [parse_request(part).resource_metrics[0] for part, _ in parts]
    assert [points for _, points in parts] == [1, 2, 1, 2]
    assert [(p.schema_url, p.scope_metrics[0].schema_url) for p in parsed] == [("u", "a")] * 2 + [("u", "b")] * 2
