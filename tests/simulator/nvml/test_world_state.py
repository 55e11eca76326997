"""The simulated node as the unmodified binding sees it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulens.nvml.containers import Containers
from gpulens.simulator.command import simulate
from gpulens.simulator.layout import container_id
from gpulens.simulator.nvml.build import LIBRARY
from gpulens.simulator.nvml.world_state import WorldState
from gpulens.simulator.world import World
from tests.simulator.nvml.child import Child

NODE = """
gpus:
  - {model: H100, minor: 4, xids: [{at: 90s, code: 79}]}
  - {model: H100, mig: [3g.40gb, 1g.10gb]}
  - {model: L4, sharing: time_slicing, replicas: 2}
  - {model: B200}
pods:
  - {name: train, namespace: n, devices: ["0"], start: -1h, phases: [{profile: training}]}
  - {name: slice, namespace: n, devices: ["1/gi1"], start: -1h, phases: [{profile: decode}]}
  - {name: a, namespace: n, devices: ["2::0"], start: -1h, phases: [{profile: decode, memory_mib: 9000}]}
  - {name: b, namespace: n, devices: ["2::1"], start: -1h, end: 60s, phases: [{profile: parked}]}
  - {name: bare, namespace: n, devices: ["3"], start: 0s, phases: [{profile: empty, for: 10s}, {profile: spin}]}
faults:
  - {kind: gpu_lost, from: 100s, to: 110s, gpus: [0]}
"""


class Node:
    """The node, and a child that looks at it; `go` moves both a second at a time."""

    def __init__(self, state: WorldState, child: Child) -> None:
        self.state = state
        self.world = state.world
        self.child = child
        self.t_s = self.world.start_s

    def go(self, seconds: int) -> None:
        for _ in range(seconds):
            self.t_s += 1.0
            with self.state.fake.batch():
                self.state.fake.advance(1.0)
                self.state.write(self.t_s)


@pytest.fixture
def node(cache: Path, tmp_path: Path) -> Iterator[Node]:
    """The node at its start."""
    with started(World.load(NODE), cache, tmp_path) as made:
        yield made


@contextmanager
def started(world: World, cache: Path, folder: Path) -> Iterator[Node]:
    """This world with its library in the folder, and a child that has started it."""
    state = WorldState(world, folder, clock_s=5000.0)
    state.fake.install(cache=cache)
    state.write(world.start_s)
    with state.fake as environment, Child(environment) as child:
        child.start()
        yield Node(state, child)


def test_the_gpus_are_those_of_the_world(node: Node) -> None:
    """UUIDs, minors, addresses, MIG instances and their memory are the world's own."""
    devices = node.world.devices()
    assert node.child.value("uuids()") == [d.uuid for d in devices]
    assert node.child.value("n.nvmlDeviceGetMinorNumber(h0)") == 4
    assert node.child.value("[n.nvmlDeviceGetPciInfo(h).busId for h in (h0, h1, h2, h3)]") == [d.pci for d in devices]
    node.child.do("ms = [n.nvmlDeviceGetMigDeviceHandleByIndex(h1, i) for i in range(2)]")
    rows = node.child.value("[[n.nvmlDeviceGetUUID(m), n.nvmlDeviceGetGpuInstanceId(m), memory(m)[0]] for m in ms]")
    assert rows == [[i.uuid, i.gi, i.memory_bytes] for i in devices[1].mig]


def test_readings_are_the_worlds(node: Node) -> None:
    """Residency, memory and power are what the world has; energy rises as the world's does."""
    gpu = node.world.devices()[0].uuid
    node.go(3)
    now = node.world.activity(gpu, node.t_s)
    assert node.child.value("n.nvmlDeviceGetUtilizationRates(h0).gpu") == round(100 * (now.residency or 0))
    assert node.child.value("memory(h0)[3]") == now.memory_bytes
    assert node.child.value("n.nvmlDeviceGetPowerUsage(h0)") == pytest.approx(1000 * (now.power_w or 0), rel=0.01)
    before, began = node.child.value("n.nvmlDeviceGetTotalEnergyConsumption(h0)"), node.t_s
    node.go(20)
    used = (node.world.energy_j(gpu, node.t_s) - node.world.energy_j(gpu, began)) * 1000
    assert node.child.value("n.nvmlDeviceGetTotalEnergyConsumption(h0)") - before == pytest.approx(used, abs=2)


def test_gpm_measures_gpus_and_instances_as_the_world_has_them(node: Node) -> None:
    """A window gives the world's means, of a whole GPU and of a MIG instance."""
    gpu, instance = node.world.devices()[0].uuid, node.world.devices()[1].mig[0]
    node.child.do(f"a, b = sample(h0), sample(h1, {instance.gi})")
    began = node.t_s
    node.go(10)
    node.child.do(f"c, d = sample(h0), sample(h1, {instance.gi})")
    whole = node.world.mean_activity(gpu, began, node.t_s)
    part = node.world.mean_activity(instance.key, began, node.t_s)
    wanted = [100 * x for x in (whole.engine, whole.sm, whole.occupancy, whole.tensor, whole.dram)]
    assert node.child.value("gpm(a, c, [1, 2, 3, 5, 10])") == pytest.approx(wanted, abs=1e-6)
    assert node.child.value("gpm(b, d, [2, 10])") == pytest.approx([100 * part.sm, 100 * part.dram], abs=1e-6)


def test_samples_are_the_history_of_residency(cache: Path, tmp_path: Path) -> None:
    """The mean over the ring since ten seconds ago is the world's mean, though the GPU works in bursts."""
    text = """
gpus: [{model: L4}]
pods: [{name: p, namespace: n, devices: ["0"], start: 0s, phases: [{profile: data_loading}]}]
"""
    with started(World.load(text), cache, tmp_path) as node:
        node.go(20)
        node.child.do("found = n.nvmlDeviceGetSamples(h0, 1, int((5020 - 10) * 1e6))[1]")
        mean = node.child.value("sum(s.sampleValue.uiVal for s in found) / len(found)")
        truth = node.world.mean_activity(node.world.devices()[0].uuid, node.t_s - 10, node.t_s)
        assert mean == pytest.approx(100 * (truth.residency or 0), abs=2)
        assert node.child.value("max(s.sampleValue.uiVal for s in found)") == 100


def test_processes_are_those_of_the_pods(node: Node) -> None:
    """Each pod with a context has a process with its memory, in its container's cgroup, as long as it has one."""
    shared, mig, bare = (node.world.devices()[i] for i in (2, 1, 3))
    owners = {
        o.pod: o for key in (shared.uuid, mig.mig[0].key, bare.uuid) for o in node.world.owner_memory(key, node.t_s)
    }
    rows = "{p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(%s)}"
    found = {int(pid): used for pid, used in node.child.value(rows % "h2").items()}
    containers = Containers(node.state.proc)
    by_pod = {}
    for pid, used in found.items():
        container = containers.find(pid)
        assert container is not None
        by_pod[container.pod_uid] = (container.id, used)
    memory = node.world.owner_memory(shared.uuid, node.t_s)
    assert by_pod == {o.uid: (container_id(o), memory[o]) for o in (owners["a"], owners["b"])}
    ran = node.child.value("[s.pid for s in n.nvmlDeviceGetProcessUtilization(h2, 0)]")
    assert [containers.find(pid).pod_uid for pid in ran] == [owners["a"].uid]  # type: ignore[union-attr]
    assert node.child.value(rows % "h3") == {}
    (on_mig,) = node.child.value(rows % "n.nvmlDeviceGetMigDeviceHandleByIndex(h1, 0)")
    assert containers.find(int(on_mig)).pod_uid == owners["slice"].uid  # type: ignore[union-attr]
    node.go(61)
    assert len(node.child.value(rows % "h2")) == 1
    assert len(node.child.value(rows % "h3")) == 1
    pids = {int(path.name) for path in node.state.proc.iterdir()}
    assert len(pids) == 4
    assert pids & set(found) == {pid for pid in found if containers.find(pid)}


def test_xids_and_a_lost_gpu_happen_when_the_world_has_them(node: Node) -> None:
    """An XID is told at its moment, and the GPU is gone and back as the fault has it."""
    node.child.do("events = n.nvmlEventSetCreate()")
    node.child.do("n.nvmlDeviceRegisterEvents(h0, n.nvmlEventTypeXidCriticalError, events)")
    node.go(89)
    assert node.child.code("n.nvmlEventSetWait_v2(events, 0)") == 10
    node.go(1)
    assert node.child.value("n.nvmlEventSetWait_v2(events, 0).eventData") == 79
    node.go(10)
    assert node.child.code("n.nvmlDeviceGetHandleByIndex(0)") == 15
    node.go(10)
    assert node.child.code("n.nvmlDeviceGetHandleByIndex(0)") == 0


def test_every_process_has_a_start_time(node: Node) -> None:
    """Field 22 of stat is a number, so that a reader can tell a process from a later one with its number."""
    for folder in node.state.proc.iterdir():
        fields = re.sub(r"\(.*\)", "x", (folder / "stat").read_text()).split()
        assert len(fields) == 52
        assert int(fields[0]) == int(folder.name)
        assert int(fields[21]) >= 0


async def test_simulate_serves_a_library_and_its_state(cache: Path, tmp_path: Path) -> None:
    """`simulate --nvml` puts the library, the state and /proc into the folder and says where they are; they go with
    it."""
    folder = tmp_path / "nvml"
    told: list[tuple[bool, bool, bool]] = []

    def say(text: str) -> None:
        state = (folder / "state").read_text()
        told.append((str(folder) in text and (folder / LIBRARY).exists(), "gpu.7.uuid" in state, any_process(folder)))

    await simulate(
        "demo",
        dcgm="127.0.0.1:0",
        gke="127.0.0.1:0",
        kubelet=str(tmp_path / "k.sock"),
        nvml=str(folder),
        duration=0.01,
        say=say,
    )
    assert told == [(True, True, True)]
    assert not await asyncio.to_thread(folder.exists)


def any_process(folder: Path) -> bool:
    """Whether there is a process in the folder's /proc."""
    return any((folder / "proc").iterdir())


async def test_simulate_goes_on_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library can't be built `simulate` says why and serves the rest."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    await simulate(
        "demo",
        dcgm="127.0.0.1:0",
        gke="127.0.0.1:0",
        kubelet=str(tmp_path / "k.sock"),
        nvml=str(tmp_path / "nvml"),
        duration=0.01,
        say=said.append,
    )
    assert "not simulated: no C compiler" in said[0]
    assert "dcgm-exporter" in said[0]
