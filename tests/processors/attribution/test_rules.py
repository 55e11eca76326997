"""Who owns what, rule by rule."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from gpulens.pipeline.ack import Ack
from gpulens.pipeline.catalogue import CATALOGUE, MetricScope, metric
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Metric, Resource, Scope, Series, build_layout
from gpulens.pipeline.otlp import Decoder, record_request
from tests.processors.attribution.kit import (
    GPU,
    NODE,
    NS,
    OTHER,
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

INSTANCE = f"{GPU}/gi7"
MIG_FACT = {"hw.id": "MIG-1", "hw.parent": GPU, "gpu.mig.gi": "7", "gpu.mig.ci": "0"}
NOWHERE = Resource({"service.name": "somebody"})


# --- scopes


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_each_metric_stands_where_its_scope_says_and_only_there(name: str) -> None:
    """Work follows the one owner; device, owner and fact metrics stay where the receiver put them; no point is
    doubled."""
    if name in {"gpu.allocated", "gpu.attribution", "gpu.source.up", "gpu.source.interval", "gpu.source.window"}:
        return  # these have rules of their own
    scope = CATALOGUE[name].scope
    home = pod("a") if scope is MetricScope.OWNER else NODE
    sink = Sink()
    reading = message("nvml", at(5), [(home, name, {"hw.id": GPU}, 1)])
    feed(processor(sink), holders(at(0), {GPU: [pod("a")]}), reading, holders(at(10), {GPU: [pod("a")]}))
    expected = "" if scope in (MetricScope.DEVICE, MetricScope.FACT) else "a"
    assert [(point[0], point[2]) for point in sink.points(name)] == [(expected, 1)]


def test_work_of_a_shared_device_stays_on_the_node() -> None:
    """A device-wide value is charged to none of several owners."""
    sink = Sink()
    both = {GPU: [pod("a"), pod("b")]}
    feed(processor(sink), holders(at(0), both), activity(at(5)), holders(at(10), both))
    assert sink.owner_of_last() == ""


def test_replicas_of_one_container_are_one_owner() -> None:
    """A container that holds two replicas of a GPU, alone, owns what it does."""
    sink = Sink()
    held = {f"{GPU}": [pod("a")], "nvidia0": [pod("a")]}
    join = processor(sink)
    feed(join, described(at(0), {"hw.id": GPU, "gpu.minor": "0"}), holders(at(0), held), activity(at(5)))
    feed(join, holders(at(10), held))
    assert sink.owner_of_last() == "a"
    assert len([point for point in sink.points("gpu.allocated") if point[3] == 10]) == 1


def test_foreign_data_passes_untouched() -> None:
    """What is not ours, and what somebody else has attributed, is passed on as it came."""
    foreign = Metric("vllm.requests", "1", is_int=True)
    owned = Resource({**NODE.map, "k8s.pod.name": "other", "k8s.namespace.name": "ns"})
    entries = [
        (NODE, Scope("vllm"), Series(foreign, {"hw.id": GPU})),
        (owned, Scope("gpulens"), Series(metric("gpu.sm.active"), {"hw.id": GPU})),
        (NODE, Scope("x"), Series(metric("gpu.sm.active"), {})),
    ]
    layout, _ = build_layout(entries)
    sink = Sink()
    batch = Batch.of(layout, [3, 0.5, 0.25], round(at(5) * NS), "otlp", complete=False)
    feed(processor(sink), holders(at(0), {GPU: [pod("a")]}), batch, holders(at(10), {GPU: [pod("a")]}))
    (out,) = [each for each in sink.batches if each.stream == "otlp"]
    assert list(out.layout.identities()) == entries
    assert out.readings() == [3, 0.5, 0.25]


def test_what_travels_beside_the_columns_stays_with_its_batch() -> None:
    """Events, opaque parts, stream and completeness go through, held or not, owned or not."""
    sink = Sink()
    join = processor(sink)
    held = {GPU: [pod("a")]}
    reading = replace(activity(at(5), complete=False), events=(b"event",), opaque=(b"histogram",))
    alone = replace(reading, layout=EMPTY_LAYOUT, values=b"", stream="alone", complete=True)
    feed(join, holders(at(0), held), reading, alone, holders(at(10), held))
    for stream, complete in (("nvml", False), ("alone", True)):
        (out,) = [each for each in sink.batches if each.stream == stream]
        assert (out.events, out.opaque, out.complete) == ((b"event",), (b"histogram",), complete)


def test_an_absent_reading_stays_absent() -> None:
    """None is not zero, also on an owner's resource."""
    sink = Sink()
    reading = message(
        "nvml", at(5), [(NODE, "gpu.sm.active", {"hw.id": each}, value) for each, value in ((GPU, 0.0), (OTHER, 0.0))]
    )
    slot = next(i for i, (_, _, series) in enumerate(reading.layout.identities()) if series.map.get("hw.id") == OTHER)
    reading = replace(reading, absent=(1 << slot).to_bytes(1, "little"))
    held = {GPU: [pod("a")], OTHER: [pod("b")]}
    join = processor(sink)
    feed(join, holders(at(0), held), reading, holders(at(10), held))
    assert [point[:3] for point in sink.points("gpu.sm.active")] == [("a", GPU, 0.0)]
    assert join._settings.telemetry.value("gpulens_attribution_points", reason="owned") == 1


def test_each_reading_of_a_batch_is_judged_by_its_own_time() -> None:
    """Points of different moments in one message: one lies between snapshots that agree, the other does not."""
    sink = Sink()
    rows = [(NODE, "gpu.sm.active", {"hw.id": each}, 0.5) for each in (GPU, OTHER)]
    reading = message("nvml", at(5), rows, up=None)
    reading = replace(reading, time_ns=array("Q", [round(at(5) * NS), round(at(15) * NS)]))
    join = processor(sink)
    feed(join, holders(at(0), {GPU: [pod("a")], OTHER: [pod("b")]}), reading)
    feed(join, holders(at(10), {GPU: [pod("a")], OTHER: [pod("b")]}))
    feed(join, holders(at(20), {GPU: [pod("z")], OTHER: [pod("b")]}))
    assert [point[:2] for point in sink.points("gpu.sm.active")] == [("a", GPU), ("b", OTHER)]


# --- windows, hold, late facts


def test_the_configured_hold_is_the_longest_wait() -> None:
    """`hold` overrides one and a half intervals of the allocation source."""
    sink = Sink()
    join = processor(sink, hold="3s")
    feed(join, holders(at(0), {GPU: [pod("a")]}), activity(at(1)), activity(at(3.9)))
    assert sink.points("gpu.sm.active") == []
    feed(join, activity(at(4)))
    assert sink.points("gpu.sm.active") == [("", GPU, 0.5, 1.0)]


def test_what_waits_does_not_delay_the_acknowledgement() -> None:
    """The source's handle settles with its own share, while the reading is still held."""
    join = processor(Sink())
    feed(join, holders(at(0), {GPU: [pod("a")]}))
    ack = Ack()
    join.consume(activity(at(5)), ack)
    ack.settle()
    assert ack.settled


def test_two_exporters_have_each_their_own_window() -> None:
    """The window that one stream names says nothing of another stream of the same kind."""
    sink = Sink()
    join = processor(sink)
    for second in (0, 10, 20):
        feed(join, holders(at(second), {GPU: [pod("a" if second else "z")]}))
    feed(join, activity(at(25), 0.1, source="dcgm", stream="dcgm/fast", window_s=10))
    feed(join, activity(at(25), 0.2, source="dcgm", stream="dcgm/slow", window_s=60))
    feed(join, holders(at(30), {GPU: [pod("a")]}))
    assert {point[2]: point[0] for point in sink.points("gpu.sm.active")} == {0.1: "a", 0.2: ""}


def test_readings_that_reconcile_has_chosen_get_the_longest_window() -> None:
    """Under the scope `gpulens` the source is not told, so the node's longest window is taken."""
    sink = Sink()
    join = processor(sink)
    feed(join, activity(at(0), source="dcgm", window_s=25))
    for second in (0, 10, 20, 30):
        feed(join, holders(at(second), {GPU: [pod("a")]}))
    chosen = message("gpulens", at(24), [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.7)], up=None)
    later = message("gpulens", at(26), [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.8)], up=None)
    feed(join, chosen, later)
    assert [(point[0], point[2]) for point in sink.points("gpu.sm.active")][1:] == [("", 0.7), ("a", 0.8)]


def test_a_reply_says_nothing_of_the_time_after_it_was_asked_for() -> None:
    """A kubelet that was asked before the reading and answered after it may have looked before, too."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(0), {GPU: [pod("a")]}), activity(at(12)))
    feed(join, holders(at(15), {GPU: [pod("a")]}, asked_s=at(11)), holders(at(25), {GPU: [pod("b")]}, asked_s=at(21)))
    assert sink.owner_of_last() == ""


def test_snapshots_far_apart_do_not_vouch_for_the_time_between() -> None:
    """More than `max_gap` between two snapshots: the device may have passed through any hands."""
    sink = Sink()
    held = {GPU: [pod("a")]}
    feed(processor(sink, hold="100s"), holders(at(0), held), activity(at(5)), holders(at(61), held))
    assert sink.owner_of_last() == ""
    feed(processor(sink, hold="100s"), holders(at(0), held), activity(at(5)), holders(at(60), held))
    assert sink.owner_of_last() == "a"


def test_a_map_that_comes_while_a_reading_waits_still_counts() -> None:
    """Late facts help what is still here."""
    sink = Sink()
    join = processor(sink)
    held = {"MIG-1": [pod("a")]}
    feed(join, holders(at(0), held), activity(at(5), device=INSTANCE), described(at(6), MIG_FACT))
    feed(join, holders(at(10), held))
    assert sink.points("gpu.sm.active") == [("a", "MIG-1", 0.5, 5.0)]


def test_a_part_of_a_snapshot_vouches_for_what_it_names_and_for_nothing_else() -> None:
    """When the free devices could not be listed, a device that no pod is named for has no proof of its owner."""
    sink = Sink()
    join = processor(sink, hold="60s")
    feed(join, holders(at(0), {GPU: [pod("a")], OTHER: [pod("b")]}))
    feed(join, activity(at(5)), activity(at(5), 0.1, OTHER, stream="nvml/2"))
    feed(join, holders(at(10), {OTHER: [pod("b")]}, complete=False))
    assert [point[:2] for point in sink.points("gpu.sm.active")] == [("b", OTHER)]
    feed(join, holders(at(20), {OTHER: [pod("b")]}, complete=False), activity(at(15)))
    feed(join, holders(at(30), {GPU: [pod("c")], OTHER: [pod("b")]}))
    assert {point[0] for point in sink.points("gpu.sm.active") if point[1] == GPU} == {""}


# --- what is taken back


def test_an_allocation_that_a_complete_batch_leaves_out_is_gone_at_once() -> None:
    """The stream's word replaces its earlier word, also when it has none any more."""
    for last in (
        message("x", at(6), [], stream="pod_resources", up=None),
        message("x", at(6), [(NODE, "hw.power", {"hw.id": GPU}, 1.0)], stream="pod_resources", up=None),
    ):
        sink = Sink()
        join = processor(sink)
        feed(join, holders(at(0), {GPU: [pod("a")]}), activity(at(5)), last)
        assert sink.points("gpu.sm.active") == [("", GPU, 0.5, 5.0)]
        feed(join, activity(at(20)))
        assert sink.reasons() == {}


def test_an_empty_complete_batch_takes_the_device_map_back() -> None:
    """Identity that nobody vouches for any more joins nothing."""
    sink = Sink()
    join = processor(sink)
    held = {"nvidia0": [pod("a")]}
    feed(join, described(at(0), {"hw.id": GPU, "gpu.minor": "0"}), holders(at(1), held), activity(at(2)))
    feed(join, holders(at(11), held))
    assert sink.owner_of_last() == "a"
    empty = Batch.of(EMPTY_LAYOUT, [], round(at(12) * NS), "info")
    feed(join, empty, activity(at(13)), holders(at(21), held))
    assert sink.owner_of_last() == ""
    assert empty in sink.batches


def test_a_silent_source_does_not_give_way_to_a_page_at_once() -> None:
    """After a kubelet outage of a minute its word is gone, but the labels of a page do not take its place."""
    sink = Sink()
    join = processor(sink, source_timeout="300s")
    claim = [(pod("page"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "dcgm"}, 1)]
    reading = [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.5)]
    feed(join, holders(at(0), {GPU: [pod("a")]}), holders(at(10), {GPU: [pod("a")]}))
    for second in range(20, 500, 10):
        feed(join, message("pod_resources", at(second), [], up=False, complete=second >= 80))
        feed(join, message("dcgm", at(second + 1), claim + reading, window_s=30))
    owners = {point[3]: point[0] for point in sink.points("gpu.sm.active")}
    assert {owner for second, owner in owners.items() if second <= 300} == {""}
    assert {owner for second, owner in owners.items() if second > 360} == {"page"}


def test_a_changed_label_of_a_page_does_not_count_in_its_first_period() -> None:
    """Labels are of now, values of up to one refresh ago: the new name waits for a full window."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 150, 15):
        name = "old" if second < 60 else "new"
        claim = [(pod(name), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "dcgm"}, 1)]
        reading = [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.5)]
        feed(join, message("dcgm", at(second), claim + reading, window_s=30, interval_s=15))
    owners = {round(point[3]): point[0] for point in sink.points("gpu.sm.active")}
    assert owners == {
        0: "",
        15: "old",
        30: "old",
        45: "old",
        60: "",
        75: "",
        **dict.fromkeys(range(90, 150, 15), "new"),
    }


# --- what is told of it


def test_a_mig_uuid_without_a_map_stays_unowned_and_says_so() -> None:
    """The instance is told as not mapped, on the node's resource."""
    sink = Sink()
    join = processor(sink)
    held = {"MIG-1": [pod("a")]}
    feed(join, described(at(0), {"hw.id": INSTANCE, "hw.parent": GPU, "gpu.mig.gi": "7"}), holders(at(1), held))
    feed(join, activity(at(5), device=INSTANCE), holders(at(11), held), holders(at(21), held))
    assert sink.owner_of_last() == ""
    assert sink.reasons() == {("", INSTANCE): ("none", "mig_unmapped"), ("", "MIG-1"): ("none", "mig_unmapped")}
    assert join._settings.telemetry.value("gpulens_attribution_points", reason="mig_unmapped") == 1


def test_each_device_says_how_its_owner_was_found_or_why_it_has_none() -> None:
    """One owner, several by design, several by mistake, nobody, unknown: each in a series of its own."""
    third, fourth = GPU[:-1] + "3", GPU[:-1] + "4"
    unknown = {"hw.id": GPU[:-1] + "5"}
    sink = Sink()
    join = processor(sink)
    rows = [(NODE, "gpu.allocation.replicas", {"hw.id": third}, 1)]
    claims = {GPU: [pod("a")], OTHER: [pod("a"), pod("b")], third: [pod("c"), pod("d")], fourth: []}
    for moment in (0, 10, 20):
        snapshot = holders(at(moment), claims)
        extra = message("pod_resources", at(moment), rows, up=None, asked_s=None)
        layout, slots = build_layout([*snapshot.layout.identities(), *extra.layout.identities()])
        values = [0.0] * layout.size
        for slot, value in zip(slots, [*snapshot.numbers(), *extra.numbers()], strict=True):
            values[slot] = value
        numbers = [int(v) if is_int else v for v, is_int in zip(values, layout.is_int, strict=True)]
        feed(join, described(at(moment), unknown), Batch.of(layout, numbers, round(at(moment) * NS), "pod_resources"))
    assert sink.reasons() == {
        ("a", GPU): ("pod_resources", ""),
        ("a", OTHER): ("pod_resources", "shared"),
        ("b", OTHER): ("pod_resources", "shared"),
        ("", third): ("none", "conflict"),
        ("", fourth): ("none", "unallocated"),
        ("", unknown["hw.id"]): ("none", "unnamed"),
    }


def test_method_and_sharing_are_series_of_their_own() -> None:
    """No value series carries how its owner was found or how the device is shared, so neither can rename it."""
    sink = Sink()
    join = processor(sink)
    for moment in (0, 10):
        rows = [
            (pod("a"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "pod_resources"}, 1),
            (NODE, "gpu.sharing", {"hw.id": GPU, "gpu.sharing.mode": "exclusive"}, 1),
        ]
        feed(join, message("pod_resources", at(moment), rows), activity(at(moment + 1)))
    owned = {"hw.id"}
    for batch in sink.batches:
        for _, _, series in batch.layout.identities():
            if series.metric.name in {"gpu.sm.active", "gpu.allocated"}:
                assert series.map.keys() == owned
    assert [point[:2] for point in sink.points("gpu.sharing")] == [("", GPU)] * 2
    assert sink.reasons() == {("a", GPU): ("pod_resources", "")}


def test_a_change_of_the_source_renames_nothing() -> None:
    """The same pod told by a page first and by Pod Resources later keeps every series."""
    sink = Sink()
    join = processor(sink)
    claim = [(pod("a"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "dcgm"}, 1)]
    reading = [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.5)]
    for second in range(0, 200, 10):
        feed(join, message("dcgm", at(second), claim + reading, window_s=30))
        if second >= 100:
            feed(join, holders(at(second + 1), {GPU: [pod("a")]}))
    methods = {series.text("gpu.attribution.method") for series in _series(sink, "gpu.attribution")}
    assert methods >= {"dcgm", "pod_resources"}
    for name in ("gpu.allocated", "gpu.sm.active"):
        assert len({each.attributes for each in _series(sink, name)}) == 1
    moments = [point[3] for point in sink.points("gpu.allocated")]
    assert len(moments) == len(set(moments)) == 19


def _series(sink: Sink, name: str) -> list[Series]:
    found = (series for batch in sink.batches for _, _, series in batch.layout.identities())
    return [series for series in found if series.metric.name == name]


def test_only_the_most_trusted_source_is_heard() -> None:
    """The others' allocations are not passed on, whatever they say."""
    sink = Sink()
    join = processor(sink)
    for source, name in (("self", "me"), ("pod_resources", "a"), ("process", "p"), ("gke", "g"), ("dcgm", "d")):
        rows = [(pod(name), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": source}, 1)]
        for second in (0, 20, 40):
            feed(join, message(source, at(second), rows))
    mine = {"hw.id": GPU, "gpu.allocation.source": "self"}
    feed(join, activity(at(45)), message("self", at(50), [(pod("me"), "gpu.allocated", mine, 1)]))
    assert sink.owner_of_last() == "me"
    assert sink.points("gpu.allocated")[-1][0] == "me"
    assert sink.reasons() == {("me", GPU): ("self", "")}


# --- steadiness


def test_the_same_batches_in_the_same_order_give_the_same_bytes() -> None:
    """Straight from the receivers or read back from a recording, twice or ten times."""
    batches = []
    for second in range(0, 120, 10):
        held = {GPU: [pod("a" if second < 60 else "b")], "MIG-1": [pod("c"), pod("d")]}
        batches += [holders(at(second), held), activity(at(second + 3), second / 100, source="dcgm", window_s=30)]
        if second == 40:
            batches.append(described(at(second), MIG_FACT, {"hw.id": GPU, "gpu.minor": "0"}))
        batches.append(activity(at(second + 4), 0.5, device=INSTANCE, stream="nvml/mig"))
    decoder = Decoder()
    recorded = [each for batch in batches for each in decoder.decode(record_request(batch), "recording")]
    results = []
    for run in (batches, batches, recorded):
        sink = Sink()
        feed(processor(sink), *run)
        results.append([record_request(batch).SerializeToString() for batch in sink.batches])
    assert len(results[0]) > len(batches)
    assert results[0] == results[1] == results[2]


def test_layouts_stay_the_same_objects_while_nothing_changes() -> None:
    """Every stream, the allocations and the report included, comes back on its layout tick after tick."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 100, 10):
        feed(join, holders(at(second), {GPU: [pod("a")], OTHER: []}), activity(at(second + 5), source="dcgm"))
    settled = [batch for batch in sink.batches if batch.latest_ns() >= at(45) * NS]
    for stream in ("pod_resources", "dcgm", "attribution"):
        assert len({id(batch.layout) for batch in settled if batch.stream == stream}) == 1


def test_ten_thousand_pods_leave_nothing_behind() -> None:
    """State and caches are bounded by what is there now, not by who has been (two pods a round)."""
    sink = Sink()
    join = processor(sink)

    def live(pods: range) -> None:
        for number in pods:
            mig = f"MIG-{number}"
            feed(
                join,
                described(at(10 * number), {**MIG_FACT, "hw.id": mig}),
                holders(at(10 * number), {GPU: [pod(f"p{number}")], mig: [pod(f"q{number}")]}),
                activity(at(10 * number + 5)),
            )
            sink.batches.clear()

    live(range(200))
    small = _size(join)
    live(range(200, 5_000))
    assert _size(join) <= small * 1.5


def _size(join: object) -> int:
    """How many objects of ours hang on the processor, the telemetry left out."""
    seen: set[int] = set()
    waiting: list[object] = [join]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type) or type(each).__name__ in {"Telemetry", "Sink"}:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)) or type(each).__name__ == "deque":
            waiting += list(each)  # type: ignore[call-overload]
        elif type(each).__module__.startswith("gpulens."):
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [getattr(each, name, None) for name in slots]
            waiting += list(getattr(each, "__dict__", {}).values())
    return len(seen)
