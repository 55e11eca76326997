"""A kubelet that is away for three minutes: the past and the future of every series have one name."""

from __future__ import annotations

from collections import defaultdict

import pytest

from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.schema import FaultSpec, PodSpec
from gpulens.simulator.world import World
from tests.system.churning import Names, Node, Score

BEFORE_S, GONE_S, AFTER_S = 200.0, 180.0, 200.0


def steady(mode: ChurnMode, *, labels: bool) -> World:
    """A node whose pods all stay, with a three-minute outage of its kubelet."""
    spec = churn_world(0, 4, mode).spec
    devices = {
        "whole": ("0", "1", "2"),
        "gke": ("0", "1", "2"),
        "mig": ("0/gi1", "0/gi3", "2/gi7"),
        "gke_mig": ("0/gi1", "0/gi3", "2/gi7"),
        "time_slicing": ("0::0", "1::0", "1::1", "2::3"),
        "gke_shared": ("0::0", "1::0", "1::1", "2::3"),
    }[mode]
    pods = [PodSpec(name=f"pod-{i}", namespace="ml", start=-600.0, devices=[each]) for i, each in enumerate(devices)]
    fault = FaultSpec(kind="kubelet_gone", from_=BEFORE_S, to=BEFORE_S + GONE_S)
    dcgm = spec.dcgm.model_copy(update={"kubernetes": labels, "per_process": mode == "time_slicing"})
    return World(spec.model_copy(update={"pods": pods, "faults": [fault], "dcgm": dcgm, "horizon": 3600.0}))


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("mode", ["whole", "mig", "time_slicing", "gke", "gke_shared", "gke_mig"])
async def test_three_minutes_without_a_kubelet_rename_no_series(mode: ChurnMode, labels: bool) -> None:
    """Owned series are the same ones before and after, and none has another name in between; what belongs to devices
    and owners goes on as it was."""
    world = steady(mode, labels=labels)
    names, score = Names(), Score(world)
    node = Node(world, [names, score])
    if "mig" in mode:
        node.know_the_instances()
    await node.run(30.0)  # until every source has spoken once
    names.seen.clear()
    periods = []
    for until_s in (BEFORE_S, BEFORE_S + GONE_S, BEFORE_S + GONE_S + AFTER_S):
        await node.run(until_s)
        periods.append(names.seen)
        names.seen = defaultdict(set)
    before, during, after = periods
    assert before["owned"]
    assert after["owned"] == before["owned"]
    assert during["owned"] <= before["owned"]
    assert before["device"] == during["device"] == after["device"]
    assert after["owner"] == before["owner"]
    assert during["owner"] <= before["owner"]
    assert after["gpu.allocated"] == before["gpu.allocated"]
    assert during["gpu.allocated"] <= before["gpu.allocated"]
    assert after["gpu.sharing"] == before["gpu.sharing"]
    assert after["unowned"] <= during["unowned"]
    assert score.wrong == []
