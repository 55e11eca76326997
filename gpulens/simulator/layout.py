"""The devices of a world, the ids that a device plugin gives them, and who gets which.

Invariant: a unit (a GPU, a MIG instance, or one replica of either) is held by at most one pod at any instant;
a hold lasts for [start, end), so a handover at one instant leaves no moment with two owners.

Device ids are those that the kubelet shows (NVIDIA's plugin: UUIDs, `::N` for replicas; GKE's:
nvidiaN/giM/vgpuK with N the minor, not the index).
"""

from __future__ import annotations

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from gpulens.pipeline.errors import ConfigError, Problem
from gpulens.simulator.models import MIB, MODELS, GpuModel, MigProfile, number_instances
from gpulens.simulator.schema import GpuSpec, KubeletSpec, PodSpec, WorldSpec

# A GPU by its UUID, or a MIG instance by its parent's UUID and its GPU-instance id.
DeviceKey: TypeAlias = str | tuple[str, int]

FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds a device."""

    namespace: str
    pod: str
    container: str
    uid: str


def container_id(owner: Owner) -> str:
    """The invented id of a pod's container: 64 hexadecimal digits that its pod's UID and its name make up."""
    return hashlib.sha256(f"{owner.uid}/{owner.container}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One GPU instance with its only compute instance."""

    uuid: str
    parent: str
    gi: int
    ci: int
    profile: MigProfile
    memory_bytes: int

    @property
    def key(self) -> DeviceKey:
        """What this instance goes by in the truth functions."""
        return (self.parent, self.gi)


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU. `index` is DCGM's gpu id, `minor` the N of /dev/nvidiaN."""

    index: int
    uuid: str
    minor: int
    pci: str
    numa: int
    model: GpuModel
    sharing: str
    replicas: int
    mig: tuple[MigInstance, ...]
    xids: tuple[tuple[float, int], ...]

    @property
    def memory_bytes(self) -> int:
        """The memory of the whole board, the driver's share included."""
        return self.model.memory_mib * MIB

    @property
    def held_as(self) -> tuple[DeviceKey, ...]:
        """What can be held on this GPU: the GPU itself, or its MIG instances."""
        return tuple(instance.key for instance in self.mig) if self.mig else (self.uuid,)


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing that the device plugin hands out."""

    key: DeviceKey
    reference: str
    device_id: str
    resource: str
    numa: int
    replica: int | None
    model: str
    profile: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A container has a unit during [start_s, end_s); old kubelets list it until `listed_until_s`."""

    owner: Owner
    unit: Unit
    start_s: float
    end_s: float
    listed_until_s: float
    pod: int


def build_devices(spec: WorldSpec) -> tuple[Device, ...]:
    """The GPUs of the world, in the order of the file; invented identities depend on the seed alone."""
    return tuple(_device(spec, index, gpu) for index, gpu in enumerate(spec.gpus))


def _device(spec: WorldSpec, index: int, gpu: GpuSpec) -> Device:
    model = MODELS[gpu.model]
    identity = gpu.uuid or f"GPU-{_invented(spec.seed, 'gpu', str(index))}"
    profiles = [model.mig[m.profile] for m in gpu.mig]
    instances = []
    for given, profile, numbered in zip(gpu.mig, profiles, _instance_ids(gpu, profiles), strict=True):
        gi = numbered if given.gi is None else given.gi
        memory = (model.memory_mib - model.reserved_mib) * profile.memory // 8 * MIB
        name = f"MIG-{_invented(spec.seed, identity, str(gi))}"
        instances.append(MigInstance(name, identity, gi, 0, profile, memory))
    return Device(
        index=index,
        uuid=identity,
        minor=index if gpu.minor is None else gpu.minor,
        pci=gpu.pci or f"00000000:{0x04 + 0x11 * index & 0xFF:02X}:00.0",
        numa=gpu.numa,
        model=model,
        sharing=gpu.sharing,
        replicas=gpu.replicas,
        mig=tuple(instances),
        xids=tuple(sorted((spec.start + x.at, x.code) for x in gpu.xids)),
    )


def _instance_ids(gpu: GpuSpec, profiles: list[MigProfile]) -> list[int]:
    given = {m.gi for m in gpu.mig if m.gi is not None}
    free = (gi for gi in number_instances(profiles * 2) if gi not in given)
    numbered = number_instances(profiles)
    return [gi if gi not in given else next(free) for gi in numbered]


def _invented(seed: int, *names: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join((str(seed), *names))))


def build_units(spec: WorldSpec, devices: tuple[Device, ...]) -> tuple[Unit, ...]:
    """Everything that can be allocated, in the order in which a plugin would list it."""
    return tuple(unit for device, gpu in zip(devices, spec.gpus, strict=True) for unit in _units(spec, device, gpu))


def _units(spec: WorldSpec, device: Device, gpu: GpuSpec) -> Iterator[Unit]:
    places: list[tuple[DeviceKey, str, MigInstance | None]] = [
        (i.key, f"{device.index}/gi{i.gi}", i) for i in device.mig
    ] or [(device.uuid, str(device.index), None)]
    shared = device.sharing != "whole"
    for key, reference, instance in places:
        for replica in range(device.replicas) if shared else [None]:
            yield Unit(
                key=key,
                reference=reference if replica is None else f"{reference}::{replica}",
                device_id=_device_id(spec.kubelet, device, instance, replica),
                resource=_resource(spec.kubelet, instance, shared=shared),
                numa=device.numa,
                replica=replica,
                model=gpu.model,
                profile=instance.profile.name if instance else "",
            )


def _device_id(kubelet: KubeletSpec, device: Device, instance: MigInstance | None, replica: int | None) -> str:
    if kubelet.plugin == "gke":
        name = f"nvidia{device.minor}"
        if instance is not None:
            name += f"/gi{instance.gi}"
        return name if replica is None else f"{name}/vgpu{replica}"
    if instance is None:
        name = device.uuid
    elif kubelet.mig_ids == "legacy":
        name = f"MIG-{device.uuid}/{instance.gi}/{instance.ci}"
    else:
        name = instance.uuid
    return name if replica is None else f"{name}::{replica}"


def _resource(kubelet: KubeletSpec, instance: MigInstance | None, *, shared: bool) -> str:
    name = "nvidia.com/gpu"
    if kubelet.plugin == "gke":
        return name
    if instance is not None and kubelet.mig_strategy == "mixed":
        name = f"nvidia.com/mig-{instance.profile.name}"
    return f"{name}.shared" if shared and kubelet.rename_shared else name


def place_pods(spec: WorldSpec, units: tuple[Unit, ...]) -> tuple[Hold, ...]:
    """Who holds what and when, sorted by start and then by the order of the file.

    Pods that name their devices come first, then requests in the order of their starts. Raises ConfigError
    where a device is not there, is held already, or where a request finds too little that is free.
    """
    board = _Board(units)
    order = sorted(enumerate(spec.pods), key=lambda item: (not item[1].devices, item[1].start, item[0]))
    holds: list[Hold] = []
    problems: list[Problem] = []
    for index, pod in order:
        start, end = spec.start + pod.start, FOREVER if pod.end is None else spec.start + pod.end
        try:
            chosen = board.take(pod, start, end)
        except _NoPlaceError as error:
            problems.append(Problem(spec.node, 0, 0, f"pods::{index}", f"{pod.namespace}/{pod.name}: {error}"))
            continue
        owner = owner_of(spec, index)
        holds += [Hold(owner, unit, start, end, end + pod.linger, index) for unit in chosen]
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(holds, key=lambda h: (h.start_s, h.pod)))


def owner_of(spec: WorldSpec, index: int) -> Owner:
    """The container of this pod that holds its devices; the invented UID differs for each pod of the file."""
    pod = spec.pods[index]
    uid = pod.uid or _invented(spec.seed, "pod", pod.namespace, pod.name, str(index))
    return Owner(pod.namespace, pod.name, pod.container, uid)


class _NoPlaceError(Exception):
    """A pod can't get what it asks for."""


class _Board:
    """Which unit is taken when."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self._units = units
        self._taken: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def take(self, pod: PodSpec, start: float, end: float) -> list[Unit]:
        """The units for the pod, marked as taken. Raises _NoPlaceError."""
        if pod.devices:
            chosen = [self._named(reference, start, end) for reference in pod.devices]
        else:
            fitting = (u for u in self._units if pod.of in (None, u.model, u.profile))
            chosen = [u for u in fitting if self._is_free(u, start, end)][: pod.request]
            if len(chosen) < pod.request:
                raise _NoPlaceError(f"asks for {pod.request} of {pod.of or 'any device'}, {len(chosen)} are free")
        if len({u.reference for u in chosen}) != len(chosen):
            raise _NoPlaceError("names one device twice")
        for unit in chosen:
            self._taken[unit.reference].append((start, end))
        return chosen

    def _named(self, reference: str, start: float, end: float) -> Unit:
        exact = [u for u in self._units if u.reference == reference]
        candidates = exact or [u for u in self._units if u.reference.rpartition("::")[0] == reference]
        if not candidates:
            known = ", ".join(u.reference for u in self._units)
            raise _NoPlaceError(f"there is no device {reference}; known: {known}")
        for unit in candidates:
            if self._is_free(unit, start, end):
                return unit
        raise _NoPlaceError(f"device {reference} is held by another pod during that time")

    def _is_free(self, unit: Unit, start: float, end: float) -> bool:
        return all(end <= s or e <= start for s, e in self._taken[unit.reference])
