"""Counts what travels as opaque OTLP and has no place on the page: histograms and summaries.

Invariant: counting reads nothing but how many points there are, and bytes that can't be read are one point of
`unreadable`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics


def points_by_type(opaque: Iterable[bytes]) -> Mapping[str, int]:
    """Data points of encoded ResourceMetrics messages by their type (`histogram`, `exponential_histogram`,
    `summary`, `gauge`, `sum`)."""
    found: Counter[str] = Counter()
    for encoded in opaque:
        try:
            message = ResourceMetrics.FromString(encoded)
        except DecodeError:
            found["unreadable"] += 1
            continue
        for scope in message.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                if kind is not None:
                    found[kind] += _points(metric, kind)
    return found


def _points(metric: Metric, kind: str) -> int:
    return len(getattr(metric, kind).data_points)
