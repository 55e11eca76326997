"""The nvml receiver run for a few ticks as the agent runs it, with what it emitted and what that cost this process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from bench.device.markdown import table
from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import SystemClock
from gpulens.pipeline.component import Extension, Settings
from gpulens.pipeline.data import Batch, Value
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.nvml import FACTORY
from gpulens.receivers.nvml.config import NvmlConfig

_LIMIT_S = 60.0
_RESOURCE_KEYS = ("k8s.pod.uid", "container.id")
_HIDDEN = "gpu.serial"


@dataclass(slots=True)
class Collected:
    """The batches by stream, the trouble that was reported, and this process's CPU seconds up to each fast tick."""

    batches: dict[str, list[Batch]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    ticked: asyncio.Event = field(default_factory=asyncio.Event)

    def consume(self, data: Batch, ack: Ack) -> None:
        """Takes one batch."""
        self.batches.setdefault(data.stream, []).append(data)
        if data.stream == "nvml":
            self.cpu_s.append(time.process_time())
            self.ticked.set()

    def cpu_ms(self, warm: int) -> float:
        """Milliseconds of CPU from one fast tick to the next: the median, without the first `warm` ticks."""
        steady = self.cpu_s[warm:]
        return 1e3 * statistics.median(end - begin for begin, end in pairwise(steady))

    def report(self, status: Status, reason: str) -> bool:
        """Takes a change of state; every one is new to it."""
        if reason:
            self.trouble.append(f"{status.name}: {reason}")
        return True


class Alone:
    """A host with no extensions."""

    def extension(self, component_id: ComponentID) -> Extension | None:
        """There are none."""
        return None

    def stop(self, reason: str) -> None:
        """Nobody to stop."""


def collect(ticks: int, interval_s: float, *, all_tiers: bool = True, folder: str = "") -> Collected:
    """Runs the receiver until its fast tier has ticked so often.

    With `all_tiers` the other tiers are read at the same interval, else once. `folder` holds the driver's library.
    Raises TimeoutError.
    """
    return asyncio.run(_collect(ticks, interval_s, all_tiers, folder))


async def _collect(ticks: int, interval_s: float, all_tiers: bool, folder: str) -> Collected:
    fast, other = f"{round(1000 * interval_s)}ms", "1h"
    found = Collected()
    config = NvmlConfig.model_validate(
        {
            "collection_interval": fast,
            **dict.fromkeys(("process_interval", "error_interval", "inventory_interval"), fast if all_tiers else other),
            "initial_delay": "100ms",
            "library_path": [folder] if folder else [],
        }
    )
    settings = Settings(
        ComponentID("nvml"), Kind.RECEIVERS, "node-1", SystemClock(), Telemetry(), ComponentLog(), found.report
    )
    assert FACTORY.metrics is not None
    made = FACTORY.metrics(settings, config, found)
    await made.start(Alone())
    try:
        async with asyncio.timeout(_LIMIT_S):
            while len(found.cpu_s) < ticks:
                found.ticked.clear()
                await found.ticked.wait()
    finally:
        await made.shutdown()
    return found


def series(batch: Batch) -> Iterator[tuple[str, str, Value | None]]:
    """(name with attributes, owner, value) of each slot."""
    for (resource, _, one), value in zip(batch.layout.identities(), batch.readings(), strict=True):
        inner = ", ".join(f"{key}={'told' if key == _HIDDEN else str(each)}" for key, each in one.map.items())
        owner = ", ".join(f"{key}={str(resource.map[key])[:12]}" for key in _RESOURCE_KEYS if key in resource.map)
        yield f"{one.metric.name}{{{inner}}}", owner, value


def shown(found: Collected, gpu: str) -> str:
    """The last batch of each stream, of this GPU, its instances and the node; and how many series each device has."""
    parts, counts = [], Counter[str]()
    for stream, batches in sorted(found.batches.items()):
        last = batches[-1]
        for _, _, one in last.layout.identities():
            counts[str(one.map.get("hw.id", "the node"))] += 1
        rows = [
            (f"`{name}`", owner, "absent" if value is None else value)
            for name, owner, value in series(last)
            if gpu in name or "hw.id=" not in name
        ]
        parts.append(f"### Stream `{stream}`\n\n{table(('series', 'owner', 'value'), rows)}")
    sums = ", ".join(f"{device}: {count}" for device, count in counts.items())
    head = [f"{found.cpu_ms(1):.2f} ms of the agent's CPU a tick of all tiers. Series: {sums}."]
    head += [f"- {text}" for text in found.trouble]
    return "\n\n".join([*head, *parts])
