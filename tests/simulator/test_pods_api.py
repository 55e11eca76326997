"""The simulated kubelet's Pods API, asked by the observer that users run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import grpc.aio
import pytest

from gpulens.extensions.k8s_observer import pods_pb2 as pb
from gpulens.extensions.k8s_observer.kubelet import slim
from gpulens.simulator.layout import container_id
from gpulens.simulator.server import serve
from gpulens.simulator.world import World

WORLD = """
gpus: [{model: L4}]
pods:
  - {name: a, namespace: n, container: c, sidecars: [logs], devices: ['0'], start: -1h, end: 60s, linger: 30s}
  - {name: b, namespace: n, container: c, devices: ['0'], start: 60s}
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path short enough for a unix socket."""
    with TemporaryDirectory(prefix="gl") as folder:
        yield Path(folder) / "pods.sock"


async def test_pods_come_change_and_go(path: Path) -> None:
    """A list and then events: the old pod succeeds as the new one starts, and is deleted when it has lingered."""
    world = World.load(WORLD)
    since = 0.0
    async with (
        serve(world, lambda: world.start_s + since, pods=path, tick_s=None) as node,
        grpc.aio.insecure_channel(node.pods_endpoint) as channel,
    ):
        reply: bytes = await channel.unary_unary("/v1beta1.Pods/ListPods", None, None)(b"")
        listed = pb.ListPodsResponse.FromString(reply)
        (pod,) = map(slim, map(pb.Pod.FromString, listed.pods))
        assert (pod.name, pod.phase, pod.ready, pod.start_s) == ("a", "Running", True, world.start_s - 3600)
        (hold, _) = world.holds()
        assert [each.name for each in pod.containers] == ["c", "logs"]
        assert pod.uid == hold.owner.uid
        assert pod.containers[0].id == container_id(hold.owner)

        watch = channel.unary_stream("/v1beta1.Pods/WatchPods", None, None)(b"")

        async def events(count: int) -> list[tuple[int, str, str]]:
            seen: list[tuple[int, str, str]] = []
            for _ in range(count):
                data = await watch.read()
                assert isinstance(data, bytes)
                event = pb.WatchPodsEvent.FromString(data)
                found = slim(pb.Pod.FromString(event.pod))
                seen.append((int(event.type), found.name, found.phase))
            return seen

        assert await events(2) == [(pb.ADDED, "a", "Running"), (pb.INITIAL_SYNC_COMPLETE, "", "")]
        since = 61.0
        await node.settle()
        assert await events(2) == [(pb.MODIFIED, "a", "Succeeded"), (pb.ADDED, "b", "Running")]
        since = 95.0
        await node.settle()
        assert await events(1) == [(pb.DELETED, "a", "Succeeded")]
        watch.cancel()
