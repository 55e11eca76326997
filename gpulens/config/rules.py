"""Rules that are gpulens's own: who may write where, and what is probably not meant.

Invariant: a destination gets each derived series from one writer (two would overwrite each other unseen).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulens.config.decode import Report, join_path
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.pipelines import Pipeline, Pipelines
from gpulens.config.sections import Declared, Sections
from gpulens.config.suggest import closest


def check_destinations(pipelines: Pipelines, sections: Sections, report: Report) -> None:
    """Reports exporters of one signal that share a destination, and pipelines that both derive into one
    exporter."""
    writers: dict[tuple[Signal, str], ComponentID] = {}
    derivers: dict[ComponentID, PipelineID] = {}
    for pipeline_id, pipeline in pipelines.items():
        derives = any(_has(sections, Kind.PROCESSORS, each.id, "derives") for each in pipeline.of(Kind.PROCESSORS))
        for exporter in dict.fromkeys(reference.id for reference in pipeline.of(Kind.EXPORTERS)):
            _check_writer(exporter, pipeline_id.signal, writers, sections, report)
            if derives and exporter in sections.of(Kind.EXPORTERS):
                _check_deriver(exporter, pipeline_id, pipeline, derivers, report)


def check_extensions(pipelines: Pipelines, running: Sequence[ComponentID], sections: Sections, report: Report) -> None:
    """Reports each component of a pipeline that needs an extension which would not run."""
    if Kind.EXTENSIONS in sections.unreadable:
        return
    used = {
        (kind, reference.id)
        for pipeline in pipelines.values()
        for kind, references in pipeline.references.items()
        for reference in references
    }
    for kind in (Kind.RECEIVERS, Kind.PROCESSORS, Kind.EXPORTERS):
        for declared in sections.of(kind).values():
            if (kind, declared.id) in used and declared.config is not None:
                for path, extension in declared.config.needs_extensions():
                    _check_extension(kind, declared, path, extension, running, sections, report)


def _check_extension(
    kind: Kind,
    declared: Declared,
    path: str,
    extension: str,
    running: Sequence[ComponentID],
    sections: Sections,
    report: Report,
) -> None:
    wanted = ComponentID.parse(extension)
    if wanted in running:
        return
    known = sections.of(Kind.EXTENSIONS)
    if wanted in known:
        message = f"needs extension \"{wanted}\", which is not listed in 'service::extensions'"
        hint = ""
    else:
        message = (
            f"needs extension \"{wanted}\", which is not configured: write it under 'extensions' and list it in"
            " 'service::extensions'"
        )
        hint = closest(str(wanted), [str(each) for each in known])
    report.add(declared.place(path), join_path(kind.value, str(declared.id), path), message, hint)


def warn_of_aliases(sections: Sections, report: Report) -> None:
    """One warning for each component whose type is spelled in the old way."""
    for kind in Kind:
        for declared in sections.of(kind).values():
            if declared.alias:
                message = (
                    f'"{declared.id.type}" is a deprecated alias of the {kind.singular} type '
                    f'"{declared.type}"; write "{declared.type}" (id "{declared.id}")'
                )
                report.warn(declared.at, kind.value, message)


def warn_of_repetitions(pipelines: Pipelines, report: Report) -> None:
    """A warning for each receiver and exporter that a list names again; the Collector takes it silently as one."""
    for pipeline_id, pipeline in pipelines.items():
        for kind in (Kind.RECEIVERS, Kind.EXPORTERS):
            seen: set[ComponentID] = set()
            for reference in pipeline.of(kind):
                if reference.id in seen:
                    message = f'references {kind.singular} "{reference.id}" multiple times; it is used once'
                    report.warn(reference.at, join_path("service::pipelines", str(pipeline_id)), message)
                seen.add(reference.id)


def warn_of_missing_allocations(pipelines: Pipelines, sections: Sections, report: Report) -> None:
    """A warning for each pipeline that joins owners without anyone who tells them."""
    for pipeline_id, pipeline in pipelines.items():
        fed = _is_fed([reference.id for reference in pipeline.of(Kind.RECEIVERS)], sections)
        for reference in pipeline.of(Kind.PROCESSORS):
            if not fed and _has(sections, Kind.PROCESSORS, reference.id, "needs_allocation_source"):
                message = (
                    f'processor "{reference.id}" has no allocation source: '
                    "none of its receivers says who holds which GPU, so every series stays without an owner"
                )
                report.warn(reference.at, join_path("service::pipelines", str(pipeline_id)), message)


def _is_fed(receivers: Sequence[ComponentID], sections: Sections) -> bool:
    """Whether one of a pipeline's receivers, or two of them together, say who holds what."""
    if any(receiver in sections.of(Kind.CONNECTORS) for receiver in receivers):
        return True
    found = [declared for each in receivers if (declared := sections.of(Kind.RECEIVERS).get(each)) is not None]
    configs = [declared.config for declared in found if declared.config is not None]
    types = {declared.type for declared in found}
    return any(config.tells_owners() or config.names_owners_for & types for config in configs)


def _has(sections: Sections, kind: Kind, component_id: ComponentID, trait: str) -> bool:
    declared = sections.of(kind).get(component_id)
    return declared is not None and bool(getattr(declared.config, trait, False))


def _check_writer(
    exporter: ComponentID,
    signal: Signal,
    writers: dict[tuple[Signal, str], ComponentID],
    sections: Sections,
    report: Report,
) -> None:
    declared = sections.of(Kind.EXPORTERS).get(exporter)
    destination = declared.config.destination() if declared is not None and declared.config is not None else None
    if declared is None or destination is None:
        return
    first = writers.setdefault((signal, destination), exporter)
    if first != exporter:
        message = f'writes {signal} to the same destination as exporter "{first}" ({destination}); use one exporter'
        report.add(declared.at, join_path(Kind.EXPORTERS.value, str(exporter)), message)


def _check_deriver(
    exporter: ComponentID,
    pipeline_id: PipelineID,
    pipeline: Pipeline,
    derivers: dict[ComponentID, PipelineID],
    report: Report,
) -> None:
    first = derivers.setdefault(exporter, pipeline_id)
    if first != pipeline_id:
        message = (
            f'derives series into exporter "{exporter}", and so does pipeline "{first}"; '
            "derive in one pipeline or write to different destinations"
        )
        report.add(pipeline.at, join_path("service::pipelines", str(pipeline_id)), message)
