"""What doctor asks of the node: a simulated kubelet on a real socket, pages and a metadata server on real ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.doctor_node import _count, any_page, dcgm_page, gke_metadata, kubernetes, pod_resources, pods_api
from gpulens.pipeline.doctor_report import Finding, Verdict
from gpulens.pipeline.errors import DecodeError
from gpulens.pipeline.scrape_client import HttpPages
from gpulens.receivers.pod_resources import podresources_pb2 as pb
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World

WORLD = """
kubelet: {plugin: gke}
gpus:
  - {model: L4}
  - {model: L4}
pods:
  - {name: p, namespace: n, devices: ['0', '1'], start: -1h, phases: [{profile: training}]}
  - {name: q, namespace: n, devices: [], start: -1h}
"""
SOON_S = 0.3
"""A deadline for what never answers."""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path short enough for a unix socket."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder) / "kubelet.sock"


@asynccontextmanager
async def node(path: Path, *faults: str) -> AsyncIterator[Simulator]:
    """The simulated node, two minutes after its start: its collectors have been round."""
    text = WORLD + "".join(["faults:\n", *(f"  - {{{fault}}}\n" for fault in faults)] if faults else [])
    world = World.load(text)
    async with serve(world, lambda: world.start_s + 120, kubelet=path, tick_s=None) as simulator:
        yield simulator


@asynccontextmanager
async def site(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A server that answers every path so; gives host:port."""
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


async def silence(request: web.Request) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_kubelet_that_answers(path: Path) -> None:
    """List is called, pods and devices are counted."""
    async with node(path):
        found = await pod_resources(path, "/shown")
    assert found.ok
    assert found.facts["pods"] == 2
    assert found.facts["devices"] == {"nvidia.com/gpu": 2}


async def test_an_old_kubelet_answers_too(path: Path) -> None:
    """Where v1 is not served v1alpha1 is asked."""
    async with node(path, "kind: kubelet_v1alpha1_only"):
        found = await pod_resources(path)
    assert found.ok


async def test_a_kubelet_that_hangs(path: Path) -> None:
    """A call without an answer ends at its deadline."""
    async with node(path, "kind: kubelet_hung"):
        found = await pod_resources(path, deadline_s=SOON_S)
    assert found.verdict is Verdict.MISSING
    assert "did not answer" in found.finding


async def test_a_kubelet_that_refuses(path: Path) -> None:
    """A rate limit is told as such."""
    async with node(path, "kind: kubelet_rate_limited"):
        found = await pod_resources(path)
    assert found.verdict is Verdict.MISSING
    assert "rate limit" in found.finding


async def test_no_socket_names_the_mount(path: Path) -> None:
    """Missing folder, missing socket and a plain file in its place each give the mount as the fix."""
    lacking = await pod_resources(path.parent / "nowhere" / "kubelet.sock", "/var/lib/x/kubelet.sock")
    assert lacking.finding == "there is no /var/lib/x"
    gone = await pod_resources(path, "/var/lib/x/kubelet.sock")
    assert gone.finding == "there is no /var/lib/x/kubelet.sock"
    _plain_file(path)
    plain = await pod_resources(path, "/var/lib/x/kubelet.sock")
    assert plain.finding == "/var/lib/x/kubelet.sock is no socket"
    for each in (lacking, gone, plain):
        assert each.verdict is Verdict.MISSING
        assert "/var/lib/x (hostPath)" in each.fix


def _plain_file(path: Path) -> None:
    path.write_text("no socket")


async def test_a_stale_socket(path: Path) -> None:
    """A socket's file that nobody listens on is not taken for a kubelet."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    found = await pod_resources(path)
    assert found.verdict is Verdict.MISSING
    assert "nobody listens" in found.finding


async def test_a_reply_that_is_no_list(path: Path) -> None:
    """Bytes that are no such message give a finding."""

    async def garbage(request: bytes, context: object) -> bytes:
        return b"\x0a\xff\xff\xff\xff\x0f"

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(garbage)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler}),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        found = await pod_resources(path)
    finally:
        await server.stop(None)
    assert found.verdict is Verdict.MISSING
    assert "no List reply" in found.finding


NAMES = st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "example.com/x"])
DEVICES = st.builds(
    pb.ContainerDevices,
    resource_name=NAMES,
    device_ids=st.lists(st.text(max_size=5), max_size=4),
    topology=st.builds(pb.TopologyInfo, nodes=st.lists(st.builds(pb.NUMANode, ID=st.integers(0, 9)), max_size=2)),
)
CLAIMS = st.builds(
    pb.DynamicResource,
    claim_name=st.text(max_size=5),
    claim_resources=st.lists(st.builds(pb.ClaimResource, driver_name=st.just("gpu.nvidia.com")), max_size=2),
)
CONTAINERS = st.builds(
    pb.ContainerResources,
    name=st.text(max_size=5),
    devices=st.lists(DEVICES, max_size=3),
    cpu_ids=st.lists(st.integers(0, 500), max_size=3),
    dynamic_resources=st.lists(CLAIMS, max_size=2),
)
PODS = st.lists(
    st.builds(pb.PodResources, name=st.text(max_size=5), containers=st.lists(CONTAINERS, max_size=2)), max_size=3
)


@given(PODS)
def test_counting_agrees_with_protobuf(pods: list[pb.PodResources]) -> None:
    """Our own small reader counts what protobuf's decoder finds."""
    found, devices = _count(pb.ListPodResourcesResponse(pod_resources=pods).SerializeToString())
    assert found == len(pods)
    containers = [container for pod in pods for container in pod.containers]
    plain = sum(len(group.device_ids) for container in containers for group in container.devices)
    claimed = sum(len(claim.claim_resources) for container in containers for claim in container.dynamic_resources)
    assert devices.total() == plain + claimed


@given(st.binary(max_size=60))
def test_counting_survives_any_bytes(data: bytes) -> None:
    """Bytes that are no message raise DecodeError and nothing else."""
    try:
        pods, _ = _count(data)
    except DecodeError:
        return
    assert pods >= 0


async def test_the_pods_api_is_optional(tmp_path: Path, path: Path) -> None:
    """Not served is told as optional; a socket that takes connections is fine; one that does not is a warning."""
    assert (await pods_api(tmp_path)).verdict is Verdict.MISSING
    gone = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    async with await asyncio.start_unix_server(greet, path):
        found = await pods_api(path.parent, ["/nowhere.sock", f"/{path.name}"])
        await gone.wait()
    assert found.ok
    left = path.with_name("left.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(left))
    assert (await pods_api(path.parent, ["/left.sock"])).verdict is Verdict.WARN


def _pages(url: str) -> HttpPages:
    return HttpPages(url, {}, 1 << 20)


async def test_a_dcgm_page_is_counted_by_gpu(path: Path) -> None:
    """GPUs of a simulated exporter's page are counted once each, and profiling fields are noticed."""
    async with node(path) as simulator:
        found = await dcgm_page(_pages(simulator.dcgm_url), simulator.dcgm_url)
    assert found.ok
    assert found.facts["gpus"] == 2
    assert found.facts["profiling"] is True


@pytest.mark.parametrize(
    ("page", "verdict", "word"),
    [
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 5\n', Verdict.WARN, "without profiling fields"),
        ("# nothing\n", Verdict.WARN, "no GPU on its page"),
        ("node_cpu 1\n", Verdict.WARN, "no GPU on its page"),
    ],
)
async def test_a_dcgm_page_that_tells_too_little(page: str, verdict: Verdict, word: str) -> None:
    """A page without GPUs or without profiling fields is not ok, and says why."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=page)

    async with site(answer) as host:
        found = await dcgm_page(_pages(f"http://{host}/metrics"), f"http://{host}/metrics")
    assert found.verdict is verdict
    assert word in found.finding
    assert found.fix


async def test_no_page_hints_at_discovery(free_port: Callable[[], int]) -> None:
    """Nobody on the port: the fix is discovery, and the need stays open."""
    url = f"http://127.0.0.1:{free_port()}/metrics"
    found = await dcgm_page(_pages(url), url)
    assert found.verdict is Verdict.MISSING
    assert "discovery" in found.fix
    assert found.facts == {"gpus": 0}


async def test_a_page_that_hangs_ends_at_its_deadline() -> None:
    """A server that never answers gives a finding in time."""
    async with site(silence) as host:
        found = await any_page(_pages(f"http://{host}/metrics"), f"http://{host}/metrics", "receiver gke", SOON_S)
    assert found.verdict is Verdict.MISSING
    assert "no answer within" in found.finding


async def test_samples_of_any_page_are_counted(path: Path) -> None:
    """A page of another kind is counted by its samples; an empty one is a warning."""
    async with node(path) as simulator:
        found = await any_page(_pages(simulator.gke_url), simulator.gke_url, "receiver gke")
    assert found.ok
    samples = found.facts["samples"]
    assert isinstance(samples, int)
    assert samples > 0

    async def empty(request: web.Request) -> web.StreamResponse:
        return web.Response(text="# HELP x y\n\n")

    async with site(empty) as host:
        assert (await any_page(_pages(f"http://{host}/"), f"http://{host}/", "x")).verdict is Verdict.WARN


def _metadata(**attributes: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Metadata-Flavor": "Google"}
        name = request.path.rpartition("/")[2]
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        if name not in attributes:
            return web.Response(status=404, headers=headers)
        return web.Response(text=attributes[name], headers=headers)

    return answer


async def test_googles_metadata_tells_cluster_and_location() -> None:
    """Both attributes make the check ok; one of them is named as lacking; none is no GKE node."""
    both = _metadata(**{"cluster-name": "c1", "cluster-location": "europe-west4"})
    async with site(both) as host:
        found = await gke_metadata({"GCE_METADATA_HOST": host})
    assert found.ok
    assert found.facts == {"cluster": "c1", "location": "europe-west4"}
    async with site(_metadata(**{"cluster-name": "c1"})) as host:
        half = await gke_metadata({"GCE_METADATA_HOST": host})
    assert half.verdict is Verdict.WARN
    assert "cluster-location" in half.finding
    async with site(_metadata()) as host:
        assert (await gke_metadata({"GCE_METADATA_HOST": host})).verdict is Verdict.MISSING


async def test_another_clouds_metadata_is_not_googles(free_port: Callable[[], int]) -> None:
    """An answer without Google's header is not taken; silence ends at the deadline; nobody there is fine too."""

    async def other(request: web.Request) -> web.StreamResponse:
        return web.Response(text="i-0123456789")

    async with site(other) as host:
        found = await gke_metadata({"GCE_METADATA_HOST": host})
    assert found.verdict is Verdict.MISSING
    assert "not as Google's" in found.finding
    async with site(silence) as host:
        assert (await gke_metadata({"GCE_METADATA_HOST": host}, SOON_S)).verdict is Verdict.MISSING
    nobody = await gke_metadata({"GCE_METADATA_HOST": f"127.0.0.1:{free_port()}"})
    assert nobody.verdict is Verdict.MISSING


def _by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings}


def test_a_pod_is_told_by_its_token_and_its_node(tmp_path: Path) -> None:
    """Outside a pod, in one without token, in a whole one: each is told apart; the node's name comes by environment."""
    outside = _by_check(kubernetes(tmp_path, {}))
    assert "not in a pod" in outside["service-account"].finding
    assert outside["node-name"].verdict is Verdict.WARN
    assert "spec.nodeName" in outside["node-name"].fix
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "node-7"}
    bare = _by_check(kubernetes(tmp_path, environ))
    assert "automountServiceAccountToken" in bare["service-account"].fix
    token = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount/token"
    token.parent.mkdir(parents=True)
    token.write_text("t")
    whole = _by_check(kubernetes(tmp_path, environ))
    assert whole["service-account"].ok
    assert whole["node-name"].finding == "node-7 (NODE_NAME)"
    assert _by_check(kubernetes(tmp_path, environ, "other"))["node-name"].finding == "other (service::node)"
