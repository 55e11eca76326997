"""Who would tell a config's k8s_observer of pods, as doctor finds out; and which line says what is missing."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from aiohttp import web

from gpulens.config import ServiceConfig, load, resolve
from gpulens.nvml.protocol import Tier
from gpulens.pipeline.doctor import Surroundings, examine
from gpulens.pipeline.doctor_node import api_server
from gpulens.pipeline.doctor_nvml import Answer, Dcgm, ask, gpus
from gpulens.pipeline.doctor_report import Finding, Report, Verdict, as_text
from gpulens.pipeline.registry import Registry
from gpulens.simulator.server import serve
from gpulens.simulator.world import World

SCRIPT = Path(__file__).with_name("doctor_child.py")
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TOKEN = "var/run/secrets/kubernetes.io/serviceaccount/token"
TEXT = """
receivers: {k8s_pods: , dcgm: {discovery: {}}}
exporters: {debug: }
extensions: {k8s_observer: {%s}}
service:
  extensions: [k8s_observer]
  pipelines: {metrics: {receivers: [k8s_pods, dcgm], exporters: [debug]}}
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """The machine's files; a short path, for a unix socket lies in it."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder)


def around(root: Path, **environ: str) -> Surroundings:
    """A machine whose NVML shows no GPU."""
    return Surroundings(
        root=root,
        environ={"GCE_METADATA_HOST": "127.0.0.1:1", **environ},
        child=(sys.executable, str(SCRIPT), "empty", "-"),
        dcgm_url="http://127.0.0.1:1/metrics",
        nvml_window_s=0.0,
    )


def config(observer: str) -> ServiceConfig:
    """Two receivers that need this observer."""
    return resolve(load([f"yaml:{TEXT % observer}"], [], {}), Registry())


def of(report: Report, what: str) -> Finding:
    """The one line of this name."""
    (found,) = [each for each in report.findings if each.what == what]
    return found


@asynccontextmanager
async def answering(status: int = 200) -> AsyncIterator[str]:
    """Address of a server that answers everything with this status."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("source", ["auto", "kubelet"])
async def test_the_configured_kubelet_socket_is_asked(root: Path, source: str) -> None:
    """A kubelet that serves its pods where the config says meets the need of every receiver that asks for pods."""
    world = World.load("demo")
    path = root / "pods.sock"
    async with serve(world, lambda: world.start_s, kubelet=root / "k.sock", pods=path, tick_s=None):
        report = await examine(around(root), config(f"source: {source}, kubelet_endpoint: 'unix://{path}'"))
    assert of(report, "extension k8s_observer").finding == f"pods by the kubelet: {path} takes connections"
    assert [(need.what, need.met) for need in report.needs] == [("receiver k8s_pods", True), ("receiver dcgm", True)]
    assert report.healthy
    assert not any(each.what == "kubelet Pods API" for each in report.findings)


async def test_an_observer_that_only_asks_the_kubelet_needs_its_socket(root: Path) -> None:
    """With `source: kubelet` a way to the API server does not help."""
    token = root / TOKEN
    token.parent.mkdir(parents=True)
    token.write_text("t")
    report = await examine(around(root, **KUBERNETES), config(f"source: kubelet, kubelet_endpoint: 'unix://{root}/x'"))
    found = of(report, "extension k8s_observer")
    assert found.verdict is Verdict.MISSING
    assert f"{root}/x: not served on this node" in found.finding
    assert "API server" not in found.fix
    assert not report.healthy


async def test_auto_falls_back_to_the_service_account(root: Path) -> None:
    """No Pods API is no lack where the API server tells."""
    without = await examine(around(root), config("source: auto"))
    token = root / TOKEN
    token.parent.mkdir(parents=True)
    token.write_text("t")
    with_one = await examine(around(root, **KUBERNETES), config("source: auto"))
    assert (without.healthy, with_one.healthy) == (False, True)
    assert of(without, "extension k8s_observer").verdict is Verdict.MISSING
    assert of(with_one, "extension k8s_observer").finding == "pods by the API server, by the service account"


@pytest.mark.parametrize("status", [200, 403])
async def test_an_endpoint_is_asked(root: Path, status: int) -> None:
    """Any answer shows that a server is there; nobody there is told with the address."""
    async with answering(status) as url:
        assert await api_server(root, {}, url, "") == (f"the API server at {url}", "")
    way, problem = await api_server(root, {}, url, "")
    assert way == ""
    assert problem.startswith(f"{url}: ")


async def test_a_kubeconfig_is_looked_for_where_lightkube_looks(root: Path) -> None:
    """The config's own, $KUBECONFIG, or the one at home."""
    file = root / ".kube" / "config"
    nowhere = await api_server(root, {"HOME": str(root)}, "", "")
    file.parent.mkdir()
    file.write_text("{}")
    told = (f"the API server of {file}", "")
    assert nowhere == ("", "not in a pod (KUBERNETES_SERVICE_HOST is not set)")
    assert await api_server(root, {"HOME": str(root)}, "", "") == told
    assert await api_server(root, {"KUBECONFIG": str(file)}, "", "") == told
    assert await api_server(root, {}, "", str(file)) == told
    assert await api_server(root, {}, "", f"{file}.gone") == ("", f"{file}.gone can't be read")


async def test_without_the_extra_there_is_no_way_to_the_api_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "lightkube", None)
    way, problem = await api_server(root, KUBERNETES, "", "")
    assert way == ""
    assert "pip install '.[k8s]'" in problem


@pytest.mark.parametrize("text", ["", "source: kubelet, kubelet_endpoint: 'unix:///gone/x'"])
async def test_the_summary_names_lines_that_exist(root: Path, text: str) -> None:
    """What is needed and missing has a line with that verdict; what nothing needs is absent and not missing."""
    report = await examine(around(root), config(text) if text else None)
    names = {each.what for each in report.findings if each.verdict is Verdict.MISSING}
    needed = [need for need in report.needs if not need.met]
    assert needed
    assert all(names & set(need.lines) for need in needed)
    assert names <= {line for need in needed for line in (*need.lines, *need.causes)}
    summary = as_text(report, colour=False).splitlines()[-1]
    assert f"{len(names)} missing" in summary
    assert all(need.label in summary for need in needed)
    for optional in ("GKE metadata", "service account"):
        assert of(report, optional).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    ("dcgm", "verdict", "fix"),
    [
        (Dcgm.TELLS, Verdict.OK, ""),
        (Dcgm.NONE, Verdict.WARN, "run dcgm-exporter with DCGM_FI_PROF_SM_ACTIVE"),
        (Dcgm.PLAIN, Verdict.WARN, "add DCGM_FI_PROF_SM_ACTIVE"),
        (Dcgm.UNSEEN, Verdict.WARN, "see that the exporter that the dcgm receiver reads"),
    ],
)
def test_sm_activity_by_a_dcgm_exporter_is_enough(dcgm: Dcgm, verdict: Verdict, fix: str) -> None:
    """A GPU without GPM is fine where an exporter tells its SM activity, and the fix fits what is there."""
    answer = ask((sys.executable, str(SCRIPT), "works", "sm"), {}, window_s=0.0)
    first, second = gpus(answer, {"sm": "gpu.sm.active"}, dcgm)
    assert (first.what, second.what) == ("nvidia0", "nvidia1")
    assert second.ok
    assert first.verdict is verdict
    assert fix in first.fix
    assert bool(first.fix) == bool(fix)


async def test_a_page_with_profiling_fields_spares_the_advice(root: Path) -> None:
    """The exporter is there already: a config that reads it is not told to run one."""
    world = World.load("demo")
    async with serve(world, lambda: world.start_s + 60, kubelet=root / "k.sock", tick_s=None) as simulator:
        text = f"""
receivers: {{nvml: , dcgm: {{endpoint: "{simulator.dcgm_url}"}}}}
exporters: {{debug: }}
service: {{pipelines: {{metrics: {{receivers: [nvml, dcgm], exporters: [debug]}}}}}}
"""
        works = Surroundings(
            root=root,
            environ={"GCE_METADATA_HOST": "127.0.0.1:1"},
            child=(sys.executable, str(SCRIPT), "works", "sm"),
            nvml_window_s=0.0,
        )
        report = await examine(works, resolve(load([f"yaml:{text}"], [], {}), Registry()))
    assert of(report, "nvidia0").ok
    assert report.healthy


def test_gpus_stand_in_the_order_of_their_names() -> None:
    """By number and not by letter, whatever order the driver has."""
    answer = Answer(driver={"up": True})
    for name in ("nvidia10", "nvidia2", "nvidia1"):
        answer.asked.setdefault(Tier.FAST, []).append(f"GPU-{name}")
        answer.shapes[f"GPU-{name}", "fast"] = {"entities": [{"hw.id": f"GPU-{name}", "hw.name": name}]}
    assert [each.what for each in gpus(answer, {})] == ["nvidia1", "nvidia2", "nvidia10"]
