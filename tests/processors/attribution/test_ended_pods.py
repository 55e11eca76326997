"""Pods that have ended hold nothing, also where the kubelet goes on to list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from gpulens.pipeline.data import Batch, Resource
from tests.processors.attribution.kit import (
    BOX_A,
    GPU,
    UID_A,
    UID_B,
    A,
    B,
    Known,
    Proc,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    pod,
    pods,
    processes,
    processor,
)

DONE = replace(A, phase="Succeeded", containers={})
LISTED = {GPU: [pod("a"), pod("b")]}


def run(
    known: Sequence[Known], held: Mapping[str, Sequence[Resource]], *, told_until_s: int = 90, **more: object
) -> Sink:
    """A node that is read every 10 s; from `told_until_s` on nobody can tell of pods."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 90, 10):
        told = pods(at(second), *known) if second < told_until_s else pods(at(second), up=False)
        feed(join, described(at(second), {"hw.id": GPU}), told)
        feed(join, holders(at(second + 1), held, **more), activity(at(second + 5)))  # type: ignore[arg-type]
    return sink


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_who_has_ended_loses_the_device_to_who_runs(phase: str) -> None:
    """An old kubelet lists both for an exclusive device: it is the living one's, and told as his alone."""
    sink = run([replace(DONE, phase=phase), B], LISTED, exclusive=True)
    assert {point[0] for point in sink.points("gpu.sm.active")[1:]} == {"b"}
    assert {point[:3] for point in sink.points("gpu.allocated")} == {("b", GPU, 1)}
    assert sink.reasons() == {("b", GPU): ("pod_resources", "")}


@pytest.mark.parametrize(
    "known",
    [
        [],
        [B],
        [A, B],
        [replace(DONE, phase="Unknown"), B],
        [replace(DONE, phase=""), B],
        [DONE, Known("a", UID_B)],
        [replace(DONE, namespace="other"), B],
    ],
    ids=["nobody_tells", "gone", "runs", "unknown", "no_phase", "comes_back", "another_namespace"],
)
def test_without_proof_that_one_has_ended_nobody_owns_the_device(known: Sequence[Known]) -> None:
    """Two owners of an exclusive device stay a conflict until a phase resolves it; a pod that came back under the
    name of one that ended is alive."""
    sink = run(known, LISTED, exclusive=True)
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert sink.reasons() == {("", GPU): ("none", "conflict")}


def test_a_device_of_an_ended_pod_alone_is_free() -> None:
    """Nothing is charged to it any more, and `gpu.attribution` says that nobody holds the device."""
    sink = run([DONE, B], {GPU: [pod("a")]}, exclusive=True)
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert sink.points("gpu.allocated") == []
    assert sink.reasons() == {("", GPU): ("none", "unallocated")}


def test_old_words_of_pods_take_nobody_off() -> None:
    """An observer that is away knows of no pod that came since: its word counts for `max_gap` and no longer."""
    sink = run([DONE], {GPU: [pod("a")]}, told_until_s=10)
    assert [(point[0], point[3]) for point in sink.points("gpu.sm.active")][-2:] == [("a", 65.0), ("a", 75.0)]
    assert {point[0] for point in sink.points("gpu.sm.active")[:6]} == {""}


def test_an_owner_with_a_uid_goes_by_the_uid() -> None:
    """The pod of that UID has ended, whatever runs under its name."""
    owner = Resource({**pod("a").map, "k8s.pod.uid": UID_A})
    sink = run([DONE, Known("a", UID_B)], {GPU: [owner, pod("b")]}, exclusive=True)
    assert {point[0] for point in sink.points("gpu.sm.active")[1:]} == {"b"}


def test_an_evicted_pod_that_is_on_its_way_out_is_no_rogue() -> None:
    """Old kubelets say `Failed` before the containers are gone: while the device is listed as the pod's, its processes
    accuse nobody."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 300, 10):
        known = replace(A, phase="Running" if second < 50 else "Failed")
        batches: list[Batch] = [pods(at(second), known), holders(at(second + 1), {GPU: [pod("a")]}, asked_s=at(second))]
        feed(join, described(at(second), {"hw.id": GPU}), *batches, processes(at(second + 2), Proc(7, UID_A, BOX_A)))
    assert sink.reasons() == {("", GPU): ("none", "unallocated")}
