"""What components need of one another, told when the config is read: extensions, and who says who holds a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulens.config import ServiceConfig, load, resolve
from gpulens.pipeline.errors import ConfigError
from gpulens.pipeline.registry import Registry

MAPPING = """
description: An invented exporter.
device: {id: "{board}"}
metrics: [{from: power, to: hw.power, attributes: {hw.type: gpu}, unit: W}]
"""


def read(receivers: str, rest: str = "", extensions: str = "") -> ServiceConfig:
    """A config with these receivers, all of them in one pipeline that joins owners."""
    names = ", ".join(line.split(":")[0].strip() for line in receivers.splitlines() if line.startswith("  "))
    text = (
        f"receivers:\n{receivers}\nprocessors: {{attribution: }}\nexporters: {{debug: }}\n{rest}\n"
        f"service: {{extensions: [{extensions}], "
        f"pipelines: {{metrics: {{receivers: [{names}], processors: [attribution], exporters: [debug]}}}}}}\n"
    )
    return resolve(load([f"yaml:{text}"], [], {}), Registry())


OBSERVED = {"rest": "extensions: {k8s_observer: {source: kubelet}}", "extensions": "k8s_observer"}


@pytest.mark.parametrize(
    "receivers",
    [
        "  dcgm: {endpoint: 'http://x:9400'}",
        "  gke: {endpoint: 'http://x:2112'}",
        "  prometheus: {endpoint: 'http://x:1', mapping: amd}",
        "  pod_resources: {}",
        "  nvml: {}\n  k8s_pods: {}",
    ],
)
def test_who_tells_owners_needs_no_warning(receivers: str) -> None:
    """Pod labels of a page are an allocation source, and so are the driver's processes with this node's pods."""
    assert read(receivers, **OBSERVED).warnings == ()


@pytest.mark.parametrize(
    "receivers",
    ["  nvml: {}", "  k8s_pods: {}", "  prometheus: {endpoint: 'http://x:1'}", "  prometheus: {MAPPING}"],
)
def test_nobody_who_tells_owners_is_a_warning(receivers: str, tmp_path: Path) -> None:
    """Processes without pods, pods without processes, and pages that name no owner leave every series without one."""
    file = tmp_path / "m.yaml"
    file.write_text(MAPPING)
    text = receivers.replace("MAPPING", f"endpoint: 'http://x:1', mapping: {file}")
    (warning,) = read(text, **OBSERVED).warnings
    assert 'processor "attribution" has no allocation source' in warning


@pytest.mark.parametrize(
    ("receivers", "extensions", "listed", "complaint"),
    [
        (
            "  dcgm: {discovery: {}}",
            "",
            "",
            'yaml:2:10: receivers::dcgm::discovery::observer: needs extension "k8s_observer", which is not configured:'
            " write it under 'extensions' and list it in 'service::extensions'",
        ),
        (
            "  gke: {discovery: {observer: k8s_observr}}",
            "extensions: {k8s_observer: {source: kubelet}}",
            "k8s_observer",
            'yaml:2:21: receivers::gke::discovery::observer: needs extension "k8s_observr", which is not configured',
        ),
        (
            "  k8s_pods: {}",
            "extensions: {k8s_observer: {source: kubelet}}",
            "",
            'yaml:2:3: receivers::k8s_pods::observer: needs extension "k8s_observer", which is not listed in'
            " 'service::extensions'",
        ),
    ],
)
def test_an_extension_that_would_not_run_is_an_error(
    receivers: str, extensions: str, listed: str, complaint: str
) -> None:
    """It is told at the key that names it, or at the nearest block, when the config is read and not at the start."""
    with pytest.raises(ConfigError) as raised:
        read(receivers, extensions, listed)
    (problem,) = raised.value.problems
    assert complaint in str(problem)
    if "observr" in receivers:
        assert problem.suggestion == "k8s_observer"


def test_what_no_pipeline_uses_needs_nothing() -> None:
    """A receiver that stands in the config and does not run asks for no extension."""
    text = """
receivers: {dcgm: {discovery: {}}, gke: {endpoint: "http://x:2112"}}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [gke], exporters: [debug]}}}
"""
    assert resolve(load([f"yaml:{text}"], [], {}), Registry()).warnings == ()


def test_an_extension_that_is_listed_and_not_configured_is_told_once() -> None:
    """The list names it wrongly; what needs it adds nothing."""
    with pytest.raises(ConfigError) as raised:
        read("  k8s_pods: {}", "", "k8s_observer")
    (problem,) = raised.value.problems
    assert 'references extension "k8s_observer" which is not configured' in str(problem)
