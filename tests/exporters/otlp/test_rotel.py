from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel

from gpulens.exporters import otlp_grpc, otlp_http
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Exporter
from gpulens.pipeline.data import Batch
from tests.exporters.otlp.rig import Rig, node, pod, tick, until
from tests.pipeline.export_bench import NoExtensions

Point = tuple[tuple[str, ...], str, tuple[str, ...], str, str]
"""(resource attributes, metric, point attributes, time, value)"""


class Rotel:
    """A running rotel that prints every point it gets."""

    def __init__(self, grpc_port: int, http_port: int) -> None:
        self.grpc = f"127.0.0.1:{grpc_port}"
        self.http = f"127.0.0.1:{http_port}"
        self.lines: list[str] = []

    def points(self) -> list[Point]:
        """All points printed so far."""
        return list(_points(self.lines))


def _points(lines: list[str]) -> Iterator[Point]:
    resource: list[str] = []
    point: list[str] = []
    target, name, time = resource, "", ""
    for line in map(str.strip, lines):
        key, _, value = line.partition(": ")
        if line == "Resource attributes:":
            resource = target = []
        elif line == "Data point attributes:":
            point = target = []
        elif line.startswith("-> Name: "):
            name = line.removeprefix("-> Name: ")
        elif line.startswith("-> ") and "Str(" in line:
            target.append(line)
        elif key == "Timestamp":
            time = value
        elif key == "Value":
            yield tuple(resource), name, tuple(point), time, value


@asynccontextmanager
async def running(binary: str, free_port: Callable[[], int], folder: Path) -> AsyncIterator[Rotel]:
    """Starts rotel and reads what it prints."""
    rotel = Rotel(free_port(), free_port())
    arguments = ["start", "--exporter", "blackhole", "--debug-log", "metrics", "--debug-log-verbosity", "detailed"]
    arguments += ["--otlp-grpc-endpoint", rotel.grpc, "--otlp-http-endpoint", rotel.http]
    arguments += ["--pid-file", str(folder / "pid"), "--log-file", str(folder / "log")]
    process = await asyncio.create_subprocess_exec(
        binary, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            rotel.lines.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        yield rotel
    finally:
        process.terminate()
        await process.wait()
        await reading


def _exporter(kind: str, rotel: Rotel, rig: Rig, **keys: object) -> Exporter[Batch]:
    retry = {"retry_on_failure": {"initial_interval": "20ms", "max_interval": "100ms"}}
    if kind == "grpc":
        return _make(otlp_grpc.FACTORY, rig, {"endpoint": f"http://{rotel.grpc}", **retry, **keys})
    return _make(otlp_http.FACTORY, rig, {"endpoint": f"http://{rotel.http}", **retry, **keys})


def _make(factory: object, rig: Rig, keys: dict[str, object]) -> Exporter[Batch]:
    config: type[BaseModel] = getattr(factory, "config")  # noqa: B009 - two factories of different types
    made: Exporter[Batch] = getattr(factory, "metrics")(rig.settings, config.model_validate(keys))  # noqa: B009
    return made


async def test_rotel_gets_the_same_series_by_grpc_and_http(
    rotel_binary: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """A third party's server reads the same points from gRPC, HTTP protobuf and HTTP JSON, compressed or not."""
    ways: list[tuple[str, dict[str, object]]] = [
        ("grpc", {}),
        ("grpc", {"compression": "none"}),
        ("http", {}),
        ("http", {"encoding": "json", "compression": "none"}),
    ]
    seen: list[list[Point]] = []
    async with running(rotel_binary, free_port, tmp_path) as rotel:
        for kind, keys in ways:
            rig, before = Rig(), len(rotel.points())
            exporter = _exporter(kind, rotel, rig, **keys)
            await exporter.start(NoExtensions())
            exporter.consume(tick(pod("a", "GPU-1", "GPU-2"), pod("b", "GPU-1"), node("GPU-1")), Ack())
            await until(lambda rotel=rotel, before=before: len(rotel.points()) == before + 4)  # type: ignore[misc]
            await exporter.shutdown()
            assert rig.count("otelcol_exporter_sent_metric_points") == 4
            seen.append(rotel.points()[before:])
    assert seen[0][0] == (
        (
            "-> k8s.container.name: Str(main)",
            "-> k8s.namespace.name: Str(research)",
            "-> k8s.node.name: Str(node-1)",
            "-> k8s.pod.label.team: Str(vision)",
            "-> k8s.pod.name: Str(a)",
            "-> k8s.pod.uid: Str(uid-a)",
        ),
        "gpu.sm.active",
        ("-> hw.id: Str(GPU-1)",),
        "1700000000000000000",
        "0.5",
    )
    assert all(points == seen[0] for points in seen)


@pytest.mark.parametrize("owner", ["resource", "attributes", "both"])
async def test_sharing_pods_arrive_as_distinct_series(
    owner: str, rotel_binary: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """Two pods on one GPU and one pod with two GPUs are distinct series at a real server, wherever the owner stands."""
    async with running(rotel_binary, free_port, tmp_path) as rotel:
        exporter = _exporter("grpc", rotel, Rig(), owner=owner)
        await exporter.start(NoExtensions())
        exporter.consume(tick(pod("a", "GPU-1", "GPU-2"), pod("b", "GPU-1")), Ack())
        await until(lambda: len(rotel.points()) == 3)
        await exporter.shutdown()
        assert len({(resource, name, attributes) for resource, name, attributes, _, _ in rotel.points()}) == 3
