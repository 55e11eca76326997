"""Pods that have a process on a device without holding it are reported, on proof only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulens.pipeline.component import Stateful
from gpulens.pipeline.data import Batch, Resource
from gpulens.processors.attribution.join import AttributionProcessor
from tests.processors.attribution.kit import (
    GPU,
    NS,
    OTHER,
    Known,
    Proc,
    Sink,
    at,
    described,
    feed,
    holders,
    message,
    pod,
    pods,
    processes,
    processor,
)

UID = "aaaaaaaa-0000-0000-0000-000000000000"
BOX = "a" * 64
ROGUE = Known("rogue", UID, {BOX: "main"})
PROCESS = Proc(7, UID, BOX)
INSTANCE = f"{GPU}/gi7"
MIG_FACT = {"hw.id": "MIG-1", "hw.parent": GPU, "gpu.mig.gi": "7"}

Held = Mapping[str, Sequence[Resource]]


def run(
    held: Callable[[int], Held | None],
    *,
    until_s: int = 150,
    known: Known = ROGUE,
    seen: Callable[[int], Sequence[Proc] | None] = lambda _: [PROCESS],
    facts: Sequence[Mapping[str, str]] = ({"hw.id": GPU, "gpu.minor": "0"}, {"hw.id": OTHER}),
    **config: object,
) -> Sink:
    """A node that is read every 10 s; None says that the source is away."""
    sink = Sink()
    join = processor(sink, **config)
    for second in range(0, until_s, 10):
        claims, procs = held(second), seen(second)
        feed(join, described(at(second), *facts), pods(at(second), known))
        if claims is None:
            feed(join, message("pod_resources", at(second + 1), [], up=False, complete=False))
        else:
            feed(join, holders(at(second + 1), claims, asked_s=at(second + 0.5)))
        feed(join, message("nvml", at(second + 2), []) if procs is None else processes(at(second + 2), *procs))
    return sink


def reported(sink: Sink) -> dict[float, list[tuple[str, str, str]]]:
    """Grid instant -> (pod, container, device) of the rogues."""
    found: dict[float, list[tuple[str, str, str]]] = {}
    for batch in sink.batches:
        rows = [
            (resource.text("k8s.pod.name"), resource.text("k8s.container.name"), series.text("hw.id"))
            for resource, _, series in batch.layout.identities()
            if series.text("gpu.attribution.reason") == "rogue"
        ]
        if rows:
            found[round(batch.latest_ns() / NS - at(0))] = rows
    return found


def test_a_process_of_a_pod_that_does_not_hold_the_device_is_reported() -> None:
    """On the rogue pod's resource, on the grid, beside the holder's own series, once a whole minute vouches for it."""
    sink = run(lambda _: {GPU: [pod("a")], OTHER: []})
    assert reported(sink) == {float(second): [("rogue", "main", GPU)] for second in range(70, 150, 10)}
    newest = [batch for batch in sink.batches if batch.stream == "attribution"][-1]
    told = {
        (resource.text("k8s.pod.name"), resource.text("k8s.pod.uid"), series.attributes)
        for resource, _, series in newest.layout.identities()
        if series.text("hw.id") == GPU
    }
    plain = (("gpu.attribution.method", "pod_resources"), ("hw.id", GPU))
    mark = (("gpu.attribution.method", "process"), ("gpu.attribution.reason", "rogue"), ("hw.id", GPU))
    assert told == {("a", "", plain), ("rogue", "", mark)}
    assert set(newest.readings()) == {1}


def test_a_device_that_nobody_holds_may_have_a_rogue_too() -> None:
    """The device is told as unallocated, and the pod as rogue."""
    sink = run(lambda _: {GPU: [], OTHER: []})
    assert sink.reasons() == {
        ("", GPU): ("none", "unallocated"),
        ("", OTHER): ("none", "unallocated"),
        ("rogue", GPU): ("process", "rogue"),
    }


@pytest.mark.parametrize(
    "held",
    [
        lambda _: {GPU: [pod("rogue")]},
        lambda _: {GPU: [pod("rogue", container="other")]},
        lambda _: {GPU: [pod("a"), pod("rogue")]},
        lambda _: {"nvidia0": [pod("rogue")]},
        lambda _: {OTHER: [pod("rogue")]},
        lambda _: {GPU: [pod("a")], "unknown-device": [pod("rogue")]},
        lambda _: {GPU: [pod("a")], "MIG-9": [pod("rogue")]},
        lambda _: {GPU: [pod("a")], INSTANCE: [pod("rogue")]},
        lambda _: {GPU: [pod("a")], "nvidia0/gi7": [pod("rogue")]},
        lambda _: None,
        lambda second: {GPU: [pod("a")]} if second < 50 else None,
        lambda second: {GPU: [pod("rogue" if second % 50 == 0 else "a")]},
    ],
    ids=[
        "holds_it",
        "another_container_of_it",
        "shares_it",
        "by_minor",
        "device_not_listed",
        "holds_something_unknown",
        "holds_an_unmapped_instance",
        "holds_an_instance",
        "holds_an_instance_by_minor",
        "no_word",
        "old_word",
        "held_it_lately",
    ],
)
def test_who_holds_it_or_may_hold_it_is_no_rogue(held: Callable[[int], Held | None]) -> None:
    """Also in part, lately, or perhaps: without proof nobody is accused."""
    assert reported(run(held)) == {}


@pytest.mark.parametrize(
    ("known", "process"),
    [
        (ROGUE, Proc(7)),
        (ROGUE, Proc(7, "bbbbbbbb-0000-0000-0000-000000000000", BOX)),
        (Known("rogue", UID, {BOX: "main"}, phase="Pending"), PROCESS),
        (Known("rogue", UID, {BOX: "main"}, phase="Unknown"), PROCESS),
        (Known("rogue", UID, {BOX: "main"}, phase=""), PROCESS),
        (Known("rogue", UID, {BOX: "main"}, namespace="kube-system"), PROCESS),
        (ROGUE, Proc(7, UID, BOX, device="MIG-9")),
        (ROGUE, Proc(7, UID, BOX, device="tegra")),
    ],
    ids=["host", "unknown_pod", "init", "phase_unknown", "no_phase", "system", "unmapped", "unlisted"],
)
def test_what_is_not_known_or_the_nodes_own_is_no_rogue(known: Known, process: Proc) -> None:
    """Host daemons, pods nobody knows, pods whose init containers may run, the node's own daemons, unknown devices."""
    assert reported(run(lambda _: {GPU: [pod("a")]}, known=known, seen=lambda _: [process])) == {}


def test_the_nodes_own_namespaces_can_be_named() -> None:
    """`system_namespaces` says whose pods are the node's own."""
    known = Known("rogue", UID, {BOX: "main"}, namespace="kube-system")
    assert reported(run(lambda _: {GPU: [pod("a")]}, known=known, system_namespaces=[]))
    assert not reported(run(lambda _: {GPU: [pod("a")]}, system_namespaces=["ml"]))


def test_a_pod_that_just_got_the_device_is_no_rogue() -> None:
    """Its process is seen before the first snapshot that names it: the newest one is older than that."""
    sink = run(
        lambda second: {GPU: [pod("a" if second <= 100 else "rogue")]},
        seen=lambda second: [PROCESS] if second >= 100 else [],
    )
    assert reported(sink) == {}


def test_a_pod_that_lost_the_device_is_a_rogue_a_minute_later() -> None:
    """A process that ends with its pod is none; one that stays is."""
    sink = run(lambda second: {GPU: [pod("rogue" if second < 50 else "a")]}, until_s=200)
    assert min(reported(sink)) == 110
    sink = run(
        lambda second: {GPU: [pod("rogue" if second < 50 else "a")]},
        seen=lambda second: [PROCESS] if second < 80 else [],
        until_s=200,
    )
    assert reported(sink) == {}


@pytest.mark.parametrize("phase", ["Running", "Failed"])
@pytest.mark.parametrize("lag_s", [1, 9, 14])
def test_an_init_container_that_just_ended_accuses_nobody(phase: str, lag_s: int) -> None:
    """Nobody lists what an init container holds: its last process may be younger than the phase that follows it, and
    older than the next reading of processes."""
    events: list[tuple[float, Batch]] = []
    for second in range(0, 300, 10):
        known = Known("p", UID, {BOX: "init"}, "Pending") if second <= 120 else Known("p", UID, phase=phase)
        events += [(second, pods(at(second), known)), (second, described(at(second), {"hw.id": GPU}))]
        events.append((second + 1, holders(at(second + 1), {GPU: []}, asked_s=at(second + 0.5))))
    events += [(second, message("nvml", at(second), [], stream="nvml")) for second in range(0, 300, 3)]
    for second in range(lag_s, 300, 15):
        events.append((second, processes(at(second), *([PROCESS] if second <= 130 else []))))
    sink = Sink()
    join = processor(sink)
    for _, batch in sorted(events, key=lambda event: event[0]):
        feed(join, batch)
    assert reported(sink) == {}


def test_a_process_that_outlives_the_start_of_its_pod_is_a_rogue_a_minute_later() -> None:
    """The wait for the pod's containers is over after `max_gap`."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 300, 10):
        known = Known("rogue", UID, {BOX: "main"}, "Pending" if second < 100 else "Running")
        feed(join, described(at(second), {"hw.id": GPU}), pods(at(second), known))
        feed(join, holders(at(second + 1), {GPU: [pod("a")]}, asked_s=at(second)), processes(at(second + 2), PROCESS))
    assert min(reported(sink)) == 160


@pytest.mark.parametrize("namespace", ["nvidia-gpu-operator", "nvidia-device-plugin", "nvidia-dra-driver-gpu"])
def test_the_mps_daemon_is_no_rogue_where_its_charts_are_installed_as_documented(namespace: str) -> None:
    """OpenShift's operator, the device plugin and the DRA driver have namespaces of their own; the server of MPS holds
    a context on every device that it serves, and is listed for none."""
    known = Known("rogue", UID, {BOX: "main"}, namespace=namespace)
    assert reported(run(lambda _: {GPU: [pod("a")]}, known=known)) == {}


def test_a_rogue_that_ends_is_no_longer_reported() -> None:
    """With its last process the series goes; so it does when the processes can't be read any more."""
    for gone, last in (([], 100), (None, 150)):
        sink = run(lambda _: {GPU: [pod("a")]}, seen=_until(100, gone), until_s=250)
        assert max(reported(sink)) <= last


def _until(second: int, later: list[Proc] | None) -> Callable[[int], list[Proc] | None]:
    return lambda now: [PROCESS] if now < second else later


def test_a_kubelet_that_comes_back_needs_a_minute_of_snapshots() -> None:
    """After a hole nobody can say who held the device in it."""

    def held(second: int) -> Held | None:
        return None if 100 <= second < 200 else {GPU: [pod("a")]}

    moments = set(reported(run(held, until_s=300)))
    assert moments & {float(second) for second in range(170, 260, 10)} == set()
    assert moments >= {90.0, 270.0}


def test_instances_have_rogues_of_their_own() -> None:
    """Another instance of the same GPU is no excuse; holding the whole GPU is."""
    facts = [{"hw.id": GPU, "gpu.minor": "0"}, MIG_FACT, {**MIG_FACT, "hw.id": "MIG-2", "gpu.mig.gi": "8"}]
    on_first = [Proc(7, UID, BOX, device="MIG-1")]
    sink = run(lambda _: {"MIG-1": [pod("a")], "MIG-2": [pod("rogue")]}, seen=lambda _: on_first, facts=facts)
    assert reported(sink)[140.0] == [("rogue", "main", "MIG-1")]
    sink = run(lambda _: {GPU: [pod("rogue")], "MIG-1": []}, seen=lambda _: on_first, facts=facts)
    assert reported(sink) == {}
    sink = run(lambda _: {"MIG-1": [pod("rogue")]}, seen=lambda _: on_first, facts=facts)
    assert reported(sink) == {}


def test_the_report_keeps_its_layout_while_the_same_pods_are_rogue() -> None:
    """A steady accusation costs no new identities."""
    sink = run(lambda _: {GPU: [pod("a")], OTHER: []})
    newest = [batch for batch in sink.batches if batch.stream == "attribution" and batch.latest_ns() > at(75) * NS]
    assert len({id(batch.layout) for batch in newest}) == 1


def test_names_and_processes_survive_a_restart() -> None:
    """The new processor names processes and reports the rogue without having heard of the pods again."""
    sink = Sink()
    join = processor(Sink())

    def live(join: AttributionProcessor, seconds: range, *, known: bool) -> None:
        for second in seconds:
            batches: list[Batch] = [holders(at(second), {GPU: [pod("a")]}), processes(at(second + 1), PROCESS)]
            feed(join, *([pods(at(second), ROGUE)] if known else []), *batches)

    live(join, range(0, 100, 10), known=True)
    fresh = processor(sink)
    assert isinstance(join, Stateful)
    assert fresh.load_state(*join.save_state())
    live(fresh, range(100, 130, 10), known=False)
    assert min(reported(sink)) == 100
    assert {point[0] for point in sink.points("gpu.process.memory.usage")} == {"rogue"}
    assert fresh.save_state()[0] == 2


# --- whatever happens

_turns = st.lists(
    st.tuples(
        st.sampled_from([0.0, 2.0, 30.0]),  # nobody holds it
        st.sampled_from([4.0, 25.0, 100.0, 300.0]),  # a pod holds it
        st.sampled_from([0.0, 1.0, 12.0]),  # until its process starts
        st.sampled_from([-2.0, 0.0, 10.0, 40.0]),  # how long its process outlives that
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150)
@given(
    _turns,
    st.lists(st.sampled_from([10.0, 10.0, 10.0, 10.5, 40.0, 70.0]), max_size=60),
    st.lists(st.sampled_from([15.0, 15.0, 5.0, 45.0]), max_size=60),
    st.sampled_from([0.0, 0.25, 4.0]),
)
def test_no_pod_that_held_the_device_while_its_process_ran_is_ever_accused(
    turns: list[tuple[float, float, float, float]], polls: list[float], reads: list[float], answer_s: float
) -> None:
    """Pods one after the other, processes that linger for 40 s, snapshots and process lists that come late or not at
    all: nobody who was given the device is called rogue."""
    held: list[tuple[str, float, float]] = []
    alive: list[tuple[str, float, float]] = []
    now_s = 5.0
    for number, (pause_s, hold_s, start_s, linger_s) in enumerate(turns):
        begin_s = now_s + pause_s
        now_s = begin_s + hold_s
        held.append((f"p{number}", begin_s, now_s))
        alive.append((f"p{number}", begin_s + start_s, now_s + linger_s))
    known = [Known(name, f"uid-{name}", {f"box-{name}": "main"}) for name, _, _ in held]
    events: list[tuple[float, Batch]] = []
    for steps, read in ((polls, False), (reads, True)):
        moment = 0.0
        for step in steps:
            moment += step
            if read:
                names = [name for name, begin_s, end_s in alive if begin_s <= moment < end_s]
                procs = [Proc(each, f"uid-{name}", f"box-{name}") for each, name in enumerate(names)]
                events.append((moment, processes(at(moment), *procs)))
            else:
                owners = [pod(name) for name, begin_s, end_s in held if begin_s <= moment + answer_s / 2 < end_s]
                batch = holders(at(moment + answer_s), {GPU: owners}, asked_s=at(moment))
                events.append((moment + answer_s, batch))
    sink = Sink()
    join = processor(sink)
    for moment, batch in sorted(events, key=lambda event: event[0]):
        feed(join, pods(at(moment), *known), batch)
    assert reported(sink) == {}
