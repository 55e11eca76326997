"""Checks a loaded document as a whole and gives the engine its ServiceConfig.

Invariant: every problem of the document is found in one pass; what depends on something that is already
reported is not reported again. Texts are the Collector's where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulens.config.connectors import check_connectors
from gpulens.config.decode import Report, decode, expected_map
from gpulens.config.document import Document
from gpulens.config.ids import ComponentID, Kind
from gpulens.config.nodes import Broken, Entry, MapNode, Position, Scalar, because
from gpulens.config.pipelines import Pipelines, read_pipelines, read_references, without_positions
from gpulens.config.rules import (
    check_destinations,
    check_extensions,
    warn_of_aliases,
    warn_of_missing_allocations,
    warn_of_repetitions,
)
from gpulens.config.sections import Sections, read_sections
from gpulens.config.service import ComponentEntry, ComponentLookup, ServiceConfig, TelemetryConfig
from gpulens.pipeline.errors import ConfigError

_SERVICE_KEYS = ("extensions", "pipelines", "telemetry", "node")
_TOP_KEYS = (*(kind.value for kind in Kind), "service")


@dataclass(frozen=True, slots=True)
class _Service:
    extensions: tuple[ComponentID, ...]
    pipelines: Pipelines
    telemetry: TelemetryConfig
    node: str


def resolve(document: Document, lookup: ComponentLookup) -> ServiceConfig:
    """The service that a document describes. Raises ConfigError with every problem, those of loading
    included."""
    report = Report(document.sources, document.problems, document.warnings)
    root = document.root
    report.unknown_keys(root, "", _TOP_KEYS)
    sections = read_sections(root, lookup, report)
    if root.entries:
        _require_some(root, sections, report)
    else:
        report.add(root.at, "", "empty configuration file")
    service = _read_service(root, sections, lookup, report)
    check_connectors(service.pipelines, sections, lookup, report)
    check_destinations(service.pipelines, sections, report)
    check_extensions(service.pipelines, service.extensions, sections, report)
    if problems := report.problems():
        raise ConfigError(problems)
    warn_of_aliases(sections, report)
    warn_of_repetitions(service.pipelines, report)
    warn_of_missing_allocations(service.pipelines, sections, report)
    return ServiceConfig(
        components=_entries(sections),
        extensions=service.extensions,
        pipelines={pipeline_id: without_positions(pipeline) for pipeline_id, pipeline in service.pipelines.items()},
        telemetry=service.telemetry,
        node=service.node,
        warnings=tuple(str(warning) for warning in report.warnings()),
    )


def _require_some(root: MapNode, sections: Sections, report: Report) -> None:
    for kind in (Kind.RECEIVERS, Kind.EXPORTERS):
        if not sections.of(kind) and kind not in sections.unreadable:
            entry = root.entries.get(kind, Entry(root.at, MapNode({}, root.at)))
            message = f"no {kind.singular} configuration specified in config{because(entry.node)}"
            report.add(entry.key_at, "", message)


def _read_service(root: MapNode, sections: Sections, lookup: ComponentLookup, report: Report) -> _Service:
    entry = root.entries.get("service", Entry(root.at, MapNode({}, root.at)))
    block = expected_map(report, entry, "service")
    if block is None:
        return _Service((), {}, TelemetryConfig(), "")
    report.unknown_keys(block, "service", _SERVICE_KEYS)
    telemetry = None
    if "telemetry" in block.entries:
        telemetry = decode(block.entries["telemetry"], "service::telemetry", TelemetryConfig, report)
    extensions = _read_extensions(block, sections, report)
    pipelines = _read_pipelines(block, entry.key_at, sections, lookup, report)
    return _Service(extensions, pipelines, telemetry or TelemetryConfig(), _read_node(block, report))


def _read_extensions(block: MapNode, sections: Sections, report: Report) -> tuple[ComponentID, ...]:
    path = "service::extensions"
    if "extensions" not in block.entries:
        return ()
    references = read_references(block.entries["extensions"], path, report)
    for reference in references:
        sections.check_reference(reference.id, (Kind.EXTENSIONS,), reference.at, path, report)
    return tuple(dict.fromkeys(reference.id for reference in references))


def _read_pipelines(
    block: MapNode, service_at: Position, sections: Sections, lookup: ComponentLookup, report: Report
) -> Pipelines:
    path = "service::pipelines"
    entry = block.entries.get("pipelines", Entry(service_at, MapNode({}, service_at)))
    pipelines = expected_map(report, entry, path)
    if pipelines is None:
        return {}
    if not pipelines.entries:
        report.add(entry.key_at, path, f"service must have at least one pipeline{because(entry.node)}")
    return read_pipelines(pipelines, path, sections, lookup, report)


def _read_node(block: MapNode, report: Report) -> str:
    entry = block.entries.get("node")
    if entry is None or isinstance(entry.node, Broken):
        return ""
    if isinstance(entry.node, Scalar) and (entry.node.value is None or entry.node.original is not None):
        return entry.node.original or ""
    report.add(entry.at, "service", "'node' must be a text: the name of this node")
    return ""


def _entries(sections: Sections) -> Mapping[tuple[Kind, ComponentID], ComponentEntry]:
    return {
        (kind, declared.id): ComponentEntry(declared.id, declared.type, declared.config, declared.at)
        for kind in Kind
        for declared in sections.of(kind).values()
        if declared.config is not None
    }
