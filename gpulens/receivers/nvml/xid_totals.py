"""Counts XIDs and tells of each as an event.

Invariant: totals are ours and outlive the process that saw the events: they never fall while the GPU is there. The
codes that matter exist at 0 from the first sight of a GPU; any other is sent as 0 before its first 1, so that the first
event is an increase to everybody. Codes are the driver's to invent: past `MOST_FURTHER` of them on a GPU the rest is
counted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, SeverityNumber

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import AttributeValue, Batch, Block, Layout, Resource, Scope, Series, attributes
from gpulens.pipeline.otlp_attributes import write_attributes
from gpulens.pipeline.xids import COUNTED_FROM_START, XidClass, xid_class
from gpulens.receivers.nvml.assembly import Extra
from gpulens.receivers.nvml.messages import Attrs, Xid

EVENT_NAME = "gpu.xid"
MOST_FURTHER = 32
"""So many codes a GPU have a counter of their own beside those that exist from the start."""
MOST_RECORDS = 1000
"""A storm of XIDs is counted whole; as records no more than this leave in a tick, or a receiver refuses the message."""
OTHER: Final = "other"
_LEAD_NS = 1_000_000
"""The 0 of a new code is that much older than its first 1 at least."""


_Code: TypeAlias = "int | None"
"""A code, or None for those that are counted together."""


class XidTotals:
    """The XIDs of all GPUs since their first sight."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[_Code, int]] = {}
        self._starts: dict[tuple[str, _Code], int] = {}
        self._sent: set[tuple[str, _Code]] = set()
        self._extras: dict[str, tuple[Attrs, tuple[Extra, ...]]] = {}

    def see(self, gpu: str, now_ns: int) -> None:
        """A GPU is there."""
        if gpu not in self._counts:
            self._counts[gpu] = dict.fromkeys(COUNTED_FROM_START, 0)
            self._starts.update({(gpu, code): now_ns for code in COUNTED_FROM_START})

    def add(self, xid: Xid) -> None:
        """An XID was told."""
        counts, code = self._counts[xid.gpu], xid.code
        further = len(counts) - len(COUNTED_FROM_START)
        named: _Code = code if code in counts or further < MOST_FURTHER else None
        counts[named] = counts.get(named, 0) + 1
        self._starts.setdefault((xid.gpu, named), xid.time_ns - _LEAD_NS)
        self._extras.pop(xid.gpu, None)

    def forget(self, gpu: str) -> None:
        """The GPU is gone."""
        for code in self._counts.pop(gpu, {}):
            self._starts.pop((gpu, code), None)
            self._sent.discard((gpu, code))
        self._extras.pop(gpu, None)

    def extras(self, gpu: str, device: Attrs) -> tuple[Extra, ...]:
        """The counters of a GPU as they are now; the same object while nothing changes."""
        known = self._extras.get(gpu)
        if known is None or known[0] != device:
            made = tuple(
                Extra(Series(metric("gpu.xid.errors"), {**device, **_named(code)}), total, self._starts[gpu, code])
                for code, total in self._counts.get(gpu, {}).items()
            )
            known = self._extras[gpu] = (device, made)
        return known[1]

    def zeros(self, gpu: str, extras: Sequence[Extra]) -> list[Extra]:
        """The series that were never sent and are no longer 0: what they were before. They count as sent then."""
        fresh = []
        for code, extra in zip(self._counts.get(gpu, {}), extras, strict=True):
            if (gpu, code) not in self._sent:
                self._sent.add((gpu, code))
                if extra.value:
                    fresh.append(Extra(extra.series, 0, extra.start_ns))
        return fresh


def _named(code: _Code) -> dict[str, str]:
    if code is None:
        return {"gpu.xid": OTHER, "gpu.xid.class": str(XidClass.UNKNOWN)}
    return {"gpu.xid": str(code), "gpu.xid.class": str(xid_class(code))}


def before_batch(node: Resource, scope: Scope, stream: str, zeros: Iterable[Extra]) -> tuple[Batch, ...]:
    """One partial batch for each start time, oldest first, with the zeros of that time."""
    by_start: dict[int, list[Extra]] = {}
    for extra in zeros:
        by_start.setdefault(extra.start_ns, []).append(extra)
    return tuple(
        Batch.of(
            Layout([Block(node, scope, [extra.series for extra in extras])]),
            [0] * len(extras),
            start_ns,
            stream,
            complete=False,
            start_ns=start_ns,
        )
        for start_ns, extras in sorted(by_start.items())
    )


def log_records(node: Resource, scope: Scope, xids: Sequence[Xid]) -> tuple[bytes, ...]:
    """The first `MOST_RECORDS` events as one encoded OTLP ResourceLogs message; nothing where there are none."""
    message = ResourceLogs()
    write_attributes(node.attributes, message.resource)
    records = message.scope_logs.add()
    records.scope.name = scope.name
    for xid in xids[:MOST_RECORDS]:
        _write(xid, records.log_records.add())
    return (message.SerializeToString(),) if records.log_records else ()


def _write(xid: Xid, record: LogRecord) -> None:
    kind = xid_class(xid.code)
    record.time_unix_nano = record.observed_time_unix_nano = xid.time_ns
    warning = kind is XidClass.APPLICATION
    record.severity_number = SeverityNumber.SEVERITY_NUMBER_WARN if warning else SeverityNumber.SEVERITY_NUMBER_ERROR
    record.severity_text = "WARN" if warning else "ERROR"
    record.body.string_value = f"XID {xid.code} ({kind}) on {xid.gpu}"
    attrs: dict[str, AttributeValue] = {"hw.id": xid.gpu, **_named(xid.code)}
    if xid.gi is not None:
        attrs["gpu.mig.gi"] = str(xid.gi)
    if xid.ci is not None:
        attrs["gpu.mig.ci"] = str(xid.ci)
    if "event_name" in LogRecord.DESCRIPTOR.fields_by_name:
        record.event_name = EVENT_NAME
    else:  # opentelemetry-proto before 1.5 of the protocol
        attrs["event.name"] = EVENT_NAME
    write_attributes(attributes(attrs), record)
