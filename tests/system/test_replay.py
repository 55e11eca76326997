"""A recording replays to the same bytes: live and replayed runs decide by the same batches in the same order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from gpulens.config import ComponentConfig, Kind, ServiceConfig, load, resolve
from gpulens.exporters.prometheus.server import PrometheusExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Exporter, ExporterFactory, Host, Settings, Stability
from gpulens.pipeline.data import Batch
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.replay import replay_config
from gpulens.pipeline.service import Service
from gpulens.simulator.inventory import write_inventory
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World

NS = 10**9
LAST_END_S = 261.0
END_S = 320.0
WORLD = """
node: node-1
gke: {serve: always}
gpus:
  - {model: T4, minor: 3}
  - {model: H100, minor: 2}
  - {model: A100, minor: 1, mig: [3g.20gb, 2g.10gb]}
  - {model: L4, minor: 0, sharing: time_slicing, replicas: 2}
pods:
  - {name: notebook, namespace: research, start: -1h, end: 200s, devices: ['0'], phases: [{profile: parked}]}
  - {name: train-0, namespace: research, start: -1h, end: 45s, devices: ['1'], phases: [{profile: training}]}
  - {name: train-1, namespace: research, start: 45s, end: 261s, devices: ['1'], phases: [{profile: training}]}
  - {name: embed, namespace: serving, start: -1h, end: 180s, devices: ['2/gi1'], phases: [{profile: decode}]}
  - {name: etl, namespace: batch, start: 20s, end: 120s, devices: ['2/gi3'], phases: [{profile: data_loading}]}
  - {name: chat-a, namespace: serving, start: -1h, end: 150s, devices: ['3::0'], phases: [{profile: decode}]}
  - {name: chat-b, namespace: serving, start: 30s, end: 240s, devices: ['3::1'], phases: [{profile: decode}]}
faults:
  - {kind: kubelet_gone, from: 62s, to: 138s}
  - {kind: dcgm_down, from: 142s, to: 161s}
  - {kind: dcgm_frozen, from: 165s, to: 212s}
  - {kind: gke_error, from: 205s, to: 230s}
"""
CONFIG = """
receivers:
  dcgm: {endpoint: "${env:DCGM}", collection_interval: 15s, timeout: 10s}
  gke: {endpoint: "${env:GKE}", collection_interval: 30s, timeout: 10s}
  pod_resources: {endpoint: "${env:KUBELET}", collection_interval: 10s, timeout: 5s}
  otlp_json_file/inventory: {include: ["${env:FOLDER}/inventory.jsonl"], poll_interval: 60s}
processors:
  attribution:
exporters:
  file/raw: {path: "${env:FOLDER}/raw.jsonl"}
  file/out: {path: "${env:FOLDER}/out.jsonl"}
  prometheus: {endpoint: "127.0.0.1:0"}
  probe/raw:
  probe/out:
service:
  pipelines:
    metrics:
      receivers: [otlp_json_file/inventory, pod_resources, dcgm, gke]
      processors: [attribution]
      exporters: [file/out, prometheus, probe/out]
"""
RECORDING = """
service:
  pipelines:
    metrics/raw:
      receivers: [otlp_json_file/inventory, pod_resources, dcgm, gke]
      exporters: [file/raw, probe/raw]
"""
INTERVALS_S = {"pod_resources": 10.0, "dcgm": 15.0, "gke": 30.0}
FIRST_S = 1.0
"""The receivers' initial delay."""

RECONNECT_S = 0.15
"""gRPC waits 100 ms of real time between two attempts to connect, and our clock does not move it."""


class ProbeConfig(ComponentConfig):
    """Nothing to set."""


@dataclass
class Probe:
    """An exporter that only looks: at `raw` it counts the batches of each stream, at `out` it reads the Prometheus
    page as it is after each batch."""

    start_s: float
    ticks: Counter[str] = field(default_factory=Counter)
    ticked: asyncio.Event = field(default_factory=asyncio.Event)
    page: PrometheusExporter | None = None
    pages: list[tuple[str, float, str]] = field(default_factory=list)
    """(stream, time of its batch in s since the world's start, page)."""

    def registry(self) -> Registry:
        """A registry that knows the two as `probe/raw` and `probe/out`."""

        def create(settings: Settings, config: ComponentConfig) -> Exporter[Batch]:
            return _End(self.count if settings.id.name == "raw" else self.read)

        return Registry([(Kind.EXPORTERS, ExporterFactory("probe", ProbeConfig, Stability.DEVELOPMENT, create))])

    def count(self, batch: Batch) -> None:
        """Counts a tick."""
        self.ticks[batch.stream] += 1
        self.ticked.set()

    def read(self, batch: Batch) -> None:
        """Reads the page."""
        assert self.page is not None
        at_s = batch.latest_ns() / NS - self.start_s
        self.pages.append((batch.stream, at_s, self.page.page().decode()))

    def watch(self, service: Service) -> None:
        """Finds the Prometheus page of a service."""
        found = [node.component for node in service.graph.nodes if isinstance(node.component, PrometheusExporter)]
        (self.page,) = found


@dataclass
class _End:
    look: Callable[[Batch], None]

    async def start(self, host: Host) -> None:
        """Nothing to begin."""

    async def shutdown(self) -> None:
        """Nothing to end."""

    def consume(self, batch: Batch, ack: Ack) -> None:
        """Looks at a batch."""
        self.look(batch)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A live run: its config, what its Prometheus page said, and the files it left."""

    folder: Path
    environ: dict[str, str]
    config: ServiceConfig
    registry: Registry
    live: Probe

    @property
    def raw(self) -> Path:
        """What the receivers said."""
        return self.folder / "raw.jsonl"

    @property
    def out(self) -> bytes:
        """What came out of the processors."""
        return (self.folder / "out.jsonl").read_bytes()

    async def replay(self, name: str) -> bytes:
        """Replays the recording through the processors of the live config."""
        target = self.folder / name
        config = replay_config(self.config, self.registry, str(self.raw), str(target), "metrics")
        await Service(config, "another-node", self.registry).run()
        return target.read_bytes()


def moments(world: World) -> list[float]:
    """When something happens: a receiver's tick, or the begin or end of a fault."""
    ticks = {
        FIRST_S + interval_s * number
        for interval_s in INTERVALS_S.values()
        for number in range(int((END_S - FIRST_S) / interval_s) + 1)
    }
    return sorted(ticks | {edge for fault in world.spec.faults for edge in (fault.from_, fault.until)})


async def live(service: Service, probe: Probe, world: World, clock: VirtualClock, simulator: Simulator) -> None:
    """Runs a service from the world's start to `END_S`; time stands still while the sockets are busy."""
    for moment in moments(world):
        await clock.advance(moment - clock.monotonic())
        await simulator.settle()
        if any(fault.kind == "kubelet_gone" and fault.until == moment for fault in world.spec.faults):
            await asyncio.sleep(RECONNECT_S)
        due = {name: int((moment - FIRST_S) // interval_s) + 1 for name, interval_s in INTERVALS_S.items()}
        async with asyncio.timeout(20):
            while any(probe.ticks[name] < count for name, count in due.items()):
                probe.ticked.clear()
                await probe.ticked.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded() -> AsyncIterator[Recorded]:
    """One live run with a kubelet that was gone, an exporter that was down, and pages that stood still."""
    world = World.load(WORLD)
    clock = VirtualClock(round(world.start_s * NS))
    with TemporaryDirectory(prefix="gpulens") as name:
        folder = Path(name)
        write_inventory(world, folder / "inventory.jsonl")
        async with serve(world, lambda: clock.now_ns() / NS, kubelet=folder / "kubelet.sock", tick_s=None) as simulator:
            environ = {
                "FOLDER": name,
                "DCGM": simulator.dcgm_url,
                "GKE": simulator.gke_url,
                "KUBELET": simulator.kubelet_endpoint,
            }
            probe = Probe(world.start_s)
            registry = probe.registry()
            config = resolve(load([f"yaml:{CONFIG}", f"yaml:{RECORDING}"], [], environ), registry)
            service = Service(config, world.spec.node, registry, clock)
            probe.watch(service)
            await service.start()
            try:
                await live(service, probe, world, clock, simulator)
            finally:
                await service.shutdown()
        yield Recorded(folder, environ, config, registry, probe)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_replay_has_the_bytes_of_the_live_run(recorded: Recorded) -> None:
    """What came out live, with all its faults, comes out again: byte by byte, and the second time, too."""
    assert recorded.out.count(b"\n") > 80
    for word in (b"train-0", b"chat-b", b"gpu.source.up", b"no_snapshot", b"shared"):
        assert word in recorded.out
    assert await recorded.replay("first.jsonl") == recorded.out
    assert await recorded.replay("second.jsonl") == recorded.out


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_pods_series_are_off_the_page_at_the_next_tick(recorded: Recorded) -> None:
    """The last GPU pod ends: live and replayed, each stream's next word takes its series off the page."""
    replayed = Probe(recorded.live.start_s)
    registry = replayed.registry()
    again = [
        f"yaml:receivers: {{otlp_json_file/raw: {{include: ['{recorded.raw}'], on_end: stop}}}}",
        "yaml:exporters: {file/out: {path: '${env:FOLDER}/again.jsonl'}}",
        "yaml:service: {pipelines: {metrics: {receivers: [otlp_json_file/raw]}}}",
    ]
    config = resolve(load([f"yaml:{CONFIG}", *again], [], recorded.environ), registry)
    service = Service(config, "another-node", registry)
    replayed.watch(service)
    await service.run()
    for probe in (recorded.live, replayed):
        assert any('pod="train-1"' in page for _, _, page in probe.pages)
        seen: set[str] = set()
        for stream, at_s, page in probe.pages:
            if at_s > LAST_END_S:
                seen.add(stream)
            for needed, series in (("pod_resources", "gpu_allocated{"), ("dcgm", "gpu_sm_active_ratio{")):
                lines = [line for line in page.splitlines() if line.startswith(series) and 'pod="train-1"' in line]
                assert not (needed in seen and lines)
        assert seen >= {"pod_resources", "dcgm", "attribution"}
        assert 'pod="' not in probe.pages[-1][2].replace('pod=""', "")
    assert replayed.pages == recorded.live.pages
