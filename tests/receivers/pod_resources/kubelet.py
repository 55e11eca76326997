"""A kubelet's Pod Resources socket: a real gRPC server on a unix socket, saying what a test sets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from gpulens.receivers.pod_resources.podresources_pb2 import (
    AllocatableResourcesResponse,
    ClaimResource,
    ContainerDevices,
    ContainerResources,
    DynamicResource,
    ListPodResourcesResponse,
    PodResources,
)

LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
LIST_ALPHA = "/v1alpha1.PodResourcesLister/List"

_Context = grpc.aio.ServicerContext[bytes, bytes]


def devices(resource: str, *ids: str) -> ContainerDevices:
    """One resource with these device ids."""
    return ContainerDevices(resource_name=resource, device_ids=ids)


def pod(
    namespace: str, name: str, *held: ContainerDevices, container: str = "main", claims: Sequence[ClaimResource] = ()
) -> PodResources:
    """A pod with one container."""
    dynamic = [DynamicResource(claim_name="claim", claim_namespace=namespace, claim_resources=claims)] if claims else []
    inner = ContainerResources(name=container, devices=held, dynamic_resources=dynamic)
    return PodResources(namespace=namespace, name=name, containers=[inner])


def pod_list(*pods: PodResources) -> bytes:
    """An encoded List reply."""
    return ListPodResourcesResponse(pod_resources=pods).SerializeToString()


def allocatable(*groups: ContainerDevices) -> bytes:
    """An encoded GetAllocatableResources reply."""
    return AllocatableResourcesResponse(devices=groups).SerializeToString()


@dataclass
class Fault:
    """What a method answers instead of a reply."""

    code: grpc.StatusCode
    details: str


@dataclass
class FakeKubelet:
    """Serves `answers` by method path: bytes, a Fault, or nothing at all for a method that is not there."""

    path: Path
    answers: dict[str, bytes | Fault] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens on the socket."""
        self.server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
        self.server.add_generic_rpc_handlers((_Handlers(self),))
        self.server.add_insecure_port(f"unix:{self.path}")
        await self.server.start()

    async def stop(self) -> None:
        """Stops listening and takes the socket file away."""
        server, self.server = self.server, None
        if server is not None:
            await server.stop(None)
        self.path.unlink(missing_ok=True)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in the stubs only
    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = details.method
        self._kubelet.calls.append(method)
        if method not in self._kubelet.answers:
            return None
        return grpc.unary_unary_rpc_method_handler(self._answer(method))

    def _answer(self, method: str) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def answer(request: bytes, context: _Context) -> bytes:
            found = self._kubelet.answers[method]
            if isinstance(found, Fault):
                await context.abort(found.code, found.details)
            assert isinstance(found, bytes)
            return found

        return answer
