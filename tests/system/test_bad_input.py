"""Sources and destinations at their worst, all at once: a clear error each, the other series unharmed, and an end on
SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gpulens.config import load, resolve
from gpulens.exporters.prometheus.server import PrometheusExporter
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.service import Service
from gpulens.pipeline.status import Status
from tests.receivers.pod_resources.kubelet import ALLOCATABLE, LIST, FakeKubelet, allocatable, devices, pod, pod_list
from tests.system.processes import REPO, eventually, fetch, gpulens, running

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PAGES = sorted((SHARED / "fixtures" / "dcgm_exporter").rglob("*.prom")) if SHARED.is_dir() else []
GOOD = "GPU-00000000-0000-0000-0000-00000000900d"
MIB = 2**20
FREE = allocatable(devices("nvidia.com/gpu", GOOD))


def good_page(value: int) -> str:
    """A page with one GPU and one reading."""
    labels = f'gpu="0",UUID="{GOOD}",device="nvidia0",modelName="Tesla T4",Hostname="node"'
    return f"# TYPE DCGM_FI_DEV_GPU_TEMP gauge\nDCGM_FI_DEV_GPU_TEMP{{{labels}}} {value}\n" + (
        f"# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{{{labels}}} 50\n"
    )


# --- pages that never should have been

Write = Callable[[bytes], Awaitable[None]]


async def huge(write: Write) -> None:
    """100 MiB of GPUs, every line another one."""
    for first in range(0, 1_600_000, 2000):
        rows = range(first, first + 2000)
        await write("".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="{n}",UUID="GPU-{n:036d}"}} 40\n' for n in rows).encode())


async def endless(write: Write) -> None:
    """A line without an end."""
    while True:
        await write(b"a" * 65536)


async def drip(write: Write) -> None:
    """A byte now and then, for ever."""
    while True:
        await write(b"D")
        await asyncio.sleep(0.05)


async def silence(write: Write) -> None:
    """Accepted, and never answered."""
    await asyncio.Event().wait()


async def noise(write: Write) -> None:
    """Bytes that are no text."""
    await write(bytes((17 * n * n + n // 7) % 256 for n in range(100_000)))


def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    line = f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{GOOD}"}} 1\n'.encode() * 20_000
    return b"".join([*(packer.compress(line) for _ in range(150)), packer.flush()])


HOSTILE = {"huge": huge, "endless": endless, "drip": drip, "silence": silence, "noise": noise}


async def _hostile(request: web.Request) -> web.StreamResponse:
    """One of the bad pages, by its path."""
    response = web.StreamResponse()

    async def write(part: bytes) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(part)

    with contextlib.suppress(ConnectionError):  # the reader had enough
        await HOSTILE[request.path[1:]](write)
    return response


@asynccontextmanager
async def hostile_node(good: Callable[[], str]) -> AsyncIterator[str]:
    """An HTTP server with a good page and every bad one; yields its address."""

    async def fine(request: web.Request) -> web.StreamResponse:
        return web.Response(text=good())

    async def bomb(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    packed = _bomb()
    app = web.Application()
    app.router.add_get("/good", fine)
    app.router.add_get("/bomb", bomb)
    app.router.add_get("/{name}", _hostile)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def kubelet_at(path: Path, listed: bytes, allocatable_reply: bytes) -> AsyncIterator[FakeKubelet]:
    """A kubelet that says this."""
    kubelet = FakeKubelet(path, {LIST: listed, ALLOCATABLE: allocatable_reply})
    await kubelet.start()
    try:
        yield kubelet
    finally:
        await kubelet.stop()


def peak_mib(process: subprocess.Popen[bytes]) -> float:
    """The most memory that a process ever had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def rss_mib(process: subprocess.Popen[bytes]) -> float:
    """The memory that a process has now."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 / MIB


def reading(page: str, metric: str, uuid: str = GOOD) -> tuple[str, float] | None:
    """(pod, value) of a metric of one GPU on a page; the pod is empty where none is named. The good page names a model,
    the bomb that claims the same GPU does not."""
    for line in page.splitlines():
        if line.startswith(f"{metric}{{") and f'gpu_uuid="{uuid}"' in line and 'gpu_model="' in line:
            owner = re.search(r'[{,]pod="([^"]*)"', line)
            return owner[1] if owner else "", float(line.rpartition(" ")[2])
    return None


def unknown_fields() -> bytes:
    """Fields 90 to 93 of each wire type, with a message within a message."""
    inner = b"\xda\x05\x03new"  # 91: text
    return (
        b"\xd0\x05\x07" + b"\xda\x05" + bytes((len(inner),)) + inner + b"\xe1\x05" + bytes(8) + b"\xed\x05" + bytes(4)
    )


def big_reply() -> bytes:
    """5 MiB of pods that hold other things, and one that holds the good GPU, as a kubelet of the future says it."""
    owner = pod("team", "owner", devices("nvidia.com/gpu", GOOD))
    for message in (owner.containers[0].devices[0], owner.containers[0], owner):
        message.MergeFromString(unknown_fields())
    others = (
        pod("team", f"web-{n}", devices("example.com/nic", *(f"nic-{n}-{i:064d}" for i in range(70))))
        for n in range(1100)
    )
    return pod_list(owner, *others) + unknown_fields()


async def test_hostile_sources_leave_the_others_unharmed(
    tmp_path: Path, free_port: Callable[[], int], promtool: str
) -> None:
    """Beside 100 MiB of GPUs, an endless line, a gzip bomb, a slow page, a silent one and noise, and with a kubelet
    that says 5 MiB in words of the future, the good page goes on fresh and attributed, memory stays bounded, each
    source's trouble is named, and SIGTERM ends it all with 0."""
    count = iter(range(30, 10_000))
    reply = big_reply()
    assert len(reply) > 5 * MIB
    odd = tmp_path / "a b%20#?c"  # gRPC reads a target as a URI
    odd.symlink_to(tmp_path)
    listen, log = f"127.0.0.1:{free_port()}", tmp_path / "agent.log"
    names = ["good", "bomb", *HOSTILE]
    async with hostile_node(lambda: good_page(next(count))) as node, kubelet_at(tmp_path / "kubelet.sock", reply, FREE):
        receivers = {
            f"dcgm/{name}": f"{{endpoint: '{node}/{name}', collection_interval: 400ms, timeout: 3s, "
            "initial_delay: 100ms, refresh: 400ms}"
            for name in names
        }
        config = tmp_path / "config.yaml"
        config.write_text(
            "receivers:\n"
            + "".join(f"  {name}: {block}\n" for name, block in receivers.items())
            + f"  pod_resources: {{endpoint: 'unix://{odd}/kubelet.sock', collection_interval: 400ms, timeout: 3s}}\n"
            "processors: {attribution: }\n"
            f"exporters: {{prometheus: {{endpoint: '{listen}'}}}}\n"
            "service: {pipelines: {metrics: {receivers: [pod_resources, "
            + ", ".join(receivers)
            + "], processors: [attribution], exporters: [prometheus]}}}\n"
        )
        with running(gpulens("run", "--config", str(config)), log, {"NODE_NAME": "node-1"}) as agent:
            url = f"http://{listen}/metrics"
            troubles = {
                "huge": "longer than max_page_size",
                "endless": "longer than max_page_size",
                "bomb": "longer than max_page_size",
                "drip": "no answer within 3s",
                "silence": "no answer within 3s",
                "noise": "no DCGM series",
            }

            def named() -> bool:
                lines = [line for line in log.read_text().splitlines() if "Scrape failed." in line]
                return all(
                    any(f"=dcgm/{k}\t" in line and text in line for line in lines) for k, text in troubles.items()
                )

            await asyncio.to_thread(eventually, named, log, 20)

            def owned(page: str) -> tuple[str, float] | None:
                found = reading(page, "hw_gpu_utilization_ratio")
                return found if found and found[0] == "owner" else None

            await asyncio.to_thread(eventually, lambda: owned(fetch(url)), log, 10)
            before = reading(await asyncio.to_thread(fetch, url), "hw_temperature_celsius")
            assert before is not None

            def moved() -> bool:
                now = reading(fetch(url), "hw_temperature_celsius")
                return now is not None and now[1] > before[1]

            await asyncio.to_thread(eventually, moved, log, 10)
            page = await asyncio.to_thread(fetch, url)
            assert peak_mib(agent) < 350
            began = time.monotonic()
            agent.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(agent.wait, 10) == 0
            assert time.monotonic() - began < 5
    await assert_lints(page, promtool)
    assert "Traceback" not in log.read_text()


async def assert_lints(page: str, promtool: str) -> None:
    """Prometheus' own linter has nothing to say."""
    command, data = [promtool, "check", "metrics"], page.encode()
    checked = await asyncio.to_thread(subprocess.run, command, input=data, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


# --- one pipeline in this process


def service_of(config: str) -> Service:
    """The service of a config in YAML."""
    registry = Registry()
    return Service(resolve(load([f"yaml:{config}"], [], {}), registry), "node-1", registry)


def page_of(service: Service) -> str:
    """What the prometheus exporter shows now."""
    (exporter,) = (node.component for node in service.graph.nodes if isinstance(node.component, PrometheusExporter))
    return exporter.page().decode()


async def until(done: Callable[[], bool], what: str) -> None:
    """Waits for the loop to get there."""
    for _ in range(1000):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 10s: {what}")


async def test_a_kubelet_that_says_nonsense_is_an_error_and_no_owner(tmp_path: Path) -> None:
    """Random bytes are named in the status and own nothing; the readings go on; a good reply heals it."""
    random = bytes((n * n + 3 * n + 255) % 256 for n in range(4096))
    async with (
        hostile_node(lambda: good_page(44)) as node,
        kubelet_at(tmp_path / "kubelet.sock", random, b"\xff\xff\xff") as kubelet,
    ):
        service = service_of(
            f"""
            receivers:
              dcgm: {{endpoint: "{node}/good", collection_interval: 30ms, initial_delay: 0s, refresh: 30ms}}
              pod_resources: {{endpoint: "unix:{tmp_path}/kubelet.sock", collection_interval: 30ms, initial_delay: 0s}}
            processors: {{attribution: {{lateness: 0s}}}}
            exporters: {{prometheus: {{endpoint: "127.0.0.1:0"}}}}
            service:
              pipelines:
                metrics: {{receivers: [pod_resources, dcgm], processors: [attribution], exporters: [prometheus]}}
            """
        )
        await service.start()
        try:
            await until(lambda: reading(page_of(service), "hw_gpu_utilization_ratio") == ("", 0.5), "unowned")
            status = service.board.get("receivers/pod_resources")
            assert status.status is Status.RECOVERABLE
            assert "no Pod Resources message" in status.reason
            kubelet.answers = {LIST: big_reply(), ALLOCATABLE: FREE}
            await until(lambda: reading(page_of(service), "hw_gpu_utilization_ratio") == ("owner", 0.5), "owned")
            assert service.board.get("receivers/pod_resources").status is Status.OK
        finally:
            await service.shutdown()


@pytest.mark.skipif(not PAGES, reason="needs shared: the folder is not beside this checkout")
@pytest.mark.parametrize("path", PAGES or [Path("none")], ids=lambda path: path.stem)
async def test_no_real_or_hostile_page_spoils_the_page_or_another_source(path: Path, promtool: str) -> None:
    """Behind attribution and the prometheus exporter the page stays valid, and the other exporter's readings are the
    same as without the neighbour."""
    async with hostile_node(path.read_text) as node, hostile_node(lambda: good_page(44)) as other:
        service = service_of(
            f"""
            receivers:
              dcgm/tested: {{endpoint: "{node}/good", collection_interval: 50ms, initial_delay: 0s}}
              dcgm/other: {{endpoint: "{other}/good", collection_interval: 50ms, initial_delay: 0s}}
            processors: {{attribution: {{lateness: 0s}}}}
            exporters: {{prometheus: {{endpoint: "127.0.0.1:0"}}}}
            service:
              pipelines:
                metrics:
                  receivers: [dcgm/tested, dcgm/other]
                  processors: [attribution]
                  exporters: [prometheus]
            """
        )
        await service.start()
        try:
            status = service.board.get
            await until(lambda: "gpu_uuid" in page_of(service).replace(GOOD, ""), "read")
            await until(lambda: reading(page_of(service), "hw_temperature_celsius") == ("", 44), "the other")
            page = page_of(service)
            assert reading(page, "hw_gpu_utilization_ratio") == ("", 0.5)
            assert status("receivers/dcgm/other").status is Status.OK
        finally:
            await service.shutdown()
    await assert_lints(page, promtool)


# --- configs


def test_a_config_with_five_errors_names_each_with_its_position(tmp_path: Path) -> None:
    """One line an error, in the order of the file, with line and column; exit code 1, for `validate` and `run`."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "receivers:\n"
        "  dcgm:\n"
        "    endpoint: http://localhost:9400/metrics\n"
        "    colection_interval: 15s\n"
        "  gke: {endpoint: 'ftp://somewhere', timeout: 10}\n"
        "exporters:\n"
        "  promethius: {endpoint: '0.0.0.0:9464'}\n"
        "service:\n"
        "  pipelines:\n"
        "    metrics: {receivers: [dcgm, gke, podres], exporters: [promethius]}\n"
    )
    for command in ("validate", "run"):
        done = subprocess.run(
            gpulens(command, "--config", str(config)), capture_output=True, text=True, cwd=REPO, check=False
        )
        places = [line.split(" ", 2)[1].removeprefix(str(config)) for line in done.stderr.splitlines()]
        assert done.returncode == 1
        assert places == [":4:5:", ":5:19:", ":5:47:", ":7:3:", ":10:38:"], done.stderr
        assert "(did you mean 'collection_interval'?)" in done.stderr
        assert "(did you mean 'prometheus'?)" in done.stderr


# --- destinations


async def test_dead_destinations_cost_memory_only_up_to_a_bound(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """With nobody behind either OTLP exporter the page goes on, some hundred ticks later the process is no larger,
    and SIGTERM ends it within the grace of one try."""
    count = iter(range(1, 10**9))
    listen, log, dead = f"127.0.0.1:{free_port()}", tmp_path / "agent.log", free_port()
    async with hostile_node(lambda: good_page(20 + next(count) % 60)) as node:
        config = f"""
        receivers: {{dcgm: {{endpoint: "{node}/good", collection_interval: 10ms, initial_delay: 0s}}}}
        processors: {{attribution: {{lateness: 0s}}}}
        exporters:
          prometheus: {{endpoint: "{listen}"}}
          otlp_grpc: {{endpoint: "127.0.0.1:{dead}", tls: {{insecure: true}}, sending_queue: {{queue_size: 100000}}}}
          otlp_http: {{endpoint: "http://127.0.0.1:{dead}", sending_queue: {{queue_size: 100000}}}}
        service:
          pipelines:
            metrics: {{receivers: [dcgm], processors: [attribution], exporters: [prometheus, otlp_grpc, otlp_http]}}
        """
        with running(gpulens("run", "--config", f"yaml:{config}"), log) as agent:
            url = f"http://{listen}/metrics"
            await asyncio.to_thread(eventually, lambda: reading(fetch(url), "hw_temperature_celsius"), log)
            await until(lambda: next(count) > 100, "warm")
            before = rss_mib(agent)
            began = next(count)
            await until(lambda: next(count) > began + 300, "ticks")
            assert rss_mib(agent) - before < 20
            assert await asyncio.to_thread(fetch, url) != await asyncio.to_thread(_later, url)
            agent.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(agent.wait, 15) == 0
    text = log.read_text()
    assert text.count("Exporting failed. Will retry") == 2
    assert "Traceback" not in text


def _later(url: str) -> str:
    """The page once more, a few ticks on."""
    time.sleep(0.1)
    return fetch(url)
