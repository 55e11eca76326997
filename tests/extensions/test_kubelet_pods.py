"""The observer under a kubelet's Pods API, and between the kubelet and the API server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from pydantic import ValidationError

from gpulens.extensions.k8s_observer import config
from gpulens.extensions.k8s_observer import pods_pb2 as pb
from gpulens.pipeline.pods import Container, Pod
from gpulens.pipeline.status import Status
from tests.extensions.kube_api import KubeApi, pod_json, serving
from tests.extensions.pods_socket import PodsSocket, pod_proto
from tests.extensions.watching import watching


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path, short enough for a unix socket."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder) / "pods.sock"


@pytest.fixture
async def kubelet(path: Path) -> AsyncIterator[PodsSocket]:
    """A served socket with two pods."""
    async with PodsSocket(path).serving() as socket:
        socket.put(pod_proto("a"))
        socket.put(pod_proto("b"))
        yield socket


def asking(kubelet: PodsSocket) -> dict[str, object]:
    """The block of an observer that asks this kubelet only."""
    return {"source": "kubelet", "kubelet_endpoint": f"unix://{kubelet.path}"}


async def test_it_lists_and_then_follows_what_happens(kubelet: PodsSocket) -> None:
    """Added, changed and deleted pods, from one list and one watch."""
    async with watching(**asking(kubelet)) as on:
        await on.knows("a", "b")
        await on.hears(kubelet.queues, kubelet.send_odd)
        kubelet.put(pod_proto("c", "Pending"))
        await on.knows("a", "b", "c")
        kubelet.put(pod_proto("c"))
        await on.until(lambda: on.seen.pods["uid-c"].phase == "Running")
        kubelet.delete("a")
        await on.knows("b", "c")
        assert kubelet.lists == 1
        assert on.status == (Status.OK, "")


async def test_what_is_kept_of_a_pod(kubelet: PodsSocket) -> None:
    """The same as from the API server."""
    kubelet.put(pod_proto("c", note="x", long="x" * 2000))
    async with watching(**asking(kubelet)) as on:
        await on.knows("a", "b", "c")
        assert on.seen.pods["uid-c"] == Pod(
            uid="uid-c",
            namespace="ml",
            name="c",
            ip="10.0.0.1",
            phase="Running",
            ready=False,
            start_s=1767603600.0,
            host_network=True,
            owner_kind="Job",
            owner_name="sweep",
            labels={"app": "c"},
            annotations={"note": "x"},
            containers=(Container("main", "f00d", 1767603630.0, True),),
        )


async def test_a_pod_that_has_hardly_begun_says_what_it_can(kubelet: PodsSocket) -> None:
    """No status at all: nothing is made up."""
    kubelet.put(pb.Pod(metadata=pb.ObjectMeta(name="c", namespace="ml", uid="uid-c")))
    async with watching(**asking(kubelet)) as on:
        await on.knows("a", "b", "c")
        assert on.seen.pods["uid-c"] == Pod("uid-c", "ml", "c")


async def test_the_alpha_service_is_asked_too(path: Path) -> None:
    """Kubernetes 1.35 serves v1alpha1 only, and marks no end of the first events."""
    socket = PodsSocket(path, services=("v1alpha1.Pods",), marks_sync=False)
    async with socket.serving(), watching(**asking(socket)) as on:
        await on.knows()
        socket.put(pod_proto("a"))
        await on.knows("a")


async def test_a_kubelet_that_has_not_synced_is_asked_again(kubelet: PodsSocket) -> None:
    """FAILED_PRECONDITION, and the rate limit, pass; the status says which it is."""
    kubelet.faults.append((grpc.StatusCode.FAILED_PRECONDITION, "pods are not synced"))
    kubelet.faults.append((grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"))
    async with watching(**asking(kubelet)) as on:
        await on.until(lambda: "has not synced its pods yet" in on.seen.problem)
        assert not on.seen.synced
        await on.until(lambda: "rate limit" in on.seen.problem, resuming=True)
        await on.until(lambda: on.names == {"a", "b"} and not on.seen.problem, resuming=True)


async def test_events_that_were_dropped_are_found_by_the_next_list(kubelet: PodsSocket) -> None:
    """The kubelet drops events for a slow reader and says nothing."""
    async with watching(**asking(kubelet), watch_timeout="60s") as on:
        await on.knows("a", "b")
        await on.hears(kubelet.queues, kubelet.send_odd)
        kubelet.put(pod_proto("c"), silently=True)
        kubelet.delete("a", silently=True)
        await on.hears(kubelet.queues, kubelet.send_odd)
        assert on.names == {"a", "b"}
        changes = on.bench.changes
        await on.clock.advance(61)
        await on.knows("b", "c")
        assert (kubelet.lists, on.bench.changes) == (2, changes)


async def test_a_pod_that_ended_between_list_and_watch_goes(kubelet: PodsSocket) -> None:
    """The watch's first events, up to its marker, are all there is."""

    async def list_with_a_ghost(request: bytes, context: object) -> bytes:
        pods = [*kubelet.pods.values(), pod_proto("ghost")]
        return pb.ListPodsResponse(pods=[pod.SerializeToString() for pod in pods]).SerializeToString()

    socket = PodsSocket(kubelet.path.with_name("other.sock"), pods=kubelet.pods)
    socket.list = list_with_a_ghost  # type: ignore[method-assign]
    async with socket.serving(), watching(**asking(socket)) as on:
        await on.knows("a", "b")
        assert on.seen.version == 2


async def test_a_kubelet_that_restarts_is_found_again(path: Path) -> None:
    """The pods stay known meanwhile, and `problem` says so."""
    socket = PodsSocket(path, pods={"uid-a": pod_proto("a")})
    async with watching(**asking(socket)) as on:
        async with socket.serving():
            await on.until(lambda: on.names == {"a"}, resuming=True)
        await on.until(lambda: bool(on.seen.problem))
        assert on.names == {"a"}
        socket.pods["uid-b"] = pod_proto("b")
        async with socket.serving():
            await on.until(lambda: on.names == {"a", "b"} and not on.seen.problem, resuming=True)


async def test_bytes_that_are_no_pod_do_not_hide_the_others(kubelet: PodsSocket) -> None:
    """They are counted and skipped."""
    async with watching(**asking(kubelet)) as on:
        await on.knows("a", "b")
        await on.hears(kubelet.queues, kubelet.send_odd)
        kubelet.send(pb.WatchPodsEvent(type=pb.ADDED, pod=b"\xff\xff\xff").SerializeToString())
        kubelet.send(b"\xff\xff\xff")
        kubelet.put(pod_proto("c"))
        await on.knows("a", "b", "c")
        assert on.odd_events == 3


async def test_only_the_kubelet_is_asked_where_the_block_says_so(path: Path) -> None:
    """No socket: the status says what to mount, and nothing else is tried."""
    async with watching(source="kubelet", kubelet_endpoint=f"unix://{path}") as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert f"there is no socket {path}" in on.status[1]
        assert "hostPath" in on.status[1]


async def test_auto_prefers_the_kubelet(kubelet: PodsSocket) -> None:
    """The API server hears nothing."""
    api = KubeApi()
    async with serving(api), watching(**{**asking(kubelet), "source": "auto", "endpoint": api.url}) as on:
        await on.knows("a", "b")
        assert (api.lists, api.watches) == ([], [])


async def test_auto_asks_the_api_server_where_there_is_no_socket(path: Path) -> None:
    """From the first round on."""
    api = KubeApi()
    api.put(pod_json("x"))
    async with serving(api), watching(kubelet_endpoint=f"unix://{path}", endpoint=api.url) as on:
        await on.knows("x")
        assert on.status == (Status.OK, "")


async def test_auto_leaves_a_kubelet_without_the_api_at_once(path: Path) -> None:
    """The socket is there, its service is not; after five minutes the kubelet, upgraded, is asked again."""
    api = KubeApi()
    api.put(pod_json("x"))
    async with serving(api):
        socket = PodsSocket(path, services=("v1.Other",))
        async with watching(kubelet_endpoint=f"unix://{path}", endpoint=api.url) as on:
            async with socket.serving():
                await on.until(lambda: on.names == {"x"}, resuming=True)
            upgraded = PodsSocket(path, pods={"uid-a": pod_proto("a")})
            async with upgraded.serving():
                await on.hears(api.watchers, api.send_odd)
                await on.clock.advance(320)
                api.end_watches()
                await on.until(lambda: on.names == {"a"}, resuming=True)
                assert len(api.lists) == 1


async def test_auto_leaves_a_kubelet_that_stays_down(kubelet: PodsSocket) -> None:
    """One failure may be a restart; the third in a row is not."""
    api = KubeApi()
    api.put(pod_json("x"))
    kubelet.faults.extend([(grpc.StatusCode.INTERNAL, "broken")] * 3)
    async with serving(api), watching(**{**asking(kubelet), "source": "auto", "endpoint": api.url}) as on:
        await on.until(lambda: on.names == {"x"}, resuming=True)
        assert kubelet.lists == 3


async def test_auto_leaves_a_kubelet_whose_watch_never_works(kubelet: PodsSocket) -> None:
    """That it lists its pods each time is not enough."""
    api = KubeApi()
    api.put(pod_json("x"))
    kubelet.watch_faults.extend([(grpc.StatusCode.INTERNAL, "broken")] * 3)
    async with serving(api), watching(**{**asking(kubelet), "source": "auto", "endpoint": api.url}) as on:
        await on.until(lambda: on.names == {"x"}, resuming=True)
        assert kubelet.lists == 3


async def test_failures_between_good_rounds_do_not_add_up(kubelet: PodsSocket) -> None:
    """Three restarts, each after a round that went well, are no reason to leave the kubelet."""
    api = KubeApi()
    async with (
        serving(api),
        watching(**{**asking(kubelet), "source": "auto", "endpoint": api.url, "watch_timeout": "5s"}) as on,
    ):
        for _ in range(4):
            await on.knows("a", "b")
            await on.hears(kubelet.queues, kubelet.send_odd)
            kubelet.faults.append((grpc.StatusCode.INTERNAL, "broken"))
            await on.clock.advance(5.1)
            await on.until(lambda: "broken" in on.seen.problem)
            await on.until(lambda: not on.seen.problem, resuming=True)
        assert api.lists == []


async def test_auto_needs_no_extra_where_the_kubelet_serves(
    kubelet: PodsSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lightkube is for the API server only."""
    monkeypatch.delitem(sys.modules, "gpulens.extensions.k8s_observer.kubernetes", raising=False)
    monkeypatch.setitem(sys.modules, "lightkube.config.client_adapter", None)
    async with watching(**{**asking(kubelet), "source": "auto"}) as on:
        await on.knows("a", "b")


async def test_auto_without_the_extra_starts_and_says_what_to_install(
    kubelet: PodsSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that may serve its pods later keeps the agent alive; the status names the other way."""
    monkeypatch.delitem(sys.modules, "gpulens.extensions.k8s_observer.kubernetes", raising=False)
    monkeypatch.setitem(sys.modules, "lightkube.config.client_adapter", None)
    gone = kubelet.path.with_name("gone.sock")
    async with watching(source="auto", kubelet_endpoint=f"unix://{gone}") as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert f"there is no socket {gone}" in on.status[1]
        assert "pip install '.[k8s]'" in on.status[1]
        gone.symlink_to(kubelet.path)
        await on.until(lambda: on.names == {"a", "b"}, resuming=True)
        assert on.status == (Status.OK, "")


@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        ("auto", "pods are known only where the kubelet serves its Pods API"),
        ("kubernetes", "which is not installed"),
        ("kubelet", ""),
    ],
)
def test_a_missing_extra_is_a_warning(source: str, doubt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config says so before anything starts; who asks only the kubelet needs nothing."""
    assert config.K8sObserverConfig.model_validate({"source": source}).doubts() == ()
    monkeypatch.setitem(sys.modules, "lightkube", None)
    doubts = config.K8sObserverConfig.model_validate({"source": source}).doubts()
    assert len(doubts) == bool(doubt)
    assert all(doubt in each and "pip install '.[k8s]'" in each for each in doubts)


async def test_the_root_is_no_folder_to_mount() -> None:
    """A socket that would lie in `/` is told to be put elsewhere."""
    async with watching(source="kubelet", kubelet_endpoint="unix:///gpulens-no-such.sock") as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert "must name one in a directory of its own" in on.status[1]
        assert "mount the host's directory" not in on.status[1]


@pytest.mark.parametrize(("written", "valid"), [("999ms", False), ("0s", False), ("1s", True)])
def test_a_watch_lasts_at_least_a_second(written: str, valid: bool) -> None:
    """Shorter ones would be lists without end."""
    if valid:
        assert config.K8sObserverConfig.model_validate({"watch_timeout": written}).watch_timeout == 1.0
        return
    with pytest.raises(ValidationError, match="must be at least 1s"):
        config.K8sObserverConfig.model_validate({"watch_timeout": written})


def test_the_alpha_socket_is_looked_at_where_the_default_is_not_there() -> None:
    """A path that the user wrote is the only one."""
    assert config.K8sObserverConfig().socket_paths == (
        "/var/lib/kubelet/pods-api/pods-api.sock",
        config.ALPHA_KUBELET_PATH,
    )
    assert config.K8sObserverConfig(kubelet_endpoint="unix:/x/y.sock").socket_paths == ("/x/y.sock",)
