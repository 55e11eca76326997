"""The bar of attribution where NVML is the only witness of activity, and where somebody tells of pods."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulens.extensions.k8s_observer import pods_pb2 as pb
from gpulens.extensions.k8s_observer.kubelet import slim
from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.data import AttributeValue, Batch, Scope, Series, build_layout
from gpulens.pipeline.scraping import Scraped, Scraper, node_resource
from gpulens.receivers.k8s_pods.scraper import PodFacts
from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.pods_api import pods_at
from gpulens.simulator.world import World
from tests.system.churning import NS, Node, Score
from tests.system.test_churn import GPUS, LIFE_S, SHARED, mostly_alone


class WorldNvml:
    """The memory of every device of a world as `nvml` tells it: each reading covers the time since the one before."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        scope, resource = Scope("gpulens/nvml"), node_resource(world.spec.node)
        rows: list[dict[str, AttributeValue]] = []
        for device in world.devices():
            rows += [{"hw.id": part.uuid, "hw.parent": device.uuid} for part in device.mig] or [{"hw.id": device.uuid}]
        self._layout, _ = build_layout((resource, scope, Series(metric("hw.gpu.memory.usage"), row)) for row in rows)
        self._before_ns = clock.now_ns()

    async def scrape(self, now_ns: int) -> Scraped:
        """One reading of each device."""
        window_s, self._before_ns = (now_ns - self._before_ns) / NS, now_ns
        return Scraped(Batch.of(self._layout, [1] * self._layout.size, now_ns, "nvml"), window_s=window_s)

    async def close(self) -> None:
        """Nothing is open."""


class WorldPods:
    """The pods of a world as `k8s_pods` tells them."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        self._world = world
        self._facts = PodFacts(world.spec.node, lambda _: False, lambda _: False)

    async def scrape(self, now_ns: int) -> Scraped:
        """Every pod that the API has now."""
        pods = map(slim, map(pb.Pod.FromString, pods_at(self._world, now_ns / NS).values()))
        told = [self._facts.of(pod, "") for pod in pods]
        identities = [
            (block.resource, block.scope, series) for blocks, _ in told for block in blocks for series in block.series
        ]
        layout, slots = build_layout(identities)
        values: list[float | int] = [0] * layout.size
        for slot, value in zip(slots, (value for _, numbers in told for value in numbers), strict=True):
            values[slot] = value
        return Scraped(Batch.of(layout, values, now_ns, "k8s_pods"))

    async def close(self) -> None:
        """Nothing is open."""


Made = tuple[str, float, float, Callable[[World, VirtualClock], Scraper]]

NVML: Made = ("nvml", 4.3, 10.0, WorldNvml)
K8S_PODS: Made = ("k8s_pods", 2.2, 10.0, WorldPods)


async def churn(world: World, *, pods: bool) -> Score:
    """Lets a world pass with `pod_resources` and `nvml` every 10 s, with or without `k8s_pods`."""
    score = Score(world)
    more = [NVML, K8S_PODS] if pods else [NVML]
    node = Node(world, [score], more=more, only=("pod_resources", "nvml", "k8s_pods"))
    score.kubelet = node.kubelet
    node.know_the_instances()
    await node.run(max(hold.end_s for hold in world.holds()) - world.start_s + 60)
    await node.stop()
    return score


def share(score: Score) -> float:
    """Owned samples of those that truly had one owner."""
    return sum(score.owned.values()) / sum(score.sole.values())


@pytest.mark.parametrize("mode", ["whole", "time_slicing", "gke_mig"])
async def test_readings_of_ten_seconds_reach_the_bar(mode: ChurnMode) -> None:
    """All that NVML tells counts as covering the time since the reading before: nine in ten still have their owner at
    the churn of the test, and none a wrong one."""
    shared = mode in SHARED
    world = mostly_alone(mode) if shared else churn_world(250, GPUS, mode, pod_life_s=LIFE_S)
    score = await churn(world, pods=not shared)
    assert score.wrong == []
    assert score.swapped == 0
    assert share(score) >= 0.90
    assert sum(score.sole.values()) > 3000


async def test_pods_that_have_ended_take_no_device_from_who_runs() -> None:
    """Before Kubernetes 1.34 finished pods stay in the list: where `k8s_pods` tells who has finished, the others have
    their devices as with a newer kubelet; without it nearly everything stays in dispute."""
    world = churn_world(60, 4, "whole", pod_life_s=LIFE_S, lists_finished=True)
    blind, seeing = await churn(world, pods=False), await churn(world, pods=True)
    assert share(blind) < 0.10
    assert share(seeing) >= 0.90
    # Between a pod's end and the next word of `k8s_pods` an idle device may stay with it.
    assert [each for each in seeing.wrong if set(each.truly) - {each.owner}] == []
    assert len(seeing.wrong) < 0.01 * sum(seeing.samples.values())
