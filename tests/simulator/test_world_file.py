"""Reading world files."""

from __future__ import annotations

import contextlib
import re
from importlib import resources
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.errors import ConfigError
from gpulens.simulator import schema
from gpulens.simulator.loads import PROFILES
from gpulens.simulator.models import MODELS
from gpulens.simulator.reading import shipped_worlds
from gpulens.simulator.schema import WorldSpec, parse_duration
from gpulens.simulator.world import World

ONE_GPU = "gpus:\n  - {model: T4}\n"


def problems(text: str) -> list[str]:
    """What is wrong with this world, as the user reads it."""
    with pytest.raises(ConfigError) as caught:
        World.load(text)
    return [str(p) for p in caught.value.problems]


@pytest.mark.parametrize("name", shipped_worlds())
def test_shipped_worlds_load_by_name(name: str) -> None:
    """Every world that comes along loads and holds at most eight GPUs."""
    world = World.load(name)
    assert 1 <= len(world.devices()) <= 8
    assert world.holds()


def test_a_file_loads_by_path(tmp_path: Path) -> None:
    """A path reads the same world as its text does."""
    path = tmp_path / "w.yaml"
    path.write_text(ONE_GPU)
    assert World.load(path).devices() == World.load(ONE_GPU).devices()


def test_all_errors_come_at_once_with_position_and_hint() -> None:
    """A misspelt key, an unknown model and a bare number are three problems, each with its place."""
    text = "gpus:\n  - {model: T5}\npods:\n  - nmae: x\n    name: p\n    start: 30\n"
    found = problems(text)
    assert len(found) == 3
    assert found[0].startswith("world:2:13: gpus::0::model: unknown model 'T5'")
    assert found[1] == "world:4:5: pods::0::nmae: unknown key (did you mean 'name'?)"
    assert "world:6:12: pods::0::start: '30' is no duration" in found[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: []\n", "at least 1 item"),
        ("gpus:\n  - {model: A100, mig: [3g.20gb, 3g.20gb, 2g.10gb]}\n", "more than the GPU has"),
        ("gpus:\n  - {model: T4, mig: [1g.5gb]}\n", "has no MIG profile"),
        ("gpus:\n  - {model: L4, sharing: time_slicing}\n", "needs replicas"),
        ("gpus:\n  - {model: L4, minor: 1}\n  - {model: L4}\n", "two GPUs have the minor 1"),
        (ONE_GPU + "pods:\n  - {name: p, devices: ['1']}\n", "there is no device 1"),
        (ONE_GPU + "pods:\n  - {name: p, request: 2}\n", "asks for 2 of any device, 1 are free"),
        (ONE_GPU + "pods:\n  - {name: p, end: 0s}\n", "a pod ends after its start"),
        (ONE_GPU + "faults:\n  - {kind: dcgm_down, gpus: [4]}\n", "names a GPU that is not there"),
        (ONE_GPU + "pods:\n  - {name: p}\n  - {name: p, start: 1s}\n", "two pods are called default/p"),
        (ONE_GPU + "seed: 1\nseed: 2\n", "stands here twice"),
        ("gpus: [\n", "not YAML"),
        ("gpus: &a\n  - *a\n", "inside of what it names"),
    ],
)
def test_worlds_that_cannot_exist_are_refused(text: str, message: str) -> None:
    """Each impossible world names its reason."""
    assert any(message in p for p in problems(text)), problems(text)


def test_two_pods_never_get_one_device_at_once() -> None:
    """An overlap on an exclusive device is refused; a handover at one instant is fine."""
    pods = "pods:\n  - {{name: a, devices: ['0'], end: 60s}}\n  - {{name: b, devices: ['0'], start: {start}}}\n"
    assert any("held by another pod" in p for p in problems(ONE_GPU + pods.format(start="59s")))
    assert len(World.load(ONE_GPU + pods.format(start="60s")).holds()) == 2


def test_a_missing_file_names_the_closest_shipped_world() -> None:
    """A slip in the name of a shipped world is pointed out."""
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        World.load("demoo")


@given(st.integers(0, 500), st.integers(0, 59), st.integers(0, 59), st.booleans())
def test_durations_read_back(hours: int, minutes: int, seconds: int, negative: bool) -> None:
    """A duration in hours, minutes and seconds is that many seconds, also below zero."""
    text = f"{'-' if negative else ''}{hours}h{minutes}m{seconds}s"
    assert parse_duration(text) == (-1 if negative else 1) * (hours * 3600 + minutes * 60 + seconds)


@given(st.text(max_size=200))
def test_any_text_is_a_world_or_a_config_error(text: str) -> None:
    """Nothing but a ConfigError comes out of a bad world file."""
    with contextlib.suppress(ConfigError):
        assert World.load(text + "\n").devices()


def test_the_readme_names_everything_that_a_world_may_say() -> None:
    """Each fault, profile, model and key of the schema stands in the simulator's README."""
    text = resources.files("gpulens.simulator").joinpath("README.md").read_text("utf-8")
    words = {*get_args(schema.FaultKind), *PROFILES, *MODELS}
    specs = (WorldSpec, schema.DcgmSpec, schema.GkeSpec, schema.KubeletSpec, schema.GpuSpec)
    for spec in (*specs, schema.PodSpec, schema.PhaseSpec, schema.FaultSpec):
        words |= {field.alias or name for name, field in spec.model_fields.items()}
    assert {w for w in words if not re.search(rf"(?<![\w-]){re.escape(w)}(?![\w-])", text)} == set()
