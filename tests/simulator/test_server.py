"""The simulated node's real ports and its real socket, driven by a virtual clock."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import grpc
import grpc.aio
import pytest

from gpulens.pipeline.errors import StartError
from gpulens.receivers.pod_resources import podresources_pb2 as pb
from gpulens.simulator.command import add_arguments, scaled_now, simulate
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World
from tests.simulator.pages import read_page

BASE = """
kubelet: {plugin: gke}
gpus:
  - {model: L4}
pods:
  - {name: p, namespace: n, devices: ['0'], start: -1h, phases: [{profile: training}]}
"""
V1 = "/v1.PodResourcesLister/List"
V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"
QUICK = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.min_reconnect_backoff_ms", 20)]
BIG = [("grpc.max_receive_message_length", 64 * 1024 * 1024)]


class Clock:
    """Simulated seconds that move when told to."""

    def __init__(self, t_s: float) -> None:
        self.t_s = t_s

    def __call__(self) -> float:
        return self.t_s


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A socket path short enough for a unix socket."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder) / "kubelet.sock"


@asynccontextmanager
async def node(
    path: Path, *faults: str, base: str = BASE
) -> AsyncIterator[tuple[Simulator, Callable[[float], Awaitable[None]]]]:
    """A served world with these faults, and the function that moves it to so many seconds after its start."""
    text = base + "".join(["faults:\n", *(f"  - {{{fault}}}\n" for fault in faults)] if faults else [])
    world = World.load(text)
    clock = Clock(world.start_s)

    async def move(seconds: float) -> None:
        clock.t_s = world.start_s + seconds
        await simulator.settle()

    async with serve(world, clock, kubelet=path, tick_s=None) as simulator:
        yield simulator, move


async def fetch(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and text of a page."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
        return response.status, await response.text()


async def fetch_on_and_on(url: str) -> None:
    """Reads a page until that fails."""
    while True:
        await fetch(url)


async def until_waiting(simulator: Simulator, count: int) -> None:
    """Gives the loop turns until so many calls hang in the servers."""
    while simulator.waiting < count:  # noqa: ASYNC110 - the servers have no event for what only tests ask
        await asyncio.sleep(0)


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one made later under its name; None when there is none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ctime_ns, found.st_ino


async def call(endpoint: str, method: str, request: bytes = b"", timeout_s: float = 5.0, big: bool = True) -> bytes:
    """One call on a channel of its own."""
    async with grpc.aio.insecure_channel(endpoint, options=BIG if big else None) as channel:
        answer: bytes = await channel.unary_unary(method, None, None)(request, timeout=timeout_s)
        return answer


async def refusal(endpoint: str, method: str, **options: float | bool) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(endpoint, method, **options)  # type: ignore[arg-type]
    return caught.value


async def test_both_pages_and_the_socket_answer(socket_path: Path) -> None:
    """What is served is the world's own answer for the time of the clock."""
    async with node(socket_path) as (simulator, move):
        await move(60)
        world, t = simulator.world, simulator.world.start_s + 60
        assert await fetch(simulator.dcgm_url) == (200, world.dcgm_page(t))
        assert await fetch(simulator.gke_url) == (200, world.gke_page(t))
        assert (await fetch(simulator.dcgm_url.replace("metrics", "health")))[0] == 200
        for method in (V1, V1ALPHA1):
            assert await call(simulator.kubelet_endpoint, method) == world.pod_resources(t)
        everything = await call(simulator.kubelet_endpoint, "/v1.PodResourcesLister/GetAllocatableResources")
        assert everything == world.allocatable(t)


async def test_get_finds_one_pod(socket_path: Path) -> None:
    """Get answers for a pod on the node and says so where there is none."""
    async with node(socket_path) as (simulator, _):
        get = "/v1.PodResourcesLister/Get"
        wanted = pb.GetPodResourcesRequest(pod_name="p", pod_namespace="n").SerializeToString()
        found = pb.GetPodResourcesResponse.FromString(await call(simulator.kubelet_endpoint, get, wanted))
        assert found.pod_resources.containers[0].devices[0].device_ids == ["nvidia0"]
        error = await refusal(simulator.kubelet_endpoint, get)
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_the_content_type_is_prometheus_text(socket_path: Path) -> None:
    """Pages come as text 0.0.4, GKE's compressed when asked for."""
    async with node(socket_path) as (simulator, move), aiohttp.ClientSession() as session:
        await move(60)
        async with session.get(simulator.dcgm_url) as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        async with session.get(simulator.gke_url, headers={"Accept-Encoding": "gzip"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert read_page(await response.text())


async def test_a_kubelet_restart_recreates_the_socket(socket_path: Path) -> None:
    """The file goes away, calls fail, and a channel that lives on works again on the new socket."""
    async with (
        node(socket_path, "kind: kubelet_gone, from: 60s, to: 240s") as (simulator, move),
        grpc.aio.insecure_channel(simulator.kubelet_endpoint, options=QUICK) as channel,
    ):
        ask = channel.unary_unary(V1, None, None)
        assert await ask(b"", timeout=5)
        await move(61)
        assert not identity(socket_path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(b"", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await move(241)
        assert identity(socket_path)
        assert await ask(b"", timeout=30, wait_for_ready=True)


async def test_a_restart_between_two_looks_still_happens(socket_path: Path) -> None:
    """At a high time scale a restart may begin and end at once: the socket is a new one all the same."""
    async with node(socket_path, "kind: kubelet_restart, from: 60s") as (simulator, move):
        before = identity(socket_path)
        await move(120)
        assert identity(socket_path) != before
        assert await call(simulator.kubelet_endpoint, V1)


async def test_the_rate_limit_is_told_apart_by_its_text(socket_path: Path) -> None:
    """Rate limit and over-size reply share a code; only the texts differ."""
    faults = ("kind: kubelet_rate_limited, from: 0s, to: 10s", "kind: kubelet_large, from: 10s, to: 20s")
    async with node(socket_path, *faults) as (simulator, move):
        limited = await refusal(simulator.kubelet_endpoint, V1)
        await move(10)
        too_large = await refusal(simulator.kubelet_endpoint, V1, big=False)
        assert limited.code() == too_large.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert limited.details() == "rejected by rate limit"
        assert "larger than max" in (too_large.details() or "")
        assert len(await call(simulator.kubelet_endpoint, V1)) > 5 * 1024 * 1024


async def test_old_kubelets_know_v1alpha1_only(socket_path: Path) -> None:
    """v1 answers UNIMPLEMENTED and v1alpha1 answers."""
    async with node(socket_path, "kind: kubelet_v1alpha1_only") as (simulator, _):
        for method in (V1, "/v1.PodResourcesLister/GetAllocatableResources", "/v1.PodResourcesLister/Get"):
            assert (await refusal(simulator.kubelet_endpoint, method)).code() == grpc.StatusCode.UNIMPLEMENTED
        assert await call(simulator.kubelet_endpoint, V1ALPHA1)


async def test_a_hung_kubelet_answers_when_it_comes_back(socket_path: Path) -> None:
    """The call is taken and stays open until the fault is over."""
    async with node(socket_path, "kind: kubelet_hung, from: 0s, to: 30s") as (simulator, move):
        error = await refusal(simulator.kubelet_endpoint, V1, timeout_s=0.05)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.create_task(call(simulator.kubelet_endpoint, V1))
        await move(30)
        assert await waiting == simulator.world.pod_resources(simulator.world.start_s + 30)


@pytest.mark.parametrize("page", ["dcgm", "gke"])
async def test_a_page_that_is_down_refuses_and_comes_back(socket_path: Path, page: str) -> None:
    """The port is closed during the fault and the same port answers after it."""
    async with node(socket_path, f"kind: {page}_down, from: 60s, to: 90s") as (simulator, move):
        await move(40)
        url = simulator.dcgm_url if page == "dcgm" else simulator.gke_url
        assert (await fetch(url))[0] == 200
        await move(60)
        with pytest.raises(aiohttp.ClientConnectorError):
            await fetch(url)
        await move(90)
        assert (await fetch(url))[0] == 200


async def test_gke_under_mig_refuses_connections(socket_path: Path) -> None:
    """On a MIG node nothing listens on GKE's port."""
    base = "kubelet: {plugin: gke}\ngpus:\n  - {model: A100, mig: [1g.5gb]}\n"
    async with node(socket_path, base=base) as (simulator, _):
        with pytest.raises(aiohttp.ClientConnectorError):
            await fetch(simulator.gke_url)
        assert (await fetch(simulator.dcgm_url))[0] == 200


@pytest.mark.parametrize("page", ["dcgm", "gke"])
async def test_errors_and_hung_pages(socket_path: Path, page: str) -> None:
    """A failing page is a 500; a hung one takes the request, answers nothing, and answers once it recovers."""
    faults = (f"kind: {page}_error, from: 40s, to: 50s", f"kind: {page}_hung, from: 50s, to: 90s")
    async with node(socket_path, *faults) as (simulator, move):
        url = simulator.dcgm_url if page == "dcgm" else simulator.gke_url
        await move(40)
        assert (await fetch(url))[0] == 500
        await move(50)
        with pytest.raises(TimeoutError):
            await fetch(url, timeout_s=0.05)
        waiting = asyncio.create_task(fetch(url))
        await move(90)
        assert (await waiting)[0] == 200


async def test_a_slow_page_takes_simulated_time(socket_path: Path) -> None:
    """The answer comes after the delay on the world's clock, not before."""
    async with node(socket_path, "kind: dcgm_slow, from: 0s, delay: 8s") as (simulator, move):
        waiting = asyncio.create_task(fetch(simulator.dcgm_url))
        await until_waiting(simulator, 1)
        await move(7)
        assert not waiting.done()
        await move(8)
        assert (await waiting)[0] == 200


async def test_stopping_drops_hung_calls_and_the_socket(socket_path: Path) -> None:
    """A node with a call that hangs stops at once, twice if asked, and leaves no file behind."""
    async with node(socket_path, "kind: dcgm_hung", "kind: kubelet_hung") as (simulator, _):
        page = asyncio.create_task(fetch(simulator.dcgm_url))
        reply = asyncio.create_task(call(simulator.kubelet_endpoint, V1))
        await until_waiting(simulator, 2)
        await simulator.stop()
        await simulator.stop()
        results = await asyncio.gather(page, reply, return_exceptions=True)
        assert all(isinstance(r, Exception) for r in results)
    assert not identity(socket_path)


async def test_what_cannot_be_listened_on_is_a_start_error(socket_path: Path) -> None:
    """A taken port, a bad address and an over-long socket path each name the trouble."""
    world = World.load(BASE)
    clock = Clock(world.start_s)
    async with serve(world, clock, kubelet=None, tick_s=None) as first:
        taken = first.dcgm_url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(StartError, match="can't listen"):
            async with serve(world, clock, dcgm=taken, tick_s=None):
                pass
    with pytest.raises(StartError, match="host:port"):
        Simulator(world, clock, dcgm="nowhere")
    with pytest.raises(StartError, match="too long"):
        Simulator(world, clock, kubelet=socket_path / ("x" * 120))


async def test_the_ticker_follows_the_clock(socket_path: Path) -> None:
    """Without anybody settling, faults begin when the scaled clock says so."""
    world = World.load(BASE + "faults:\n  - {kind: dcgm_down, from: 1s}\n")
    clock = Clock(world.start_s)
    async with serve(world, clock, kubelet=socket_path, tick_s=0.001) as simulator:
        assert (await fetch(simulator.dcgm_url))[0] == 200
        clock.t_s += 1
        with pytest.raises(aiohttp.ClientConnectorError):
            await fetch_on_and_on(simulator.dcgm_url)


async def test_simulate_says_where_and_ends_on_sigterm(socket_path: Path) -> None:
    """The command prints its endpoints, serves, and ends cleanly on SIGTERM."""
    said: asyncio.Queue[str] = asyncio.Queue()
    free = "127.0.0.1:0"
    running = asyncio.create_task(
        simulate("demo", dcgm=free, gke=free, kubelet=str(socket_path), scale=30, say=said.put_nowait)
    )
    text = await said.get()
    url = next(word for word in text.split() if word.startswith("http://"))
    assert f"unix://{socket_path}" in text
    assert "8 GPUs" in text
    status, page = await fetch(url)
    assert status == 200
    assert read_page(page)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert not identity(socket_path)


async def test_simulate_leaves_no_nvml_behind(socket_path: Path, tmp_path: Path) -> None:
    """Library, state and processes go with the node; what somebody else put beside them stays."""
    folder = tmp_path / "nvml"
    said: asyncio.Queue[str] = asyncio.Queue()
    free, kubelet = "127.0.0.1:0", str(socket_path)
    for others in (False, True):
        running = asyncio.create_task(
            simulate("demo", dcgm=free, gke=free, kubelet=kubelet, nvml=str(folder), say=said.put_nowait)
        )
        if "not simulated" in await said.get():
            pytest.skip("needs a C compiler")
        assert {each.name for each in folder.iterdir()} >= {"libnvidia-ml.so.1", "state", "proc"}
        if others:
            (folder / "proc" / "mine").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
        assert folder.exists() is others
    assert [str(each.relative_to(folder)) for each in folder.rglob("*")] == ["proc", "proc/mine"]


def test_the_command_line_takes_what_simulate_takes() -> None:
    """Arguments parse to the parameters of `simulate`; bad ones are refused."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = vars(parser.parse_args(["demo", "--scale", "20", "--duration", "1m30s"]))
    assert options["world_path"] == "demo"
    assert options["scale"] == 20
    assert options["duration"] == 90
    assert options["dcgm"] == "127.0.0.1:9400"
    for bad in (["--scale", "0"], ["--scale", "x"], ["--duration", "20"]):
        with pytest.raises(argparse.ArgumentError):
            parser.parse_args(["demo", *bad])


def test_scaled_time() -> None:
    """Two real seconds at scale 30 are a simulated minute."""
    real = iter([100.0, 100.0, 102.0])
    now = scaled_now(1000.0, 30.0, lambda: next(real))
    assert [now(), now()] == [1000.0, 1060.0]
