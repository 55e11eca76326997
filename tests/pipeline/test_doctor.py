"""The whole of doctor: a node made of files, sockets and pages; what is needed; text, JSON and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from aiohttp import web

from gpulens.config import ServiceConfig, load, resolve
from gpulens.nvml.places import LIBRARY_FOLDERS
from gpulens.pipeline.cli import main
from gpulens.pipeline.doctor import Surroundings, examine
from gpulens.pipeline.doctor_driver import LIBRARY
from gpulens.pipeline.doctor_nvml import SM_ACTIVE
from gpulens.pipeline.doctor_report import Finding, Need, Report, Verdict, as_json, as_text
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.scrape_client import PageScrapeConfig
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World

SCRIPT = Path(__file__).with_name("doctor_child.py")
WORLD = """
kubelet: {plugin: gke}
gpus:
  - {model: L4}
pods:
  - {name: p, namespace: n, devices: ['0'], start: -1h, phases: [{profile: training}]}
"""
REST = """
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [%s], exporters: [debug]}}}
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """The machine's files; a short path, for a unix socket lies in it."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder)


def _write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _no_gpu(root: Path) -> None:
    _write(
        root,
        {"/sys/bus/pci/devices/0000:00:01.0/vendor": "0x8086", "/sys/bus/pci/devices/0000:00:01.0/class": "0x060000"},
    )


def _gpu_node(root: Path) -> None:
    card = "/sys/bus/pci/devices/0000:00:04.0"
    _write(
        root,
        {
            f"{card}/vendor": "0x10de",
            f"{card}/class": "0x030200",
            "/dev/nvidiactl": "",
            "/dev/nvidia0": "",
            f"{LIBRARY_FOLDERS[0]}/{LIBRARY}": "x",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48.01  Sat Aug 19\n",
            "/var/run/secrets/kubernetes.io/serviceaccount/token": "t",
        },
    )


def _sm_active_key() -> str:
    from gpulens.nvml.table import ROWS

    return next(row.key for row in ROWS if row.metric == SM_ACTIVE)


def _around(
    root: Path, child: str = "down", dcgm_url: str = "http://127.0.0.1:1/metrics", **environ: str
) -> Surroundings:
    environ.setdefault("GCE_METADATA_HOST", "127.0.0.1:1")
    return Surroundings(
        root=root,
        environ=environ,
        child=(sys.executable, str(SCRIPT), child, _sm_active_key()),
        dcgm_url=dcgm_url,
        nvml_window_s=0.0,
    )


def _config(receivers: str, names: str, **environ: str) -> ServiceConfig:
    return resolve(load([f"yaml:{receivers}", f"yaml:{REST % names}"], [], environ), Registry())


@asynccontextmanager
async def _node(root: Path) -> AsyncIterator[Simulator]:
    world = World.load(WORLD)
    kubelet = root / "var/lib/kubelet/pod-resources/kubelet.sock"
    async with serve(world, lambda: world.start_s + 120, kubelet=kubelet, tick_s=None) as simulator:
        yield simulator


@asynccontextmanager
async def _google() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="here", headers={"Metadata-Flavor": "Google"})

    app = web.Application()
    app.router.add_get("/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def _each_says_what_to_do(report: Report) -> None:
    for finding in report.findings:
        assert finding.ok != bool(finding.fix), finding


async def test_a_machine_without_gpu(root: Path) -> None:
    """It is told plainly, both needs are open, and every finding that is not ok has its fix."""
    _no_gpu(root)
    report = await examine(_around(root))
    assert report.note == "This machine has no NVIDIA GPU that can be seen."
    assert [need.met for need in report.needs] == [False, False]
    assert not report.healthy
    _each_says_what_to_do(report)
    assert "no NVIDIA GPU that can be seen" in as_text(report, colour=False).splitlines()[-1]


async def test_a_whole_node(root: Path) -> None:
    """With everything in place nothing that is needed is missing."""
    _gpu_node(root)
    async with _node(root) as simulator, _google() as host:
        around = _around(
            root,
            "works",
            simulator.dcgm_url,
            GCE_METADATA_HOST=host,
            NODE_NAME="n1",
            KUBERNETES_SERVICE_HOST="10.0.0.1",
        )
        report = await examine(around)
    found = {each.check: each for each in report.findings}
    assert report.healthy
    assert report.note == ""
    for check in ("hardware", "device-nodes", "driver-library", "nvml", "pod-resources", "dcgm-exporter"):
        assert found[check].ok, found[check]
    for check in ("gke-metadata", "service-account", "node-name", "gpu:GPU-h"):
        assert found[check].ok, found[check]
    assert found["driver"].facts["driver"] == "590.48.01"
    assert found["processes"].verdict is Verdict.WARN  # the child is told: not every process
    assert as_text(report, colour=False).splitlines()[-1].endswith("Nothing that is needed is missing.")
    _each_says_what_to_do(report)


async def test_one_reader_of_the_gpus_is_enough(root: Path) -> None:
    """Without NVML a dcgm-exporter on the host meets the need, and the other way round."""
    _no_gpu(root)
    async with _node(root) as simulator:
        page = await examine(_around(root, "down", simulator.dcgm_url))
        nvml = await examine(_around(root, "works"))
        neither = await examine(_around(root, "empty"))
    assert page.healthy
    assert nvml.healthy
    assert [need.met for need in neither.needs] == [False, True]


async def test_a_config_says_what_is_needed(root: Path) -> None:
    """With a config its receivers, and nothing else, are needed, each by its own address."""
    _no_gpu(root)
    async with _node(root) as simulator:
        config = _config(
            f"""
receivers:
  dcgm: {{endpoint: "{simulator.dcgm_url}"}}
  gke: {{endpoint: "http://127.0.0.1:1"}}
  pod_resources: {{endpoint: "unix://{root}/var/lib/kubelet/pod-resources/kubelet.sock"}}
  pod_resources/gone: {{endpoint: "unix://{root}/gone/kubelet.sock"}}
  pod_resources/unused: {{}}
""",
            "dcgm, gke, pod_resources, pod_resources/gone",
        )
        report = await examine(_around(root), config)
    assert {need.what: need.met for need in report.needs} == {
        "receiver dcgm": True,
        "receiver gke": False,
        "receiver pod_resources": True,
        "receiver pod_resources/gone": False,
    }
    assert f"{root}/gone" in next(need.reason for need in report.needs if need.what == "receiver pod_resources/gone")
    _each_says_what_to_do(report)


@pytest.mark.parametrize("in_a_pod", [False, True])
async def test_discovery_needs_to_know_pods(root: Path, in_a_pod: bool) -> None:
    """A receiver that finds its page by pods needs a service account; its page is not asked for by address."""
    _no_gpu(root)
    environ = {}
    if in_a_pod:
        environ["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
        _write(root, {"/var/run/secrets/kubernetes.io/serviceaccount/token": "t"})
    text = """
receivers: {dcgm: {discovery: {}}}
extensions: {k8s_observer: }
exporters: {debug: }
service: {extensions: [k8s_observer], pipelines: {metrics: {receivers: [dcgm], exporters: [debug]}}}
"""
    report = await examine(_around(root, **environ), resolve(load([f"yaml:{text}"], [], {}), Registry()))
    assert [(need.what, need.met) for need in report.needs] == [("receiver dcgm", in_a_pod)]
    assert not any(each.check == "receiver dcgm" for each in report.findings)


class _GuardedPage(PageScrapeConfig):
    """A receiver whose page wants more than an address."""

    bearer_token_file: str = ""


async def test_a_page_that_wants_a_token_is_not_asked(root: Path) -> None:
    """Without the receiver's own token or TLS a refusal would mean nothing: it is unknown, and no need stays open."""
    _no_gpu(root)
    config = _config("receivers: {gke: {endpoint: 'http://127.0.0.1:1'}}", "gke")
    guarded = _GuardedPage(endpoint="http://127.0.0.1:1", bearer_token_file="/token")
    entries = {
        key: replace(entry, config=guarded) if entry.type == "gke" else entry
        for key, entry in config.components.items()
    }
    report = await examine(_around(root), replace(config, components=entries))
    assert {each.check: each.verdict for each in report.findings}["receiver gke"] is Verdict.UNKNOWN
    assert report.healthy


async def test_a_config_that_reads_no_node_needs_nothing(root: Path) -> None:
    """A config that only reads a recording is healthy anywhere."""
    _no_gpu(root)
    config = _config("receivers: {otlp_json_file: {include: [x.jsonl]}}", "otlp_json_file")
    assert (await examine(_around(root), config)).healthy


REPORT = Report(
    (
        Finding("a", "short", Verdict.OK, "fine", facts={"n": 1}),
        Finding("b", "much longer", Verdict.MISSING, "gone \x1b[31m", "word " * 60),
    ),
    (Need("a"), Need("b", "gone")),
    "Note.",
)


def test_the_text_is_aligned_and_wrapped() -> None:
    """One line for each check, findings in one column, fixes indented below, a summary at the end."""
    lines = as_text(REPORT, colour=False).splitlines()
    assert lines[0] == "ok       short:       fine"
    assert lines[1] == "missing  much longer: gone  [31m"  # nothing that drives the terminal gets through
    assert lines[2].startswith("         fix: word word")
    assert lines[3].startswith("              word")
    assert max(map(len, lines[:-1])) <= 120
    assert lines[-1] == "Note. 1 ok, 0 warn, 1 missing, 0 absent, 0 unknown. Needed and missing: b."
    assert "\x1b[" not in as_text(REPORT, colour=False)
    assert "\x1b[32mok" in as_text(REPORT, colour=True)


def test_the_json_holds_everything() -> None:
    """Machines get the verdicts, fixes and figures, and whether all is well."""
    document = json.loads(as_json(REPORT))
    assert document["healthy"] is False
    assert document["needs"] == [
        {"what": "a", "met": True, "reason": ""},
        {"what": "b", "met": False, "reason": "gone"},
    ]
    assert document["findings"][0] == {
        "check": "a",
        "what": "short",
        "verdict": "ok",
        "finding": "fine",
        "fix": "",
        "facts": {"n": 1},
    }


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]) -> None:
    """No metadata server is asked but one that is not there."""
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{free_port()}")


@pytest.mark.usefixtures("offline")
def test_the_command_fails_when_something_is_missing(
    capsys: pytest.CaptureFixture[str], free_port: Callable[[], int]
) -> None:
    """`gpulens doctor --json` writes JSON to stdout and exits 1 while a receiver's source is not there."""
    text = f"receivers: {{dcgm: {{endpoint: 'http://127.0.0.1:{free_port()}'}}}}"
    code = main(["doctor", "--json", "--config", f"yaml:{text}", "--config", f"yaml:{REST % 'dcgm'}"])
    out = capsys.readouterr().out
    assert code == 1
    assert json.loads(out)["needs"][0]["met"] is False


@pytest.mark.usefixtures("offline")
def test_the_command_is_content_when_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits 0 where nothing needed is missing, and what is no terminal gets no colour."""
    text = "receivers: {otlp_json_file: {include: [x.jsonl]}}"
    code = main(["doctor", "--config", f"yaml:{text}", "--config", f"yaml:{REST % 'otlp_json_file'}"])
    out = capsys.readouterr().out
    assert code == 0
    assert "\x1b[" not in out
    assert out.splitlines()[-1].endswith("Nothing that is needed is missing.")


def test_help_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """--help tells the exit codes and what counts as needed."""
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0 when nothing that is needed is missing, else 1" in text
    assert "Pod Resources socket" in text
