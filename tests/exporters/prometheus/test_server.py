"""The server: what clients ask for, what they get, and a real Prometheus among them."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession, TCPConnector
from pydantic import ValidationError

from gpulens.exporters.prometheus import FACTORY
from gpulens.exporters.prometheus.config import PrometheusConfig, split_endpoint
from gpulens.exporters.prometheus.negotiation import OPEN_METRICS, TEXT, wants_gzip, wants_open_metrics
from gpulens.pipeline.errors import StartError
from tests.exporters.prometheus.serving import NODE, Host, make, own_batch, pod, serving

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        (PROMETHEUS_ACCEPT, OPEN_METRICS),
        ("application/openmetrics-text", OPEN_METRICS),
        ('Application/OpenMetrics-Text; version="1.0.0"', OPEN_METRICS),
        ("application/openmetrics-text; version=0.0.1", TEXT),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=x", TEXT),
    ],
)
def test_the_accept_header_decides_the_format(accept: str, expected: str) -> None:
    """OpenMetrics goes to who asks for it and prefers it; everybody else gets plain text."""
    assert (OPEN_METRICS if wants_open_metrics(accept) else TEXT) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("*", True),
        ("", False),
        ("gzip;q=0", False),
        ("br", False),
    ],
)
def test_gzip_only_when_asked_for(header: str, expected: bool) -> None:
    """A page is compressed only for a client that takes it."""
    assert wants_gzip(header) is expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        (":9464", ("", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:8889", ("localhost", 8889)),
    ],
)
def test_endpoints(endpoint: str, expected: tuple[str, int]) -> None:
    """An endpoint is an address and a port."""
    assert split_endpoint(endpoint) == expected


@pytest.mark.parametrize("endpoint", ["9464", "http://x:1", "x:99999", "x", "a:b:1", "::1:80"])
def test_bad_endpoints_are_config_errors(endpoint: str) -> None:
    """What is no host:port is refused with an example of one."""
    with pytest.raises(ValidationError, match=r"is not host:port"):
        PrometheusConfig.model_validate({"endpoint": endpoint})


def test_the_endpoint_is_required() -> None:
    """There is no default address, as in the Collector."""
    with pytest.raises(ValidationError, match="endpoint"):
        PrometheusConfig.model_validate({})
    assert FACTORY.config is PrometheusConfig


async def test_formats_and_content_types() -> None:
    """The same readings come as text or OpenMetrics, with the exact content type of each."""
    async with serving() as (served, client):
        served.take(own_batch((NODE, "hw.energy", {}, 1.0)))
        async with client.get(f"{served.url}/metrics") as answer:
            assert (answer.status, answer.headers["Content-Type"]) == (200, TEXT)
            assert "# TYPE hw_energy_joules_total counter" in await answer.text()
        async with client.get(f"{served.url}/metrics", headers={"Accept": PROMETHEUS_ACCEPT}) as answer:
            assert answer.headers["Content-Type"] == OPEN_METRICS
            assert (await answer.text()).endswith("# EOF\n")


async def test_compression_is_by_request() -> None:
    """A client that names gzip gets gzip, another one plain bytes; both say the same."""
    async with serving() as (served, _), ClientSession(auto_decompress=False) as raw:
        served.take(own_batch((NODE, "hw.power", {}, 70.0)))
        async with raw.get(f"{served.url}/metrics", headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            packed = await answer.read()
        async with raw.get(f"{served.url}/metrics", headers={"Accept-Encoding": "identity"}) as answer:
            assert "Content-Encoding" not in answer.headers
            assert gzip.decompress(packed) == await answer.read() == served.exporter.page()


async def test_other_requests() -> None:
    """HEAD answers without a body, other paths name the right one, other methods are refused."""
    async with serving() as (served, client):
        served.take(own_batch((NODE, "hw.power", {}, 70.0)))
        async with client.head(f"{served.url}/metrics") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
            assert answer.headers["Content-Type"] == TEXT
        async with client.get(f"{served.url}/") as answer:
            assert answer.status == 404
            assert "/metrics" in await answer.text()
        async with client.post(f"{served.url}/metrics", data=b"x") as answer:
            assert answer.status == 405


async def test_a_taken_port_is_named() -> None:
    """A port in use is a start error that says which port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        served = make(endpoint=f"127.0.0.1:{port}")
        with pytest.raises(StartError, match=f"port {port} is in use"):
            await served.exporter.start(Host())
        assert served.exporter.port == 0


async def test_an_address_that_is_not_ours_is_named() -> None:
    """An address that this machine does not have is a start error with the endpoint."""
    with pytest.raises(StartError, match=r"192\.0\.2\.1:9464"):
        await make(endpoint="192.0.2.1:9464").exporter.start(Host())


async def test_shutdown_without_start_and_twice() -> None:
    """Stopping is safe at any time, and frees the port."""
    served = make()
    await served.exporter.shutdown()
    await served.exporter.start(Host())
    url = served.url
    await served.exporter.shutdown()
    await served.exporter.shutdown()
    async with ClientSession() as client:
        with pytest.raises(ClientConnectionError):
            await client.get(f"{url}/metrics")


def certificate(folder: Path) -> tuple[str, str]:
    """A fresh certificate for 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl: apt-get install openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return str(cert), str(key)


async def test_https(tmp_path: Path) -> None:
    """With tls the page is served by HTTPS; files that can't be used are a start error."""
    cert, key = certificate(tmp_path)
    tls = {"cert_file": cert, "key_file": key}
    async with serving(tls=tls) as (served, _):
        served.take(own_batch((NODE, "hw.power", {}, 70.0)))
        trust = TCPConnector(ssl=ssl.create_default_context(cafile=cert))
        async with (
            ClientSession(connector=trust) as client,
            client.get(f"https://127.0.0.1:{served.exporter.port}/metrics") as answer,
        ):
            assert "hw_power_watts" in await answer.text()
    with pytest.raises(StartError, match=r"nothing\.pem"):
        await make(tls={**tls, "key_file": "/nothing.pem"}).exporter.start(Host())


def test_points_and_caches_are_counted() -> None:
    """Points taken are counted without the absent ones, and the caches' sizes can be read."""
    served = make()
    served.take(own_batch((NODE, "hw.power", {}, 70.0), (NODE, "hw.temperature", {}, None)))
    served.page()
    assert served.telemetry.value("otelcol_exporter_sent_metric_points", exporter="prometheus") == 1
    read = served.telemetry.read()
    gauges = {(name, labels["cache"]): value for name, labels, value in read if "cache" in labels}
    assert gauges["gpulens_cache_bytes", "prometheus_sections"] > 0
    assert gauges["gpulens_cache_misses", "prometheus_plans"] == 1


@asynccontextmanager
async def prometheus(binary: str, target: int, port: int, folder: Path) -> AsyncIterator[str]:
    """A real Prometheus that scrapes a port every 200 ms; gives its address."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        "scrape_configs:\n"
        "  - job_name: gpulens\n"
        "    honor_labels: true\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
    )
    process = await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def query(client: ClientSession, address: str, expression: str) -> dict[str, str]:
    """A query's result by its `pod` label; empty while there is none."""
    try:
        async with client.get(f"{address}/api/v1/query", params={"query": expression}) as answer:
            found = json.loads(await answer.text())
    except (ClientConnectionError, ValueError):
        return {}
    rows = found.get("data", {}).get("result", [])
    return {row["metric"].get("pod", ""): row["value"][1] for row in rows}


async def eventually(ask: Callable[[], Awaitable[bool]], give_up_s: float = 30.0) -> None:
    """Asks until the answer is yes; another process can't tell us when to look."""
    async with asyncio.timeout(give_up_s):
        while not await ask():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)


async def test_a_real_prometheus_answers_by_pod(
    prometheus_binary: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """Prometheus scrapes the page (it asks for OpenMetrics) and sums by the true pods; a pod that ends goes
    stale."""
    gpu = {"hw.id": "GPU-1", "hw.gpu.task": "general"}
    a = (pod("train-0"), "hw.gpu.utilization", gpu, 0.75)
    b = (pod("notebook"), "hw.gpu.utilization", {**gpu, "hw.id": "GPU-2"}, 0.0)
    energy = (NODE, "hw.energy", {"hw.id": "GPU-1"}, 12.5)
    expression = "sum by (pod) (hw_gpu_utilization_ratio)"
    async with serving() as (served, client):
        served.take(own_batch(a, b, energy))
        async with prometheus(prometheus_binary, served.exporter.port, free_port(), tmp_path) as address:

            async def both() -> bool:
                return await query(client, address, expression) == {"train-0": "0.75", "notebook": "0"}

            async def one() -> bool:
                return await query(client, address, expression) == {"notebook": "0"}

            await eventually(both)
            assert await query(client, address, "hw_energy_joules_total") == {"": "12.5"}
            served.take(own_batch(b, energy))
            await eventually(one)
