"""The bar of attribution: not one wrong owner while pods come and go, and few samples without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from gpulens.pipeline.component import Metrics
from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.schema import PodSpec
from gpulens.simulator.world import World
from tests.system.churning import Names, Node, Score

MODES: Sequence[ChurnMode] = ("whole", "mig", "time_slicing", "gke", "gke_shared", "gke_mig")
SHARED = ("time_slicing", "gke_shared")
LABELLED = ("mig", "gke")
"""Modes in which the exporter names owners, too; in the others it is as its binary comes, without them."""

PODS = 500
GPUS = 8
LIFE_S = 180.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to."""

    score: Score
    reasons: Counter[str]
    kubelet_outages: int

    @property
    def share(self) -> float:
        """Owned samples of those that truly had exactly one owner."""
        return sum(self.score.owned.values()) / sum(self.score.sole.values())


async def churn(world: World, *more: Metrics, intervals: tuple[float, float, float] = (10.0, 30.0, 30.0)) -> Run:
    """Lets a world pass from its start to its last pod's end."""
    score = Score(world)
    node = Node(world, [score, *more], intervals)
    score.kubelet = node.kubelet
    if any(device.mig for device in world.devices()):
        node.know_the_instances()
    await node.run(max(hold.end_s for hold in world.holds()) - world.start_s + 60)
    await node.stop()
    reasons: Counter[str] = Counter()
    for name, labels, count in node.telemetry.read():
        if name == "gpulens_attribution_points":
            reasons[labels["reason"]] += round(count)
    return Run(score, reasons, sum(fault.kind == "kubelet_gone" for fault in world.spec.faults))


def table(runs: dict[str, Run]) -> str:
    """The shares by reason, one row a run."""
    names = sorted({reason for run in runs.values() for reason in run.reasons})
    heads = ["run".ljust(24), "samples".rjust(8), "sole".rjust(8), "owned/sole", "wrong", "swapped", *names]
    lines = ["  ".join(heads)]
    for name, run in runs.items():
        total = sum(run.reasons.values())
        shares = [f"{run.reasons[reason] / total:.1%}".rjust(len(reason)) for reason in names]
        figures = [f"{total:8}", f"{sum(run.score.sole.values()):8}", f"{run.share:10.1%}"]
        faults = [f"{len(run.score.wrong):5}", f"{run.score.swapped:7}"]
        lines.append("  ".join([name.ljust(24), *figures, *faults, *shares]))
    return "\n".join(lines)


def varied(world: World, **dcgm: object) -> World:
    """The same world with another exporter."""
    return World(world.spec.model_copy(update={"dcgm": world.spec.dcgm.model_copy(update=dcgm)}))


def mostly_alone(mode: ChurnMode) -> World:
    """500 pods on shared GPUs of which six lend only one of their replicas, so that most pods are alone on theirs."""

    def stays(pod: PodSpec) -> bool:
        gpu, _, replica = pod.devices[0].partition("::")
        return int(gpu) >= GPUS - 2 or replica == "0"

    world = churn_world(1200, GPUS, mode, pod_life_s=LIFE_S)
    pods = [pod for pod in world.spec.pods if stays(pod)][:PODS]
    length = max(pod.end or 0.0 for pod in pods)
    return World(world.spec.model_copy(update={"pods": pods, "horizon": length}))


@pytest.mark.parametrize("mode", MODES)
async def test_no_owner_is_wrong_and_nine_in_ten_are_found(mode: ChurnMode) -> None:
    """500 pods over 8 GPUs, the kubelet restarting: no sample is charged to somebody who did not hold the device
    during all that it covers, and 90 % of those that had one owner throughout have it."""
    shared = mode in SHARED
    world = mostly_alone(mode) if shared else churn_world(PODS, GPUS, mode, pod_life_s=LIFE_S)
    world = varied(world, kubernetes=mode in LABELLED)
    run = await churn(world)
    print("\n" + table({mode: run}))
    assert len(world.spec.pods) == PODS
    assert run.kubelet_outages == 4
    assert run.score.wrong == []
    assert run.score.swapped == 0
    assert run.share >= 0.90
    assert sum(run.score.sole.values()) > 10_000
    assert (run.reasons["shared"] > 0) == shared


@pytest.mark.parametrize("mode", ["whole", "mig", "gke"])
async def test_ten_minute_pods_lose_one_sample_in_twenty(mode: ChurnMode) -> None:
    """With pods that live for ten minutes 95 % of the samples with one owner have it."""
    world = churn_world(60, 4, mode, pod_life_s=600.0, kubelet_restarts=2)
    run = await churn(varied(world, kubernetes=False))
    print("\n" + table({f"{mode}, 10-minute pods": run}))
    assert run.score.wrong == []
    assert run.share >= 0.95


@pytest.mark.parametrize(
    ("mode", "exporter"),
    [
        ("whole", {"naming": "4.9"}),
        ("mig", {"naming": "4.9", "view": "honor_labels"}),
        ("whole", {"view": "honor_labels", "pod_uid": True}),
        ("gke", {"view": "no_honor_labels"}),
        ("time_slicing", {"virtual_gpus": True, "per_process": True, "pod_uid": True}),
        ("gke_shared", {"virtual_gpus": True, "per_process": True, "naming": "4.9"}),
    ],
)
async def test_the_exporters_own_labels_neither_leak_nor_override(mode: ChurnMode, exporter: dict[str, object]) -> None:
    """Whatever owner labels the page carries: no sample takes one, and no series names the exporter's own pod."""
    world = varied(churn_world(60, 4, mode, seed=5, pod_life_s=LIFE_S, kubelet_restarts=2), **exporter)
    names = Names()
    run = await churn(world, names, intervals=(10.0, 15.0, 30.0))
    print("\n" + table({f"{mode}, labelled": run}))
    assert run.score.wrong == []
    assert sum(run.score.owned.values()) > 0
    pods = {resource.text("k8s.pod.name") for series in names.seen.values() for resource, _ in series}
    assert pods - {""} <= {pod.name for pod in world.spec.pods}
    owned = {series.metric.name for _, series in names.seen["owned"]}
    assert owned
    assert {"k8s.pod.uid"}.isdisjoint(key for resource, _ in names.seen["owned"] for key in resource.map)


async def test_a_pod_that_comes_back_under_its_name_is_a_swap_and_counted() -> None:
    """A StatefulSet's pod can be replaced between two snapshots under the same name: no poll can see that, and
    nothing else is ever wrong."""
    run = await churn(varied(churn_world(300, 4, "whole", pod_life_s=90.0, recreated=0.6), kubernetes=False))
    print("\n" + table({"recreated pods": run}))
    assert run.score.wrong == []
    assert run.score.swapped > 0


async def test_an_old_kubelet_that_lists_finished_pods_charges_no_second_owner() -> None:
    """Before Kubernetes 1.34 a finished pod keeps its device in the list: while two pods are named for one exclusive
    device, neither is charged."""
    world = varied(churn_world(60, 4, "whole", pod_life_s=LIFE_S, lists_finished=True), kubernetes=False)
    run = await churn(world)
    print("\n" + table({"finished pods listed": run}))
    assert run.reasons["conflict"] > 0
    # Who has finished is known once pods' phases flow by; until then an idle device may stay with its last pod.
    assert [each for each in run.score.wrong if set(each.truly) - {each.owner}] == []
