from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from gpulens.receivers.pod_resources.allocations import Reader
from gpulens.receivers.pod_resources.device_ids import Selection, parse_device_id
from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.server import Simulator
from tests.receivers.pod_resources.node import Node, rows

MODES: list[ChurnMode] = ["whole", "mig", "time_slicing", "gke", "gke_shared", "gke_mig"]


@pytest.mark.parametrize("mode", MODES)
def test_every_owner_is_the_true_one(mode: ChurnMode) -> None:
    """At every instant and in every mode: exactly the true owners, and free is exactly what nobody holds."""
    world = churn_world(pods=40, gpus=4, mode=mode, seed=7)
    keys = {parse_device_id(unit.device_id).hw_id: unit.key for unit in world.units}
    replicas: defaultdict[str, int] = defaultdict(int)
    for unit in world.units:
        replicas[parse_device_id(unit.device_id).hw_id] += 1
    reader = Reader(Selection())
    for step in range(120):
        t_s = world.start_s + 37.0 * step
        found = reader.read_encoded(world.pod_resources(t_s), world.allocatable(t_s))
        owners = defaultdict(set)
        for owner, ids in found.held:
            for hw_id in ids:
                owners[hw_id].add((owner.namespace, owner.pod, owner.container))
        for hw_id, key in keys.items():
            true = {(o.namespace, o.pod, o.container) for o in world.held_throughout(key, t_s, t_s)}
            assert owners[hw_id] == true, (hw_id, t_s)
            assert (hw_id in found.free) == (not true)
        assert dict(found.replicas) == replicas
        assert found.rejected == ()


async def test_a_kubelet_that_comes_and_goes_is_read_whenever_it_is_there() -> None:
    """Through its restarts the receiver is up exactly when the kubelet is, with the owners of that moment."""
    world = churn_world(pods=20, gpus=2, mode="mig", seed=3, pod_life_s=100, kubelet_restarts=5)
    now_s = world.start_s
    with tempfile.TemporaryDirectory(prefix="gl") as folder:
        path = Path(folder) / "kubelet.sock"
        simulator = Simulator(world, lambda: now_s, dcgm=None, gke=None, kubelet=path)
        await simulator.start()
        node = Node(path)
        seen = set()
        for _ in range(60):
            now_s += 10
            await simulator.settle()
            batch = await node.tick()
            up = rows(batch, "gpu.source.up") == {("", ""): 1}
            assert up == world.kubelet_reachable(now_s)
            seen.add(up)
            if up:
                held = {key for key, value in rows(batch, "gpu.allocated").items() if value}
                assert {pod for pod, _ in held} == {hold.owner.pod for hold in world.held_at(now_s)}
        await node.receiver.shutdown()
        await simulator.stop()
    assert seen == {True, False}
