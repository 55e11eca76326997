"""MIG made, re-partitioned and taken apart while readings flow: nothing goes to an instance that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulens.pipeline.data import Resource
from tests.processors.attribution.kit import (
    GPU,
    NODE,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    message,
    pod,
    processor,
)

WHOLE = {"hw.id": GPU, "gpu.minor": "0", "gpu.pci.address": "0000:01:00.0"}
GI7 = f"{GPU}/gi7"


def instance(uuid: str, gi: str = "7", ci: str = "0") -> dict[str, str]:
    """One instance of the GPU as NVML describes it."""
    return {"hw.id": uuid, "hw.parent": GPU, "gpu.mig.gi": gi, "gpu.mig.ci": ci}


def owners(sink: Sink) -> list[tuple[str, str, float]]:
    """(pod, device, seconds) of every activity."""
    return [(point[0], point[1], point[3]) for point in sink.points("gpu.sm.active")]


def test_instances_are_made_re_partitioned_and_taken_apart() -> None:
    """The GPU whole, then two instances, then one under a reused GI id, then whole again; each reading has the owner
    of what was there, from the second snapshot on."""
    held: Mapping[str, Sequence[Resource]]
    sink = Sink()
    join = processor(sink)
    for second in range(0, 160, 10):
        if second < 40:
            facts, held = [WHOLE], {GPU: [pod("a")]}
        elif second < 80:
            facts = [WHOLE, instance("MIG-1"), instance("MIG-2", "8")]
            held = {"MIG-1": [pod("b")], "MIG-2": [pod("c")]}
        elif second < 120:
            facts, held = [WHOLE, instance("MIG-3")], {"MIG-3": [pod("d")]}
        else:
            facts, held = [WHOLE], {GPU: [pod("e")]}
        readings = [(NODE, "gpu.sm.active", {"hw.id": each}, 0.5) for each in held]
        feed(join, described(at(second), *facts), holders(at(second + 1), held))
        feed(join, message("nvml", at(second + 5), readings))
    found = owners(sink)
    assert found == [
        *[("a", GPU, second + 5.0) for second in (0, 10, 20)],
        ("", GPU, 35.0),
        *[(name, uuid, second + 5.0) for second in (40, 50, 60) for name, uuid in (("b", "MIG-1"), ("c", "MIG-2"))],
        ("", "MIG-1", 75.0),
        ("", "MIG-2", 75.0),
        *[("d", "MIG-3", second + 5.0) for second in (80, 90, 100)],
        ("", "MIG-3", 115.0),
        *[("e", GPU, second + 5.0) for second in (120, 130, 140)],
    ]
    assert sink.reasons() == {("e", GPU): ("pod_resources", "")}


def test_a_reused_gi_id_is_another_instance() -> None:
    """A page names instances by GI: its readings follow the map, and one that waits over the change goes to nobody."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), instance("MIG-1")), holders(at(0), {"MIG-1": [pod("a")]}))
    feed(join, activity(at(5), 0.1, GI7), holders(at(10), {"MIG-1": [pod("a")]}), activity(at(12), 0.2, GI7))
    feed(join, described(at(13), instance("MIG-2")), holders(at(20), {"MIG-2": [pod("b")]}))
    feed(join, activity(at(25), 0.3, GI7), holders(at(30), {"MIG-2": [pod("b")]}))
    assert [(point[0], point[1], point[2]) for point in sink.points("gpu.sm.active")] == [
        ("a", "MIG-1", 0.1),
        ("", "MIG-2", 0.2),
        ("b", "MIG-2", 0.3),
    ]


def test_a_reading_of_an_instance_that_is_gone_keeps_its_own_name() -> None:
    """A late reading of the old UUID does not become one of the new instance with the same GI id."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), instance("MIG-1")), holders(at(0), {"MIG-1": [pod("a")]}))
    feed(join, described(at(10), instance("MIG-2")), holders(at(11), {"MIG-2": [pod("b")]}))
    feed(join, activity(at(12), 0.1, "MIG-1"), holders(at(21), {"MIG-2": [pod("b")]}))
    feed(join, holders(at(31), {"MIG-2": [pod("b")]}))
    assert owners(sink) == [("", "MIG-1", 12.0)]


def test_two_words_about_one_gi_id_join_by_uuid_only() -> None:
    """A stale map beside a fresh one, or two compute instances in one GPU instance: UUIDs stand for themselves, and
    what is named by the GI id alone goes to nobody."""
    sink = Sink()
    join = processor(sink)
    claims = {"MIG-1": [pod("a")], "second": [pod("b")]}
    fact = {**instance("MIG-2", ci="1"), "gpu.device.plugin.id": "second"}
    feed(
        join, described(at(0), WHOLE, instance("MIG-1"), stream="stale"), described(at(0), fact), holders(at(1), claims)
    )
    readings = [(NODE, "gpu.sm.active", {"hw.id": each}, 0.5) for each in ("MIG-1", "MIG-2", GI7)]
    feed(join, message("nvml", at(5), readings), holders(at(11), claims))
    assert sorted(owners(sink)) == [("", GI7, 5.0), ("a", "MIG-1", 5.0), ("b", "MIG-2", 5.0)]
    parents = {
        (series.text("hw.id"), series.text("hw.parent"))
        for batch in sink.batches
        for resource, _, series in batch.layout.identities()
        if series.metric.name == "gpu.sm.active" and resource.text("k8s.pod.name")
    }
    assert parents == {("MIG-1", GPU), ("MIG-2", GPU)}
    reasons = sink.reasons()
    assert reasons["a", "MIG-1"] == reasons["b", "MIG-2"] == ("pod_resources", "")


def test_gke_ids_follow_a_re_partition_without_a_map_of_uuids() -> None:
    """`nvidia0/gi7` before and after is another pod's: the readings around the change go to nobody."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 10):
        held = {"nvidia0/gi7": [pod("a" if second < 30 else "b")]}
        feed(join, described(at(second), WHOLE, instance("MIG-1" if second < 30 else "MIG-2")))
        feed(join, holders(at(second + 1), held), activity(at(second + 5), device=GI7))
    assert owners(sink) == [
        ("a", "MIG-1", 5.0),
        ("a", "MIG-1", 15.0),
        ("", "MIG-2", 25.0),
        ("b", "MIG-2", 35.0),
        ("b", "MIG-2", 45.0),
    ]
