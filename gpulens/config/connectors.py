"""Rules for connectors, which end one pipeline and begin another.

Invariant: a connector in use has, for each pipeline on one side, one on the other side that its signals lead
to, and no data can come back to the pipeline it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpulens.config.decode import Report, join_path
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.nodes import Position
from gpulens.config.pipelines import Pipelines
from gpulens.config.sections import Sections
from gpulens.config.service import ComponentLookup

Uses = Mapping[PipelineID, Position]


@dataclass(frozen=True, slots=True)
class _Edge:
    """Data leaves a pipeline through a connector and enters another."""

    source: PipelineID
    connector: ComponentID
    target: PipelineID
    at: Position


def check_connectors(pipelines: Pipelines, sections: Sections, lookup: ComponentLookup, report: Report) -> None:
    """Reports connectors used on one side only, signal pairs that do not exist, and cycles."""
    edges: list[_Edge] = []
    for connector, declared in sections.of(Kind.CONNECTORS).items():
        if not declared.type:
            continue
        sources = _uses(pipelines, Kind.EXPORTERS, connector)
        targets = _uses(pipelines, Kind.RECEIVERS, connector)
        pairs = lookup.connector_pairs(declared.type)
        _check_side(connector, sources, targets, pairs, report)
        _check_side(connector, targets, sources, frozenset((b, a) for a, b in pairs), report, as_receiver=True)
        edges += [
            _Edge(source, connector, target, at)
            for source, at in sources.items()
            for target in targets
            if (source.signal, target.signal) in pairs
        ]
    _check_cycles(edges, report)


def _uses(pipelines: Pipelines, kind: Kind, connector: ComponentID) -> Uses:
    return {
        pipeline_id: reference.at
        for pipeline_id, pipeline in pipelines.items()
        for reference in pipeline.of(kind)
        if reference.id == connector
    }


def _check_side(
    connector: ComponentID,
    here: Uses,
    there: Uses,
    pairs: frozenset[tuple[Signal, Signal]],
    report: Report,
    as_receiver: bool = False,
) -> None:
    role, other = ("receiver", "exporter") if as_receiver else ("exporter", "receiver")
    for pipeline_id, at in here.items():
        if not any((pipeline_id.signal, target.signal) in pairs for target in there):
            message = (
                f'connector "{connector}" used as {role} in [{pipeline_id}] pipeline '
                f"but not used in any supported {other} pipeline"
            )
            report.add(at, join_path(Kind.CONNECTORS.value, str(connector)), message)


def _check_cycles(edges: list[_Edge], report: Report) -> None:
    reported: set[frozenset[PipelineID]] = set()
    for cycle in _cycles(edges):
        members = frozenset(edge.source for edge in cycle)
        if members in reported:
            continue
        reported.add(members)
        steps = "".join(f' -> connector "{edge.connector}" -> pipeline "{edge.target}"' for edge in cycle)
        message = f'cycle detected: pipeline "{cycle[0].source}"{steps}'
        report.add(cycle[-1].at, "service::pipelines", message)


def _cycles(edges: list[_Edge]) -> Iterator[list[_Edge]]:
    """For each edge that closes a way back to its source, one shortest such way, beginning and ending
    there."""
    leaving: dict[PipelineID, list[_Edge]] = {}
    for edge in edges:
        leaving.setdefault(edge.source, []).append(edge)
    for start in leaving:
        came_by: dict[PipelineID, _Edge] = {}
        waiting = [start]
        while waiting and start not in came_by:
            for edge in leaving.get(waiting.pop(0), ()):
                if edge.target not in came_by:
                    came_by[edge.target] = edge
                    waiting.append(edge.target)
        if start in came_by:
            way = [came_by[start]]
            while way[0].source != start:
                way.insert(0, came_by[way[0].source])
            yield way
