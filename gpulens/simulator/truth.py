"""What is really so on the simulated node at any instant, whatever its pages say.

Invariant: no method has a side effect and every answer depends on the spec and on the given time alone. Times
are seconds since 1970 of simulated time; holds are half-open, so at the instant of a handover the new owner
has it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpulens.simulator.activity import Activity, GpuTimeline, UnitTimeline, make_activity, spans_of
from gpulens.simulator.layout import (
    Device,
    DeviceKey,
    Hold,
    MigInstance,
    Owner,
    build_devices,
    build_units,
    place_pods,
)
from gpulens.simulator.models import MIB
from gpulens.simulator.schema import FaultKind, FaultSpec, WorldSpec


class Truth:
    """Devices, holds, activity and faults of one world."""

    def __init__(self, spec: WorldSpec) -> None:
        """Raises ConfigError where the pods can't be placed on the devices."""
        self.spec = spec
        self.start_s = spec.start
        self.loaded_s = spec.start - spec.uptime
        self._devices = build_devices(spec)
        self.units = build_units(spec, self._devices)
        self._holds = place_pods(spec, self.units)
        self._by_key: dict[DeviceKey, list[Hold]] = defaultdict(list)
        for hold in self._holds:
            self._by_key[hold.unit.key].append(hold)
        self._timelines = {d.uuid: self._timeline(d) for d in self._devices}
        self._instances = {i.key: i for d in self._devices for i in d.mig}
        self._names = self._name_index()

    def _timeline(self, device: Device) -> GpuTimeline:
        board = device.model.memory_mib - device.model.reserved_mib
        sizes: dict[int | None, tuple[DeviceKey, float]] = {i.gi: (i.key, i.memory_bytes / MIB) for i in device.mig}
        sizes = sizes or {None: (device.uuid, board)}
        units = {gi: self._unit_timeline(key, memory) for gi, (key, memory) in sizes.items()}
        return GpuTimeline(device, units, self.loaded_s, self.noise(device.uuid, 0) * 6.28)

    def _unit_timeline(self, key: DeviceKey, memory_mib: float) -> UnitTimeline:
        # A pod with two replicas of one device is still one program on it.
        first_of_pod = {hold.pod: hold for hold in reversed(self._by_key[key])}
        horizon = self.start_s + self.spec.horizon
        pods = self.spec.pods
        return UnitTimeline(memory_mib, [s for h in first_of_pod.values() for s in spans_of(h, pods[h.pod], horizon)])

    def _name_index(self) -> dict[str, DeviceKey]:
        names: dict[str, DeviceKey] = {u.device_id: u.key for u in self.units}
        for device in self._devices:
            names[device.uuid] = device.uuid
            names |= {f"{device.uuid}/gi{i.gi}": i.key for i in device.mig}
            names |= {i.uuid: i.key for i in device.mig}
        return names

    def devices(self) -> tuple[Device, ...]:
        """The GPUs, in DCGM's order."""
        return self._devices

    def keys(self) -> tuple[DeviceKey, ...]:
        """Everything that can be held: GPUs without MIG, and MIG instances."""
        return tuple(key for device in self._devices for key in device.held_as)

    def holds(self) -> Sequence[Hold]:
        """Every allocation there will ever be, by start."""
        return self._holds

    def key_of(self, name: str) -> DeviceKey | None:
        """What a Pod Resources id, a GPU or MIG UUID, or `<GPU UUID>/gi<N>` stands for; None if unknown."""
        return self._names.get(name)

    def owners(self, key: DeviceKey, start_s: float, end_s: float) -> frozenset[Owner]:
        """Everybody who had the device at any instant of [start_s, end_s]."""
        return frozenset(h.owner for h in self._by_key.get(key, ()) if h.start_s <= end_s and h.end_s > start_s)

    def held_throughout(self, key: DeviceKey, start_s: float, end_s: float) -> frozenset[Owner]:
        """Everybody who had the device during all of [start_s, end_s]."""
        return frozenset(h.owner for h in self._by_key.get(key, ()) if h.start_s <= start_s and h.end_s > end_s)

    def held_at(self, t_s: float) -> tuple[Hold, ...]:
        """All allocations in force at this instant, in the kubelet's order."""
        return tuple(h for h in self._holds if h.start_s <= t_s < h.end_s)

    def activity(self, key: DeviceKey, t_s: float) -> Activity:
        """What the device does at this instant. Raises KeyError for a device that is not there."""
        if isinstance(key, str):
            return self._timelines[key].activity(t_s)
        unit = self.unit_timeline(key)
        return make_activity(unit.now(t_s), unit.used_mib(t_s), None, resident=False)

    def mean_activity(self, key: DeviceKey, start_s: float, end_s: float) -> Activity:
        """What it did on average over [start_s, end_s]; memory is that of the end. Raises KeyError."""
        if isinstance(key, str):
            return self._timelines[key].mean(start_s, end_s)
        unit = self.unit_timeline(key)
        return make_activity(unit.mean(start_s, end_s), unit.used_mib(end_s), None, resident=False)

    def owner_memory(self, key: DeviceKey, t_s: float) -> Mapping[Owner, int]:
        """Bytes that each owner's processes hold on the device. Raises KeyError."""
        return {owner: mib * MIB for owner, mib in self.unit_timeline(key).owner_mib(t_s).items()}

    def owner_residency(self, key: DeviceKey, t_s: float) -> Mapping[Owner, float]:
        """The part of the device's residency that is each owner's. Raises KeyError."""
        spans = self.unit_timeline(key).holders(t_s)
        on = {s.owner: s.load.residency if s.load.is_on(t_s - s.start_s) else 0.0 for s in spans}
        return {owner: part / len(spans) for owner, part in on.items()}

    def energy_j(self, uuid: str, t_s: float) -> float:
        """Joules that this GPU has used since its driver was loaded. Raises KeyError."""
        return self._timelines[uuid].energy_j(t_s)

    def unit_timeline(self, key: DeviceKey) -> UnitTimeline:
        """The timeline of a GPU without MIG or of a MIG instance. Raises KeyError."""
        uuid, gi = (key, None) if isinstance(key, str) else key
        return self._timelines[uuid].units[gi]

    def instance(self, key: DeviceKey) -> MigInstance | None:
        """The MIG instance of this key; None for a whole GPU."""
        return self._instances.get(key)

    def last_xid(self, device: Device, t_s: float) -> int | None:
        """The code of the last XID up to this instant; None when there was none."""
        i = bisect_right(device.xids, (t_s, 1 << 30))
        return device.xids[i - 1][1] if i else None

    def fault(self, kind: FaultKind, t_s: float, gpu: int | None = None) -> FaultSpec | None:
        """The fault of this kind that is in force at this instant, for this GPU where one is named."""
        since = t_s - self.start_s
        for fault in self.spec.faults:
            concerned = gpu is None or not fault.gpus or gpu in fault.gpus
            if concerned and fault.kind == kind and fault.from_ <= since < fault.until:
                return fault
        return None

    def kubelet_reachable(self, t_s: float) -> bool:
        """Whether a client on the node with default limits (4 MiB) gets a List."""
        kinds: tuple[FaultKind, ...] = ("kubelet_gone", "kubelet_restart", "kubelet_hung", "kubelet_large")
        return all(self.fault(kind, t_s) is None for kind in kinds)

    def noise(self, name: str, tick: int) -> float:
        """A number in [0, 1) that depends on the seed, the name and the tick alone."""
        return zlib.crc32(f"{self.spec.seed}/{name}/{tick}".encode()) / 2**32
