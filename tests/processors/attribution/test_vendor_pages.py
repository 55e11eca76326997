"""A vendor's page stands in for Pod Resources for devices that the kubelet's ids do not name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulens.pipeline.data import Batch
from gpulens.processors.attribution.join import AttributionProcessor
from tests.processors.attribution.kit import (
    BOX_A,
    BOX_B,
    GPU,
    NODE,
    NS,
    UID_A,
    UID_B,
    Known,
    Proc,
    Row,
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

SN = "SN0"
KUBELET = "0000:c1:00.0"
MAP = {"hw.id": SN, "gpu.pci.address": KUBELET}
PLACE = "gpu.allocated"


def page(
    at_s: float,
    held: Mapping[str, Sequence[str]],
    *,
    devices: Sequence[Mapping[str, str]] = ({"hw.id": SN},),
    window_s: float = 10,
    source: str = "prometheus",
    stream: str = "prometheus/amd",
    work: bool = True,
) -> Batch:
    """A scrape of a vendor's page: device -> pods on its labels, and one reading of each device."""
    rows: list[Row] = [(NODE, "gpu.device.info", dict(each), 1) for each in devices]
    if work:
        rows += [(NODE, "gpu.sm.active", {key: each[key] for key in each if key[:2] == "hw"}, 0.5) for each in devices]
    for device, owners in held.items():
        attrs = {"hw.id": device, "gpu.allocation.source": source}
        rows += [(pod(name), PLACE, attrs, 1) for name in owners]
    return message(source, at_s, rows, stream=stream, window_s=window_s)


def run(join: AttributionProcessor, until_s: float, held: Mapping[str, Sequence[str]], ids: Sequence[str]) -> None:
    """Every 10 s a snapshot of the kubelet with free devices `ids` and a page that labels `held`."""
    for second in range(0, int(until_s), 10):
        feed(join, holders(at(second), {each: [] for each in ids}), page(at(second + 1), held))


def owners_at(sink: Sink, second: float) -> set[str]:
    """The pods of a device's reading at a time."""
    return {owner for owner, _, _, when in sink.points("gpu.sm.active") if when == second}


def test_the_page_counts_for_what_the_kubelet_cannot_name() -> None:
    """Its reading goes to the labels' pod, and `gpu.allocated` and `gpu.attribution` say so too."""
    sink = Sink()
    join = processor(sink)
    run(join, 80, {SN: ["a"]}, [KUBELET])
    assert owners_at(sink, 51) == {"a"}
    assert sink.reasons()["a", SN] == ("prometheus", "")
    assert sink.reasons()["", KUBELET] == ("none", "unallocated")
    assert ("a", SN, 1, 61) in sink.points(PLACE)


def test_a_page_of_nvidias_never_stands_in() -> None:
    """What dcgm-exporter describes, Pod Resources can name once somebody maps it."""
    for source in ("dcgm", "gke"):
        sink = Sink()
        join = processor(sink)
        for second in range(0, 120, 10):
            told = page(at(second + 1), {SN: ["a"]}, source=source, stream=source)
            feed(join, holders(at(second), {KUBELET: []}), told)
        assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
        assert {point[0] for point in sink.points(PLACE)} == {""}
        assert sink.reasons()["", SN] == ("none", "unnamed")


def test_a_page_that_is_not_listed_as_a_source_never_stands_in() -> None:
    """`sources` says what may count at all."""
    sink = Sink()
    run(processor(sink, sources=["pod_resources"]), 80, {SN: ["a"]}, [KUBELET])
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}


def test_a_mig_uuid_that_nobody_maps_keeps_the_page_out() -> None:
    """The kubelet does name the instance, only nobody knows which one it is: the same for the GPU that may hold it."""
    instance = f"{GPU}/gi7"
    sink = Sink()
    join = processor(sink)
    told = [{"hw.id": GPU}, {"hw.id": instance, "hw.parent": GPU, "gpu.mig.gi": "7"}]
    for second in range(0, 80, 10):
        feed(join, holders(at(second), {"MIG-9": [pod("a")]}))
        feed(join, page(at(second + 1), {GPU: ["b"], instance: ["b"]}, devices=told))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert sink.reasons()["", instance] == ("none", "mig_unmapped")
    assert "b" not in {point[0] for point in sink.points(PLACE)}


def test_the_kubelets_word_goes_first_where_it_names_the_device_also_as_free() -> None:
    """A label that the kubelet contradicts is left, its allocation too."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), MAP))
    run(join, 80, {SN: ["a"]}, [KUBELET])
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}
    assert sink.reasons()["", SN] == ("none", "unallocated")
    assert {point[:2] for point in sink.points(PLACE)} == {("", SN)}


def test_labels_do_not_count_in_the_settle_time() -> None:
    """After the node's first sign somebody may still map the device."""
    sink = Sink()
    run(processor(sink, settle_time="30s"), 60, {SN: ["a"]}, [KUBELET])
    assert owners_at(sink, 1) == {""}
    assert owners_at(sink, 31) == {"a"}


def test_a_change_of_labels_leaves_the_period_around_it_unowned() -> None:
    """A reading over [t - 10 s, t] needs labels from before and after that agree; silence proves nothing."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 110, 10):
        pods_now = ["a"] if second <= 40 else [] if second <= 60 else ["b"]
        feed(join, holders(at(second), {KUBELET: []}), page(at(second + 1), {SN: pods_now}))
    found = {second: owners_at(sink, second) for second in range(21, 101, 10)}
    assert found[31] == found[41] == {"a"}
    assert found[51] == found[61] == found[71] == {""}
    assert found[81] == found[91] == {"b"}
    assert sink.reasons()["b", SN] == ("prometheus", "")


def test_a_page_of_a_free_device_is_no_proof_that_it_is_free() -> None:
    """Nobody on the labels is `unnamed`, not `unallocated`."""
    sink = Sink()
    run(processor(sink), 60, {}, [KUBELET])
    assert sink.reasons()["", SN] == ("none", "unnamed")


def test_two_pods_on_the_labels_share_the_device() -> None:
    """Both have their `gpu.allocated`, the reading stays with the node."""
    sink = Sink()
    run(processor(sink), 60, {SN: ["a", "b"]}, [KUBELET])
    assert owners_at(sink, 41) == {""}
    assert sink.reasons()["a", SN] == ("prometheus", "shared")
    assert {"a", "b"} <= {point[0] for point in sink.points(PLACE) if point[1] == SN}


def test_once_somebody_maps_the_device_the_kubelets_word_counts_and_no_owner_is_doubled() -> None:
    """The kubelet's pod from then on; the page's allocation goes with its next scrape."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 10):
        feed(join, holders(at(second), {KUBELET: [pod("a")]}), page(at(second + 1), {SN: ["stale"]}))
    assert owners_at(sink, 41) == {"stale"}
    feed(join, described(at(59), MAP))
    for second in range(60, 120, 10):
        feed(join, holders(at(second), {KUBELET: [pod("a")]}), page(at(second + 1), {SN: ["stale"]}))
    assert owners_at(sink, 71) == {"a"}
    assert {point[0] for point in sink.points(PLACE) if point[1] == SN and point[3] > 60} == {"a"}
    assert sink.reasons()["a", SN] == ("pod_resources", "")
    assert ("stale", SN) not in sink.reasons()


def test_when_the_map_is_gone_the_page_counts_again() -> None:
    """The kubelet can't name the device any more."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), MAP))
    run(join, 60, {SN: ["a"]}, [KUBELET])
    feed(join, described(at(60)))
    for second in range(70, 120, 10):
        feed(join, holders(at(second), {KUBELET: []}), page(at(second + 1), {SN: ["a"]}))
    assert owners_at(sink, 91) == {"a"}


def test_a_kubelet_that_begins_to_name_the_device_is_asked_for_windows_that_it_names_in_part() -> None:
    """Its first snapshot with the device says that somebody else has it now: no owner over the change."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), MAP))
    for second in range(0, 80, 10):
        held = {KUBELET: [pod("b")]} if second >= 40 else {"0000:ff:00.0": []}
        feed(join, holders(at(second), held), page(at(second + 1), {SN: ["a"] if second < 40 else ["b"]}))
    assert owners_at(sink, 21) == {"a"}
    assert owners_at(sink, 41) == {""}
    assert owners_at(sink, 61) == {"b"}


def test_a_snapshot_of_some_devices_only_is_no_proof_that_the_kubelet_cannot_name_one() -> None:
    """Of a stream without the promise to be complete the rest is not known."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 60, 10):
        part = holders(at(second), {KUBELET: []}, complete=False)
        feed(join, part, page(at(second + 1), {SN: ["a"]}))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}


def test_the_page_goes_on_while_the_kubelet_does_not_answer() -> None:
    """What it could not name before it can't name while it is away."""
    sink = Sink()
    join = processor(sink)
    run(join, 60, {SN: ["a"]}, [KUBELET])
    for second in range(60, 120, 10):
        feed(join, message("pod_resources", at(second), [], up=False), page(at(second + 1), {SN: ["a"]}))
    assert owners_at(sink, 101) == {"a"}


def test_what_the_kubelet_named_before_it_went_away_is_not_taken_over_by_the_page() -> None:
    """Until `source_timeout` its silence changes nobody's word."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), MAP))
    run(join, 60, {SN: ["a"]}, [KUBELET])
    for second in range(60, 120, 10):
        feed(join, message("pod_resources", at(second), [], up=False), page(at(second + 1), {SN: ["a"]}))
    assert {point[0] for point in sink.points("gpu.sm.active")} == {""}


def test_readings_wait_for_the_pages_next_scrape() -> None:
    """The page is read every 30 s, the kubelet asked every 10: the later label is the page's."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 150, 10):
        feed(join, holders(at(second), {KUBELET: []}))
        if second % 30 == 0:
            told = page(at(second + 1), {SN: ["a"]}, window_s=30)
            feed(join, _every(told, 30.0))
        if second == 60:
            feed(join, activity(at(65), device=SN))
    assert owners_at(sink, 65) == {"a"}


def _every(batch: Batch, seconds: float) -> Batch:
    values = list(batch.readings())
    for slot, (_, _, series) in enumerate(batch.layout.identities()):
        if series.metric.name == "gpu.source.interval":
            values[slot] = seconds
    return Batch.of(batch.layout, values, batch.latest_ns(), batch.stream)


def test_processes_of_the_pages_pod_are_no_rogues_and_stand_with_its_other_series() -> None:
    """The kubelet lists only the card that the tile is part of, for another pod: the page's word about the tile
    counts, and the pod that it names is nobody's rogue. A pod that neither of them names is one."""
    tile, box = f"{SN}/tile0", {"hw.id": SN, "gpu.pci.address": KUBELET}
    part = {"hw.id": tile, "hw.parent": SN}
    sink = Sink()
    join = processor(sink, system_namespaces=[])
    for second in range(0, 300, 10):
        known = [Known("a", UID_A, {BOX_A: "main"}), Known("b", UID_B, {BOX_B: "main"})]
        feed(join, pods(at(second), *known), holders(at(second), {KUBELET: [pod("z")]}))
        feed(join, page(at(second + 1), {tile: ["a"]}, devices=[box, part]))
        seen = [Proc(1, UID_A, BOX_A, device=tile), Proc(2, UID_B, BOX_B, device=tile)]
        feed(join, processes(at(second + 2), *seen))
    assert sink.reasons()["a", tile] == ("prometheus", "")
    assert sink.reasons()["b", tile] == ("process", "rogue")
    assert (names("a"), tile, "1") in places(sink)


def test_the_answer_survives_a_restart() -> None:
    """What a saved state says of both sources is enough."""
    sink = Sink()
    first = processor(sink)
    run(first, 60, {SN: ["a"]}, [KUBELET])
    version, saved = first.save_state()
    later = Sink()
    second = processor(later)
    assert second.load_state(version, saved)
    feed(second, activity(at(58), device=SN, source="nvml"), holders(at(60), {KUBELET: []}))
    feed(second, page(at(61), {SN: ["a"]}))
    assert owners_at(later, 58) == {"a"}
    assert later.batches[-1].latest_ns() >= at(58) * NS
