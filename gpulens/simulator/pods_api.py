"""What the simulated kubelet answers on the socket of its Pods API.

Invariant: a pod is there from its start until it has lingered after its end, with the phase that it has then. Container
ids are those that stand in the cgroups of its simulated processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace

from gpulens.extensions.k8s_observer import pods_pb2 as pb
from gpulens.simulator.layout import FOREVER, container_id, owner_of
from gpulens.simulator.truth import Truth

SERVICE = "v1beta1.Pods"


def pods_at(truth: Truth, t_s: float) -> dict[str, bytes]:
    """The serialized core/v1 Pods at this instant, by UID."""
    return {pod.metadata.uid: pod.SerializeToString() for pod in _pods(truth, t_s)}


def pods_reply(truth: Truth, t_s: float) -> bytes:
    """A serialized ListPodsResponse."""
    return pb.ListPodsResponse(pods=pods_at(truth, t_s).values()).SerializeToString()


async def pod_events(
    pods: Callable[[], Mapping[str, bytes]], wait: Callable[[Callable[[], bool]], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """The serialized WatchPodsEvents of one watch: what is there, the mark, then every change, for good.

    `wait` returns once what it is given is true.
    """
    known = dict(pods())
    for pod in known.values():
        yield _event(pb.ADDED, pod)
    yield pb.WatchPodsEvent(type=pb.INITIAL_SYNC_COMPLETE).SerializeToString()
    while True:
        await wait(lambda: pods() != known)  # noqa: B023 - evaluated before the next round sets it
        now = dict(pods())
        for uid, pod in known.items():
            if uid not in now:
                yield _event(pb.DELETED, pod)
        for uid, pod in now.items():
            if pod != known.get(uid):
                yield _event(pb.MODIFIED if uid in known else pb.ADDED, pod)
        known = now


def _event(kind: pb.EventType, pod: bytes) -> bytes:
    return pb.WatchPodsEvent(type=kind, pod=pod).SerializeToString()


def _pods(truth: Truth, t_s: float) -> Iterator[pb.Pod]:
    for index, pod in enumerate(truth.spec.pods):
        start_s = truth.start_s + pod.start
        end_s = FOREVER if pod.end is None else truth.start_s + pod.end
        if not start_s <= t_s < end_s + pod.linger:
            continue
        running = t_s < end_s
        owner = owner_of(truth.spec, index)
        statuses = [
            _status(name, container_id(replace(owner, container=name)), start_s, running)
            for name in (pod.container, *pod.sidecars)
        ]
        yield pb.Pod(
            metadata=pb.ObjectMeta(name=pod.name, namespace=pod.namespace, uid=owner.uid),
            status=pb.PodStatus(
                phase="Running" if running else "Succeeded",
                conditions=[pb.PodCondition(type="Ready", status=str(running))],
                start_time=pb.Time(seconds=int(start_s)),
                container_statuses=statuses,
            ),
        )


def _status(name: str, identity: str, start_s: float, running: bool) -> pb.ContainerStatus:
    state = pb.ContainerState(running=pb.ContainerStateRunning(started_at=pb.Time(seconds=int(start_s))))
    return pb.ContainerStatus(
        name=name,
        container_id=f"containerd://{identity}",
        ready=running,
        state=state if running else pb.ContainerState(),
    )
