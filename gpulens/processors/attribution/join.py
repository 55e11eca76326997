"""The attribution processor: readings meet the allocations that flow by.

Invariant: a `work` reading gets an owner only when the allocation snapshots before its window and after it agree;
it waits for the second one at most `hold`, then goes out without. Decisions depend on the order and the event times
of what arrives and on nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Host, Metrics, Settings
from gpulens.pipeline.counters import CLOCK_STEP_NS
from gpulens.pipeline.data import Batch, Layout, bitmap_slots
from gpulens.pipeline.grid import NS, Grid, Watermark
from gpulens.pipeline.lru import BytesLRU
from gpulens.processors.attribution import state
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.mapping import Mapped, View, build
from gpulens.processors.attribution.nodes import Nodes
from gpulens.processors.attribution.ownership import Owner, Verdict
from gpulens.processors.attribution.plan import Plan
from gpulens.processors.attribution.report import Reporter
from gpulens.processors.attribution.words import VENDOR

PLAN_BYTES = 2000
"""Rough cost of a series in a plan or a mapping with the layout that it keeps alive, measured on 8 GPUs."""

MOST_CAUGHT_UP = 30
"""Grid instants that are reported at once after a hole in event time. Before that nothing new is known; a stale
recording beside live sources would otherwise fill every queue with reports of times long gone."""

SWEEP_NS = 300 * NS
"""Event time between two sweeps of the caches; a multiple of any sensible grid."""

MAX_HELD = 1000
"""Batches that may wait; beyond, the oldest goes out undecided."""


_Span = tuple[int, int, int | None]
"""What the readings of a group cover: first time, last time, and the window before the first; ns. The window is None
while nobody knows the node."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AgingCache(Generic[K, V]):
    """A cache bounded in bytes whose entries also go when two sweeps pass without a use: what churn leaves behind
    must not fill the room that is there for many senders."""

    def __init__(self, name: str, limit_bytes: int, cost: Callable[[K, V], int]) -> None:
        self.entries: BytesLRU[K, V] = BytesLRU(name, limit_bytes, cost)
        self._used: set[K] = set()
        self._before: set[K] = set()

    def get(self, key: K) -> V | None:
        """The value, None when it is not there."""
        value = self.entries.get(key)
        if value is not None:
            self._used.add(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Keeps a value."""
        self.entries.put(key, value)
        self._used.add(key)

    def sweep(self) -> None:
        """Drops what was not used since the sweep before."""
        for key in self._before - self._used:
            self.entries.discard(key)
        self._before, self._used = self._used, set()


@dataclass(slots=True)
class _Held:
    batch: Batch
    plan: Plan
    spans: list[_Span]
    deadline_ns: int
    ack: Ack


class AttributionProcessor:
    """Gives each reading its owner, or says why it has none."""

    def __init__(self, settings: Settings, config: AttributionConfig, consumer: Metrics) -> None:
        self._settings = settings
        self._consumer = consumer
        self._config = config
        self._begin()
        self._reporter = Reporter(str(settings.id))
        self._plans: AgingCache[Layout, Plan] = AgingCache("attribution_plans", 32 << 20, _plan_cost)
        self._mappings: AgingCache[tuple[Layout, View], Mapped] = AgingCache(
            "attribution_mappings", 64 << 20, lambda key, _: PLAN_BYTES * (key[0].size + 1)
        )

    def _begin(self) -> None:
        """Knows nothing yet."""
        self._nodes = Nodes(self._config)
        self._watermark = Watermark(round(self._config.lateness * NS))
        self._grid = Grid(round(self._config.grid * NS), limit=MOST_CAUGHT_UP)
        self._held: dict[str, deque[_Held]] = {}
        self._told_ns: dict[str, int] = {}
        self._late_seen = 0

    async def start(self, host: Host) -> None:
        """Registers the caches' figures."""
        for cache in (self._plans.entries, self._mappings.entries):
            for figure in ("bytes", "hits", "misses", "evictions"):
                self._settings.telemetry.watch(
                    f"gpulens_cache_{figure}", partial(getattr, cache, figure), cache=cache.name
                )

    async def shutdown(self) -> None:
        """Lets go of what waits: undecided readings go out without an owner."""
        self._release_all()

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Learns what the batch says, then passes on everything that can be decided."""
        self._watch_clock(batch)
        plan = self._plan(batch.layout)
        self._nodes.learn(plan, batch)
        self._count_late()
        if batch.latest_ns():
            self._grid.start(batch.latest_ns())
            self._watermark.observe(batch.latest_ns())
        queue = self._held.setdefault(batch.stream, deque())
        held = _Held(batch, plan, self._spans(plan, batch), self._deadline(plan, batch), ack)
        queue.append(held)
        self._release()
        held.ack = Ack()  # what waits beyond this call does not delay the source
        self._report()

    def save_state(self) -> tuple[int, bytes]:
        """(version, what was learned of the nodes)."""
        return state.VERSION, state.dump(self._nodes)

    def load_state(self, version: int, saved: bytes) -> bool:
        """Takes a saved state up before the first batch; False when it can't be used."""
        return version == state.VERSION and not self._nodes.all() and state.load(self._nodes, saved)

    def _watch_clock(self, batch: Batch) -> None:
        """Begins anew when a stream's own clock was set back: what was learned lies in its future, and waiting for it
        would freeze every decision for as long as the step."""
        now_ns = batch.latest_ns()
        if not batch.complete or not now_ns:
            return
        if now_ns < self._told_ns.get(batch.stream, 0) - CLOCK_STEP_NS:
            self._settings.log.warning("Clock went back. Learning owners anew.", stream=batch.stream)
            self._settings.telemetry.count("gpulens_attribution_clock_steps", processor=str(self._settings.id))
            self._release_all()
            self._begin()
        self._told_ns[batch.stream] = now_ns

    # --- what waits

    def _spans(self, plan: Plan, batch: Batch) -> list[_Span]:
        """The span of each group's readings, by what is known of the sources when they arrive."""
        spans = []
        for group, slots in zip(plan.groups, plan.members, strict=True):
            if isinstance(batch.time_ns, int):
                first = last = batch.time_ns
            else:
                times = [batch.time_ns[slot] for slot in slots]
                first, last = min(times), max(times)
            node = self._nodes.find(group.node, group.device)
            spans.append((first, last, None if node is None else node.window(group.witness, batch.stream)))
        return spans

    def _deadline(self, plan: Plan, batch: Batch) -> int:
        """Event time at which a batch goes out, decided or not."""
        holds = []
        for group in plan.groups:
            node = self._nodes.find(group.node, group.device)
            if node is not None:
                holds.append(self._nodes.hold_ns(node, group.device))
        return batch.latest_ns() + max(holds, default=0)

    def _release(self) -> None:
        """Passes on, oldest first, every batch that is decided or has waited long enough."""
        progress = True
        while progress:
            progress = False
            for stream in list(self._held):
                while stream in self._held and self._try_first(stream):
                    progress = True
        while sum(map(len, self._held.values())) > MAX_HELD:
            self._release_first()

    def _try_first(self, stream: str) -> bool:
        queue = self._held[stream]
        held = queue[0]
        verdicts = self._verdicts(held)
        waiting = any(not verdict.final for verdict in verdicts)
        if waiting and self._watermark.latest_ns < held.deadline_ns:
            return False
        self._pop(stream)
        self._emit(held, verdicts)
        return True

    def _release_all(self) -> None:
        """Passes on all that waits, as it stands."""
        while self._held:
            self._release_first()

    def _release_first(self) -> None:
        """Passes the oldest waiting batch on as it stands."""
        stream = min(self._held, key=lambda name: (self._held[name][0].deadline_ns, name))
        held = self._held[stream][0]
        self._pop(stream)
        self._emit(held, self._verdicts(held))

    def _pop(self, stream: str) -> None:
        queue = self._held[stream]
        queue.popleft()
        if not queue:
            del self._held[stream]

    # --- deciding

    def _verdicts(self, held: _Held) -> list[Verdict]:
        verdicts = []
        for group, (first_ns, last_ns, window_ns) in zip(held.plan.groups, held.spans, strict=True):
            node = self._nodes.find(group.node, group.device)
            if node is not None and window_ns is None:
                window_ns = node.window(group.witness, held.batch.stream)
            verdicts.append(self._nodes.decide(node, group.device, first_ns - (window_ns or 0), last_ns))
        return verdicts

    def _emit(self, held: _Held, verdicts: list[Verdict]) -> None:
        batch = held.batch
        if batch.layout.size:
            mapped = self._mapping(held.plan, self._view(held.plan, verdicts))
            batch = mapped.projection.apply(batch)
            self._count(held.plan, verdicts, held.batch.absent)
            if mapped.duplicates:
                self._settings.telemetry.count(
                    "gpulens_attribution_duplicates", mapped.duplicates, processor=str(self._settings.id)
                )
        self._consumer.consume(batch, held.ack)

    def _view(self, plan: Plan, verdicts: list[Verdict]) -> View:
        nodes = [node for name in plan.nodes if (node := self._nodes.find(name, "")) is not None]
        elected = tuple((node.name, node.elected) for node in nodes)
        versions = tuple((node.name, node.devices.version) for node in nodes)
        disputed = paged = frozenset[tuple[str, str]]()
        ended = frozenset[tuple[str, Owner]]()
        if plan.allocations:
            paged = frozenset(
                (node.name, key) for node in nodes for key, word in node.words().items() if word.source == VENDOR
            )
            disputed = frozenset((node.name, key) for node in nodes for key in self._nodes.disputed(node))
            ended = frozenset((node.name, owner) for node in nodes for owner in node.ended_now())
        owners_of = tuple(verdict.owner for verdict in verdicts)
        return View(owners_of, self._nodes.holders(plan), elected, versions, disputed, paged, ended)

    def _plan(self, layout: Layout) -> Plan:
        plan = self._plans.get(layout)
        if plan is None:
            plan = Plan.of(layout)
            self._plans.put(layout, plan)
        return plan

    def _mapping(self, plan: Plan, view: View) -> Mapped:
        key = (plan.layout, view)
        mapped = self._mappings.get(key)
        if mapped is None:
            devices = {node.name: node.devices for node in self._nodes.all()}
            mapped = build(plan, view, devices)
            self._mappings.put(key, mapped)
        return mapped

    # --- telling

    def _report(self) -> None:
        for instant in self._grid.due(self._watermark.ns):
            self._nodes.judge(instant)
            batch = self._reporter.batch(self._nodes, instant)
            if batch is not None:
                self._consumer.consume(batch, Ack())
            self._nodes.forget(instant)
            if instant % SWEEP_NS == 0:
                self._plans.sweep()
                self._mappings.sweep()

    def _count(self, plan: Plan, verdicts: list[Verdict], absent: bytes) -> None:
        counts: Counter[str] = Counter()
        for verdict, slots in zip(verdicts, plan.members, strict=True):
            counts[str(verdict.reason)] += len(slots)
        for slot in bitmap_slots(absent):
            if slot in plan.work:
                counts[str(verdicts[plan.work[slot]].reason)] -= 1
        for reason, count in counts.items():
            self._settings.telemetry.count(
                "gpulens_attribution_points", count, processor=str(self._settings.id), reason=reason
            )

    def _count_late(self) -> None:
        if self._nodes.late > self._late_seen:
            self._settings.telemetry.count(
                "gpulens_attribution_late_facts",
                self._nodes.late - self._late_seen,
                processor=str(self._settings.id),
            )
            self._late_seen = self._nodes.late


def _plan_cost(layout: Layout, _: Plan) -> int:
    return PLAN_BYTES * (layout.size + 1)


def create(settings: Settings, config: AttributionConfig, consumer: Metrics) -> AttributionProcessor:
    """Makes the processor for one pipeline."""
    return AttributionProcessor(settings, config, consumer)
