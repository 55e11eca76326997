"""Processes as an allocation source: who uses a device, where nobody says who holds it."""

from __future__ import annotations

from gpulens.pipeline.data import Batch
from tests.processors.attribution.kit import (
    BOX_A,
    BOX_B,
    GPU,
    NODE,
    OTHER,
    UID_A,
    UID_B,
    A,
    B,
    Proc,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    message,
    names,
    places,
    pod,
    pods,
    processes,
    processor,
)


def test_processes_name_the_owner_where_nobody_else_does() -> None:
    """Without Pod Resources a device belongs to the one pod that has processes on it, by its names."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 15):
        feed(join, pods(at(second), A), processes(at(second), Proc(7, UID_A, BOX_A)))
        feed(join, activity(at(second + 5)))
    assert [(point[0], point[3]) for point in sink.points("gpu.sm.active")] == [("", 5.0), ("a", 20.0), ("a", 35.0)]
    assert sink.points("gpu.allocated")[-1][:3] == ("a", GPU, 1)
    assert sink.reasons() == {("a", GPU): ("process", "")}


def test_a_process_that_nobody_knows_keeps_the_device_from_the_others() -> None:
    """One of two holders is unknown: the device is shared, and it is not told as the known one's alone."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 15):
        seen = [Proc(7, UID_A, BOX_A), Proc(8, UID_B, BOX_B), Proc(9, UID_B, BOX_B, device=OTHER)]
        feed(join, pods(at(second), A), processes(at(second), *seen))
        feed(join, activity(at(second + 5)), activity(at(second + 5), 0.1, OTHER, stream="nvml/2"))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert {point[:2] for point in sink.points("gpu.allocated")} == {("a", GPU)}
    assert sink.reasons() == {("a", GPU): ("process", "shared"), ("", OTHER): ("none", "unnamed")}


def test_a_process_of_the_host_keeps_the_device_from_the_pods() -> None:
    """A process of no container (or one that may not be looked up) is somebody, too: what the whole device does is not
    charged to the only pod on it."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 15):
        seen = [Proc(7, UID_A, BOX_A), Proc(8, busy=None), Proc(9, UID_B, BOX_B, device=OTHER)]
        feed(join, pods(at(second), A, B), processes(at(second), *seen))
        feed(join, activity(at(second + 5)), activity(at(second + 5), 0.1, OTHER, stream="nvml/2"))
    assert {point[:2] for point in sink.points("gpu.sm.active")[2:]} == {("", GPU), ("b", OTHER)}
    assert sink.reasons() == {("a", GPU): ("process", "shared"), ("b", OTHER): ("process", "")}
    # A 1 on the node's resource would read as 'the node holds it'.
    assert {point[:2] for point in sink.points("gpu.allocated")} == {("a", GPU), ("b", OTHER)}


def test_processes_of_the_host_alone_silence_no_page() -> None:
    """They name nobody, so whoever comes next in the order of trust is heard."""
    sink = Sink()
    join = processor(sink)
    claim = [(pod("page"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "gke"}, 1)]
    for second in range(0, 150, 15):
        feed(join, processes(at(second), Proc(7)), message("gke", at(second), claim), activity(at(second + 5)))
    assert sink.owner_of_last() == "page"


def test_silence_of_processes_proves_nothing() -> None:
    """A device without processes is unnamed, not free."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 15):
        feed(join, described(at(second), {"hw.id": GPU}, {"hw.id": OTHER}))
        feed(join, pods(at(second), A), processes(at(second), Proc(7, UID_A, BOX_A)))
    assert sink.reasons() == {("a", GPU): ("process", ""), ("", OTHER): ("none", "unnamed")}


def test_processes_count_only_where_pod_resources_does_not_answer() -> None:
    """Where it does, its word stands, and what processes allocate is not passed on."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 10):
        feed(join, holders(at(second), {GPU: [pod("b")]}), pods(at(second), A, B))
        feed(join, processes(at(second), Proc(7, UID_A, BOX_A)), activity(at(second + 5)))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {"b"}
    assert {point[0] for point in sink.points("gpu.allocated")} == {"b"}


def test_processes_that_cannot_all_be_seen_allocate_nothing() -> None:
    """In a PID namespace of its own the agent sees some processes at most: the others may hold the device, too."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 15):
        seen = processes(at(second), Proc(7, UID_A, BOX_A))
        slot = next(
            slot
            for slot, (_, _, series) in enumerate(seen.layout.identities())
            if series.metric.name == "gpu.process.visible"
        )
        numbers = [0 if each == slot else number for each, number in enumerate(seen.numbers())]
        blind = Batch.of(seen.layout, numbers, seen.time_ns, seen.stream)
        feed(join, pods(at(second), A), blind, activity(at(second + 5)))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert sink.points("gpu.allocated") == []
    assert places(sink) == [(names("a"), GPU, "7")]


def test_processes_without_names_do_not_silence_a_page() -> None:
    """Where nobody tells of pods, processes name nobody, and GKE's own labels go on to count."""
    sink = Sink()
    join = processor(sink)
    claim = [(pod("page"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "gke"}, 1)]
    for second in range(0, 150, 15):
        feed(join, processes(at(second), Proc(7, UID_A, BOX_A)), message("gke", at(second), claim))
        feed(join, activity(at(second + 5)))
    assert sink.owner_of_last() == "page"
    assert sink.points("gpu.allocated")[-1][0] == "page"


def test_a_mapped_page_of_another_vendor_is_heard_last() -> None:
    """Labels that a mapping made into allocations count where nobody else speaks, and not before."""
    for others, expected in ((False, "page"), (True, "gke")):
        sink = Sink()
        join = processor(sink)
        for second in range(0, 150, 15):
            for source, name in (("gke", "gke"), ("prometheus", "page")):
                if source == "prometheus" or others:
                    claim = {"hw.id": "0000:c1:00.0", "gpu.allocation.source": source}
                    rows = [(pod(name), "gpu.allocated", claim, 1)]
                    feed(join, message(source, at(second), [*rows]))
            reading = [(NODE, "gpu.engine.active", {"hw.id": "amd-1"}, 0.5)]
            fact = {"hw.id": "amd-1", "gpu.device.plugin.id": "0000:c1:00.0"}
            feed(join, described(at(second), fact), message("prometheus", at(second), reading, stream="prometheus/amd"))
        assert sink.points("gpu.engine.active")[-2][0] == expected
