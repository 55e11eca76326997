"""This node's pods from the kubelet itself, by its Pods API (KEP-4188): no API server, no rights but the socket's.

Invariant: what the stream drops is found again, since the pods are listed anew after every watch; a kubelet without
the API is told apart from one that is only restarting.

Facts: beta and on by default in Kubernetes 1.37; the calls share 100 a second (burst 10) with every other client of
the node; FAILED_PRECONDITION until the kubelet has synced (kubernetes pkg/kubelet/apis/pods).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gpulens.extensions.k8s_observer import pods_pb2 as pb
from gpulens.extensions.k8s_observer.known import NOT_SERVED, KnownPods, WatchError, bare_id, short_annotations
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.pods import Container, Pod
from gpulens.pipeline.scraping import DeadlineError, within

SERVICES: Final = ("v1beta1.Pods", "v1alpha1.Pods")
MAX_MESSAGE: Final = 64 * 2**20
"""A list of 500 pods with long annotations is larger than gRPC's default of 4 MiB."""


class Kubelet:
    """Lists and watches the pods behind one of some sockets: the first that is there."""

    def __init__(
        self,
        paths: tuple[str, ...],
        clock: Clock,
        timeout_s: float,
        watch_s: float,
        known: KnownPods,
        unreadable: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._clock = clock
        self._timeout_s = timeout_s
        self._watch_s = watch_s
        self._known = known
        self._unreadable = unreadable

    @property
    def path(self) -> str:
        """The socket that is there, else the first."""
        return next((path for path in self._paths if Path(path).exists()), self._paths[0])

    @property
    def is_there(self) -> bool:
        """A socket file is there; whether anybody listens shows when it is asked."""
        return Path(self.path).exists()

    async def follow(self) -> None:
        """One list, then one watch for its time. Raises WatchError."""
        options = (
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.default_authority", "localhost"),
        )
        # gRPC reads a target as a URI: a bare %, # or ? in the path would name another file.
        channel = grpc.aio.insecure_channel(f"unix:{quote(self.path)}", options=options)
        try:
            await self._round(channel)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from error
        finally:
            await channel.close(None)

    async def _round(self, channel: grpc.aio.Channel) -> None:
        try:
            service = await within(self._clock, self._timeout_s, self._list(channel))
        except DeadlineError as error:
            raise WatchError(f"the kubelet did not list its pods on {self.path}: {error}", "timeout") from error
        try:
            await within(self._clock, self._watch_s, self._watch(channel, service))
        except DeadlineError:
            return  # its time is over: the next round lists anew

    async def close(self) -> None:
        """Nothing stays open between two rounds."""

    def forget(self) -> None:
        """Nothing is kept between two rounds."""

    async def _list(self, channel: grpc.aio.Channel) -> str:
        """Takes the list in; returns the service that this kubelet has."""
        for service in SERVICES:
            try:
                body: bytes = await channel.unary_unary(f"/{service}/ListPods", None, None)(b"")
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                continue
            try:
                reply = pb.ListPodsResponse.FromString(body)
            except DecodeError as error:
                raise WatchError(f"the kubelet's list of pods can't be read: {error}", "bad_answer") from error
            self._known.replace(pod for data in reply.pods if (pod := self._read(data)) is not None)
            return service
        raise WatchError(f"the kubelet behind {self.path} has no Pods API (Kubernetes 1.37)", NOT_SERVED)

    async def _watch(self, channel: grpc.aio.Channel, service: str) -> None:
        first: set[str] | None = set()
        async for data in channel.unary_stream(f"/{service}/WatchPods", None, None)(b""):
            try:
                event = pb.WatchPodsEvent.FromString(data)
            except DecodeError as error:
                self._unreadable(str(error))
                continue
            if event.type == pb.INITIAL_SYNC_COMPLETE:
                if first is not None:  # what ended between list and watch
                    self._known.retain(first)
                first = None
                continue
            pod = self._read(event.pod)
            if pod is None:
                continue
            if event.type == pb.DELETED:
                self._known.remove(pod.uid)
                continue
            self._known.put(pod)
            if first is not None:
                first.add(pod.uid)

    def _read(self, data: bytes) -> Pod | None:
        """A pod; None, and counted, for what can't be read: one odd pod must not hide the others."""
        try:
            return slim(pb.Pod.FromString(data))
        except DecodeError as error:
            self._unreadable(str(error))
            return None

    def _explained(self, error: grpc.aio.AioRpcError) -> WatchError:
        code, text, path = error.code(), error.details() or "", self.path
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return WatchError(f"the kubelet behind {path} can't watch pods", NOT_SERVED)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return WatchError(f"the kubelet has not synced its pods yet: {text}", "not_synced")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            if "larger than max" in text.lower():
                return WatchError(f"the kubelet's list of pods is larger than {MAX_MESSAGE} bytes", "too_large")
            return WatchError(
                f"the kubelet rejects the call by its rate limit: another client of {path} asks too often",
                "rate_limited",
            )
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return WatchError(f"the kubelet refuses the call on {path}: {text}", NOT_SERVED)
        if code is not grpc.StatusCode.UNAVAILABLE:
            return WatchError(f"the kubelet answers {code.name} on {path}: {text}", code.name.lower())
        if not Path(path).exists():
            folder = Path(path).parent
            mount = (
                f"mount the host's directory {folder} (hostPath)"
                if folder != Path("/")
                else "'kubelet_endpoint' must name one in a directory of its own, which can be mounted"
            )
            return WatchError(f"there is no socket {path}: this kubelet has no Pods API, or {mount}", NOT_SERVED)
        if "permission denied" in text.lower():
            return WatchError(f"no permission to open {path}; run as root, or with the socket's group", NOT_SERVED)
        return WatchError(f"nobody listens on {path}: the kubelet is down or restarting", "unavailable")


def slim(pod: pb.Pod) -> Pod:
    """What is kept of a pod."""
    meta, status = pod.metadata, pod.status
    owner = next((each for each in meta.owner_references if each.controller), None)
    statuses = (*status.container_statuses, *status.init_container_statuses, *status.ephemeral_container_statuses)
    ready = [condition.status == "True" for condition in status.conditions if condition.type == "Ready"]
    return Pod(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        ip=status.pod_ip,
        phase=status.phase,
        ready=ready[0] if ready else None,
        start_s=_seconds(status.start_time) if status.HasField("start_time") else None,
        deleting=meta.HasField("deletion_timestamp"),
        host_network=pod.spec.host_network,
        owner_kind=owner.kind if owner is not None else "",
        owner_name=owner.name if owner is not None else "",
        labels=dict(meta.labels),
        annotations=short_annotations(meta.annotations),
        containers=tuple(map(_container, statuses)),
    )


def _container(status: pb.ContainerStatus) -> Container:
    running = status.state.running
    started_s = _seconds(running.started_at) if running.HasField("started_at") else None
    return Container(status.name, bare_id(status.container_id), started_s, status.ready)


def _seconds(time: pb.Time) -> float:
    return time.seconds + time.nanos / 1e9
