from tests.processors.attribution.kit import (
    GPU,
    NODE,
    OTHER,
    Sink,
    activity,
    at,
    feed,
    holders,
    message,
    pod,
    processor,
)


def test_a_reading_between_two_snapshots_that_agree_gets_the_owner() -> None:
    """Snapshots before and after the reading name the same pod."""
    sink = Sink()
    feed(processor(sink), holders(at(0), {GPU: [pod("a")]}), activity(at(5)), holders(at(10), {GPU: [pod("a")]}))
    assert sink.points("gpu.sm.active") == [("a", GPU, 0.5, 5.0)]


def test_a_reading_waits_for_the_second_snapshot_and_no_longer() -> None:
    """Nothing leaves before the next snapshot; after 1.5 intervals without one it goes out unowned."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(0), {GPU: [pod("a")]}), activity(at(5)))
    assert sink.points("gpu.sm.active") == []
    feed(join, activity(at(19)))
    assert sink.points("gpu.sm.active") == []
    feed(join, activity(at(20)))
    assert sink.points("gpu.sm.active") == [("", GPU, 0.5, 5.0)]


def test_before_the_first_snapshot_nothing_is_owned() -> None:
    """A reading older than the first snapshot stays on the node, at once."""
    sink = Sink()
    feed(processor(sink), activity(at(0)), holders(at(5), {GPU: [pod("a")]}))
    assert sink.points("gpu.sm.active") == [("", GPU, 0.5, 0.0)]


def test_a_change_between_the_snapshots_leaves_the_reading_unowned() -> None:
    """The device passed from one pod to another: neither is charged."""
    sink = Sink()
    feed(processor(sink), holders(at(0), {GPU: [pod("a")]}), activity(at(5)), holders(at(10), {GPU: [pod("b")]}))
    assert sink.owner_of_last() == ""


def test_the_window_of_a_reading_counts_in_full() -> None:
    """A reading of dcgm covers 30 s: an owner needs a snapshot from before that, by any reading's own window."""
    sink = Sink()
    join = processor(sink)
    for second in (0, 10, 20, 30, 40):
        feed(join, holders(at(second), {GPU: [pod("a" if second >= 10 else "z")]}))
    feed(join, activity(at(35), source="dcgm"), activity(at(35.5), source="nvml"), activity(at(39.9), source="dcgm"))
    feed(join, holders(at(50), {GPU: [pod("a")]}))
    owners = {(point[3]): point[0] for point in sink.points("gpu.sm.active")}
    assert owners == {35.0: "", 35.5: "a", 39.9: ""}
    feed(join, activity(at(45), source="dcgm"), holders(at(60), {GPU: [pod("a")]}))
    assert sink.owner_of_last() == "a"


def test_a_snapshot_counts_from_the_reply_before_and_from_the_request_after() -> None:
    """A slow kubelet: what it said may have been true at any moment between request and reply."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(5), {GPU: [pod("a")]}, asked_s=at(0)), activity(at(3)), activity(at(12)))
    feed(join, holders(at(15), {GPU: [pod("a")]}, asked_s=at(11)), holders(at(25), {GPU: [pod("a")]}, asked_s=at(21)))
    assert [point[:1] + point[3:] for point in sink.points("gpu.sm.active")] == [("", 3.0), ("a", 12.0)]


def test_shared_devices_keep_all_owners_and_charge_none() -> None:
    """Two pods hold replicas of one GPU: both are told, the device's activity stays on the node."""
    sink = Sink()
    both = {GPU: [pod("a"), pod("b")]}
    feed(processor(sink), holders(at(0), both), activity(at(5)), holders(at(10), both))
    assert sink.owner_of_last() == ""
    assert {point[0] for point in sink.points("gpu.allocated")} == {"a", "b"}


def test_two_owners_of_an_exclusive_device_are_none() -> None:
    """An old kubelet lists a finished pod beside the new one: unknown, not two owners."""
    sink = Sink()
    both = {GPU: [pod("dead"), pod("alive")]}
    join = processor(sink)
    feed(join, holders(at(0), both, exclusive=True), activity(at(5)), holders(at(10), both, exclusive=True))
    assert sink.owner_of_last() == ""
    assert sink.points("gpu.allocated") == []


def test_gke_ids_join_by_minor_and_never_by_index() -> None:
    """nvidia1 is the GPU whose /dev minor is 1, whatever its index; nothing joins before that is known."""
    sink = Sink()
    join = processor(sink)
    held = {"nvidia1": [pod("a")], "nvidia0": []}
    feed(join, holders(at(0), held), activity(at(1)), holders(at(10), held))
    assert sink.owner_of_last() == ""
    facts = [
        (NODE, "gpu.device.info", {"hw.id": GPU, "gpu.minor": "1"}, 1),
        (NODE, "gpu.device.info", {"hw.id": OTHER, "gpu.minor": "0"}, 1),
    ]
    feed(join, message("nvml", at(11), facts, stream="nvml/inventory"), activity(at(12)), activity(at(12), 0.1, OTHER))
    feed(join, holders(at(20), held))
    assert sink.points("gpu.sm.active")[1:] == [("a", GPU, 0.5, 12.0), ("", OTHER, 0.1, 12.0)]
    assert ("a", GPU, 1, 20.0) in sink.points("gpu.allocated")


def test_a_minor_that_two_devices_claim_resolves_to_none() -> None:
    """Ambiguous join keys are no join keys."""
    sink = Sink()
    held = {"nvidia0": [pod("a")]}
    facts = [(NODE, "gpu.device.info", {"hw.id": each, "gpu.minor": "0"}, 1) for each in (GPU, OTHER)]
    join = processor(sink)
    feed(join, message("nvml", at(0), facts, stream="info"), holders(at(1), held), activity(at(5)))
    feed(join, holders(at(11), held))
    assert sink.owner_of_last() == ""


def test_mig_instances_join_by_uuid_once_the_map_is_known() -> None:
    """A page knows <parent>/gi7, the kubelet MIG-...: they meet through gpu.device.info, and take the MIG UUID."""
    sink = Sink()
    join = processor(sink)
    held = {"MIG-1": [pod("a")]}
    instance = f"{GPU}/gi7"
    reading = activity(at(5), device=instance)
    feed(join, holders(at(0), held), reading, holders(at(10), held))
    assert sink.points("gpu.sm.active") == [("", instance, 0.5, 5.0)]
    reasons = {
        series.text("gpu.attribution.reason")
        for batch in sink.batches
        for _, _, series in batch.layout.identities()
        if series.metric.name == "gpu.attribution"
    }
    assert reasons == {"mig_unmapped"}
    fact = (NODE, "gpu.device.info", {"hw.id": "MIG-1", "hw.parent": GPU, "gpu.mig.gi": "7"}, 1)
    feed(join, message("nvml", at(11), [fact], stream="info"), activity(at(12), device=instance))
    feed(join, holders(at(20), held))
    assert sink.points("gpu.sm.active")[-1] == ("a", "MIG-1", 0.5, 12.0)


def test_a_pages_own_labels_count_only_without_pod_resources_and_after_settling() -> None:
    """dcgm's labels are ignored while Pod Resources answers; alone they count once the node has settled."""
    claim = [(pod("page"), "gpu.allocated", {"hw.id": GPU, "gpu.allocation.source": "dcgm"}, 1)]
    reading = [(NODE, "gpu.sm.active", {"hw.id": GPU}, 0.5)]
    sink = Sink()
    join = processor(sink)
    for second in range(0, 90, 15):
        feed(join, message("dcgm", at(second), claim + reading, window_s=30, interval_s=15))
    owners = {point[3]: point[0] for point in sink.points("gpu.sm.active")}
    assert owners[0.0] == ""
    assert owners[75.0] == "page"
    feed(join, holders(at(80), {GPU: []}))
    feed(join, message("dcgm", at(85), claim + reading, window_s=30, interval_s=15), holders(at(90), {GPU: []}))
    assert sink.owner_of_last() == ""
    assert sink.points("gpu.allocated")[-1][:3] == ("", GPU, 0)


def test_a_kubelet_that_is_gone_leaves_unowned_and_its_return_brings_the_same_series_back() -> None:
    """Three minutes without answers: no owned series under another name, and the same ones afterwards."""
    sink = Sink()
    join = processor(sink)

    def run(begin: int, end: int, *, kubelet: bool) -> set[object]:
        mark = len(sink.batches)
        for second in range(begin, end, 10):
            if kubelet:
                feed(join, holders(at(second), {GPU: [pod("a")]}))
            else:
                feed(join, message("pod_resources", at(second), [], up=False, complete=second - begin >= 60))
            feed(join, activity(at(second + 1)))
        return {
            (resource, series)
            for batch in sink.batches[mark:]
            for resource, _, series in batch.layout.identities()
            if resource.text("k8s.pod.name") and series.metric.name != "gpu.attribution"
        }

    before = run(0, 100, kubelet=True)
    during = run(100, 280, kubelet=False)
    after = run(280, 400, kubelet=True)
    assert before == after
    assert during <= before


def test_device_scope_stays_on_the_node() -> None:
    """Power belongs to the board, not to the pod that holds it."""
    sink = Sink()
    join = processor(sink)
    reading = message("nvml", at(5), [(NODE, "hw.power", {"hw.id": GPU, "hw.type": "gpu"}, 300.0)])
    feed(join, holders(at(0), {GPU: [pod("a")]}), reading, holders(at(10), {GPU: [pod("a")]}))
    assert sink.points("hw.power") == [("", GPU, 300.0, 5.0)]


def test_the_layout_comes_back_as_the_same_object() -> None:
    """While nothing changes, a tick moves numbers only."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 50, 10):
        feed(join, holders(at(second), {GPU: [pod("a")]}), activity(at(second + 5)))
    layouts = {id(batch.layout) for batch in sink.batches if batch.stream == "nvml"}
    assert len(layouts) == 1


def test_late_facts_are_dropped_and_counted() -> None:
    """A snapshot that is older than the last one changes nothing."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(10), {GPU: [pod("a")]}), holders(at(5), {GPU: [pod("b")]}), activity(at(12)))
    feed(join, holders(at(20), {GPU: [pod("a")]}))
    assert sink.owner_of_last() == "a"
    assert join._settings.telemetry.value("gpulens_attribution_late_facts") == 1


async def test_shutdown_lets_go_of_what_waits() -> None:
    """Held readings leave without an owner; nothing is lost."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(0), {GPU: [pod("a")]}), activity(at(5)))
    await join.shutdown()
    await join.shutdown()
    assert sink.points("gpu.sm.active") == [("", GPU, 0.5, 5.0)]


def test_foreign_partial_streams_attribute_too() -> None:
    """Allocations that come in several partial messages of one moment add up, and age out."""
    sink = Sink()
    join = processor(sink)
    for second in (0, 10):
        for owner, device in ((pod("a"), GPU), (pod("b"), OTHER)):
            feed(join, holders(at(second), {device: [owner]}, complete=False, up=None, stream="otlp"))
        feed(join, activity(at(second + 1), up=None, complete=False), activity(at(second + 1), 0.1, OTHER, up=None))
    feed(join, holders(at(20), {GPU: [pod("a")]}, complete=False, up=None, stream="otlp"))
    feed(join, holders(at(20), {OTHER: [pod("b")]}, complete=False, up=None, stream="otlp"))
    assert {(point[0], point[1]) for point in sink.points("gpu.sm.active")} == {("a", GPU), ("b", OTHER)}


def test_a_clock_that_is_set_back_costs_a_minute_and_not_the_step() -> None:
    """A day in the future, then back: what was learned there is let go, and owners are found again."""
    sink = Sink()
    join = processor(sink)
    day = 86_400
    for second in range(day, day + 60, 10):
        feed(join, holders(at(second), {GPU: [pod("old")]}), activity(at(second + 5)))
    for second in range(0, 60, 10):
        feed(join, holders(at(second), {GPU: [pod("a")]}), activity(at(second + 5)))
    back = [point for point in sink.points("gpu.sm.active") if point[3] < day]
    assert [point[0] for point in back] == ["a"] * 5
    assert sink.batches[-1].latest_ns() < at(day) * 10**9
