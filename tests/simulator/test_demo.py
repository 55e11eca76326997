"""The demo where something is not installed, and its preset as the second shell uses it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from importlib import resources

import pytest

from gpulens.config import load, resolve
from gpulens.pipeline.registry import Registry
from gpulens.simulator.demo import READING_WITHOUT_NVML, demo
from gpulens.simulator.world import World


async def test_without_the_binding_the_demo_goes_on_without_nvml(
    monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    """As without a C compiler: it says so, and MIG owners come from the inventory."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    out = io.StringIO()
    await demo("2s", f"127.0.0.1:{free_port()}", "", 60.0, "", out)
    text = out.getvalue()
    assert text.startswith("NVML is not simulated: nvidia-ml-py is not installed (in gpulens's checkout: pip install")
    assert READING_WITHOUT_NVML in text
    assert "serving/embed-0" in text


@pytest.mark.parametrize(("environ", "node"), [({}, "gpu-node-1"), ({"NODE_NAME": "mine"}, "mine")])
def test_the_preset_names_the_simulated_node(environ: dict[str, str], node: str) -> None:
    """Readings of the agent stand on the same node as those of the pages, unless somebody says otherwise."""
    assert World.load("demo").spec.node == "gpu-node-1"
    assert resolve(load(["preset:demo"], [], environ), Registry()).node == node


def test_the_preset_says_how_to_go_without_nvml() -> None:
    """What its comment tells to give with --set works."""
    text = resources.files("gpulens.config").joinpath("presets/demo.yaml").read_text("utf-8")
    (setting,) = re.findall(r"--set '(.*)'", text)
    (pipeline,) = resolve(load(["preset:demo"], [setting], {}), Registry()).pipelines.values()
    names = [str(each) for each in pipeline.receivers]
    assert names == ["otlp_json_file/inventory", "k8s_pods", "pod_resources", "dcgm", "gke"]
