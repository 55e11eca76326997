"""A connector for tests: hands metrics on as metrics, and lifts their events into logs.

Invariant: it changes nothing; what it passes on is what came.
"""

from __future__ import annotations

from typing import cast

from gpulens.config.ids import Kind
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import (
    ConnectorFactory,
    Consumer,
    Factory,
    Host,
    LogBatch,
    Settings,
    Stability,
)
from gpulens.pipeline.data import Batch


class RelayConfig(ComponentConfig):
    """A relay has nothing to set."""


class Relay:
    """Metrics to metrics."""

    def __init__(self, settings: Settings, _: ComponentConfig, consumer: Consumer[Batch]) -> None:
        self._consumer = consumer

    async def start(self, host: Host) -> None:
        """Nothing runs in the background."""

    async def shutdown(self) -> None:
        """Nothing is held."""

    def consume(self, data: Batch, ack: Ack) -> None:
        self._consumer.consume(data, ack)


class Lift(Relay):
    """Metrics to logs: the events of a batch."""

    def __init__(self, settings: Settings, config: ComponentConfig, consumer: Consumer[LogBatch]) -> None:
        self._logs = consumer

    def consume(self, data: Batch, ack: Ack) -> None:
        if data.events:
            self._logs.consume(LogBatch(data.events, data.stream), ack)


class LogRelay:
    """Logs to logs."""

    def __init__(self, settings: Settings, _: ComponentConfig, consumer: Consumer[LogBatch]) -> None:
        self._consumer = consumer

    async def start(self, host: Host) -> None:
        """Nothing runs in the background."""

    async def shutdown(self) -> None:
        """Nothing is held."""

    def consume(self, data: LogBatch, ack: Ack) -> None:
        self._consumer.consume(data, ack)


RELAY: tuple[Kind, Factory] = (
    Kind.CONNECTORS,
    cast(Factory, ConnectorFactory("relay", RelayConfig, Stability.DEVELOPMENT, Relay, Lift, LogRelay)),
)
