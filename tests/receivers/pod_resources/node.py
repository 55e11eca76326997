"""A receiver on a virtual clock, and what it says."""

from __future__ import annotations

from pathlib import Path

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Value
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Status
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.pod_resources.config import PodResourcesConfig
from gpulens.receivers.pod_resources.scraper import create


class Node:
    """A receiver on a virtual clock, with what it emitted and reported."""

    def __init__(self, path: Path, **config: object) -> None:
        self.clock = VirtualClock()
        self.batches: list[Batch] = []
        self.reports: list[tuple[Status, str]] = []
        self.telemetry = Telemetry()
        settings = Settings(
            ComponentID("pod_resources"),
            Kind.RECEIVERS,
            "node-a",
            self.clock,
            self.telemetry,
            ComponentLog(),
            self.report,
        )
        parsed = PodResourcesConfig.model_validate({"endpoint": f"unix://{path}", **config})
        self.receiver = create(settings, parsed, self)

    def report(self, status: Status, reason: str) -> bool:
        """Takes a status."""
        self.reports.append((status, reason))
        return True

    def consume(self, data: Batch, ack: Ack) -> None:
        """Takes a batch."""
        self.batches.append(data)

    async def tick(self) -> Batch:
        """One scrape."""
        await self.receiver.tick()
        return self.batches[-1]


def rows(batch: Batch, name: str) -> dict[tuple[str, str], Value | None]:
    """(pod or "", device) -> value, for one metric."""
    return {
        (resource.text("k8s.pod.name"), series.text("hw.id")): value
        for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
        if series.metric.name == name
    }
