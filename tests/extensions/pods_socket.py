"""A kubelet's Pods API: a real gRPC server on a unix socket, holding the pods that a test sets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from gpulens.extensions.k8s_observer import pods_pb2 as pb

Context = grpc.aio.ServicerContext[bytes, bytes]


def pod_proto(name: str, phase: str = "Running", **meta: str) -> pb.Pod:
    """A pod as the kubelet marshals it."""
    return pb.Pod(
        metadata=pb.ObjectMeta(
            name=name,
            namespace="ml",
            uid=f"uid-{name}",
            labels={"app": name},
            annotations=meta,
            owner_references=[pb.OwnerReference(kind="Job", name="sweep", controller=True)],
        ),
        spec=pb.PodSpec(host_network=True),
        status=pb.PodStatus(
            phase=phase,
            pod_ip="10.0.0.1",
            start_time=pb.Time(seconds=1767603600),
            conditions=[pb.PodCondition(type="Ready", status="False")],
            container_statuses=[
                pb.ContainerStatus(
                    name="main",
                    ready=True,
                    container_id="containerd://f00d",
                    state=pb.ContainerState(running=pb.ContainerStateRunning(started_at=pb.Time(seconds=1767603630))),
                )
            ],
        ),
    )


@dataclass
class PodsSocket:
    """The server. `faults` are used up one a list, `watch_faults` one a watch; `marks_sync` is False for a
    kubelet without the marker."""

    path: Path
    services: Sequence[str] = ("v1beta1.Pods",)
    pods: dict[str, pb.Pod] = field(default_factory=dict)
    faults: deque[tuple[grpc.StatusCode, str]] = field(default_factory=deque)
    watch_faults: deque[tuple[grpc.StatusCode, str]] = field(default_factory=deque)
    marks_sync: bool = True
    lists: int = 0
    queues: list[asyncio.Queue[bytes | None]] = field(default_factory=list)

    def put(self, pod: pb.Pod, *, silently: bool = False) -> None:
        """A pod appears or changes; silently: the event is lost."""
        kind = pb.MODIFIED if pod.metadata.uid in self.pods else pb.ADDED
        self.pods[pod.metadata.uid] = pod
        if not silently:
            self.send(_event(kind, pod))

    def delete(self, name: str, *, silently: bool = False) -> None:
        """A pod is gone."""
        pod = self.pods.pop(f"uid-{name}")
        if not silently:
            self.send(_event(pb.DELETED, pod))

    def send(self, event: bytes | None) -> None:
        """Raw bytes to every watch; None ends it."""
        for queue in self.queues:
            queue.put_nowait(event)

    def send_odd(self) -> None:
        """An event that can't be read."""
        self.send(b"\xff\xff\xff")

    async def list(self, request: bytes, context: Context) -> bytes:
        """ListPods."""
        self.lists += 1
        if self.faults:
            await context.abort(*self.faults.popleft())
        return pb.ListPodsResponse(pods=[pod.SerializeToString() for pod in self.pods.values()]).SerializeToString()

    async def watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """WatchPods."""
        if self.watch_faults:
            await context.abort(*self.watch_faults.popleft())
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.queues.append(queue)
        try:
            for pod in list(self.pods.values()):
                yield _event(pb.ADDED, pod)
            if self.marks_sync:
                yield pb.WatchPodsEvent(type=pb.INITIAL_SYNC_COMPLETE).SerializeToString()
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self.queues.remove(queue)

    def clear(self) -> None:
        """Removes what a server before it left."""
        self.path.unlink(missing_ok=True)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PodsSocket]:
        """Serves it until the end of the block."""
        server = grpc.aio.server()
        for service in self.services:
            methods = {
                "ListPods": grpc.unary_unary_rpc_method_handler(self.list),
                "WatchPods": grpc.unary_stream_rpc_method_handler(self.watch),
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        self.clear()
        server.add_insecure_port(f"unix:{self.path}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)


def _event(kind: pb.EventType, pod: pb.Pod) -> bytes:
    return pb.WatchPodsEvent(type=kind, pod=pod.SerializeToString()).SerializeToString()
