"""Owners and honest activity without any dcgm-exporter: NVML, the kubelet's two sockets, and the real pipeline."""

from __future__ import annotations

import asyncio
from collections import Counter
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
from gpulens.simulator.nvml.state import FakeNvml
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
    call_timeout: 500ms
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
    powered: Counter[str] = field(default_factory=Counter)
    """Readings of power by GPU."""
    alive: Counter[str] = field(default_factory=Counter)
    """Ticks by source that was up."""

    def consume(self, data: Batch, ack: Ack) -> None:
        super().consume(data, ack)
        for (_, _, series), value in zip(data.layout.identities(), data.readings(), strict=True):
            if series.metric.name == "hw.power" and value is not None:
                self.powered[series.text("hw.id")] += 1
            if series.metric.name == "gpu.source.up":
                self.alive[series.text("gpu.source")] += value == 1
        self.came.set()


@dataclass
class Seen:
    """What has come out of the pipeline."""

    world: World
    ledger: Told
    fake: FakeNvml

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
async def job(text: str = WORLD) -> AsyncIterator[Seen]:
    """The pipeline on a simulated node whose only GPU source is NVML."""
    world = World.load(text)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    def now() -> float:
        return world.start_s + loop.time() - begin

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gl")))
        try:
            state = await stack.enter_async_context(follow_world(world, now, folder / "nvml"))
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
            yield Seen(world, ledger, state.fake)
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


async def test_the_ids_of_gkes_plugin_are_resolved_by_nvmls_minors() -> None:
    """`nvidia3/vgpu0`, `nvidia1/gi1` and `nvidia2` need no dcgm-exporter: nvml tells the minors and the instances."""
    async with job(f"kubelet: {{plugin: gke}}\n{WORLD}") as seen:
        shared, cut, hopper = seen.world.devices()
        await seen.until(owned={"slice", "whole"}, split={"works"})
        owned = {
            (pod_of(resource), series.text("hw.id"))
            for resource, series, _ in seen.rows("hw.gpu.memory.usage")
            if pod_of(resource)
        }
        (instance,) = (each for each in cut.mig if each.gi == 1)
        assert owned == {("slice", instance.uuid), ("whole", hopper.uuid)}
        held = {
            (pod_of(resource), series.text("hw.id")) for resource, series, value in seen.rows("gpu.allocated") if value
        }
        assert held == owned | {("works", shared.uuid), ("parks", shared.uuid)}
        assert not any(resource.text("container.id") for resource, _, _ in seen.rows("gpu.process.memory.usage"))


async def test_a_gpu_that_hangs_costs_nobody_else_a_tick() -> None:
    """One call of one GPU does not come back: it is absent; other GPUs, the kubelet and the pods keep their ticks."""
    async with job() as seen:
        shared, cut, hopper = (device.uuid for device in seen.world.devices())
        ledger = seen.ledger
        async with asyncio.timeout(30):
            while not ledger.powered[hopper]:
                ledger.came.clear()
                await ledger.came.wait()
            rule = seen.fake.delay("nvmlDeviceGetPowerUsage", 60_000, hopper)
            before = ledger.powered[shared] + 1  # a tick may be under way
            until = before + 5
            seen_hopper = ledger.powered[hopper] + 1
            alive = ledger.alive.copy()
            while ledger.powered[shared] < until:
                ledger.came.clear()
                await ledger.came.wait()
        seen.fake.clear(rule)
        assert ledger.powered[hopper] <= seen_hopper
        assert ledger.powered[cut] >= until - 1
        assert ledger.alive["nvml"] - alive["nvml"] >= 5
        assert ledger.alive["pod_resources"] - alive["pod_resources"] >= 8
        assert ledger.alive["k8s_pods"] - alive["k8s_pods"] >= 8
