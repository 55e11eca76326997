"""The exporter `debug`: writes batches into the log as they pass, without a queue.

Invariant: it changes nothing and keeps nothing; what sampling leaves out is neither formatted nor unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from google.protobuf.message import DecodeError
from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs

from gpulens.exporters.debug.config import DebugConfig, Verbosity
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Exporter, Host, LogBatch, Settings
from gpulens.pipeline.data import Attributes, Batch, Kind, Metric, Value
from gpulens.pipeline.prometheus_names import label_value
from gpulens.pipeline.status import Status

_OWNER_KEYS = ("k8s.namespace.name", "k8s.pod.name", "k8s.container.name")


class Sampler:
    """Lets the first `initial` of each second pass, then every `thereafter`-th."""

    def __init__(self, initial: int, thereafter: int) -> None:
        self._initial = initial
        self._thereafter = thereafter
        self._since_s = float("-inf")
        self._seen = 0

    def passes(self, now_s: float) -> bool:
        """Whether the batch that arrives now is written."""
        if now_s - self._since_s >= 1:
            self._since_s, self._seen = now_s, 0
        self._seen += 1
        beyond = self._seen - self._initial
        return beyond <= 0 or beyond % self._thereafter == 0


class _Debug:
    """What the exporters of both signals share."""

    def __init__(self, settings: Settings, config: DebugConfig) -> None:
        self._settings = settings
        self._verbosity = config.verbosity
        self._sampler = Sampler(config.sampling_initial, config.sampling_thereafter)

    async def start(self, host: Host) -> None:
        """Nothing to start."""
        self._settings.report(Status.OK, "")

    async def shutdown(self) -> None:
        """Nothing to stop."""

    def _passes(self) -> bool:
        return self._sampler.passes(self._settings.clock.monotonic())


class DebugMetrics(_Debug):
    """Writes metrics."""

    def consume(self, data: Batch, ack: Ack) -> None:
        """Writes one batch, if sampling lets it pass."""
        points = data.layout.size - int.from_bytes(data.absent, "little").bit_count()
        self._settings.telemetry.count("otelcol_exporter_sent_metric_points", points, exporter=str(self._settings.id))
        if not self._passes():
            return
        log = self._settings.log
        log.info("Metrics", **_counts(data.present()))
        if self._verbosity is not Verbosity.BASIC:
            lines = _point_lines if self._verbosity is Verbosity.NORMAL else _detailed_lines
            log.info("\n".join(lines(data)))


class DebugLogs(_Debug):
    """Writes counts of log records."""

    def consume(self, data: LogBatch, ack: Ack) -> None:
        """Writes one batch, if sampling lets it pass."""
        records = sum(map(_records, data.records))
        self._settings.telemetry.count("otelcol_exporter_sent_log_records", records, exporter=str(self._settings.id))
        if self._passes():
            self._settings.log.info("Logs", **{"resource logs": len(data.records), "log records": records})


def create(settings: Settings, config: DebugConfig) -> Exporter[Batch]:
    """Makes the exporter for metrics."""
    return DebugMetrics(settings, config)


def create_logs(settings: Settings, config: DebugConfig) -> Exporter[LogBatch]:
    """Makes the exporter for logs."""
    return DebugLogs(settings, config)


def _records(encoded: bytes) -> int:
    try:
        message = ResourceLogs.FromString(encoded)
    except DecodeError:
        return 0
    return sum(len(scope.log_records) for scope in message.scope_logs)


def _counts(batch: Batch) -> dict[str, int]:
    """The Collector's three figures; metrics are counted within each resource and scope."""
    layout = batch.layout
    metrics = {(block.resource, block.scope, series.metric) for block in layout.blocks for series in block.series}
    return {
        "resource metrics": len({block.resource for block in layout.blocks}),
        "metrics": len(metrics),
        "data points": layout.size,
    }


def _point_lines(batch: Batch) -> Iterator[str]:
    """One line a point: metric, attributes, value. The owner comes first: two pods on one GPU differ only by it."""
    for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
        if value is not None:
            owner = [(key, resource.map[key]) for key in _OWNER_KEYS if key in resource.map]
            pairs = ",".join(f"{key}={label_value(item)}" for key, item in (*owner, *series.attributes))
            yield f"{series.metric.name}{{{pairs}}} {value}"


def _detailed_lines(batch: Batch) -> Iterator[str]:
    """Everything of a batch, a resource and scope after the other."""
    yield f"Stream: {batch.stream} ({'complete' if batch.complete else 'partial'})"
    readings, times, starts = batch.readings(), batch.times(), batch.starts()
    for number, (block, first) in enumerate(zip(batch.layout.blocks, batch.layout.offsets, strict=False)):
        yield f"ResourceMetrics #{number}"
        yield from _attribute_lines("Resource attributes", block.resource.attributes)
        yield f"Scope: {block.scope.name} {block.scope.version}".rstrip()
        previous: Metric | None = None
        for slot, series in enumerate(block.series, first):
            if series.metric != previous:
                previous = series.metric
                yield from _metric_lines(previous)
            yield from _attribute_lines("  Data point", series.attributes)
            yield from _value_lines(readings[slot], times[slot], starts[slot])


def _metric_lines(metric: Metric) -> Iterator[str]:
    kind = "Gauge" if metric.kind is Kind.GAUGE else "Sum"
    yield f"Metric: {metric.name}"
    yield f"  Unit: {metric.unit}"
    yield f"  Description: {metric.description}"
    yield f"  Data type: {kind}"
    if metric.kind is Kind.SUM:
        yield f"  Monotonic: {str(metric.monotonic).lower()}"
        yield f"  Temporality: {metric.temporality.name.lower()}"


def _attribute_lines(title: str, pairs: Attributes) -> Iterator[str]:
    yield f"{title}:"
    for key, value in pairs:
        yield f"     -> {key}: {label_value(value)}"


def _value_lines(value: Value | None, time_ns: int, start_ns: int) -> Iterator[str]:
    if start_ns:
        yield f"  Start: {_moment(start_ns)}"
    yield f"  Time: {_moment(time_ns)}"
    yield "  Value: absent" if value is None else f"  Value: {value}"


def _moment(time_ns: int) -> str:
    """UTC with nanoseconds."""
    seconds, rest = divmod(time_ns, 10**9)  # 64 bits of nanoseconds end in 2554, which a datetime can hold
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
