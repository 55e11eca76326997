"""Splits an encoded OTLP request into smaller ones, for destinations that take only so much at a time.

Invariant: every point is in exactly one of the parts, in the order in which they stood; a part that can't be made
smaller (a single point) is passed as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics, ScopeMetrics

from gpulens.pipeline.otlp import parse_request

Halves = tuple[ExportMetricsServiceRequest, ExportMetricsServiceRequest]
Fits = Callable[[int, int], bool]
"""(bytes, points) -> whether a request of this size may go."""


def split_request(data: bytes, fits: Fits) -> list[tuple[bytes, int]]:
    """The request in parts that fit, each with its number of points. Raises DecodeError for bytes that are no
    request."""
    return _split(parse_request(data), fits)


def count_points(request: ExportMetricsServiceRequest) -> int:
    """Points of every kind."""
    return sum(
        len(_points(metric))
        for resource_metrics in request.resource_metrics
        for scope_metrics in resource_metrics.scope_metrics
        for metric in scope_metrics.metrics
    )


def _split(request: ExportMetricsServiceRequest, fits: Fits) -> list[tuple[bytes, int]]:
    points = count_points(request)
    halves = None if fits(request.ByteSize(), points) else _halve(request)
    if halves is None:
        return [(request.SerializeToString(), points)]
    return [part for half in halves for part in _split(half, fits)]


def _halve(
    request: ExportMetricsServiceRequest,
) -> Halves | None:
    """Two halves, cut at the highest level that has more than one entry; None for a single point."""
    first, second = ExportMetricsServiceRequest(), ExportMetricsServiceRequest()
    entries = request.resource_metrics
    if len(entries) > 1:
        middle = len(entries) // 2
        first.resource_metrics.extend(entries[:middle])
        second.resource_metrics.extend(entries[middle:])
        return first, second
    if len(entries) == 0:
        return None
    resource = entries[0]
    if len(resource.scope_metrics) != 1:
        return _halve_scopes(resource) if len(resource.scope_metrics) else None
    scope = resource.scope_metrics[0]
    if len(scope.metrics) != 1:
        return _halve_metrics(resource, scope) if len(scope.metrics) else None
    return _halve_points(resource, scope, scope.metrics[0])


def _halve_scopes(resource: ResourceMetrics) -> Halves:
    middle = len(resource.scope_metrics) // 2
    halves = ExportMetricsServiceRequest(), ExportMetricsServiceRequest()
    for half, part in zip(halves, (slice(middle), slice(middle, None)), strict=True):
        target = half.resource_metrics.add(resource=resource.resource, schema_url=resource.schema_url)
        target.scope_metrics.extend(resource.scope_metrics[part])
    return halves


def _halve_metrics(resource: ResourceMetrics, scope: ScopeMetrics) -> Halves:
    middle = len(scope.metrics) // 2
    halves = ExportMetricsServiceRequest(), ExportMetricsServiceRequest()
    for half, part in zip(halves, (slice(middle), slice(middle, None)), strict=True):
        _shell(half, resource, scope).metrics.extend(scope.metrics[part])
    return halves


def _halve_points(resource: ResourceMetrics, scope: ScopeMetrics, metric: Metric) -> Halves | None:
    size = len(_points(metric))
    if size < 2:
        return None
    halves = ExportMetricsServiceRequest(), ExportMetricsServiceRequest()
    for half, gone in zip(halves, (slice(size // 2, None), slice(size // 2)), strict=True):
        copy = _shell(half, resource, scope).metrics.add()
        copy.CopyFrom(metric)
        _drop(copy, gone)
    return halves


def _shell(request: ExportMetricsServiceRequest, resource: ResourceMetrics, scope: ScopeMetrics) -> ScopeMetrics:
    target = request.resource_metrics.add(resource=resource.resource, schema_url=resource.schema_url)
    return target.scope_metrics.add(scope=scope.scope, schema_url=scope.schema_url)


def _points(metric: Metric) -> list[object]:
    kind = metric.WhichOneof("data")
    return [] if kind is None else list(getattr(metric, kind).data_points)


def _drop(metric: Metric, gone: slice) -> None:
    kind = metric.WhichOneof("data")
    assert kind is not None  # it has points
    del getattr(metric, kind).data_points[gone]
