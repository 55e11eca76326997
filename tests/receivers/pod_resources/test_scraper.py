from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from pydantic import ValidationError

from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.status import Status
from gpulens.receivers.pod_resources.client import KubeletClient, why_unreachable
from gpulens.receivers.pod_resources.config import PodResourcesConfig
from tests.receivers.pod_resources.kubelet import (
    ALLOCATABLE,
    LIST,
    LIST_ALPHA,
    FakeKubelet,
    Fault,
    allocatable,
    devices,
    pod,
    pod_list,
)
from tests.receivers.pod_resources.node import Node, rows

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
GPU = "nvidia.com/gpu"


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="kubelet") as folder:
        yield Path(folder) / "kubelet.sock"


@pytest_asyncio.fixture
async def kubelet(socket_path: Path) -> AsyncIterator[FakeKubelet]:
    """A kubelet with one pod on the first of two GPUs."""
    kubelet = FakeKubelet(socket_path)
    kubelet.answers[LIST] = pod_list(pod("ml", "train", devices(GPU, A)))
    kubelet.answers[ALLOCATABLE] = allocatable(devices(GPU, A, B))
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


async def test_every_scrape_says_who_holds_what(kubelet: FakeKubelet) -> None:
    """1 on the owner, 0 on the node for the free GPU, with replicas, sharing and signs of life, all
    complete."""
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert (batch.stream, batch.complete, batch.time_ns) == ("pod_resources", True, node.clock.now_ns())
    assert rows(batch, "gpu.allocated") == {("train", A): 1, ("", B): 0}
    assert rows(batch, "gpu.allocation.replicas") == {("", A): 1, ("", B): 1}
    assert rows(batch, "gpu.sharing") == {("", A): 1, ("", B): 1}
    assert rows(batch, "gpu.source.up") == {("", ""): 1}
    owner = batch.layout.blocks[-1]
    assert owner.resource.map == {
        "k8s.node.name": "node-a",
        "service.name": "gpulens",
        "service.instance.id": "node-a",
        "k8s.namespace.name": "ml",
        "k8s.pod.name": "train",
        "k8s.container.name": "main",
    }
    assert owner.scope.name == "gpulens/pod_resources"
    assert owner.series[0].map == {"hw.id": A, "gpu.allocation.source": "pod_resources"}
    assert node.reports[-1] == (Status.OK, "")


async def test_the_layout_stays_while_the_content_does(kubelet: FakeKubelet) -> None:
    """Equal content gives the same layout object, also in another order; a new pod leaves other blocks
    alone."""
    train, other = pod("ml", "train", devices(GPU, A)), pod("ml", "zeta", devices(GPU, B))
    kubelet.answers[LIST] = pod_list(train, other)
    node = Node(kubelet.path)
    first = await node.tick()
    second = await node.tick()
    kubelet.answers[LIST] = pod_list(other, train)
    third = await node.tick()
    assert first.layout is second.layout is third.layout
    kubelet.answers[LIST] = pod_list(train)
    fourth = await node.tick()
    await node.receiver.shutdown()
    assert fourth.layout is not first.layout
    assert fourth.layout.blocks[-1] is first.layout.blocks[-2]


async def test_a_node_without_devices_still_lives(kubelet: FakeKubelet) -> None:
    """No devices is an answer: complete, with nothing but signs of life."""
    kubelet.answers[LIST] = pod_list()
    kubelet.answers[ALLOCATABLE] = allocatable()
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert batch.complete
    assert {series.metric.name for _, _, series in batch.layout.identities()} == {
        "gpu.source.up",
        "gpu.source.interval",
    }


async def test_an_old_kubelet_is_read_by_v1alpha1(kubelet: FakeKubelet) -> None:
    """Without v1 the older service is used at once, and v1 is asked again only after a while."""
    kubelet.answers = {LIST_ALPHA: pod_list(pod("ml", "train", devices(GPU, A)))}
    node = Node(kubelet.path)
    batch = await node.tick()
    assert batch.complete
    assert rows(batch, "gpu.allocated") == {("train", A): 1}
    kubelet.calls.clear()
    await node.tick()
    assert kubelet.calls == [LIST_ALPHA]
    kubelet.answers = {LIST: pod_list(pod("ml", "v1", devices(GPU, B)))}
    await node.clock.advance(301)
    assert rows(await node.tick(), "gpu.allocated") == {("v1", B): 1}
    await node.receiver.shutdown()


async def test_a_kubelet_with_neither_service_says_so(kubelet: FakeKubelet) -> None:
    """Both missing is an error that names the feature gate."""
    kubelet.answers = {}
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert rows(batch, "gpu.source.up") == {("", ""): 0}
    assert "neither v1 nor v1alpha1" in node.reports[-1][1]


@pytest.mark.parametrize(
    "answer", [None, Fault(grpc.StatusCode.UNKNOWN, "PodResources API GetAllocatableResources disabled")]
)
async def test_no_allocatable_list_is_no_failure(kubelet: FakeKubelet, answer: Fault | None) -> None:
    """A kubelet without the method, or with its gate off, still tells the owners, completely."""
    del kubelet.answers[ALLOCATABLE]
    if answer is not None:
        kubelet.answers[ALLOCATABLE] = answer
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert batch.complete
    assert rows(batch, "gpu.allocated") == {("train", A): 1}
    assert node.reports[-1] == (Status.OK, "")


async def test_a_failing_allocatable_list_is_covered_by_the_last_one(kubelet: FakeKubelet) -> None:
    """List alone says who holds what, so the batch stays complete: a device that nobody names any more must not keep
    its old owner. What is free is known from the last good answer, for as long as `reuse`."""
    node = Node(kubelet.path, reuse="60s")
    before = await node.tick()
    kubelet.answers[ALLOCATABLE] = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    await node.clock.advance(10)
    during = await node.tick()
    await node.clock.advance(60)
    later = await node.tick()
    await node.receiver.shutdown()
    assert during.complete
    assert later.complete
    assert rows(during, "gpu.allocated") == rows(before, "gpu.allocated")
    assert rows(later, "gpu.allocated") == {("train", A): 1}
    assert rows(later, "gpu.telemetry.rejected") == {("", ""): 2}


async def test_a_snapshot_tells_request_and_reply(kubelet: FakeKubelet) -> None:
    """What the kubelet says was true between the two: start time and time of its readings."""
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    slot = next(i for i, (_, _, s) in enumerate(batch.layout.identities()) if s.metric.name == "gpu.allocated")
    assert 0 < batch.starts()[slot] <= batch.times()[slot]


async def test_a_silent_kubelet_is_reused_and_then_dropped(kubelet: FakeKubelet) -> None:
    """For `reuse` only signs of life go out, partial; then a complete batch takes the old owners off."""
    node = Node(kubelet.path, reuse="60s")
    await node.tick()
    kubelet.answers[LIST] = Fault(grpc.StatusCode.INTERNAL, "not now")
    seen = []
    for _ in range(7):
        await node.clock.advance(10)
        batch = await node.tick()
        seen.append(batch.complete)
        assert rows(batch, "gpu.allocated") == {}
        assert rows(batch, "gpu.source.up") == {("", ""): 0}
    await node.receiver.shutdown()
    assert seen == [False] * 5 + [True] * 2


async def test_a_restarted_kubelet_is_found_at_the_next_scrape(kubelet: FakeKubelet) -> None:
    """The socket file goes and comes back; the same channel reads the new one."""
    node = Node(kubelet.path)
    await node.tick()
    await kubelet.stop()
    down = await node.tick()
    assert rows(down, "gpu.source.up") == {("", ""): 0}
    assert "there is no socket" in node.reports[-1][1]
    kubelet.answers[LIST] = pod_list(pod("ml", "after", devices(GPU, B)))
    await kubelet.start()
    back = await node.tick()
    await node.receiver.shutdown()
    assert rows(back, "gpu.allocated") == {("after", B): 1, ("", A): 0}


async def test_a_restart_between_two_scrapes_goes_unseen(kubelet: FakeKubelet) -> None:
    """The lost connection is noticed and made anew within one scrape."""
    node = Node(kubelet.path)
    await node.tick()
    for _ in range(3):
        await kubelet.stop()
        await kubelet.start()
        assert rows(await node.tick(), "gpu.source.up") == {("", ""): 1}
    await node.receiver.shutdown()


async def test_a_kubelet_that_was_upgraded_is_asked_for_v1_at_once(kubelet: FakeKubelet) -> None:
    """What an old kubelet lacked is not held against the one that comes after it."""
    kubelet.answers = {LIST_ALPHA: pod_list()}
    node = Node(kubelet.path)
    await node.tick()
    await kubelet.stop()
    kubelet.answers = {LIST: pod_list(pod("ml", "v1", devices(GPU, B)))}
    await node.tick()
    await kubelet.start()
    assert rows(await node.tick(), "gpu.allocated") == {("v1", B): 1}
    await node.receiver.shutdown()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rejected by rate limit", "rate_limited"),
        ("grpc: received message larger than max (5 vs. 4)", "message_too_large"),
        ("no file handles", "resource_exhausted"),
    ],
)
async def test_exhausted_resources_are_told_apart(kubelet: FakeKubelet, text: str, reason: str) -> None:
    """One code, three causes: the text decides."""
    kubelet.answers[LIST] = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    client = KubeletClient(str(kubelet.path), VirtualClock(), 5, 1 << 20)
    with pytest.raises(ScrapeError) as caught:
        await client.list()
    await client.close()
    assert caught.value.reason == reason


async def test_a_reply_of_5_mib_is_read(kubelet: FakeKubelet) -> None:
    """The default limit of gRPC is 4 MiB; big nodes answer with more."""
    pods = [
        pod("ml", f"pod-{n}", devices("nvidia.com/gpu.shared", *(f"{A}::{m}" for m in range(64 * n, 64 * n + 64))))
        for n in range(1900)
    ]
    kubelet.answers[LIST] = pod_list(*pods)
    assert len(pod_list(*pods)) > 5 << 20
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert len(rows(batch, "gpu.allocated")) == 1900 + 1


async def test_a_reply_over_the_limit_says_what_to_raise(kubelet: FakeKubelet) -> None:
    """gRPC's own refusal is recognised as a size error."""
    kubelet.answers[LIST] = pod_list(*(pod("ml", "x" * 200, devices(GPU, "y" * 400)) for _ in range(3000)))
    node = Node(kubelet.path, max_message_size_mib=1)
    await node.tick()
    await node.receiver.shutdown()
    assert "raise 'max_message_size_mib'" in node.reports[-1][1]
    assert node.telemetry.value("otelcol_scraper_errored_metric_points", reason="message_too_large") == 1


async def test_hostile_bytes_are_a_failed_scrape(kubelet: FakeKubelet) -> None:
    """A reply that is no message fails the scrape and nothing else."""
    kubelet.answers[LIST] = b"\xff\xff\xff"
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    assert rows(batch, "gpu.source.up") == {("", ""): 0}
    assert "no Pod Resources message" in node.reports[-1][1]


async def test_struck_out_entries_are_counted(kubelet: FakeKubelet) -> None:
    """What was not used shows as rejected points by reason."""
    kubelet.answers[LIST] = pod_list(pod("", "nameless", devices(GPU, A)))
    node = Node(kubelet.path)
    batch = await node.tick()
    await node.receiver.shutdown()
    found = rows(batch, "gpu.telemetry.rejected")
    assert found == {("", ""): 1}


def test_the_missing_mount_is_named(tmp_path: Path) -> None:
    """No directory, no socket in it, a plain file, a dead socket and no permission each have their own
    advice."""
    folder = tmp_path / "pod-resources"
    path = folder / "kubelet.sock"
    message, reason = why_unreachable(path, "")
    assert reason == "no_socket"
    assert f"mount the host's directory {folder}" in message
    assert "not the socket file" in message
    folder.mkdir()
    assert "down or restarting" in why_unreachable(path, "")[0]
    path.touch()
    assert "is not a socket" in why_unreachable(path, "")[0]
    path.unlink()
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as dead:
        stale = Path(short) / "s"
        dead.bind(str(stale))
        message, reason = why_unreachable(stale, "Connection refused")
        assert reason == "unavailable"
        assert "stale" in message
        assert why_unreachable(stale, "connect: Permission denied")[1] == "permission_denied"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"endpoint": "unix:kubelet.sock"}, "whole path"),
        ({"endpoint": "http://localhost:1"}, "whole path"),
        ({"collection_interval": "0s"}, "'collection_interval' must be positive"),
        ({"max_message_size_mib": 0}, "greater than or equal to 1"),
        ({"sharing_mode": "mig"}, "time_slicing"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, object], text: str) -> None:
    """A setting that can't work is refused with what would."""
    with pytest.raises(ValidationError, match=text):
        PodResourcesConfig.model_validate(config)


@pytest.mark.parametrize("endpoint", ["unix:///run/k.sock", "unix:/run/k.sock", "/run/k.sock"])
def test_every_spelling_of_a_socket_is_understood(endpoint: str) -> None:
    """With or without scheme, the path is the same."""
    assert PodResourcesConfig.model_validate({"endpoint": endpoint}).socket_path == "/run/k.sock"
