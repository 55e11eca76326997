"""The service: one graph from start to stop.

Invariant: components start extensions first, receivers last, and stop in the reverse order, so data in flight is
flushed downstream before what takes it closes. After a good start nothing ends the service but `stop`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulens.config.ids import ComponentID, Kind
from gpulens.config.service import ServiceConfig
from gpulens.pipeline.clock import Clock, SystemClock
from gpulens.pipeline.component import Extension, Settings
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.graph import Graph, Node, build
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.status import Status, StatusBoard
from gpulens.pipeline.telemetry import Telemetry

SHUTDOWN_GRACE_S = 30.0
"""A component that has not stopped by then is left behind, so that one hanging call can't keep the process alive."""


def node_name(config: ServiceConfig, environ: Mapping[str, str]) -> str:
    """The node that an agent's own receivers speak for: `service.node`, else NODE_NAME, else the hostname."""
    return config.node or environ.get("NODE_NAME", "") or socket.gethostname()


@dataclass(slots=True)
class Service:
    """Runs one config. Everything that touches the outside is an argument."""

    config: ServiceConfig
    node: str
    registry: Registry = field(default_factory=Registry)
    clock: Clock = field(default_factory=SystemClock)
    telemetry: Telemetry = field(default_factory=Telemetry)
    log: ComponentLog = field(default_factory=ComponentLog)
    board: StatusBoard = field(init=False)
    graph: Graph = field(init=False)
    _started: list[Node] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.board = StatusBoard(self.clock.now_ns)
        self.graph = build(self.config, self.registry, self._settings)

    # --- what components may ask (Host)

    def extension(self, component_id: ComponentID) -> Extension | None:
        """A running extension, None where the config has none of this id."""
        key = f"{Kind.EXTENSIONS}/{component_id}"
        return next((node.component for node in self._started if node.key == key), None)

    def stop(self, reason: str) -> None:
        """Asks the service to end in order."""
        if not self._stop.is_set():
            self.log.info("Stopping.", reason=reason)
            self._stop.set()

    # --- life

    async def start(self) -> None:
        """Starts everything. Raises StartError, with what had started stopped again."""
        for node in self.graph.nodes:
            self.board.set(node.key, Status.STARTING)
            try:
                self._started.append(node)
                await node.component.start(self)
            except Exception as error:  # a defect, too, must not leave half a graph running
                text = str(error) if isinstance(error, StartError) else repr(error)
                self.board.set(node.key, Status.PERMANENT, text)
                await self.shutdown()
                kind, _, name = node.key.partition("/")
                raise StartError(
                    f'cannot start pipelines: failed to start "{name.partition("@")[0]}" {kind[:-1]}: {text}'
                ) from error
            self.board.set(node.key, Status.OK)
        self.log.info("Everything is ready. Begin running and processing data.", node=self.node)

    async def wait(self) -> None:
        """Returns when somebody asked for the end."""
        await self._stop.wait()

    async def shutdown(self) -> None:
        """Stops what was started, receivers first; safe to call twice."""
        while self._started:
            node = self._started.pop()
            self.board.set(node.key, Status.STOPPING)
            try:
                async with asyncio.timeout(SHUTDOWN_GRACE_S):
                    await node.component.shutdown()
            except Exception as error:  # noqa: BLE001 - one component's defect must not keep the others from flushing
                self.board.set(node.key, Status.PERMANENT, repr(error))
                self.log.error("Shutdown failed.", component=node.key, error=repr(error))
            else:
                self.board.set(node.key, Status.STOPPED)

    async def run(self) -> None:
        """Start, wait for the end, shut down."""
        await self.start()
        try:
            await self.wait()
        finally:
            await self.shutdown()

    def _settings(self, kind: Kind, component_id: ComponentID, pipeline: str) -> Settings:
        key = f"{kind}/{component_id}" + (f"@{pipeline}" if pipeline else "")
        return Settings(
            id=component_id,
            kind=kind,
            node=self.node,
            clock=self.clock,
            telemetry=self.telemetry,
            log=ComponentLog(str(kind), str(component_id)),
            report=lambda status, reason: self.board.set(key, status, reason),
        )
