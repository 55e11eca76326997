"""The main job through the command line, seen by the peers that users have: promtool, Prometheus, rotel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.processes import eventually, fetch, gpulens, query, running

OWNERS = {"train-llm-0", "notebook-anna-0", "spin-eval-7f9c", "embed-0", "serve-70b-0"}
"""Pods of the demo's world that alone hold a device during the whole run."""

AGENT = "{namespace: monitoring, pod: gpulens-x7k2p, container: gpulens}"
"""What service discovery in a cluster says of the scraped target: the agent's own pod."""

EXCLUSIVE = (
    "hw_power_watts * on(gpu_uuid) group_left(namespace, pod, container) "
    "((gpu_allocated == 1) unless on(gpu_uuid) (gpu_allocation_replicas > 1))"
)
SHARED = "(gpu_allocated == 1) * on(gpu_uuid) group_left() hw_power_watts"
"""The joins that the processor's README gives."""


STEADY = "[otlp_json_file/inventory, pod_resources, dcgm, gke]"


@pytest.fixture
def page(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[str]:
    """The /metrics page of a running demo."""
    listen = f"127.0.0.1:{free_port()}"
    log = tmp_path / "demo.log"
    with running(gpulens("demo", "--duration", "0s", "--scale", "30", "--listen", listen), log):
        url = f"http://{listen}/metrics"
        eventually(lambda: owners(fetch(url)) >= OWNERS, log)
        yield url


def owners(page: str) -> set[str]:
    """The pods that have SM activity on a page."""
    return set(re.findall(r'^gpu_sm_active_ratio\{.*?pod="([^"]*)"', page, re.MULTILINE))


def test_the_demos_page_passes_promtool(page: str, promtool: str) -> None:
    """The linter of Prometheus has nothing to say."""
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=fetch(page).encode(), capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_a_real_prometheus_answers_by_pod(
    page: str, prometheus_binary: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """`sum by (pod)` names the true pods: a notebook that does nothing, a spin loop at 15 %, a training at work."""
    port = free_port()
    config = tmp_path / "prometheus.yml"
    target = page.removeprefix("http://").removesuffix("/metrics")
    config.write_text(
        "scrape_configs: [{job_name: gpulens, scrape_interval: 1s, honor_labels: true, "
        f"static_configs: [{{targets: ['{target}'], labels: {AGENT}}}]}}]\n"
    )
    command = [
        prometheus_binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = tmp_path / "prometheus.log"
    with running(command, log):
        server = f"http://127.0.0.1:{port}"
        active = eventually(lambda: _complete(query(server, "sum by (pod) (gpu_sm_active_ratio)")), log)
        resident = query(server, 'sum by (pod) (hw_gpu_utilization_ratio{hw_gpu_task="general",pod!=""})')
        joined = query(server, EXCLUSIVE)
        shared = query(server, SHARED)
    assert active["notebook-anna-0"] == 0
    assert active["spin-eval-7f9c"] < 0.2
    assert resident["spin-eval-7f9c"] > 0.9
    assert active["train-llm-0"] > 0.5
    assert not any("exporter" in pod or "gpulens" in pod for pod in active)
    assert active[""] > 0
    assert joined["train-llm-0"] > 100
    assert "chat-a" not in joined
    assert shared["chat-a"] == shared["chat-b"] > 0


def _complete(answer: dict[str, float]) -> dict[str, float] | None:
    return answer if answer.keys() >= OWNERS else None


def test_rotel_receives_the_same_series_by_grpc_and_http(
    rotel_binary: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """A third-party OTLP server sees the same owned series whichever way they come."""
    seen = {}
    for protocol in ("grpc", "http"):
        folder = tmp_path / protocol
        folder.mkdir()
        seen[protocol] = _through_rotel(rotel_binary, protocol, folder, free_port)
    assert seen["grpc"] == seen["http"]
    assert {pod for pod, _ in seen["grpc"]} >= OWNERS


def _through_rotel(rotel: str, protocol: str, folder: Path, free_port: Callable[[], int]) -> set[tuple[str, str]]:
    """(pod, metric) of everything that a rotel prints when the demo's node is sent to it."""
    grpc, http, dcgm, gke = (free_port() for _ in range(4))
    log = folder / "rotel.log"
    command = [
        rotel, "start", "--exporter", "blackhole",
        "--debug-log", "metrics", "--debug-log-verbosity", "detailed",
        "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}",
        "--pid-file", str(folder / "pid"), "--log-file", str(folder / "rotel-own.log"),
    ]  # fmt: skip
    exporter = {
        "grpc": f"exporters::otlp_grpc: {{endpoint: '127.0.0.1:{grpc}', tls: {{insecure: true}}}}",
        "http": f"exporters::otlp_http: {{endpoint: 'http://127.0.0.1:{http}'}}",
    }[protocol]
    socket, inventory = folder / "kubelet.sock", folder / "inventory.jsonl"
    node = gpulens(
        "simulate", "demo", "--dcgm", f"127.0.0.1:{dcgm}", "--gke", f"127.0.0.1:{gke}",
        "--kubelet", str(socket), "--inventory", str(inventory), "--scale", "1",
        "--pods", str(folder / "pods.sock"), "--nvml", str(folder / "nvml"),
    )  # fmt: skip
    agent = gpulens(
        "run", "--config", "preset:demo", "--config", f"yaml:{exporter}",
        "--config", f"yaml:service::pipelines::metrics::exporters: [otlp_{protocol}]",
        # Sources whose series are all there at the first tick: two runs are compared.
        "--config", f"yaml:service::pipelines::metrics::receivers: {STEADY}",
        "--set", "receivers.dcgm.collection_interval=500ms",
        "--set", "receivers.pod_resources.collection_interval=300ms",
        "--set", "receivers.dcgm.initial_delay=2s", "--set", "receivers.dcgm.refresh=1s",
        "--set", "receivers.gke.collection_interval=1s",
    )  # fmt: skip
    environ = {
        "GPULENS_DEMO_DCGM": f"http://127.0.0.1:{dcgm}/metrics",
        "GPULENS_DEMO_GKE": f"http://127.0.0.1:{gke}/metrics",
        "GPULENS_DEMO_KUBELET": f"unix://{socket}",
        "GPULENS_DEMO_INVENTORY": str(inventory),
        "GPULENS_DEMO_PODS": f"unix://{folder / 'pods.sock'}",
        "GPULENS_DEMO_NVML": str(folder / "nvml"),
        "NODE_NAME": "gpu-node-1",
    }
    agent_log = folder / "agent.log"
    with running(command, log), running(node, folder / "node.log"):
        eventually(lambda: socket.exists() and inventory.exists(), folder / "node.log")
        with running(agent, agent_log, environ):
            eventually(lambda: {pod for pod, _ in _series(log.read_text(errors="replace"))} >= OWNERS, agent_log)
    return {(pod, name) for pod, name in _series(log.read_text(errors="replace")) if pod}


def _series(text: str) -> set[tuple[str, str]]:
    """(pod or "", metric name) of the points in rotel's debug log."""
    found: set[tuple[str, str]] = set()
    pod = ""
    for line in text.splitlines():
        if "Resource SchemaURL" in line or line.startswith("ResourceMetrics"):
            pod = ""
        elif match := re.search(r"k8s\.pod\.name: (?:Str\()?\"?([\w.-]+)", line):
            pod = match[1]
        elif match := re.search(r"-> Name: (\S+)", line):
            found.add((pod, match[1]))
    return found
