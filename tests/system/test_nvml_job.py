"""Owners and honest activity without any dcgm-exporter: NVML, the kubelet's two sockets, and the real pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpulens.config import load, resolve
from gpulens.config.ids import Kind
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.data import Batch, Resource, Series, Value
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.service import Service
from gpulens.simulator.comparison import Ledger
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.world_state import follow_world
from gpulens.simulator.server import serve
from gpulens.simulator.world import World

WORLD = """
node: n1
gpus:
  - {model: L4, minor: 3, sharing: time_slicing, replicas: 4}
  - {model: A100, minor: 1, mig: [3g.20gb, 1g.5gb]}
  - {model: H100, minor: 2}
pods:
  - {name: works, namespace: ml, container: c, devices: ['0::0'], start: -1h, phases: [{profile: training, memory_mib: 9000}]}
  - {name: parks, namespace: ml, container: c, devices: ['0::1'], start: -1h, phases: [{profile: parked, memory_mib: 448}]}
  - {name: slice, namespace: ml, container: c, devices: ['1/gi1'], start: -1h, phases: [{profile: decode}]}
  - {name: whole, namespace: ml, container: c, devices: ['2'], start: -1h, phases: [{profile: spin}]}
"""  # noqa: E501 - one pod a line

CONFIG = """
receivers:
  nvml:
    collection_interval: 1s
    process_interval: 1s
    error_interval: 1s
    inventory_interval: 1s
    initial_delay: 1500ms
    library_path: ["${env:NVML}"]
    host_proc: ${env:NVML}/proc
    host_pid: true
  k8s_pods: {collection_interval: 500ms, initial_delay: 0s}
  pod_resources: {endpoint: "${env:KUBELET}", collection_interval: 500ms, initial_delay: 0s}
processors:
  attribution: {lateness: 0s, grid: 1s}
exporters: {ledger: }
extensions:
  k8s_observer: {source: kubelet, kubelet_endpoint: "${env:PODS}"}
service:
  extensions: [k8s_observer]
  pipelines: {metrics: {receivers: [nvml, k8s_pods, pod_resources], processors: [attribution], exporters: [ledger]}}
"""

Row = tuple[Resource, Series, Value]


@dataclass
class Told(Ledger):
    """Keeps the newest batches and wakes who waits for the next one."""

    came: asyncio.Event = field(default_factory=asyncio.Event)

    def consume(self, data: Batch, ack: Ack) -> None:
        super().consume(data, ack)
        self.came.set()


@dataclass
class Seen:
    """What has come out of the pipeline."""

    world: World
    ledger: Told

    def rows(self, name: str, hw_id: str = "") -> list[Row]:
        """The newest points of a metric, of one device where it is named."""
        return [
            (resource, series, value)
            for resource, _, series, value in self.ledger.readings()
            if series.metric.name == name and series.text("hw.id") in (hw_id or series.text("hw.id"))
        ]

    async def until(self, owned: set[str], split: set[str]) -> None:
        """Waits until these pods own device memory, and the processes of those are told."""
        async with asyncio.timeout(30):
            while not (owned <= self.pods("hw.gpu.memory.usage") and split <= self.pods("gpu.process.utilization")):
                self.ledger.came.clear()
                await self.ledger.came.wait()

    def pods(self, name: str) -> set[str]:
        """The pods that have a metric."""
        return {pod_of(resource) for resource, _, _ in self.rows(name)}


def pod_of(resource: Resource) -> str:
    """The pod on a resource, empty on the node's."""
    return resource.text("k8s.pod.name")


@asynccontextmanager
async def job() -> AsyncIterator[Seen]:
    """The pipeline on a simulated node whose only GPU source is NVML."""
    world = World.load(WORLD)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    def now() -> float:
        return world.start_s + loop.time() - begin

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gl")))
        try:
            await stack.enter_async_context(follow_world(world, now, folder / "nvml"))
        except BuildError as error:
            pytest.skip(str(error))
        node = await stack.enter_async_context(serve(world, now, kubelet=folder / "k.sock", pods=folder / "p.sock"))
        ledger = Told()
        registry = Registry([(Kind.EXPORTERS, ledger.factory())])
        environ = {"NVML": str(folder / "nvml"), "KUBELET": node.kubelet_endpoint, "PODS": node.pods_endpoint}
        config = resolve(load([f"yaml:{CONFIG.replace('ledger', 'demo_table')}"], [], environ), registry)
        service = Service(config, "n1", registry)
        await service.start()
        try:
            yield Seen(world, ledger)
        finally:
            await service.shutdown()


async def test_the_main_job_without_dcgm() -> None:
    """Hopper's SM activity, a MIG instance by its UUID, and a shared GPU split by processes, each with its pod."""
    async with job() as seen:
        shared, cut, hopper = seen.world.devices()
        await seen.until(owned={"slice", "whole"}, split={"works"})

        # The device's own value once, on nobody's resource; what each pod's processes have beside it.
        ((resource, _, device_memory),) = seen.rows("hw.gpu.memory.usage", shared.uuid)
        assert pod_of(resource) == ""
        memory = {pod_of(resource): value for resource, _, value in seen.rows("gpu.process.memory.usage", shared.uuid)}
        assert memory == {"works": 9000 << 20, "parks": 448 << 20}
        assert device_memory == sum(memory.values())
        busy = {pod_of(resource): value for resource, _, value in seen.rows("gpu.process.utilization", shared.uuid)}
        assert busy["works"] > 0.3
        assert not busy.get("parks")
        ((resource, _, residency),) = (
            row for row in seen.rows("hw.gpu.utilization", shared.uuid) if row[1].text("hw.gpu.task") == "general"
        )
        assert (pod_of(resource), residency > 0.3) == ("", True)

        # The kubelet names the instance by UUID, NVML says which instance that is.
        (instance,) = (each for each in cut.mig if each.gi == 1)
        assert [pod_of(resource) for resource, _, _ in seen.rows("hw.gpu.memory.usage", instance.uuid)] == ["slice"]
        assert [(pod_of(r), value) for r, _, value in seen.rows("gpu.allocated", instance.uuid)] == [("slice", 1)]

        # Measured activity without DCGM on Hopper only.
        ((resource, _, active),) = seen.rows("gpu.sm.active", hopper.uuid)
        assert pod_of(resource) == "whole"
        assert active == pytest.approx(0.15, abs=0.02)
        assert {series.text("hw.id") for _, series, _ in seen.rows("gpu.sm.active")} == {hopper.uuid}
