"""Replay: a recording through a config's processors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulens.config import load, resolve
from gpulens.config.ids import Kind, PipelineID, Signal
from gpulens.pipeline.cli import main
from gpulens.pipeline.data import Batch, Block, Layout, Metric, Resource, Scope, Series
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.replay import SINK, SOURCE, replay_config
from tests.pipeline.parts import Bench

REPO = Path(__file__).resolve().parents[2]

TWO = """
receivers: {src: }
processors: {step: , step/b: }
exporters: {tap: }
extensions: {ext: }
service:
  extensions: [ext]
  node: node-7
  pipelines:
    metrics/a: {receivers: [src], processors: [step, step/b], exporters: [tap]}
    metrics/b: {receivers: [src], exporters: [tap]}
    logs: {receivers: [src], exporters: [tap]}
"""


def test_the_processors_are_kept_and_the_ends_replaced(tmp_path: Path) -> None:
    """One pipeline from the recording through the same processors into a file; nothing else runs."""
    bench = Bench()
    replayed = replay_config(bench.config(TWO), bench.registry(), "in.jsonl", f"{tmp_path}/out.jsonl", "metrics/a")
    (body,) = replayed.pipelines.values()
    assert list(replayed.pipelines) == [PipelineID(Signal.METRICS)]
    assert [str(each) for each in body.processors] == ["step", "step/b"]
    assert (body.receivers, body.exporters) == ((SOURCE,), (SINK,))
    assert (replayed.extensions, replayed.node) == ((), "node-7")
    kinds = {kind for kind, _ in replayed.components}
    assert kinds == {Kind.RECEIVERS, Kind.PROCESSORS, Kind.EXPORTERS}


@pytest.mark.parametrize(
    ("pipeline", "complaint"),
    [
        ("", "say with --pipeline whose processors to replay: metrics/a, metrics/b"),
        ("metrics/c", 'no metrics pipeline "metrics/c"; the config has: metrics/a, metrics/b'),
        ("logs", 'no metrics pipeline "logs"'),
    ],
)
def test_a_pipeline_that_can_not_be_told_is_an_error(pipeline: str, complaint: str) -> None:
    """The message lists what there is to choose from."""
    bench = Bench()
    with pytest.raises(StartError, match=complaint):
        replay_config(bench.config(TWO), bench.registry(), "in", "out", pipeline)


RECORD = """
receivers: {{src: }}
exporters: {{file: {{path: {path}}}}}
service: {{pipelines: {{metrics: {{receivers: [src], exporters: [file]}}}}}}
"""
PLAIN = """
receivers: {otlp_json_file: {include: [unused]}}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [otlp_json_file], exporters: [debug]}}}
"""


async def record(path: Path, batches: list[Batch]) -> None:
    """Writes a recording with the real exporter."""
    bench = Bench()
    service = bench.service(RECORD.format(path=path))
    await service.start()
    for each in batches:
        bench.source().emit(each)
    await service.shutdown()


def ticks() -> list[Batch]:
    """Two streams over a few ticks: values of both types, absence, series that leave."""
    series = [
        Series(Metric("a", is_int=True), {"hw.id": "GPU-1"}),
        Series(Metric("b", "1"), {"hw.id": "GPU-1"}),
        Series(Metric("c"), {}),
    ]
    node = Resource({"k8s.node.name": "n"})
    wide = Layout([Block(node, Scope("gpulens/x"), series)])
    narrow = Layout([Block(node, Scope("gpulens/x"), series[:1])])
    second = 10**9
    return [
        Batch.of(wide, [2**63 - 1, 0.1, None], 100 * second, "x"),
        Batch.of(wide, [-1, None, 0.0], 110 * second, "x"),
        Batch.of(narrow, [5], 110 * second, "y/z", complete=False),
        Batch.of(narrow, [6], 120 * second, "x"),
    ]


def replay(folder: Path, source: Path, name: str) -> bytes:
    """What `gpulens replay`, in a process of its own, makes of a recording with a config without processors."""
    config, target = folder / "c.yaml", folder / name
    config.write_text(PLAIN, encoding="utf-8")
    arguments = ["replay", "--config", str(config), "--input", str(source), "--output", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "gpulens", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target.read_bytes()


async def test_a_recording_replays_to_the_same_bytes(tmp_path: Path) -> None:
    """Without processors the output is the input, departures included; doing it again gives the same."""
    source = tmp_path / "in.jsonl"
    await record(source, ticks())
    recorded = source.read_bytes()
    assert recorded.count(b"gpulens.departed") == 1
    for name in ("one.jsonl", "two.jsonl"):
        assert await asyncio.to_thread(replay, tmp_path, source, name) == recorded


async def test_a_stream_that_became_empty_is_empty_in_replay(tmp_path: Path) -> None:
    """A complete batch without any series takes the stream's series off, live and replayed."""
    source = tmp_path / "in.jsonl"
    await record(source, [*ticks(), Batch.of(Layout(), [], 130 * 10**9, "x")])
    last = (await asyncio.to_thread(replay, tmp_path, source, "out.jsonl")).splitlines()[-1]
    scopes = [scope for resource in json.loads(last)["resourceMetrics"] for scope in resource["scopeMetrics"]]
    empty, departed = scopes
    assert "metrics" not in empty
    assert [metric["name"] for metric in departed["metrics"]] == ["a"]


def test_an_ambiguous_replay_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what to add."""
    config = tmp_path / "c.yaml"
    config.write_text(
        PLAIN.replace("{metrics: {", "{metrics/a: {receivers: [otlp_json_file], exporters: [debug]}, metrics/b: {"),
        encoding="utf-8",
    )
    output = tmp_path / "out.jsonl"
    assert main(["replay", "--config", str(config), "--input", "in", "--output", str(output)]) == 1
    assert "say with --pipeline" in capsys.readouterr().err
    assert not output.exists()


def test_a_recording_is_never_its_own_output(tmp_path: Path) -> None:
    """Also through a link: the file would be emptied before it is read."""
    recording = tmp_path / "raw.jsonl"
    recording.write_text("{}\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(recording)
    config = resolve(load(["preset:demo"], [], {}), Registry())
    with pytest.raises(StartError, match="is the recording itself"):
        replay_config(config, Registry(), str(recording), str(link))
    assert recording.read_text() == "{}\n"


def replayed(folder: Path, source: str, target: Path) -> int:
    """The exit code of a replay without processors."""
    config = folder / "c.yaml"
    config.write_text(PLAIN, encoding="utf-8")
    return main(["replay", "--config", str(config), "--input", source, "--output", str(target)])


@pytest.mark.parametrize("source", ["gone.jsonl", "gone-*.jsonl", "."])
def test_an_output_outlives_a_recording_that_is_not_there(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped --input must not empty what an earlier replay wrote."""
    target = tmp_path / "out.jsonl"
    target.write_text("kept\n")
    assert replayed(tmp_path, str(tmp_path / source), target) == 1
    assert target.read_text() == "kept\n"
    assert capsys.readouterr().err.startswith(f"Error: --input {tmp_path}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("receivers: {}\nno OTLP\n", "none of its 2 lines is OTLP JSON"), ("", "it is empty")],
)
def test_a_recording_without_a_line_that_can_be_read_is_a_failure(
    text: str, complaint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An empty result with exit code 0 would look like a recording in which nothing happened."""
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    assert replayed(tmp_path, str(source), tmp_path / "out.jsonl") == 1
    assert f"Error: --input {source}: {complaint}, so there was nothing to replay" in capfd.readouterr().err


async def test_bad_lines_among_good_ones_are_passed_over(tmp_path: Path) -> None:
    """One line that can be read is enough."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    await record(source, ticks())
    recorded = source.read_bytes()
    source.write_bytes(b"what is this\n" + recorded)
    assert await asyncio.to_thread(replay, tmp_path, source, target.name) == recorded
