"""Replay: a recording through the processors of a config, in event time, as fast as it goes.

Invariant: the processors meet the same batches in the same order as they did live, and nothing else, so the output
has the same bytes. An output is touched only when the recording could be opened.
"""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path

from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.nodes import Position
from gpulens.config.service import ComponentEntry, PipelineConfig, ServiceConfig
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.telemetry import Telemetry

SOURCE = ComponentID("otlp_json_file", "replay")
SINK = ComponentID("file", "replay")


def replay_config(
    config: ServiceConfig, registry: Registry, source: str, target: str, pipeline: str = ""
) -> ServiceConfig:
    """The config with one pipeline: recording -> the processors of a metrics pipeline -> file.

    `pipeline` names which one; it may be left out when there is only one. Raises StartError when it can't be told.
    """
    candidates = {str(name): body for name, body in config.pipelines.items() if name.signal is Signal.METRICS}
    if pipeline and pipeline not in candidates:
        raise StartError(f'no metrics pipeline "{pipeline}"; the config has: {", ".join(candidates)}')
    if not pipeline and len(candidates) != 1:
        raise StartError(f"say with --pipeline whose processors to replay: {', '.join(candidates)}")
    body = candidates[pipeline] if pipeline else next(iter(candidates.values()))
    components = {key: entry for key, entry in config.components.items() if key[0] is Kind.PROCESSORS}
    if Path(source).exists() and Path(target).exists() and Path(source).samefile(target):
        raise StartError(f"{target} is the recording itself: name another file with --output, or it would be emptied")
    at = Position("replay", 0, 0)
    for kind, component_id, block in (
        (Kind.RECEIVERS, SOURCE, {"include": [source], "on_end": "stop"}),
        (Kind.EXPORTERS, SINK, {"path": target}),
    ):
        model = registry.config_model(kind, component_id.type)
        components[kind, component_id] = ComponentEntry(
            component_id, component_id.type, model.model_validate(block), at
        )
    return replace(
        config,
        components=components,
        extensions=(),
        pipelines={PipelineID(Signal.METRICS): PipelineConfig((SOURCE,), body.processors, (SINK,))},
    )


def check_readable(source: str) -> None:
    """Raises StartError when a recording (a path or glob) is not there or can't be opened."""
    paths = [source] if Path(source).exists() else glob.glob(source, recursive=True)  # noqa: PTH207 - takes absolute patterns
    if not paths:
        raise StartError(f"--input {source}: there is no such file")
    for path in paths:
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise StartError(f"--input {path}: can't be read: {error.strerror}") from error


def check_read(telemetry: Telemetry, source: str) -> None:
    """Raises StartError when a replay that has ended could read no line of its recording."""
    if any(name == "otelcol_receiver_accepted_metric_points" for name, _ in telemetry.counters):
        return
    bad = telemetry.value("gpulens_receiver_bad_lines")
    why = f"none of its {bad} lines is OTLP JSON" if bad else "it is empty"
    raise StartError(f"--input {source}: {why}, so there was nothing to replay")
