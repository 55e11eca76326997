"""What the tests of both OTLP exporters need: settings, batches, and waiting for real servers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.config.ids import ComponentID, Kind
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import Clock, SystemClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Status, StatusBoard
from gpulens.pipeline.telemetry import Telemetry
from tests.pipeline.export_bench import T


class Rig:
    """Settings of an exporter, and what it did with them."""

    def __init__(self, type_name: str = "otlp_grpc", clock: Clock | None = None) -> None:
        self.telemetry = Telemetry()
        self.board = StatusBoard(SystemClock().now_ns)
        self.board.set("x", Status.STARTING)
        self.board.set("x", Status.OK)
        self.settings = Settings(
            ComponentID(type_name),
            Kind.EXPORTERS,
            "node-1",
            clock or SystemClock(),
            self.telemetry,
            ComponentLog("exporter", type_name),
            lambda status, reason: self.board.set("x", status, reason),
        )

    def count(self, name: str, **labels: str) -> int:
        return self.telemetry.value(name, exporter=str(self.settings.id), **labels)


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Gives the loop turns until something is so; for what happens on real sockets."""

    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - counters have no event to wait for
            await asyncio.sleep(0.001)


def pod(name: str, *gpus: str, metric_name: str = "gpu.sm.active") -> Block:
    """A pod's block with one series for each GPU."""
    resource = Resource(
        {
            "k8s.node.name": "node-1",
            "k8s.namespace.name": "research",
            "k8s.pod.name": name,
            "k8s.pod.uid": f"uid-{name}",
            "k8s.container.name": "main",
            "k8s.pod.label.team": "vision",
        }
    )
    return Block(resource, Scope("gpulens"), [Series(metric(metric_name), {"hw.id": gpu}) for gpu in gpus])


def node(*gpus: str) -> Block:
    """The node's block with one series for each GPU."""
    return Block(
        Resource({"k8s.node.name": "node-1"}),
        Scope("gpulens"),
        [Series(metric("hw.power"), {"hw.id": gpu}) for gpu in gpus],
    )


def tick(*blocks: Block, second: int = 0, complete: bool = True) -> Batch:
    """A batch of these blocks; each value is its slot's number and a half."""
    layout = Layout(blocks)
    readings = [slot + 0.5 for slot in range(layout.size)]
    return Batch.of(layout, readings, T + second * 10**9, "dcgm", complete)


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A fresh self-signed certificate for `localhost`, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl: apt-get install openssl")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, *request, *files, *names], check=True, capture_output=True)
    return cert, key
