"""Batches that a component may meet, from plain to odd.

Invariant: each is valid; between them they have every feature of the data model.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, ResourceMetrics

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import (
    EMPTY_LAYOUT,
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
)

START = 1_700_000_000 * 10**9
S = 10**9
GPU = {"hw.id": "GPU-00000000-0000-0000-0000-000000000001", "hw.name": "nvidia0"}
NODE = Resource({"k8s.node.name": "node-1"})
POD = Resource({"k8s.namespace.name": "ns", "k8s.pod.name": "p", "k8s.container.name": "c", "k8s.node.name": "node-1"})
SCOPE = Scope("gpulens/dcgm", "1.0", {"a": True})


def _readings() -> Layout:
    series = [
        Series(metric("gpu.sm.active"), GPU),
        Series(metric("hw.gpu.memory.usage"), GPU),
        Series(metric("hw.energy"), {**GPU, "hw.type": "gpu"}),
        Series(metric("gpu.xid.errors"), {**GPU, "gpu.xid": 79}),
        Series(metric("hw.temperature"), GPU),
    ]
    allocated = Series(metric("gpu.allocated"), {**GPU, "gpu.allocation.source": "pod_resources"})
    life = [
        Series(metric("gpu.source.up"), {"gpu.source": "pod_resources"}),
        Series(metric("gpu.source.interval"), {"gpu.source": "pod_resources"}),
    ]
    info = Series(metric("gpu.device.info"), {**GPU, "gpu.minor": "0"})
    return Layout([Block(NODE, SCOPE, [*series, info, *life]), Block(POD, SCOPE, [allocated])])


def _foreign() -> Layout:
    delta = Metric("requests", "1", "d", Kind.SUM, Temporality.DELTA, monotonic=True, is_int=True)
    odd = Series(
        Metric("Größe.ß", "{näh}", 'quote " and \\ and\nline'),
        {
            "": "empty key",
            "list": (1, 2.5, "x", True, None, (b"y",)),
            "map": KeyValues((("k", KeyValues(())),)),
            "bytes": b"\x00\xff",
            "none": None,
            "quote": 'a"b\\c\nd',
            "control": "\x1b[31m",
        },
    )
    return Layout([Block(Resource(), Scope(), [odd, Series(delta), Series(Metric("1st.metric", is_int=True))])])


def _histogram() -> bytes:
    message = ResourceMetrics()
    message.resource.attributes.add(key="k8s.pod.name").value.string_value = "p"
    made = message.scope_metrics.add().metrics.add(name="latency", unit="s")
    made.histogram.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    made.histogram.data_points.add(time_unix_nano=START, count=3, sum=1.5, explicit_bounds=[1.0], bucket_counts=[2, 1])
    return message.SerializeToString()


READINGS, FOREIGN = _readings(), _foreign()
_VALUES = [0.5, 448 * 2**20, 1234.5, 2, None, 1, 1, 10.0, 1]


def samples() -> Mapping[str, Batch]:
    """Batches by what is special about them, made anew."""
    first = Batch.of(READINGS, _VALUES, START, "pod_resources", True, START - 60 * S)
    return {
        "plain": first,
        "again": Batch.of(READINGS, _VALUES, START + 10 * S, "pod_resources", True, START - 60 * S),
        "columns": Batch.of(
            READINGS,
            [1, 2**62, 0.0, 3, 40, 1, 1, 10.0, 1],
            array("Q", range(START + 20 * S, START + 29 * S, S)),
            "pod_resources",
            True,
            array("Q", [0, 0, START, START, 0, 0, 0, 0, 0]),
        ),
        "all absent": Batch.of(READINGS, [None] * 9, START + 30 * S, "pod_resources"),
        "partial": Batch.of(READINGS.select([0, 3]), [0.25, 4], START + 35 * S, "pod_resources", False),
        "series left": Batch.of(READINGS.select([0, 1, 7, 8]), [0.25, 1, 10.0, 1], START + 40 * S, "pod_resources"),
        "empty complete": Batch(EMPTY_LAYOUT, b"", START + 50 * S, "pod_resources", True),
        "empty partial": Batch(EMPTY_LAYOUT, b"", START + 50 * S, "pod_resources", False),
        "odd names": Batch.of(FOREIGN, [float("inf"), 1, -(2**63)], START, "foreign", False, START - S),
        "not a number": Batch.of(FOREIGN, [float("nan"), 0, 2**63 - 1], START + S, "foreign", False),
        "without times": Batch.of(FOREIGN, [-0.0, 0, 0], 0, "foreign", False),
        "older": Batch.of(READINGS, _VALUES, START - 3600 * S, "pod_resources", True),
        "far future": Batch.of(READINGS, _VALUES, 2**63 - 1, "other", True),
        "opaque and events": Batch(
            EMPTY_LAYOUT, b"", START, "foreign", False, events=(b"",), opaque=(_histogram(), b"")
        ),
    }
