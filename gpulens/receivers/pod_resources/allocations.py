"""From the kubelet's replies to who holds which device.

Invariant: pure. Every owner of a device is kept, also two where only one can be true (a finished pod on an
old kubelet): who is right is decided where the pods' phases are known. How a device is shared is said only
where the replies tell it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from gpulens.pipeline.errors import ScrapeError
from gpulens.receivers.pod_resources.device_ids import (
    DeviceId,
    IdKind,
    Selection,
    dra_device,
    parse_device_id,
)
from gpulens.receivers.pod_resources.podresources_pb2 import (
    AllocatableResourcesResponse,
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
)

MAX_NAME = 253  # longest name of a Kubernetes object
MAX_ID = 512
MAX_ROWS = 5_000  # allocations of one node; the largest real nodes stay below 1,000


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A container that holds a device."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class Allocations:
    """Who holds what on a node, in one order for one content.

    `held`: each owner with the devices it holds. `free`: allocatable devices that nobody holds. `replicas`:
    ways each device is shared, only where known. `sharing`: exclusive, mig, time_slicing, mps or unknown,
    for every device. `rejected`: entries that could not be used, by reason.
    """

    held: tuple[tuple[Owner, tuple[str, ...]], ...]
    free: tuple[str, ...]
    replicas: tuple[tuple[str, int], ...]
    sharing: tuple[tuple[str, str], ...]
    rejected: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _Device:
    """What is known of one device over all its ids."""

    id: DeviceId
    allocatable: int = 0


@dataclass(slots=True)
class Reader:
    """Reads replies. `sharing_mode` is what replicas of a whole GPU are called where the id can't tell
    time-slicing from MPS; empty says unknown. Parsed ids are remembered from one reply to the next."""

    selection: Selection
    sharing_mode: str = ""
    _ids: dict[str, DeviceId] = field(default_factory=dict)

    def read_encoded(self, pods: bytes, allocatable: bytes | None) -> Allocations:
        """As `read`, from the bytes of the replies. Unknown fields are passed over.

        Raises ScrapeError when they are not such replies.
        """
        try:
            return self.read(
                ListPodResourcesResponse.FromString(pods),
                None if allocatable is None else AllocatableResourcesResponse.FromString(allocatable),
            )
        except DecodeError as error:
            raise ScrapeError(f"the kubelet's reply is no Pod Resources message: {error}", "malformed") from error

    def read(self, pods: ListPodResourcesResponse, allocatable: AllocatableResourcesResponse | None) -> Allocations:
        """The allocations that a List reply and an allocatable reply (None: the kubelet has none) tell of."""
        known, self._ids = self._ids, {}
        devices: dict[str, _Device] = {}
        held: defaultdict[Owner, set[str]] = defaultdict(set)
        rejected: Counter[str] = Counter()
        rows = 0
        for owner, device in self._holdings(pods, known, rejected):
            mine = held[owner]
            if device.hw_id in mine:
                continue
            if rows == MAX_ROWS:
                rejected["too_many_allocations"] += 1
                continue
            rows += 1
            mine.add(device.hw_id)
            _note(devices, device)
        for device in self._devices(() if allocatable is None else _each_id_once(allocatable), known, rejected):
            if device.hw_id in devices or len(devices) < MAX_ROWS:
                _note(devices, device).allocatable += 1
            else:
                rejected["too_many_devices"] += 1
        taken = set().union(*held.values())
        return Allocations(
            held=tuple((owner, tuple(sorted(ids))) for owner, ids in sorted(held.items()) if ids),
            free=tuple(sorted(hw_id for hw_id in devices if hw_id not in taken)),
            replicas=tuple(sorted(_replicas(devices))),
            sharing=tuple(sorted((hw_id, self._mode(device)) for hw_id, device in devices.items())),
            rejected=tuple(sorted(rejected.items())),
        )

    def _holdings(
        self, pods: ListPodResourcesResponse, known: dict[str, DeviceId], rejected: Counter[str]
    ) -> Iterator[tuple[Owner, DeviceId]]:
        for pod in pods.pod_resources:
            for container in pod.containers:
                owner = Owner(pod.namespace, pod.name, container.name)
                usable = all(0 < len(name) <= MAX_NAME for name in (owner.namespace, owner.pod, owner.container))
                for device in self._held_by(container, known, rejected):
                    if usable:
                        yield owner, device
                    else:
                        rejected["owner_without_name"] += 1

    def _held_by(
        self, container: ContainerResources, known: dict[str, DeviceId], rejected: Counter[str]
    ) -> Iterator[DeviceId]:
        yield from self._devices(container.devices, known, rejected)
        for claim in container.dynamic_resources:
            for part in claim.claim_resources:
                if not part.device_name:
                    # Kubelets before 1.31 name only CDI devices, which can't be joined with a device.
                    rejected["dra_without_device"] += 1
                elif self.selection.takes_driver(part.driver_name):
                    device = dra_device(part.driver_name, part.pool_name, part.device_name, part.share_id)
                    if len(device.hw_id) <= MAX_ID:
                        yield device
                    else:
                        rejected["device_id_length"] += 1

    def _devices(
        self, groups: Iterable[ContainerDevices], known: dict[str, DeviceId], rejected: Counter[str]
    ) -> Iterator[DeviceId]:
        takes, ids = self.selection.takes, self._ids
        for group in groups:
            name = group.resource_name
            for text in group.device_ids:
                device = ids.get(text)
                if device is None:
                    if not 0 < len(text) <= MAX_ID:
                        rejected["device_id_length"] += 1
                        continue
                    device = ids[text] = known.get(text) or parse_device_id(text)
                if takes(name, device):
                    yield device

    def _mode(self, device: _Device) -> str:
        """How the device is shared, from its ids alone."""
        if not device.id.resolved or (device.id.kind is IdKind.CARD and not device.allocatable):
            return "unknown"  # a card's id does not tell whether it is a share
        if device.id.shared or device.allocatable > 1:
            # MPS does not work on MIG: replicas of an instance are always time slices.
            return "time_slicing" if device.id.is_mig else self.sharing_mode or "unknown"
        return "mig" if device.id.is_mig else "exclusive"


def _each_id_once(reply: AllocatableResourcesResponse) -> Iterator[ContainerDevices]:
    """The groups without ids that an earlier group has: one device listed for two NUMA nodes is not two replicas."""
    seen: set[str] = set()
    for group in reply.devices:
        new = [text for text in dict.fromkeys(group.device_ids) if text not in seen]
        seen.update(new)
        yield ContainerDevices(resource_name=group.resource_name, device_ids=new)


def _note(devices: dict[str, _Device], device: DeviceId) -> _Device:
    """Takes a device up; replicas of one device meet here."""
    seen = devices.get(device.hw_id)
    if seen is None:
        seen = devices[device.hw_id] = _Device(device)
    elif device.shared and not seen.id.shared:
        seen.id = device
    return seen


def _replicas(devices: dict[str, _Device]) -> Iterator[tuple[str, int]]:
    for hw_id, device in devices.items():
        if not device.id.resolved:
            continue  # one id may stand for several devices, or several unknown ids for one
        if device.allocatable:
            yield hw_id, device.allocatable
        elif not device.id.shared and device.id.kind is not IdKind.CARD:
            yield hw_id, 1
