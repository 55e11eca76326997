"""Who held a device over a window of time, as far as snapshots of the allocations can say.

Invariant: an owner is named only when the snapshots before the window, in it and after it agree; anything else is a
reason why there is none. A wrong owner is worse than none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpulens.pipeline.data import Attributes
from gpulens.processors.attribution.devices import DeviceMap, is_nvidia

Owner = Attributes
"""The owner's resource attributes (k8s.namespace.name, k8s.pod.name, ...), sorted by key."""

Owners = frozenset[Owner]
NOBODY: Owners = frozenset()
STRANGER: Owner = ()
"""Somebody who holds a device and whose name nobody knows: nobody else can be charged alone then."""


class Reason(StrEnum):
    """Why a reading has an owner, or none."""

    OWNED = "owned"
    UNALLOCATED = "unallocated"  # the source says that nobody holds the device
    UNNAMED = "unnamed"  # no source says anything of the device, which is no proof that nobody holds it
    SHARED = "shared"  # several owners hold it by design
    CONFLICT = "conflict"  # several owners of a device known to be exclusive
    CHANGING = "changing"  # the snapshots around the reading do not agree, or the second one did not come in time
    NO_SNAPSHOT = "no_snapshot"  # no snapshot from before the reading's window
    NO_SOURCE = "no_source"  # nobody says who holds what
    MIG_UNMAPPED = "mig_unmapped"  # a MIG UUID holds an owner, and nobody says which instance it is
    UNMAPPED = "unmapped"  # an allocation names a device that nobody knows
    ROGUE = "rogue"  # told of a pod, never of a reading: it has a process on a device that it does not hold


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who held the device: one owner or none, and why. `final` is False while a later snapshot may still decide."""

    reason: Reason
    owner: Owner | None = None
    final: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source said at one moment. The state was true at some instant of [begin_ns, end_ns] (request to reply).

    `owners` and `exclusive` are by the source's own device names. `said` is None when it says everything; else it was
    one part of what the source knows: it vouches for the devices in `said`, and `owners` has earlier parts, too.
    """

    begin_ns: int
    end_ns: int
    owners: Mapping[str, Owners]
    exclusive: frozenset[str]
    said: frozenset[str] | None = None


@dataclass(slots=True)
class _Resolved:
    """A snapshot's owners by device key, for one version of the device map."""

    source: Mapping[str, Owners]
    version: int
    owners: dict[str, Owners]
    exclusive: set[str]
    disputed: frozenset[str]
    """Devices with several owners although they are known to be exclusive."""
    unmapped_mig: bool
    """A MIG UUID is named of which nobody knows the instance."""
    split: frozenset[str]
    """Cards of which parts are named."""
    vague: bool
    """Something is named that may be a part of any card."""
    said: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Span:
    """A window over snapshots that each speak of all devices: what its verdicts have in common."""

    start: Snapshot | None
    closing: Snapshot | None
    steady: bool
    """The snapshots are close enough to each other, and all hold the same allocations."""


@dataclass(slots=True)
class History:
    """The snapshots of one source on one node that windows may still ask for, oldest first.

    - `max_gap_ns`: two snapshots further apart than this say nothing about the time between them.
    - `page`: the source's silence about a device is no proof that nobody holds it.
    - `first_is_change`: what it says first may have begun just then. A page's labels had no beginning that we saw.
    """

    max_gap_ns: int
    page: bool
    keep_ns: int
    first_is_change: bool = True
    late: int = 0
    changes: int = 0
    _snapshots: list[Snapshot] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _resolved: dict[int, _Resolved] = field(default_factory=dict)
    _named: dict[str, int] = field(default_factory=dict)
    _truncated: bool = False
    _last_span: tuple[tuple[int, int, int, int], _Span | None] | None = None
    _taken_back: Snapshot | None = None
    heard_ns: int = 0
    """When the source last said anything, also if that was taken back since."""

    @property
    def last(self) -> Snapshot | None:
        """The newest snapshot."""
        return self._snapshots[-1] if self._snapshots else None

    def add(self, snapshot: Snapshot) -> bool:
        """Takes a snapshot in; False (and it is counted) when it is not newer than the last one."""
        last = self.last
        if last is not None:
            if snapshot.begin_ns < last.end_ns or snapshot.end_ns <= last.end_ns:
                self.late += 1
                return False
            if snapshot.said is None and last.said is None and _same(snapshot, last):
                # The same mapping object lets the resolved view be reused.
                snapshot = replace(snapshot, owners=last.owners, exclusive=last.exclusive)
            else:
                self.changes += 1
        if snapshot.said is None:
            self._named = dict.fromkeys(snapshot.owners, snapshot.end_ns)
        self._snapshots.append(snapshot)
        self._ends.append(snapshot.end_ns)
        self.heard_ns = snapshot.end_ns
        self._prune(snapshot.end_ns - self.keep_ns)
        return True

    def add_part(self, part: Snapshot) -> bool:
        """Takes in a message that names only some devices (a stream without the promise to be complete). It vouches
        for these alone; of the others the last word stays known for `max_gap_ns`. Parts of one moment add up."""
        last = self.last
        same = last is not None and last.said is not None and part.end_ns == last.end_ns
        said = frozenset(part.owners)
        known = last.owners if last is not None else {}
        oldest_ns = part.end_ns - self.max_gap_ns
        owners = {name: held for name, held in known.items() if self._named.get(name, 0) >= oldest_ns}
        for name, held in part.owners.items():
            owners[name] = owners.get(name, NOBODY) | held if same else held
        exclusive = frozenset() if last is None else last.exclusive & owners.keys()
        exclusive = exclusive - said | part.exclusive
        if same:
            assert last is not None
            assert last.said is not None
            self._last_span = None
            begin_ns = min(last.begin_ns, part.begin_ns)
            self._snapshots[-1] = Snapshot(begin_ns, part.end_ns, owners, exclusive, last.said | said)
        elif not self.add(Snapshot(part.begin_ns, part.end_ns, owners, exclusive, said)):
            return False
        self._named = {name: ns for name, ns in self._named.items() if name in owners}
        self._named.update(dict.fromkeys(said, part.end_ns))
        return True

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """The snapshots kept, oldest first."""
        return self._snapshots

    def restore(self, snapshots: Iterable[Snapshot], heard_ns: int) -> None:
        """Takes up snapshots that were saved. What comes next is no first sight."""
        for snapshot in snapshots:
            self.add(snapshot)
            self._named.update(dict.fromkeys(snapshot.said or snapshot.owners, snapshot.end_ns))
        self.heard_ns = heard_ns
        self._truncated = True

    def clear(self) -> None:
        """Forgets everything: the source dropped what it knew. What it says next is no first sight."""
        self._taken_back = self.last or self._taken_back
        self._snapshots.clear()
        self._ends.clear()
        self._resolved.clear()
        self._named.clear()
        self._last_span = None
        self._truncated = True

    def owners_now(self, key: str, devices: DeviceMap) -> Owners | None:
        """Who holds the device by the newest snapshot; None when that does not name the device."""
        last = self.last
        return None if last is None else self._view(last, devices).owners.get(key)

    def owners_lately(self, key: str, devices: DeviceMap) -> Owners:
        """Who held the device by the newest snapshot, or by the one that was taken back since."""
        last = self.last or self._taken_back
        return NOBODY if last is None else self._owners(last, key, devices)

    def reason_now(self, key: str, devices: DeviceMap) -> Reason:
        """Why the device has the owners that it has by the newest snapshot."""
        last = self.last
        if last is None:
            return Reason.NO_SNAPSHOT
        return self._verdict(self._owners(last, key, devices), key, last, devices).reason

    def around(self, begin_ns: int, end_ns: int) -> Sequence[Snapshot]:
        """The snapshots that a window asks for: the newest from before it to the first from after it."""
        first = max(0, bisect_left(self._ends, begin_ns + 1) - 1)
        last = first
        while last < len(self._snapshots) and self._snapshots[last].begin_ns < end_ns:
            last += 1
        return self._snapshots[first : last + 1]

    def newest(self) -> Sequence[Snapshot]:
        """The newest snapshot alone; none where there is none."""
        return self._snapshots[-1:]

    def names(self, key: str, snapshots: Sequence[Snapshot], devices: DeviceMap) -> bool:
        """One of these snapshots of this history says something of the device."""
        return any(key in self._view(each, devices).owners for each in snapshots)

    def knows_not(self, key: str, snapshots: Sequence[Snapshot], devices: DeviceMap) -> bool | None:
        """The source has no name for the device and names no part of it either, by everything that these snapshots
        say; for a source that took its word back, by the last one. None where it never said anything."""
        if not snapshots and self._taken_back is not None:
            snapshots = (self._taken_back,)
        if not snapshots:
            return None
        views = [self._view(each, devices) for each in snapshots]
        # A MIG UUID that nobody maps may be any instance, and its GPU any GPU.
        return all(
            view.said is None
            and key not in view.owners
            and key not in view.split
            and not (view.unmapped_mig and is_nvidia(key))
            for view in views
        )

    def holds_whole(self, card: str, snapshots: Sequence[Snapshot], devices: DeviceMap) -> bool:
        """By these snapshots the card is not handed out in parts: whatever is said of it holds for its parts."""
        views = [self._view(each, devices) for each in snapshots]
        return not any(view.said is not None or card in view.split or view.vague for view in views)

    def holders_kept(self, devices: DeviceMap) -> dict[str, Owners]:
        """Everybody who held each device by any snapshot that is kept."""
        held: dict[str, Owners] = {}
        for owners in {id(each.owners): self._view(each, devices).owners for each in self._snapshots}.values():
            for key, holders in owners.items():
                held[key] = held.get(key, NOBODY) | holders
        return held

    def disputed(self, devices: DeviceMap) -> frozenset[str]:
        """Devices with several owners by the newest snapshot although they are known to be exclusive."""
        last = self.last
        return frozenset() if last is None else self._view(last, devices).disputed

    def keys_now(self, devices: DeviceMap) -> set[str]:
        """Every device key that the newest snapshot names."""
        last = self.last
        return set() if last is None else set(self._view(last, devices).owners)

    def holders_lately(self, seen_ns: int, now_ns: int, devices: DeviceMap) -> tuple[int, dict[str, Owners]] | None:
        """Everybody who held each device by any snapshot from `max_gap_ns` before `seen_ns` until now, among the
        devices that the newest one names; and when the first of these snapshots was asked for. None when they are no
        proof of who did not: the newest is old or a part, or they do not reach back over that time without a hole."""
        last = self.last
        if last is None or last.said is not None or now_ns - last.end_ns > self.max_gap_ns:
            return None
        first = bisect_right(self._ends, min(seen_ns, last.end_ns) - self.max_gap_ns) - 1
        if first < 0:
            return None
        held = dict(self._view(last, devices).owners)
        before = self._snapshots[first]
        for snapshot in self._snapshots[first:]:
            if snapshot.begin_ns - before.end_ns > self.max_gap_ns:
                return None
            if snapshot.owners is not last.owners:
                for key, holders in self._view(snapshot, devices).owners.items():
                    if key in held:
                        held[key] |= holders
            before = snapshot
        return self._snapshots[first].begin_ns, held

    def decide(self, key: str, begin_ns: int, end_ns: int, devices: DeviceMap) -> Verdict:
        """Who held the device during all of [begin_ns, end_ns]."""
        span = self._span(begin_ns, end_ns)
        if span is not None and span.steady:
            # Nothing changed over the window: one look at the newest snapshot in it serves every device.
            if span.start is None:
                return Verdict(Reason.NO_SNAPSHOT)
            if span.closing is None:
                return Verdict(Reason.CHANGING, final=False)
            return self._verdict(self._owners(span.closing, key, devices), key, span.closing, devices)
        return self._decide(key, begin_ns, end_ns, devices)

    def _span(self, begin_ns: int, end_ns: int) -> _Span | None:
        """The window as a whole, found once for all devices; None where a snapshot in it speaks of some only."""
        mark = (begin_ns, end_ns, len(self._ends), self._ends[-1] if self._ends else 0)
        if self._last_span is None or self._last_span[0] != mark:
            self._last_span = (mark, self._find_span(begin_ns, end_ns))
        return self._last_span[1]

    def _find_span(self, begin_ns: int, end_ns: int) -> _Span | None:
        first = self._first(begin_ns, end_ns)
        if first < 0:
            return _Span(None, None, steady=True)
        start = before = self._snapshots[first]
        for snapshot in self._snapshots[first:]:
            if snapshot.said is not None:
                return None
            if snapshot.owners is not start.owners or snapshot.begin_ns - before.end_ns > self.max_gap_ns:
                return _Span(start, None, steady=False)
            if snapshot.begin_ns >= end_ns:
                return _Span(start, snapshot, steady=True)
            before = snapshot
        return _Span(start, None, steady=True)

    def _first(self, begin_ns: int, end_ns: int) -> int:
        """The newest snapshot from before a window; -1 when there is none."""
        first = bisect_left(self._ends, begin_ns + 1) - 1
        if first >= 0 or not self._snapshots or self.first_is_change or self._truncated:
            return first
        # The first sight of labels reaches back over a window that it ends, not to readings from before it.
        return 0 if end_ns >= self._snapshots[0].begin_ns else -1

    def _decide(self, key: str, begin_ns: int, end_ns: int, devices: DeviceMap) -> Verdict:
        """As `decide`, snapshot by snapshot."""
        first = self._first(begin_ns, end_ns)
        while first >= 0 and not self._vouches(self._snapshots[first], key, devices):
            first -= 1
        if first < 0:
            return Verdict(Reason.NO_SNAPSHOT)
        start = self._snapshots[first]
        agreed = self._owners(start, key, devices)
        before = start
        for snapshot in self._snapshots[first:]:
            if not self._vouches(snapshot, key, devices):
                continue
            if snapshot.begin_ns - before.end_ns > self.max_gap_ns:
                return Verdict(Reason.CHANGING)
            if snapshot.owners is not start.owners and self._owners(snapshot, key, devices) != agreed:
                return Verdict(Reason.CHANGING)
            if snapshot.begin_ns >= end_ns:
                return self._verdict(agreed, key, snapshot, devices)
            before = snapshot
        return Verdict(Reason.CHANGING, final=False)

    def _verdict(self, owners: Owners, key: str, snapshot: Snapshot, devices: DeviceMap) -> Verdict:
        if len(owners) == 1 and STRANGER not in owners:
            return Verdict(Reason.OWNED, next(iter(owners)))
        view = self._view(snapshot, devices)
        if len(owners) > 1:
            return Verdict(Reason.CONFLICT if key in view.exclusive else Reason.SHARED)
        return Verdict(Reason.UNNAMED if owners else self._silence(key, view))

    def _silence(self, key: str, view: _Resolved) -> Reason:
        """Why a device has no owner in a snapshot."""
        if key in view.owners:
            return Reason.UNNAMED if self.page else Reason.UNALLOCATED
        instance = key.startswith("MIG-") or "/gi" in key
        return Reason.MIG_UNMAPPED if instance and view.unmapped_mig else Reason.UNNAMED

    def _vouches(self, snapshot: Snapshot, key: str, devices: DeviceMap) -> bool:
        """The snapshot says something of the device, be it that nobody holds it."""
        if snapshot.said is None:
            return True
        said = self._view(snapshot, devices).said
        return said is None or key in said

    def _owners(self, snapshot: Snapshot, key: str, devices: DeviceMap) -> Owners:
        return self._view(snapshot, devices).owners.get(key, NOBODY)

    def _view(self, snapshot: Snapshot, devices: DeviceMap) -> _Resolved:
        mark = id(snapshot.owners)
        view = self._resolved.get(mark)
        if view is None or view.source is not snapshot.owners or view.version != devices.version:
            owners: dict[str, Owners] = {}
            for name, holders in snapshot.owners.items():
                for key in devices.resolve(name):
                    owners[key] = owners.get(key, NOBODY) | holders
            exclusive = {key for name in snapshot.exclusive for key in devices.resolve(name)}
            unmapped = any(key.startswith("MIG-") and not devices.is_resolved(key) for key in owners)
            said = None
            if snapshot.said is not None:
                said = frozenset(key for name in snapshot.said for key in devices.resolve(name))
            disputed = frozenset(key for key, holders in owners.items() if len(holders) > 1 and key in exclusive)
            split = frozenset(card for key in owners if (card := devices.cards.get(key)))
            vague = any(map(devices.is_vague, owners))
            view = _Resolved(
                snapshot.owners, devices.version, owners, exclusive, disputed, unmapped, split, vague, said
            )
            self._resolved[mark] = view
        return view

    def _prune(self, before_ns: int) -> None:
        """Drops what no window can reach any more, but keeps the last snapshot from before that."""
        count = bisect_left(self._ends, before_ns) - 1
        if count > 0:
            self._truncated = True
            del self._snapshots[:count], self._ends[:count]
            live = {id(snapshot.owners) for snapshot in self._snapshots}
            self._resolved = {mark: view for mark, view in self._resolved.items() if mark in live}


def _same(one: Snapshot, other: Snapshot) -> bool:
    return one.owners == other.owners and one.exclusive == other.exclusive
