"""What the simulated kubelet answers on its Pod Resources socket.

Invariant: field for field what a kubelet sends: a pod without devices is listed too, sidecars as containers
without devices, devices of one container grouped by resource and NUMA node, and nothing about UIDs or phases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpulens.receivers.pod_resources import podresources_pb2 as pb
from gpulens.simulator.layout import FOREVER, Hold, Unit
from gpulens.simulator.schema import PodSpec
from gpulens.simulator.truth import Truth

LARGE_REPLY_BYTES = 5 * 1024 * 1024

# Field 111 of a later version: length-delimited, three bytes.
_UNKNOWN_FIELD = b"\xfa\x06\x03new"


def list_reply(truth: Truth, t_s: float) -> bytes:
    """A serialized ListPodResourcesResponse at this instant (v1 and v1alpha1 share the field numbers)."""
    reply = pb.ListPodResourcesResponse()
    by_pod = _holds_by_pod(truth, t_s)
    for index in _listed(truth, t_s):
        reply.pod_resources.append(_pod(truth.spec.pods[index], by_pod.get(index, ())))
    if truth.fault("kubelet_large", t_s):
        reply.pod_resources.append(_giant(LARGE_REPLY_BYTES - reply.ByteSize()))
    data = reply.SerializeToString()
    return data + _UNKNOWN_FIELD if truth.fault("kubelet_unknown_fields", t_s) else data


def allocatable_reply(truth: Truth, t_s: float) -> bytes:
    """A serialized AllocatableResourcesResponse: every unit of every GPU that is still there."""
    lost = {d.uuid for d in truth.devices() if truth.fault("gpu_lost", t_s, d.index)}
    units = [u for u in truth.units if (u.key if isinstance(u.key, str) else u.key[0]) not in lost]
    return pb.AllocatableResourcesResponse(devices=_devices(units)).SerializeToString()


def pod_reply(truth: Truth, t_s: float, namespace: str, name: str) -> bytes | None:
    """A serialized GetPodResourcesResponse; None when no such pod is listed at this instant."""
    by_pod = _holds_by_pod(truth, t_s)
    for index in _listed(truth, t_s):
        pod = truth.spec.pods[index]
        if (pod.namespace, pod.name) == (namespace, name):
            found = _pod(pod, by_pod.get(index, ()))
            return pb.GetPodResourcesResponse(pod_resources=found).SerializeToString()
    return None


def _listed(truth: Truth, t_s: float) -> Iterable[int]:
    """Pods in List. Before 1.34 finished ones stay, with their devices, as long as the API keeps them."""
    finished_too = truth.fault("kubelet_lists_finished", t_s) is not None
    for index, pod in enumerate(truth.spec.pods):
        end = FOREVER if pod.end is None else truth.start_s + pod.end
        if finished_too:
            end += pod.linger
        if truth.start_s + pod.start <= t_s < end:
            yield index


def _holds_by_pod(truth: Truth, t_s: float) -> dict[int, list[Hold]]:
    finished_too = truth.fault("kubelet_lists_finished", t_s) is not None
    out: dict[int, list[Hold]] = defaultdict(list)
    for hold in truth.holds():
        if hold.start_s <= t_s < (hold.listed_until_s if finished_too else hold.end_s):
            out[hold.pod].append(hold)
    return out


def _pod(pod: PodSpec, holds: Iterable[Hold]) -> pb.PodResources:
    main = pb.ContainerResources(name=pod.container, devices=_devices(h.unit for h in holds))
    others = [pb.ContainerResources(name=name) for name in pod.sidecars]
    return pb.PodResources(name=pod.name, namespace=pod.namespace, containers=[main, *others])


def _devices(units: Iterable[Unit]) -> list[pb.ContainerDevices]:
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for unit in units:
        groups[unit.resource, unit.numa].append(unit.device_id)
    return [
        pb.ContainerDevices(
            resource_name=resource, device_ids=ids, topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=numa)])
        )
        for (resource, numa), ids in groups.items()
    ]


def _giant(size: int) -> pb.PodResources:
    """A pod with thousands of shared devices of another vendor: how replies grow beyond 4 MiB."""
    one = "fake-device-" + "0" * 36
    ids = [f"{one}{i:06d}" for i in range(max(1, size // (len(one) + 8)) + 1)]
    devices = pb.ContainerDevices(resource_name="example.com/fake", device_ids=ids)
    container = pb.ContainerResources(name="main", devices=[devices])
    return pb.PodResources(name="many-devices", namespace="default", containers=[container])
