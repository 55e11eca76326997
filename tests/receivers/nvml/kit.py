"""The receiver between ends that remember: a clock that moves when told to, a consumer that keeps batches, and puppets
in place of processes.

Invariant: nothing waits for real time but what waits for a real process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from gpulens.config.ids import ComponentID, Kind
from gpulens.nvml.protocol import Json, Message, ProtocolError
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import Clock, VirtualClock
from gpulens.pipeline.component import Extension, Receiver, Settings
from gpulens.pipeline.data import Batch, Resource, Series, Value
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.nvml.config import NvmlConfig
from gpulens.receivers.nvml.conversation import Conversation
from gpulens.receivers.nvml.process import Child, Listener, PipedChild, Start, starter
from gpulens.receivers.nvml.scraper import NvmlReceiver, build

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
S = 10**9
XID = "gpu.xid.errors"
LIMIT_S = 20.0
"""How long a real process has for anything."""

Lines = Sequence[tuple[int, str, Mapping[str, Json], Mapping[str, Json] | None]]


def entity(gpu: str) -> dict[str, Json]:
    """A GPU's attributes on its points."""
    return {"hw.id": gpu, "hw.name": "nvidia0" if gpu == A else "nvidia1", "hw.model": "NVIDIA H100"}


@dataclass
class Card:
    """What a scripted GPU answers: by tier, row key -> number."""

    fast: dict[str, Json] = field(default_factory=lambda: {"sm": 0.5, "memory.used": 10, "energy": 100.0})
    errors: dict[str, Json] = field(default_factory=lambda: {"rows.failed": 0, "rows.pending": 0, "pcie.replays": 3})
    inventory: dict[str, Json] = field(default_factory=lambda: {"device.info": 1})
    processes: list[tuple[str, Mapping[str, Json], Mapping[str, Json] | None, Json]] = field(default_factory=list)
    epoch: int = 1
    failures: list[list[Json]] = field(default_factory=list)
    silent: tuple[str, int] | None = None
    """(reason, code) instead of readings."""
    mute: bool = False
    """Is asked and says nothing."""


class Puppet:
    """A process played by the test. `act` reacts to what it is told."""

    def __init__(self, listener: Listener, stage: Stage) -> None:
        self._listener = listener
        self._stage = stage
        self._silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.told: list[Message] = []
        self.killed = False
        self.closed = False
        self._shapes = 0

    def say(self, say: str, **fields: Json) -> None:
        """Tells the receiver something."""
        try:
            self._listener.heard({"say": say, **fields})
        except ProtocolError as error:
            self._listener.garbled(str(error))

    def die(self, code: int = 0) -> None:
        """Is gone."""
        if not self._exited.done():
            self._exited.set_result(code)
        if not self._silent.done():
            self._silent.set_result(None)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not self._exited.done()

    # --- Child

    def send(self, message: Mapping[str, Json]) -> None:
        if self.alive:
            self.told.append(dict(message))
            self._stage.act(self, dict(message))

    def hang_up(self) -> None:
        """It goes by `stop`."""

    def kill(self) -> None:
        self.killed = True
        if not self._stage.immortal:
            self.die(-9)

    async def silence(self) -> None:
        await asyncio.shield(self._silent)

    async def wait(self) -> int:
        return await asyncio.shield(self._exited)

    def close(self) -> None:
        self.closed = True

    # --- a good one

    def answer(self, tick: Json, tier: str) -> None:
        """Answers a read as the stage's cards say."""
        cards = self._stage.cards
        self.say("asked", tick=tick, tier=tier, gpus=list(cards), up=True)
        for gpu, card in cards.items():
            if card.mute:
                continue
            if card.silent is not None:
                reason, code = card.silent
                self.say("silent", tick=tick, tier=tier, gpu=gpu, call="nvmlX", reason=reason, code=code)
                continue
            lines: list[Json]
            if tier == "processes":
                lines = [
                    [0, key, dict(more), None if owner is None else dict(owner)]
                    for key, more, owner, _ in card.processes
                ]
                values: list[Json] = [value for *_, value in card.processes]
            else:
                rows: dict[str, Json] = getattr(card, tier)
                lines, values = [[0, key, {}, None] for key in rows], list(rows.values())
            shape = self._stage.shape_of(self, gpu, tier, lines)
            failures: list[Json] = [list(each) for each in card.failures]
            self.say(
                "readings", tick=tick, tier=tier, gpu=gpu, shape=shape, values=values, epoch=card.epoch,
                failures=failures,
            )  # fmt: skip


class Stage:
    """Makes puppets. `react` may be replaced to play a bad one."""

    def __init__(self) -> None:
        self.cards: dict[str, Card] = {A: Card()}
        self.driver: dict[str, Json] = {"up": True, "driver": "580", "nvml": "580", "epoch": 1, "pids": True}
        self.puppets: list[Puppet] = []
        self.immortal = False
        self.deaf = False
        """Does not stop when asked."""
        self.mute = False
        """Does not answer reads."""
        self.fails: list[OSError] = []
        self._shapes: dict[tuple[int, str, str], tuple[int, object]] = {}
        self._numbers = 0

    async def start(self, listener: Listener) -> Child:
        """One more process."""
        if self.fails:
            raise self.fails.pop(0)
        self.puppets.append(Puppet(listener, self))
        return self.puppets[-1]

    @property
    def puppet(self) -> Puppet:
        """The newest process."""
        return self.puppets[-1]

    def act(self, puppet: Puppet, message: Message) -> None:
        """What a good process does."""
        match message["do"]:
            case "configure" if not self.mute:
                puppet.say("driver", **self.driver)
            case "read" if not self.mute:
                puppet.answer(message["tick"], str(message["tier"]))
            case "stop" if not self.deaf:
                puppet.die()
            case _:
                pass

    def shape_of(self, puppet: Puppet, gpu: str, tier: str, lines: list[Json]) -> int:
        """The number of a shape, told first where it is new."""
        known = self._shapes.get((id(puppet), gpu, tier))
        if known is None or known[1] != lines:
            self._numbers += 1
            known = self._shapes[id(puppet), gpu, tier] = (self._numbers, lines)
            puppet.say("shape", shape=known[0], gpu=gpu, tier=tier, entities=[entity(gpu)], series=lines)
        return known[0]


Key = tuple[str, str]


class Rig:
    """The receiver with all that it is given. It is its own host and consumer."""

    def __init__(
        self, start: Start, clock: Clock | None = None, wishes: Message | None = None, **changes: object
    ) -> None:
        self.clock = clock or VirtualClock()
        self.telemetry = Telemetry()
        self.batches: list[Batch] = []
        self.statuses: list[tuple[Status, str]] = []
        self.config = NvmlConfig.model_validate({"initial_delay": "1s", **changes})
        settings = Settings(
            ComponentID("nvml", ""),
            Kind.RECEIVERS,
            "node-1",
            self.clock,
            self.telemetry,
            ComponentLog("receivers", "nvml"),
            self.report,
        )
        self.receiver: Receiver = build(settings, self.config, self, start, wishes=wishes)

    def report(self, status: Status, reason: str) -> bool:
        if self.statuses and self.statuses[-1] == (status, reason):
            return False
        self.statuses.append((status, reason))
        return True

    def extension(self, component_id: ComponentID) -> Extension | None:
        return None

    def stop(self, reason: str) -> None:
        """Nobody asks for it."""

    def consume(self, data: Batch, ack: Ack) -> None:
        self.batches.append(data)

    async def __aenter__(self) -> Self:
        await self.receiver.start(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        ending = asyncio.create_task(self.receiver.shutdown())
        for _ in range(30):
            if ending.done() or not isinstance(self.clock, VirtualClock):
                break
            await self.clock.advance(1)
        await ending

    async def advance(self, seconds: float) -> None:
        """Moves the virtual clock."""
        assert isinstance(self.clock, VirtualClock)
        await self.clock.advance(seconds)

    # --- what came

    def of(self, tier: str = "") -> list[Batch]:
        """The batches of a tier."""
        stream = f"nvml/{tier}" if tier else "nvml"
        return [batch for batch in self.batches if batch.stream == stream]

    def last(self, tier: str = "") -> dict[Key, Value | None]:
        """(metric, hw.id) -> number of a tier's newest batch; the last of several series."""
        return {key: value for key, value, _ in rows(self.of(tier)[-1])}

    @property
    def up(self) -> list[Value | None]:
        """gpu.source.up, tick by tick."""
        return [value for batch in self.of() for (name, _), value, _ in rows(batch) if name == "gpu.source.up"]

    def failures(self) -> dict[str, int]:
        """Failed calls by reason."""
        found: dict[str, int] = {}
        for (name, labels), times in self.telemetry.counters.items():
            if name == "gpulens_nvml_call_failures":
                reason = dict(labels)["reason"]
                found[reason] = found.get(reason, 0) + times
        return found

    def gauge(self, name: str) -> float:
        """A gauge now."""
        return next(value for known, _, value in self.telemetry.read() if known == name)


TIERS = ("", "processes", "errors", "inventory")


class Live(Rig):
    """The receiver with real processes. All tiers tick together, so that virtual time can stand still while the
    process answers."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **changes: object) -> None:
        clock = VirtualClock()
        inner = starter(command, env, clock, ComponentLog("receivers", "nvml"))
        self.children: list[PipedChild] = []

        async def start(listener: Listener) -> Child:
            child = await inner(listener)
            assert isinstance(child, PipedChild)
            self.children.append(child)
            return child

        together = dict.fromkeys(("process_interval", "error_interval", "inventory_interval"), "10s")
        wishes: Message = {"gpm_window_s": 0.1, "retry_s": [0.3, 2.0]}
        super().__init__(start, clock, wishes, **{**together, **changes})

    async def __aexit__(self, *error: object) -> None:
        await self.receiver.shutdown()  # a real process stops in real time
        await self.gone()  # one given up by the virtual clock may still be on its way

    async def gone(self) -> None:
        """Waits until every process so far has ended and was reaped, before virtual time runs out for one that needs
        real time to go. Raises TimeoutError."""
        async with asyncio.timeout(LIMIT_S):
            for child in self.children:
                await child.wait()

    @property
    def conversation(self) -> Conversation:
        """What is known of the process."""
        assert isinstance(self.receiver, NvmlReceiver)
        return self.receiver.conversation

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.children[-1].pid

    async def tick(self, count: int = 1, seconds: float = 10, tiers: Sequence[str] = TIERS) -> None:
        """The next ticks, answered in these tiers (a tier that fails says nothing at first)."""
        for _ in range(count):
            wanted = {tier: len(self.of(tier)) for tier in tiers}
            await self.advance(seconds)
            await until(partial(self._went_on, wanted))

    def _went_on(self, before: Mapping[str, int]) -> bool:
        return all(len(self.of(tier)) > number for tier, number in before.items())

    async def fresh(self, count: int = 1) -> None:
        """Ticks after the driver took samples of its own again."""
        for _ in range(count):
            await asyncio.sleep(0.3)
            await self.tick()

    async def first(self) -> None:
        """The first tick, once the driver was told of and the first windows are over."""
        await until(lambda: self.of("inventory"))
        await asyncio.sleep(0.15)
        await self.tick(seconds=1)


def rows(batch: Batch) -> list[tuple[Key, Value | None, int]]:
    """((metric, hw.id), number, start) of each slot."""
    return [
        ((series.metric.name, series.text("hw.id")), value, start)
        for (_, _, series), value, start in zip(
            batch.layout.identities(), batch.readings(), batch.starts(), strict=True
        )
    ]


def series_of(batch: Batch) -> list[tuple[Resource, Series, Value | None]]:
    """Every slot with its identity."""
    return [
        (resource, series, value)
        for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
    ]


def xids(batch: Batch) -> dict[str, tuple[object, int]]:
    """code -> (total, start) of A."""
    return {
        series.text("gpu.xid"): (value, start)
        for (_, series, value), start in zip(series_of(batch), batch.starts(), strict=True)
        if series.metric.name == XID and series.text("hw.id") == A
    }


def spelled(series: Series) -> str:
    """A series as text, without the device: name{value,...}."""
    own = {k: v for k, v in series.map.items() if k not in {"hw.id", "hw.name", "hw.model", "hw.parent", "hw.type"}}
    values = ",".join(str(value) for key, value in sorted(own.items()) if key != "gpu.mig.profile")
    return f"{series.metric.name}{{{values}}}" if values else series.metric.name


async def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Gives a real process time. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - another process makes it hold; nothing here could set an event
            await asyncio.sleep(0.005)
