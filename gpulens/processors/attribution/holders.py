"""Processes that are seen on a node's devices, and which of their pods hold them without being given them.

Invariant: a pod is called rogue only on proof: its names are known, its containers run (an init container's devices
are listed by nobody), and Pod Resources names the device and not the pod for it in every snapshot from one that was
asked for after the process was first seen, over `max_gap` and more to when it was last seen, until now. Who just got
or just lost the device is no rogue, also where snapshots are missing; nor is a pod whose containers just began to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpulens.processors.attribution.devices import DeviceMap
from gpulens.processors.attribution.ownership import History, Owner, Owners
from gpulens.processors.attribution.pods import Hint, PodKey, PodMap, pod_key

WITNESS = "pod_resources"
"""The allocation source that lists every device with all who hold it."""

MOST_PROCESSES = 4096
"""Pairs of container and device that one stream may tell of."""

RUNNING_PHASES = frozenset({"Running", "Succeeded", "Failed"})
"""Phases in which no init container runs any more (Kubernetes API, PodStatus: Pending until all containers have been
started once). `Unknown` and a phase that nobody tells prove nothing."""

Seen = tuple[str, Hint]
"""(device by its source's name, what the process tells of its owner)."""

Rogue = tuple[str, Owner]
"""(device key, the pod that has a process there)."""


@dataclass(frozen=True, slots=True)
class Sight:
    """When a stream first and last saw processes of a container on a device, ns."""

    first_ns: int
    last_ns: int


@dataclass(slots=True)
class Processes:
    """The processes of one node, by stream; of those that a partial stream no longer names, the last sight stays for
    `keep_ns`."""

    keep_ns: int
    streams: dict[str, dict[Seen, Sight]] = field(default_factory=dict)

    def learn(self, stream: str, seen: Iterable[Seen], now_ns: int, complete: bool) -> None:
        """Takes in what a stream sees; a complete word replaces its earlier ones."""
        before = self.streams.get(stream, {})
        now = {each: Sight(before[each].first_ns if each in before else now_ns, now_ns) for each in seen}
        if not complete:
            kept = {each: sight for each, sight in before.items() if now_ns - sight.last_ns <= self.keep_ns}
            now = {**kept, **now}
        if now:
            self.streams[stream] = dict(sorted(now.items(), key=_newest_first)[:MOST_PROCESSES])
        else:
            self.streams.pop(stream, None)

    def sights(self, now_ns: int) -> dict[Seen, Sight]:
        """Each that was seen within `keep_ns`."""
        found: dict[Seen, Sight] = {}
        for stream in self.streams.values():
            for each, sight in stream.items():
                if now_ns - sight.last_ns <= self.keep_ns:
                    other = found.get(each, sight)
                    found[each] = Sight(min(sight.first_ns, other.first_ns), max(sight.last_ns, other.last_ns))
        return found


def _newest_first(item: tuple[Seen, Sight]) -> tuple[int, str]:
    return -item[1].last_ns, repr(item[0])


def rogues(
    sights: Mapping[Seen, Sight],
    pods: PodMap,
    devices: DeviceMap,
    witnesses: Sequence[History],
    now_ns: int,
    settle_ns: int,
    system_namespaces: frozenset[str],
    paged: Mapping[str, Owners],
) -> tuple[Rogue, ...]:
    """The pods that have a process on a device without holding it, ordered; empty where there is no proof. Nobody is
    rogue on what a page gives him where its word counts (`paged`: device -> who held it lately), nor by a process that
    was not seen again `settle_ns` after his containers were told to run: an init container's may have been the last."""
    excused = {key: frozenset(map(pod_key, owners)) for key, owners in paged.items()}
    proofs = {
        seen_ns: _Proof.of(witnesses, devices, seen_ns, now_ns)
        for seen_ns in {sight.last_ns for sight in sights.values()}
    }
    found: set[Rogue] = set()
    for (device, hint), sight in sights.items():
        named, keys, proof = pods.find(hint), devices.resolve(device), proofs[sight.last_ns]
        if named is None or len(keys) != 1 or proof is None or sight.first_ns > proof.begin_ns:
            continue
        holders = proof.holders(keys[0])
        if holders is None or named.key in holders or named.key in proof.unclear:
            continue
        if excused and any(named.key in each for each in _related(excused, keys[0], devices)):
            continue
        if pods.phase(named.pod) not in RUNNING_PHASES or sight.last_ns - pods.phase_since_ns(named.pod) < settle_ns:
            continue
        if named.pod.namespace not in system_namespaces:
            found.add((keys[0], named.owner(())))
    return tuple(sorted(found, key=repr))


def _related(held: Mapping[str, frozenset[PodKey]], key: str, devices: DeviceMap) -> list[frozenset[PodKey]]:
    """The holders of a device, of the GPU that it is part of, and of its parts."""
    parent = devices.parent(key)
    return [pods for each, pods in held.items() if each in (key, parent) or devices.parent(each) == key]


class _Proof:
    """What all streams of the witness say together of who held what lately.

    - `begin_ns`: the snapshots were asked for no earlier than this.
    - `unclear`: pods that hold something of which nobody can tell which device it is.
    """

    def __init__(self, begin_ns: int, lately: Mapping[str, Owners], devices: DeviceMap) -> None:
        self.begin_ns = begin_ns
        self._pods = {key: frozenset(map(pod_key, owners)) for key, owners in lately.items()}
        self._devices = devices
        self.unclear = frozenset[PodKey]().union(
            *(pods for key, pods in self._pods.items() if not devices.is_resolved(key))
        )
        self._holders: dict[str, frozenset[PodKey] | None] = {}

    @classmethod
    def of(cls, witnesses: Sequence[History], devices: DeviceMap, seen_ns: int, now_ns: int) -> _Proof | None:
        """For processes that were seen at some time; None when one of the streams proves nothing."""
        begins: list[int] = []
        lately: dict[str, Owners] = {}
        for history in witnesses:
            found = history.holders_lately(seen_ns, now_ns, devices)
            if found is None:
                return None
            begins.append(found[0])
            for key, owners in found[1].items():
                lately[key] = lately.get(key, frozenset()) | owners
        return cls(min(begins), lately, devices) if begins else None

    def holders(self, key: str) -> frozenset[PodKey] | None:
        """The pods that held the device, the GPU that it is part of, or an instance of it; None where it is not known
        for sure which device this is, or nobody was asked about it."""
        if key not in self._holders:
            related = _related(self._pods, key, self._devices)
            known = bool(related) and self._devices.is_resolved(key)
            self._holders[key] = frozenset[PodKey]().union(*related) if known else None
        return self._holders[key]
