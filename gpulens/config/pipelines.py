"""The `service::pipelines` section: ids, references and signals.

Invariant: each reference keeps its place, so that what later rules find (connectors, destinations) points at
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulens.config.decode import Report, expected_map, join_path
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.nodes import (
    Broken,
    Entry,
    ListNode,
    MapNode,
    Node,
    Position,
    Scalar,
    because,
    is_null,
    type_name,
)
from gpulens.config.sections import Sections
from gpulens.config.service import ComponentLookup, PipelineConfig
from gpulens.config.suggest import closest

_ROLES: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.RECEIVERS: (Kind.RECEIVERS, Kind.CONNECTORS),
    Kind.PROCESSORS: (Kind.PROCESSORS,),
    Kind.EXPORTERS: (Kind.EXPORTERS, Kind.CONNECTORS),
}
"""The keys of a pipeline, and the sections that each one's ids may come from."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An id in a list and its place."""

    id: ComponentID
    at: Position


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline as written."""

    at: Position
    references: Mapping[Kind, tuple[Reference, ...]]

    def of(self, kind: Kind) -> tuple[Reference, ...]:
        """References under one key."""
        return self.references.get(kind, ())


Pipelines = Mapping[PipelineID, Pipeline]


def without_positions(pipeline: Pipeline) -> PipelineConfig:
    """What the engine needs of it. A receiver or exporter that is listed twice is there once, as in the
    Collector."""
    receivers, processors, exporters = (
        tuple(dict.fromkeys(reference.id for reference in pipeline.of(kind))) for kind in _ROLES
    )
    return PipelineConfig(receivers, processors, exporters)


def read_pipelines(block: MapNode, path: str, sections: Sections, lookup: ComponentLookup, report: Report) -> Pipelines:
    """Reads and checks every pipeline."""
    found: dict[PipelineID, Pipeline] = {}
    for key, entry in block.entries.items():
        try:
            pipeline_id = PipelineID.parse(key)
        except ValueError as error:
            hint = closest(key.partition("/")[0].strip(), Signal)
            report.add(entry.key_at, path, str(error), hint)
            continue
        if pipeline_id in found:
            report.add(entry.key_at, path, f'duplicate name "{pipeline_id}" after unmarshaling')
            continue
        here = join_path(path, str(pipeline_id))
        body = expected_map(report, entry, here)
        if body is not None:
            found[pipeline_id] = _read_pipeline(body, entry.key_at, here, report)
            _check(pipeline_id, found[pipeline_id], body, here, sections, lookup, report)
    return found


def read_references(entry: Entry, path: str, report: Report) -> tuple[Reference, ...]:
    """Component ids of a list; a comma-separated text is taken for a list, null for an empty one."""
    node = entry.node
    if isinstance(node, Broken) or is_null(node):
        return ()
    items: list[tuple[str, Node]] = []
    if isinstance(node, Scalar) and isinstance(node.value, str):
        items = [(part, node) for part in node.value.split(",")]
    elif isinstance(node, ListNode):
        items = [item for each in node.items if (item := _id_text(each, path, report))]
    else:
        message = f"expected type '[]component.ID', got unconvertible type '{type_name(node)}'"
        report.add(entry.at, path, message)
    references = []
    for text, written in items:
        try:
            references.append(Reference(ComponentID.parse(text), written.at))
        except ValueError as error:
            report.add(written.at, path, f"{error}{because(written)}")
    return tuple(references)


def _id_text(node: Node, path: str, report: Report) -> tuple[str, Node] | None:
    if isinstance(node, Scalar):
        return node.text, node
    if not isinstance(node, Broken):
        report.add(node.at, path, f"expected type 'component.ID', got unconvertible type '{type_name(node)}'")
    return None


def _read_pipeline(body: MapNode, at: Position, path: str, report: Report) -> Pipeline:
    report.unknown_keys(body, path, [kind.value for kind in _ROLES])
    references = {
        kind: read_references(body.entries[kind], join_path(path, kind.value), report)
        for kind in _ROLES
        if kind in body.entries
    }
    return Pipeline(at, references)


def _check(
    pipeline_id: PipelineID,
    pipeline: Pipeline,
    body: MapNode,
    path: str,
    sections: Sections,
    lookup: ComponentLookup,
    report: Report,
) -> None:
    for kind in (Kind.RECEIVERS, Kind.EXPORTERS):
        entry = body.entries.get(kind)
        if entry is None or is_null(entry.node) or (isinstance(entry.node, ListNode) and not entry.node.items):
            at, why = (pipeline.at, "") if entry is None else (entry.key_at, because(entry.node))
            report.add(at, path, f"must have at least one {kind.singular}{why}")
    seen = set()
    for reference in pipeline.of(Kind.PROCESSORS):
        if reference.id in seen:
            report.add(reference.at, path, f'references processor "{reference.id}" multiple times')
        seen.add(reference.id)
    for kind, sources in _ROLES.items():
        for reference in pipeline.of(kind):
            sections.check_reference(reference.id, sources, reference.at, path, report)
            _check_signal(pipeline_id.signal, kind, reference, path, sections, lookup, report)


def _check_signal(
    signal: Signal,
    kind: Kind,
    reference: Reference,
    path: str,
    sections: Sections,
    lookup: ComponentLookup,
    report: Report,
) -> None:
    declared = sections.of(kind).get(reference.id)
    if declared is None or not declared.type or signal in lookup.signals(kind, declared.type):
        return
    message = (
        f'failed to create "{reference.id}" {kind.singular} for data type "{signal}": telemetry type is not supported'
    )
    report.add(reference.at, path, message)
