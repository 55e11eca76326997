"""Reads this node's GPUs in four tiers through one process that owns NVML.

Invariant: a tick takes no longer than `timeout`; a GPU that does not answer in it is absent and keeps nobody else from
being told. What the driver can't say is absent, never 0.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpulens.nvml.launch import COMMAND, environment
from gpulens.nvml.protocol import Message, Tier
from gpulens.nvml.reason import Reason
from gpulens.nvml.table import BY_KEY
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Host, Metrics, Receiver, Settings
from gpulens.pipeline.data import Resource, Scope, Series
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.nvml.assembly import NO_EXTRAS, Assembly, Extra, Extras, Row
from gpulens.receivers.nvml.config import NvmlConfig
from gpulens.receivers.nvml.conversation import Conversation
from gpulens.receivers.nvml.device_status import DeviceStatus
from gpulens.receivers.nvml.health import Health
from gpulens.receivers.nvml.messages import Answer, Attrs, Reading
from gpulens.receivers.nvml.process import Start, starter
from gpulens.receivers.nvml.supervisor import Supervisor
from gpulens.receivers.nvml.xid_totals import MOST_RECORDS, XidTotals, before_batch, log_records

SOURCE: Final = "nvml"
TIER_NAMES: Final[Mapping[Tier, str]] = {
    Tier.FAST: "",
    Tier.PROCESSES: "processes",
    Tier.ERRORS: "errors",
    Tier.INVENTORY: "inventory",
}
"""What stands behind the receiver's id in a tier's stream."""

_MARGIN_S: Final = 2.0
"""A tick ends itself at its deadline; the scrape helper's own deadline is only for defects."""


@dataclass(frozen=True, slots=True)
class Node:
    """What all tiers share: whose readings these are, and what is known of its GPUs."""

    resource: Resource
    scope: Scope
    source: str
    clock: Clock
    telemetry: Telemetry
    conversation: Conversation
    health: Health
    xids: XidTotals
    status: DeviceStatus
    assemblies: Mapping[Tier, Assembly]

    def device(self, gpu: str) -> Attrs | None:
        """The attributes of a GPU on its points; None until one of its shapes was seen."""
        for assembly in self.assemblies.values():
            found = assembly.device(gpu)
            if found is not None:
                return found
        return None

    def away(self, answer: Answer) -> frozenset[str]:
        """Known GPUs that are not listed by name while the driver counts one that it does not hand out: a process that
        began after a GPU was lost does not know its name."""
        driver = self.conversation.driver
        if driver is None or not driver.unreachable:
            return frozenset()
        return frozenset(gpu for each in self.assemblies.values() for gpu in each.gpus if gpu not in answer.gpus)

    def is_one_lost(self) -> bool:
        """Whether one of those that can't be reached fell off the bus."""
        driver = self.conversation.driver
        return driver is not None and any(why == Reason.LOST for _, why in driver.unreachable)

    def forget_all_but(self, gpus: Collection[str]) -> None:
        """GPUs that the driver does not list any more are gone, with all that was known of them."""
        for assembly in self.assemblies.values():
            for gpu in set(assembly.gpus).difference(gpus):
                assembly.forget(gpu)
                self.xids.forget(gpu)
                self.status.forget(gpu)

    def note(self, answer: Answer) -> None:
        """Says who did not answer and why."""
        driver = self.conversation.driver
        texts = [f"{gpu}: no answer in time" for gpu in answer.missing]
        for gpu, silence in answer.silences.items():
            call = f" ({silence.call})" if silence.call else ""
            texts.append(f"{gpu}: {silence.reason}{call}")
        for index, why in driver.unreachable if driver and answer.tier is Tier.FAST else ():
            texts.append(f"the GPU of index {index} can't be reached: {why}")
        self.health.note(str(answer.tier), "; ".join(sorted(texts)))
        if answer.missing:
            name = "gpulens_nvml_unanswered"
            self.telemetry.count(name, len(answer.missing), receiver=self.source, tier=str(answer.tier))


class TierScraper:
    """One tier. Reads of it never overlap, whoever asks for them."""

    def __init__(self, node: Node, tier: Tier, stream: str, limit_s: float) -> None:
        self._node = node
        self._tier = tier
        self._stream = stream
        self._limit_s = limit_s
        self._lock = asyncio.Lock()
        self._assembly = node.assemblies[tier]
        self._asked_s: float | None = None
        self._made: dict[str, tuple[Sequence[Extra], Sequence[Extra], Extras]] = {}
        self._identities: dict[str, Reading] = {}
        self._visible = Series(metric("gpu.process.visible"), {"gpu.source": node.source})

    async def scrape(self, now_ns: int) -> Scraped:
        """Asks all GPUs. Points carry the time at which their batch is put together. Raises ScrapeError."""
        node = self._node
        async with self._lock:
            previous_s, self._asked_s = self._asked_s, node.clock.monotonic()
            answer = await node.conversation.read(self._tier, self._limit_s)
            away = node.away(answer)
            for gpu, reading in answer.readings.items():
                self._assembly.take(gpu, reading)
            node.note(answer)
            if self._tier is Tier.FAST:
                return self._activity(answer, away, node.conversation.born_s if previous_s is None else previous_s)
            if self._tier is Tier.ERRORS:
                for gpu, reading in answer.readings.items():
                    node.status.learn_errors(gpu, reading)
            if self._tier is Tier.INVENTORY:
                node.forget_all_but({*answer.gpus, *away})
                return self._inventory(answer)
            head = self._head() if self._tier is Tier.PROCESSES else NO_EXTRAS
            return Scraped(self._assembly.batch(answer.readings, {}, node.clock.now_ns(), head=head))

    async def close(self) -> None:
        """Has nothing of its own; the process belongs to the receiver."""

    def _head(self) -> Extras:
        driver = self._node.conversation.driver
        return Extras([Extra(self._visible, int(driver is not None and driver.pids))])

    def _inventory(self, answer: Answer) -> Scraped:
        """Who a GPU is stays known while it is listed: also when it hangs, and when it is away."""
        known = {**self._identities, **answer.readings}
        self._identities = {gpu: each for gpu, each in known.items() if gpu in self._assembly.gpus}
        return Scraped(self._assembly.batch(self._identities, {}, self._node.clock.now_ns()))

    def _activity(self, answer: Answer, away: Collection[str], previous_s: float) -> Scraped:
        node, now_ns = self._node, self._node.clock.now_ns()
        extras: dict[str, Extras] = {}
        zeros: list[Extra] = []
        for xid in node.conversation.xids:
            node.xids.see(xid.gpu, xid.time_ns)
            node.xids.add(xid)
        for gpu in self._assembly.gpus:
            device = node.device(gpu) or {"hw.id": gpu}
            silence = answer.silences.get(gpu)
            lost = silence.is_lost if silence is not None else gpu in away and node.is_one_lost()
            reading = answer.readings.get(gpu)
            node.xids.see(gpu, now_ns)
            counted = node.xids.extras(gpu, device)
            node.status.learn(gpu, reading, lost, node.clock.monotonic())
            state = node.status.extras(gpu, device, answered=lost or reading is not None)
            made = self._made.get(gpu)
            if made is None or made[0] is not counted or made[1] is not state:
                zeros += node.xids.zeros(gpu, counted)
                made = self._made[gpu] = (counted, state, Extras((*counted, *state)))
            extras[gpu] = made[2]
        since = {gpu: each.since_s for gpu, each in answer.readings.items() if each.since_s is not None}
        gaps = frozenset(gpu for gpu, since_s in since.items() if since_s < previous_s)
        batch = self._assembly.batch(answer.readings, extras, now_ns, gaps=gaps)
        xids = node.conversation.take_xids()
        if len(xids) > MOST_RECORDS:
            node.telemetry.count("gpulens_nvml_events_dropped", len(xids) - MOST_RECORDS, receiver=node.source)
        events = log_records(node.resource, node.scope, xids)
        return Scraped(
            replace(batch, events=events) if events else batch,
            window_s=node.clock.monotonic() - previous_s,
            before=before_batch(node.resource, node.scope, self._stream, zeros),
        )


class NvmlReceiver:
    """Four timers around one process."""

    def __init__(
        self, supervisor: Supervisor, conversation: Conversation, tiers: Mapping[Tier, ScrapeReceiver]
    ) -> None:
        self._supervisor = supervisor
        self.conversation = conversation
        self._tiers = tiers
        self._follower: asyncio.Task[None] | None = None

    async def start(self, host: Host) -> None:
        """Starts the process and the timers; neither is waited for."""
        self._supervisor.start()
        self._follower = asyncio.create_task(self._follow(), name="nvml changes")
        for receiver in self._tiers.values():
            await receiver.start(host)

    async def shutdown(self) -> None:
        """Stops the timers, then the process. One that hangs in the driver is left behind."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
        for receiver in self._tiers.values():
            await receiver.shutdown()
        await self._supervisor.stop()

    async def _follow(self) -> None:
        """Reads the inventory as soon as it changed, so that names are known before the next readings."""
        while True:
            await self.conversation.changed.wait()
            self.conversation.changed.clear()
            await self._tiers[Tier.INVENTORY].tick()


def create(settings: Settings, config: NvmlConfig, consumer: Metrics) -> Receiver:
    """The receiver of one `nvml:` block."""
    env = environment(os.environ, config.library_path)
    return build(settings, config, consumer, starter(COMMAND, env, settings.clock, settings.log))


def build(
    settings: Settings,
    config: NvmlConfig,
    consumer: Metrics,
    start: Start,
    rows: Mapping[str, Row] = BY_KEY,
    wishes: Message | None = None,
) -> Receiver:
    """The receiver around processes that `start` starts. `wishes` are told to them beside what the config says."""
    clock, telemetry = settings.clock, settings.telemetry
    source = f"{SOURCE}/{settings.id.name}" if settings.id.name else SOURCE
    conversation = Conversation(
        {
            "call_timeout_s": config.call_timeout,
            "proc": config.host_proc,
            "host_pid": config.host_pid,
            "processes": config.processes,
            **(wishes or {}),
        },
        clock,
        telemetry,
        source,
    )
    supervisor = Supervisor(start, conversation, clock, telemetry, settings.log)
    conversation.tell, conversation.give_up = supervisor.send, supervisor.replace
    telemetry.watch("gpulens_nvml_up", lambda: conversation.is_up, receiver=source)
    telemetry.watch("gpulens_nvml_abandoned", lambda: supervisor.abandoned, receiver=source)
    resource, scope = node_resource(settings.node), Scope(f"gpulens/{SOURCE}")
    streams = {tier: f"{settings.id}/{name}" if name else str(settings.id) for tier, name in TIER_NAMES.items()}
    wanted = {key: row for key, row in rows.items() if config.keeps(row.metric)}
    node = Node(
        resource,
        scope,
        source,
        clock,
        telemetry,
        conversation,
        Health(settings.report, settings.log),
        XidTotals(),
        DeviceStatus(rows),
        {tier: Assembly(wanted, resource, scope, stream) for tier, stream in streams.items()},
    )
    tiers = [tier for tier in Tier if tier is not Tier.PROCESSES or config.processes]
    return NvmlReceiver(
        supervisor,
        conversation,
        {tier: _tier(settings, config, consumer, node, tier, streams[tier]) for tier in tiers},
    )


def _tier(
    settings: Settings, config: NvmlConfig, consumer: Metrics, node: Node, tier: Tier, stream: str
) -> ScrapeReceiver:
    limit_s = config.patience_of(tier)
    own = config.model_copy(update={"collection_interval": config.interval_of(tier), "timeout": limit_s + _MARGIN_S})
    scraper = TierScraper(node, tier, stream, limit_s)
    reporting = replace(settings, report=node.health.of(str(tier)))
    return ScrapeReceiver(reporting, own, SOURCE, scraper, consumer, tier=TIER_NAMES[tier])
