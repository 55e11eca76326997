"""What attribution has learned of each node: its devices, who said who holds them, and which word counts.

Invariant: state is fed only by what flows by, in its order, on event time; it is bounded by the devices and sources
that exist and by the longest window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_not
from types import MappingProxyType

from gpulens.pipeline.data import Batch, Resource
from gpulens.pipeline.grid import NS
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.devices import DeviceMap, is_global
from gpulens.processors.attribution.holders import WITNESS, Processes, Rogue, rogues
from gpulens.processors.attribution.ownership import NOBODY, STRANGER, History, Owner, Owners, Reason, Snapshot, Verdict
from gpulens.processors.attribution.plan import PROCESS, Claim, Plan, SlotReader
from gpulens.processors.attribution.pods import NOTHING, Hint, Named, PodMap, pod_key
from gpulens.processors.attribution.words import VENDOR, Word, word

LABELS = frozenset({"dcgm", "gke", "prometheus"})
"""Allocation sources that are labels of a page: they had no beginning that we saw, so their first sight is no
change."""

PAGES = LABELS | {PROCESS}
"""Allocation sources whose silence about a device proves nothing, and which wait for better ones after the start."""

INTERVALS_NS = {PROCESS: 15 * NS}
"""Time between two words of an allocation source that does not tell: processes are read in a tier of their own."""

WINDOWS_NS = {"dcgm": 30 * NS, "gke": 60 * NS, "prometheus": 30 * NS}
"""What a reading covers before its own time, until the receiver says so: the exporter's default refresh (30 s), the
age that GKE's page may have, and as much as dcgm-exporter's for pages of which nothing is known (the slowest vendor
advises to scrape every 30 s)."""

_NO_WORDS: Mapping[str, Word] = MappingProxyType({})

LONGEST_WINDOW_NS = 120 * NS
LONGEST_DURATION_S = 1200.0
MOST_LOST_HOMES = 100
FORGET_NS = 3600 * NS


@dataclass(slots=True)
class Node:
    """One node."""

    name: str
    resource: Resource
    first_ns: int
    last_ns: int
    processes: Processes
    devices: DeviceMap = field(default_factory=DeviceMap)
    histories: dict[tuple[str, str], History] = field(default_factory=dict)
    interval_ns: dict[str, int] = field(default_factory=dict)
    window_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    """By source and stream: two exporters may renew their values at different intervals."""
    pods: PodMap = field(default_factory=PodMap)
    pods_ns: int = 0
    """When a source of pods last said that it is up to date."""
    ended: dict[str, frozenset[Owner]] = field(default_factory=dict)
    """Stream -> the owners that its newest allocations name although their pods have ended."""
    elected: str = ""
    """The allocation source whose word counts now; empty when there is none."""
    vendor: str = ""
    """`VENDOR` where its page may stand in for devices that the elected source can't name; else empty."""
    mixed: bool = False
    """Another may be asked of a device than the elected source under the device's own key."""
    rogues: tuple[Rogue, ...] = ()
    """Who has a process on a device without holding it, at the last grid instant."""
    _words: tuple[list[object], Mapping[str, Word]] = ([], _NO_WORDS)

    def sources(self, source: str) -> list[History]:
        """What the streams of an allocation source said."""
        return [history for (name, _), history in self.histories.items() if name == source]

    def word(self, key: str, begin_ns: int, end_ns: int) -> Word:
        """Who is asked about a device over a window."""
        devices = self.devices
        return word(
            key, self.elected, self.vendor, self.sources, devices, lambda history: history.around(begin_ns, end_ns)
        )

    def words(self) -> Mapping[str, Word]:
        """The devices of which another is asked now than the elected source under the device's own key."""
        if not self.mixed:
            return _NO_WORDS
        seen: list[object] = [self.elected, self.vendor, self.devices.state]
        for history in self._asked():
            last = history.last
            # A snapshot that repeats the one before it shares what it says, but not the object.
            seen += [None, None] if last is None else [last.owners, last.said is None]
        if len(seen) != len(self._words[0]) or any(map(is_not, seen, self._words[0])):
            keys = self.devices.keys
            for history in self.sources(self.vendor):
                keys |= history.keys_now(self.devices)
            found = {
                key: word(key, self.elected, self.vendor, self.sources, self.devices, History.newest) for key in keys
            }
            self._words = (seen, {key: each for key, each in found.items() if each != Word(self.elected, key)})
        return self._words[1]

    def word_now(self, key: str) -> Word:
        """Who is asked about a device now."""
        return self.words().get(key) or Word(self.elected, key)

    def _asked(self) -> list[History]:
        return self.sources(self.elected) + (self.sources(self.vendor) if self.vendor else [])

    def standing(self) -> Iterator[object]:
        """What the owners of the node's devices follow from now, as objects that stay the same while it does."""
        yield self
        yield self.resource
        yield self.elected
        yield self.devices.state
        yield self.rogues
        yield self.vendor
        for history in self._asked():
            last = history.last
            yield None if last is None else last.owners
            yield None if last is None else last.exclusive

    def ended_now(self) -> Owners:
        """The owners that the elected source names although their pods have ended."""
        return NOBODY.union(*self.ended.values()) if self.elected == WITNESS else NOBODY

    def names(self) -> set[str]:
        """Every name of a device that is still in use: of the devices described, and of the newest allocations."""
        allocated = (history.last.owners for history in self.histories.values() if history.last is not None)
        return self.devices.hw_ids.union(*allocated)

    def window(self, witness: str, stream: str) -> int:
        """How far back a reading of this witness reaches, in ns. `witness` is the receiver's type, or `gpulens` for
        readings that reconcile has elected: then the longest of the node's windows is the safe one."""
        own = self.window_ns.get((witness, stream))
        if own is not None:
            return own
        known = [ns for (source, _), ns in self.window_ns.items() if witness in (source, "gpulens")]
        return max(known, default=WINDOWS_NS.get(witness, 0))


class Nodes:
    """Every node that the pipeline has seen."""

    def __init__(self, config: AttributionConfig) -> None:
        self._config = config
        self._nodes: dict[str, Node] = {}
        self._homes: dict[str, str] = {}
        self._told: dict[str, set[str]] = {}
        self.late = 0

    def all(self) -> list[Node]:
        """Every node, by name."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def adopt(self, nodes: Iterable[Node]) -> None:
        """Takes up nodes that were saved."""
        for node in nodes:
            self._nodes[node.name] = node
            told = {*node.devices.facts, *node.pods.said, *node.processes.streams}
            for stream in told.union(stream for _, stream in node.histories):
                self._told.setdefault(stream, set()).add(node.name)
            if node.name:
                self._homes.update({device: node.name for device in node.names() if is_global(device)})
            self._elect(node)

    def fresh(self, name: str, resource: Resource, first_ns: int) -> Node:
        """A node of which nothing is known yet."""
        return Node(name, resource, first_ns, first_ns, Processes(round(self._config.max_gap * NS)))

    def learn(self, plan: Plan, batch: Batch) -> None:
        """Takes in the facts of a batch: devices, allocations, intervals, signs of life."""
        now_ns = batch.latest_ns()
        for name, resource in plan.nodes.items():
            node = self._nodes.get(name)
            if node is None:
                self._nodes[name] = node = self.fresh(name, resource, now_ns)
            node.last_ns = max(node.last_ns, now_ns)
        read = SlotReader(batch)
        self._learn_devices(plan, batch, read.absent)
        for slot, name, source in plan.intervals:
            if seconds := _duration(read(slot)):
                self._nodes[name].interval_ns[source] = round(seconds * NS)
        for slot, name, source in plan.windows:
            if seconds := _duration(read(slot)):
                self._nodes[name].window_ns[source, batch.stream] = round(seconds * NS)
        self._learn_pods(plan, batch, read)
        self._learn_processes(plan, batch, read)
        self._learn_allocations(plan, batch, read)
        for node in self._told_of(batch.stream) + [self._nodes[name] for name in plan.nodes]:
            self._elect(node)
        if batch.complete:
            self._told[batch.stream] = set(plan.nodes)
        else:
            self._told.setdefault(batch.stream, set()).update(plan.nodes)

    def _learn_devices(self, plan: Plan, batch: Batch, absent: frozenset[int]) -> None:
        for name, facts in plan.facts.items():
            said = [fact for slot, fact in facts if slot not in absent]
            self._nodes[name].devices.learn(batch.stream, said, batch.complete)
            if name:
                self._homes.update({fact.hw_id: name for fact in said if is_global(fact.hw_id)})
        if batch.complete:
            for node in self._told_of(batch.stream):
                if node.name not in plan.facts:
                    node.devices.learn(batch.stream, (), True)

    def _learn_pods(self, plan: Plan, batch: Batch, read: SlotReader) -> None:
        """A source that says that it is away takes no names back: a UID names one pod for ever."""
        away = {name for slot, name, _ in plan.up if read(slot) == 0}
        for name, rows in plan.pods.items():
            node, now_ns = self._nodes[name], batch.latest_ns()
            node.pods.learn(batch.stream, rows.said(read), batch.complete and name not in away, now_ns)
            if name not in away:
                node.pods_ns = max(node.pods_ns, now_ns)
        if batch.complete:
            for node in self._told_of(batch.stream):
                if batch.stream in node.pods.said and node.name not in {*plan.pods, *away}:
                    node.pods.learn(batch.stream, NOTHING, True, batch.latest_ns())

    def _learn_processes(self, plan: Plan, batch: Batch, read: SlotReader) -> None:
        seen = plan.present(read)
        told = {node.name for node in self._told_of(batch.stream) if batch.stream in node.processes.streams}
        for name in seen.keys() | (told if batch.complete else ()):
            self._nodes[name].processes.learn(batch.stream, seen.get(name, ()), batch.latest_ns(), batch.complete)

    def _learn_allocations(self, plan: Plan, batch: Batch, read: SlotReader) -> None:
        up = {(name, source): read(slot) != 0 for slot, name, source in plan.up}
        spoken = self._spoken(plan, read)
        asked = _asked_ns(plan, batch)
        exclusive: dict[str, set[str]] = {}
        for slot, name, device in plan.exclusive:
            if read(slot) == 1:
                exclusive.setdefault(name, set()).add(device)
        if batch.complete:
            self._take_back(batch.stream, {*up, *spoken})
        end_ns = batch.latest_ns()
        for name, source in {**up, **spoken}:
            if source not in self._config.sources:
                continue
            node = self._nodes[name]
            if not up.get((name, source), True):
                if batch.complete and (source, batch.stream) in node.histories:
                    # The source was silent for so long that its last word is taken back.
                    node.histories[source, batch.stream].clear()
            elif batch.complete or (name, source) in spoken:
                begin_ns = min(asked.get((name, source), end_ns), end_ns)
                owners = spoken.get((name, source), {})
                if source == WITNESS:
                    owners = self._alive(node, batch.stream, owners, end_ns)
                snapshot = Snapshot(begin_ns, end_ns, owners, frozenset(exclusive.get(name, ())))
                self._take(node, source, batch, snapshot)

    def _alive(self, node: Node, stream: str, owners: dict[str, Owners], now_ns: int) -> dict[str, Owners]:
        """The owners without those whose pods have ended: before Kubernetes 1.34 a kubelet goes on to list them beside
        those that got their devices since. Words of pods that may be old take nobody off: under the same name there
        may be a new pod by now."""
        ended: frozenset[Owner] = NOBODY
        if now_ns - node.pods_ns <= self._config.max_gap * NS:
            named = NOBODY.union(*owners.values())
            ended = frozenset(filter(node.pods.has_ended, named))
        node.ended[stream] = ended
        return {device: held - ended for device, held in owners.items()} if ended else owners

    def _spoken(self, plan: Plan, read: SlotReader) -> dict[tuple[str, str], dict[str, Owners]]:
        """(node, source) -> owners by device, for the sources whose word a batch brings."""
        blind = {name for slot, name in plan.visible if read(slot) == 0}
        spoken: dict[tuple[str, str], dict[str, Owners]] = {}
        for name, source, owners in plan.owners(read, self._named):
            # Processes are no word where some can't be seen (others may hold the device, too), nor where nobody knows
            # a single name: they would silence the sources after them and name nobody.
            nameless = not any(holders - {STRANGER} for holders in owners.values())
            if source != PROCESS or not (name in blind or nameless):
                spoken[name, source] = owners
        return spoken

    def _take_back(self, stream: str, told: set[tuple[str, str]]) -> None:
        """A complete batch takes back what its stream said before and does not say again."""
        for node in self._told_of(stream):
            for (source, teller), history in node.histories.items():
                if teller == stream and (node.name, source) not in told:
                    history.clear()
                    node.ended.pop(stream, None)

    def _told_of(self, stream: str) -> list[Node]:
        """The nodes of which a stream has said anything."""
        return [self._nodes[name] for name in self._told.get(stream, ()) if name in self._nodes]

    def _take(self, node: Node, source: str, batch: Batch, snapshot: Snapshot) -> None:
        history = self.history(node, source, batch.stream)
        if not (history.add(snapshot) if batch.complete else history.add_part(snapshot)):
            self.late += 1
        if node.name:
            self._homes.update({device: node.name for device in snapshot.owners if is_global(device)})

    def history(self, node: Node, source: str, stream: str) -> History:
        """What a stream of an allocation source said of a node."""
        key = (source, stream)
        if key not in node.histories:
            gap_ns = round(self._config.max_gap * NS)
            keep_ns = LONGEST_WINDOW_NS + gap_ns
            node.histories[key] = History(gap_ns, source in PAGES, keep_ns, source not in LABELS)
        return node.histories[key]

    def find(self, name: str, device: str) -> Node | None:
        """The node of a reading. Without a node only UUIDs join: then it is the one that holds the device."""
        if not name and is_global(device):
            name = self._homes.get(device.partition("/")[0], self._homes.get(device, ""))
        return self._nodes.get(name)

    def _elect(self, node: Node) -> None:
        """Elects the first source, in the order of trust, that has said anything lately. A vendor's page after one
        that names free devices, too, stands in for what that one can't name."""
        settled = node.last_ns - node.first_ns >= self._config.settle_time * NS
        elected = next((source for source in self._config.sources if self._speaks(node, source)), "")
        node.elected = elected if settled or elected not in PAGES else ""
        stands_in = settled and elected and elected not in PAGES and VENDOR in self._config.sources
        node.vendor = VENDOR if stands_in and self._speaks(node, VENDOR) else ""
        node.mixed = bool(node.vendor or node.devices.cards)

    def _speaks(self, node: Node, source: str) -> bool:
        heard = [history.heard_ns for history in node.sources(source) if history.heard_ns]
        return bool(heard) and node.last_ns - max(heard) <= self._config.source_timeout * NS

    def hold_ns(self, node: Node, device: str) -> int:
        """How long a reading of a device waits for the snapshot after it."""
        if self._config.hold:
            return round(self._config.hold * NS)
        source = node.elected
        if node.mixed:
            keys = node.devices.resolve(device)
            source = node.word_now(keys[0]).source if len(keys) == 1 else source
        return node.interval_ns.get(source, INTERVALS_NS.get(source, 10 * NS)) * 3 // 2

    def decide(self, node: Node | None, device: str, begin_ns: int, end_ns: int) -> Verdict:
        """Who held a device on a node during all of [begin_ns, end_ns]."""
        if node is None:
            return Verdict(Reason.NO_SOURCE)
        if not node.elected:
            return Verdict(Reason.NO_SOURCE)
        keys = node.devices.resolve(device)
        key = keys[0] if len(keys) == 1 else device
        source = node.elected
        if node.mixed:
            asked = node.word(key, begin_ns, end_ns)
            source, key = asked.source, asked.key
        verdicts = [history.decide(key, begin_ns, end_ns, node.devices) for history in node.sources(source)]
        return _combine(verdicts)

    def owners_now(self, node: Node, key: str) -> Owners | None:
        """Who holds a device by the newest word that counts for it; None when that does not name the device."""
        asked = node.word_now(key)
        held = [history.owners_now(asked.key, node.devices) for history in node.sources(asked.source)]
        known = [owners for owners in held if owners is not None]
        return frozenset().union(*known) if known else None

    def holders(self, plan: Plan) -> tuple[Owner | None, ...]:
        """For each claim of a plan, the owner of the processes: as the elected source names their pod for this device,
        else by the pod's names. None when nobody knows them. The same object while nothing changes."""
        if not plan.claims:
            return ()
        nodes = [node for name in plan.nodes if (node := self._nodes.get(name)) is not None]
        seen = [each for node in nodes for each in (node.pods.state, *node.standing())]
        before, _ = plan.holders
        if len(seen) != len(before) or any(map(is_not, seen, before)):
            plan.holders = (seen, tuple(map(self._holder, plan.claims)))
        return plan.holders[1]

    def _holder(self, claim: Claim) -> Owner | None:
        named = self._find_pod(claim.node, claim.hint)
        if named is None:
            return None
        node = self._nodes[claim.node]
        keys = node.devices.resolve(claim.device)
        if len(keys) != 1:
            return named.owner(())
        asked = node.word_now(keys[0])
        # Also by a word that was taken back: a source that is away renames no process.
        held = (history.owners_lately(asked.key, node.devices) for history in node.sources(asked.source))
        return named.owner(NOBODY.union(*held))

    def _named(self, name: str, hint: Hint) -> Owner | None:
        """The owner on a node of what a process tells, by the names of its pod alone."""
        named = self._find_pod(name, hint)
        return None if named is None else named.owner(())

    def _find_pod(self, name: str, hint: Hint) -> Named | None:
        node = self._nodes.get(name)
        return None if node is None else node.pods.find(hint)

    def judge(self, now_ns: int) -> None:
        """Finds out on each node who has a process on a device without holding it; the same tuple while it is so."""
        system = frozenset(self._config.system_namespaces)
        for node in self._nodes.values():
            sights = node.processes.sights(now_ns)
            witnesses, paged = node.sources(WITNESS), self._paged(node)
            found = rogues(sights, node.pods, node.devices, witnesses, now_ns, node.processes.keep_ns, system, paged)
            listed = {pod_key(owner) for owner in node.ended_now()}  # an evicted pod may still be on its way out
            found = tuple(each for each in found if pod_key(each[1]) not in listed)
            node.rogues = found if found != node.rogues else node.rogues

    def _paged(self, node: Node) -> Mapping[str, Owners]:
        """Who held devices lately by a vendor's page, of those that the elected source can't name."""
        held: dict[str, Owners] = {}
        if not node.vendor:
            return held
        named = {key for history in node.sources(node.elected) for key in history.keys_now(node.devices)}
        for history in node.sources(node.vendor):
            for key, holders in history.holders_kept(node.devices).items():
                if key not in named:
                    held[key] = held.get(key, frozenset()) | holders
        return held

    def reason_now(self, node: Node, key: str) -> Reason:
        """Why a device has the owners that it has, by the newest word that counts for it."""
        asked = node.word_now(key)
        verdicts = [Verdict(history.reason_now(asked.key, node.devices)) for history in node.sources(asked.source)]
        return _combine(verdicts).reason

    def disputed(self, node: Node) -> frozenset[str]:
        """The node's devices with several owners although they are known to be exclusive."""
        return frozenset().union(*(history.disputed(node.devices) for history in node.sources(node.elected)))

    def forget(self, now_ns: int) -> None:
        """Drops nodes that have been silent for an hour."""
        silent = {name for name, node in self._nodes.items() if now_ns - node.last_ns > FORGET_NS}
        if silent:
            self._nodes = {name: node for name, node in self._nodes.items() if name not in silent}
            self._homes = {device: home for device, home in self._homes.items() if home not in silent}
            left = {stream: names - silent for stream, names in self._told.items()}
            self._told = {stream: names for stream, names in left.items() if names}
        known = sum(len(node.devices.keys) for node in self._nodes.values())
        if len(self._homes) > 2 * known + MOST_LOST_HOMES:
            # MIG instances that were taken apart leave their UUIDs behind.
            alive = {device for node in self._nodes.values() for device in node.names()}
            self._homes = {device: home for device, home in self._homes.items() if device in alive}


def _duration(seconds: float | None) -> float:
    """A length of time that a source may have, in s; 0 for what can't be one."""
    return seconds if seconds is not None and 0 < seconds < LONGEST_DURATION_S else 0.0


def _asked_ns(plan: Plan, batch: Batch) -> dict[tuple[str, str], int]:
    """When each allocation source was asked, where the receiver says so: a snapshot's start time is the request's,
    its time the reply's."""
    starts = batch.starts()
    return {(each.node, each.source): starts[each.slot] for each in plan.allocations if starts[each.slot]}


def _combine(verdicts: list[Verdict]) -> Verdict:
    """One verdict from several streams of the same source: an owner only when no two name different ones."""
    if len(verdicts) == 1:
        return verdicts[0]
    named = {verdict.owner for verdict in verdicts if verdict.owner is not None}
    if len(named) > 1:
        return Verdict(Reason.CONFLICT)
    open_ones = [verdict for verdict in verdicts if not verdict.final]
    if open_ones:
        return open_ones[0]
    if named:
        return next(verdict for verdict in verdicts if verdict.owner is not None)
    # The one that says most: the order of the reasons is the order of what they know.
    return min(verdicts, key=lambda verdict: list(Reason).index(verdict.reason), default=Verdict(Reason.NO_SOURCE))
