"""Series of processes find their pod by UID and container id, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.prometheus.config import PrometheusConfig
from gpulens.exporters.prometheus.server import PrometheusExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Resource
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.otlp import Decoder, record_request
from gpulens.pipeline.telemetry import Telemetry
from tests.processors.attribution.kit import (
    BOX_A,
    BOX_B,
    BOX_C,
    BUSY,
    GPU,
    HASH,
    MEMORY,
    NS,
    OTHER,
    T0,
    UID_A,
    UID_B,
    A,
    B,
    Known,
    Proc,
    Sink,
    activity,
    at,
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

# --- names


def test_a_process_stands_on_its_pods_resource_and_its_ids_go() -> None:
    """Once the names are known, the series is on the same resource as the pod's other series of this device."""
    sink = Sink()
    join = processor(sink)
    feed(join, holders(at(0), {GPU: [pod("a")]}), pods(at(1), A))
    feed(join, activity(at(2)), processes(at(2), Proc(7, UID_A, BOX_A)), holders(at(10), {GPU: [pod("a")]}))
    assert places(sink) == places(sink, BUSY) == [(names("a"), GPU, "7")]
    owned = {
        resource
        for batch in sink.batches
        for resource, _, series in batch.layout.identities()
        if series.metric.name in {MEMORY, BUSY, "gpu.sm.active", "gpu.allocated"}
    }
    assert owned == {pod("a")}


@pytest.mark.parametrize(
    ("process", "known"),
    [
        (Proc(7, UID_A, BOX_A), [A]),
        (Proc(7, "", BOX_A), [A]),
        (Proc(7, UID_A, f"containerd://{BOX_A}"), [A]),
        (Proc(7, HASH, BOX_A), [Known("a", UID_A, {BOX_A: "main"}, config_hash=HASH)]),
        (Proc(7, UID_A, BOX_A), [A, B]),
    ],
)
def test_pod_and_container_are_found_by_what_a_cgroup_tells(process: Proc, known: Sequence[Known]) -> None:
    """UID and container id, the container id alone, a static pod's config hash in place of the UID."""
    sink = Sink()
    feed(processor(sink), pods(at(0), *known), processes(at(1), process))
    assert places(sink) == [(names("a"), GPU, "7")]


@pytest.mark.parametrize(
    ("process", "known"),
    [
        (Proc(7, UID_A, BOX_A), []),
        (Proc(7, UID_A, BOX_A), [B]),
        (Proc(7, UID_A, BOX_B), [A, B]),
        (Proc(7, "", BOX_A[:12]), [A]),
        (Proc(7, "", BOX_A), [Known("a", UID_A, {BOX_A[:12]: "main"})]),
        (Proc(7, UID_A[:8], ""), [A]),
        (Proc(7, HASH, BOX_A), [A]),
        (Proc(7, UID_B, ""), [Known("a", UID_A, config_hash=UID_B)]),
        (Proc(7, HASH, ""), [Known("a", UID_A, config_hash=HASH), Known("b", UID_B, config_hash=HASH)]),
    ],
)
def test_what_is_not_known_for_sure_keeps_its_ids(process: Proc, known: Sequence[Known]) -> None:
    """No pod, another pod's container, a part of an id, an annotation that is no hash, two that answer: no guess."""
    sink = Sink()
    feed(processor(sink), pods(at(0), *known), processes(at(1), process))
    came = {"k8s.pod.uid": process.uid, "container.id": process.container}
    assert places(sink) == [({key: value for key, value in came.items() if value}, GPU, "7")]


def test_two_streams_that_name_one_uid_differently_name_nobody() -> None:
    """A UID that two pods claim is no key; a stream that lacks the config hash does not contradict one that has it."""
    sink = Sink()
    join = processor(sink)
    static = Known("a", UID_A, {BOX_A: "main"}, config_hash=HASH)
    feed(join, pods(at(0), static), pods(at(0), A, stream="otlp", up=None), processes(at(1), Proc(7, HASH)))
    assert places(sink) == [(names("a", ""), GPU, "7")]
    feed(join, pods(at(2), Known("z", UID_A), stream="otlp", up=None), processes(at(3), Proc(7, HASH)))
    assert places(sink) == [({"k8s.pod.uid": HASH}, GPU, "7")]


def test_a_process_of_no_pod_stays_on_the_nodes_resource() -> None:
    """A daemon of the host is nobody's."""
    sink = Sink()
    feed(processor(sink), holders(at(0), {GPU: [pod("a")]}), pods(at(0), A), processes(at(1), Proc(7)))
    assert places(sink) == [({}, GPU, "7")]


def test_the_owner_is_written_as_the_allocation_source_writes_it() -> None:
    """One pod is one resource, whatever the source tells of it; another container or another UID is another owner."""
    full = Resource({**pod("a").map, "k8s.pod.uid": UID_A})
    other = Resource({**pod("a").map, "k8s.pod.uid": UID_B})
    side = pod("a", container="side")
    for owner, process, expected in (
        (full, Proc(7, UID_A, BOX_A), {**names("a"), "k8s.pod.uid": UID_A}),
        (other, Proc(7, UID_A, BOX_A), names("a")),
        (side, Proc(7, UID_A, BOX_A), names("a")),
        (side, Proc(7, UID_A, ""), names("a", "side")),
        (pod("b"), Proc(7, UID_A, BOX_A), names("a")),
    ):
        sink = Sink()
        feed(processor(sink), holders(at(0), {GPU: [owner]}), pods(at(0), A), processes(at(1), process))
        assert places(sink) == [(expected, GPU, "7")]
    sink = Sink()
    both = {GPU: [pod("a"), side]}
    feed(processor(sink), holders(at(0), both), pods(at(0), A), processes(at(1), Proc(7, UID_A)))
    assert places(sink) == [(names("a", ""), GPU, "7")]


def test_an_unknown_container_is_none_of_those_that_are_known() -> None:
    """A sidecar that holds a context before anybody told its id is not taken for the container that was given the
    device; one that may be it is."""
    for known, expected in ((A, ""), (Known("a", UID_A), "main"), (Known("a", UID_A, {BOX_B: "side"}), "main")):
        sink = Sink()
        join = processor(sink)
        feed(join, holders(at(0), {GPU: [pod("a")]}), pods(at(0), known), processes(at(1), Proc(8, UID_A, BOX_C)))
        assert places(sink) == [(names("a", expected), GPU, "8")]


def test_processes_never_fall_together() -> None:
    """One pid on two devices, of two pods, in two containers of one pod, on two nodes: as many series as there were."""
    second = Resource({"k8s.node.name": "node-2"})
    nameless = Known("a", UID_A)
    seen = [
        Proc(7, UID_A, BOX_A),
        Proc(7, UID_A, BOX_A, device=OTHER),
        Proc(7, UID_B, BOX_B),
        Proc(7, UID_A, BOX_C),
        Proc(8, UID_A, BOX_C),
        Proc(7),
    ]
    sink = Sink()
    join = processor(sink)
    feed(join, pods(at(0), nameless, B), pods(at(0), A, node=second, stream="k8s_pods/2"))
    feed(join, processes(at(1), *seen), processes(at(1), Proc(7, UID_A, BOX_A), node=second, stream="nvml/2"))
    for name in (MEMORY, BUSY):
        everything = [
            (resource, series)
            for batch in sink.batches
            for resource, _, series in batch.layout.identities()
            if series.metric.name == name
        ]
        assert len(everything) == len(set(everything)) == len(seen) + 1
    assert not join._settings.telemetry.value("gpulens_attribution_duplicates")


def test_pods_belong_to_their_node() -> None:
    """The same UID on another node (a copied recording, a clone) names nothing here."""
    second = Resource({"k8s.node.name": "node-2"})
    sink = Sink()
    join = processor(sink)
    feed(join, pods(at(0), A, node=second), processes(at(1), Proc(7, UID_A, BOX_A)))
    assert places(sink) == [({"k8s.pod.uid": UID_A, "container.id": BOX_A}, GPU, "7")]


# --- how facts of pods come and go


def test_a_complete_word_replaces_and_a_partial_one_adds() -> None:
    """What a complete batch leaves out is unknown at once; what a partial one leaves out stays."""
    sink = Sink()
    join = processor(sink)
    seen = [Proc(7, UID_A, BOX_A), Proc(8, UID_B, BOX_B)]
    feed(join, pods(at(0), A), pods(at(1), B, complete=False), processes(at(2), *seen))
    assert [place[0] for place in places(sink)] == [names("a"), names("b")]
    feed(join, pods(at(10), B), processes(at(11), *seen))
    assert [place[0] for place in places(sink)] == [{"k8s.pod.uid": UID_A, "container.id": BOX_A}, names("b")]
    feed(join, message("x", at(20), [], up=None, stream="k8s_pods"), processes(at(21), *seen))
    assert all("k8s.pod.name" not in place[0] for place in places(sink))


def test_an_observer_that_is_away_renames_nothing() -> None:
    """An API server that is away for an hour takes no name back: a UID names one pod for ever."""
    sink = Sink()
    join = processor(sink)
    feed(join, pods(at(0), A))
    for second in range(15, 3600, 300):
        feed(join, pods(at(second - 1), up=False), processes(at(second), Proc(7, UID_A, BOX_A)))
    assert {tuple(place[0].items()) for place in places(sink, newest=False)} == {tuple(sorted(names("a").items()))}
    feed(join, pods(at(3601), B), processes(at(3602), Proc(7, UID_A, BOX_A)))
    assert "k8s.pod.name" not in places(sink)[0][0]


def test_a_kubelet_that_is_away_renames_no_process() -> None:
    """A sandboxed process tells its pod and no container: the one that Pod Resources names stays on it, also when that
    word was taken back."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 400, 10):
        away = 100 <= second < 280
        word = message("pod_resources", at(second + 1), [], up=False) if away else None
        feed(join, pods(at(second), A), word or holders(at(second + 1), {GPU: [pod("a")]}))
        feed(join, processes(at(second + 2), Proc(7, UID_A)))
    assert {tuple(place[0].items()) for place in places(sink, newest=False)} == {tuple(sorted(names("a").items()))}


def test_names_that_come_later_take_the_ids_off() -> None:
    """A pod that was not known yet gets its names at the next reading, and its container's when that is known."""
    sink = Sink()
    join = processor(sink)
    process = Proc(7, UID_A, BOX_A)
    feed(join, processes(at(0), process), pods(at(1), Known("a", UID_A)), processes(at(15), process))
    assert places(sink) == [(names("a", ""), GPU, "7")]
    feed(join, pods(at(16), A), processes(at(30), process))
    assert places(sink) == [(names("a"), GPU, "7")]


def test_the_facts_of_pods_are_bounded() -> None:
    """A stream that never says what is gone does not grow without end; the newest pods stay."""
    sink = Sink()
    join = processor(sink)
    for number in range(0, 6000, 200):
        known = [Known(f"p{each}", f"uid-{each}", {f"box-{each}": "main"}) for each in range(number, number + 200)]
        feed(join, pods(at(number / 100), *known, complete=False, up=None))
    feed(join, processes(at(70), Proc(1, "uid-5999", "box-5999"), Proc(2, "uid-0", "box-0")))
    assert [place[0].get("k8s.pod.name") for place in places(sink)] == ["p5999", None]
    (node,) = [each for each in join._nodes.all() if each.name]
    assert len(node.pods.said["k8s_pods"].pods) == 2048


# --- shared devices


def test_a_time_sliced_gpu_is_split_by_processes_and_valued_once() -> None:
    """Two pods on one GPU, one working: each has its memory and its activity, the device's value stands once, and
    the Prometheus page has a series of its own for each."""
    sink = Sink()
    join = processor(sink)
    both = {GPU: [pod("a"), pod("b")]}
    feed(join, pods(at(0), A, B), holders(at(0), both))
    feed(join, activity(at(5), 0.9))
    seen = [Proc(7, UID_A, BOX_A, memory=9000, busy=0.9), Proc(8, UID_B, BOX_B, memory=448, busy=0.0)]
    feed(join, processes(at(5), *seen), holders(at(10), both))
    assert sink.points("gpu.sm.active") == [("", GPU, 0.9, 5.0)]
    assert [point[:3] for point in sink.points(MEMORY)] == [("a", GPU, 9000), ("b", GPU, 448)]
    assert [point[:3] for point in sink.points(BUSY)] == [("a", GPU, 0.9), ("b", GPU, 0.0)]
    lines = [line for line in _page(sink.batches).splitlines() if not line.startswith("#")]
    heads = [line.rpartition(" ")[0] for line in lines]
    assert len(heads) == len(set(heads))
    for name, count in (("gpu_process_memory_usage_bytes", 2), ("gpu_process_utilization_ratio", 2)):
        shown = [head for head in heads if head.startswith(name + "{")]
        assert len(shown) == count
        assert {'pod="a"' in head for head in shown} == {True, False}
        assert not any(UID_A in head or BOX_A in head for head in shown)
    assert len([head for head in heads if head.startswith("gpu_sm_active_ratio{")]) == 1


def test_two_containers_of_one_pod_are_two_series_on_a_page() -> None:
    """Also where only their ids are known."""
    sink = Sink()
    join = processor(sink)
    feed(join, pods(at(0), Known("a", UID_A, {BOX_A: "main", BOX_B: "side"})))
    feed(join, processes(at(1), Proc(7, UID_A, BOX_A), Proc(8, UID_A, BOX_B), Proc(9, UID_B, BOX_C), Proc(10)))
    shown = [line for line in _page(sink.batches).splitlines() if line.startswith("gpu_process_memory_usage_bytes{")]
    assert len(shown) == len({line.rpartition(" ")[0] for line in shown}) == 4


def _page(batches: Sequence[Batch]) -> str:
    """What the prometheus exporter shows of it."""
    settings = Settings(
        id=ComponentID("prometheus"),
        kind=Kind.EXPORTERS,
        node="node-1",
        clock=VirtualClock((T0 + 10) * NS),
        telemetry=Telemetry(),
        log=ComponentLog(),
        report=lambda *_: True,
    )
    exporter = PrometheusExporter(settings, PrometheusConfig(endpoint="127.0.0.1:0"))
    for batch in batches:
        exporter.consume(batch, Ack())
    return exporter.page(False).decode()


# --- steadiness


def test_layouts_stay_while_the_processes_do_and_churn_of_pids_costs_no_other_stream() -> None:
    """Equal processes come back on one layout; a thousand sets of pids leave the caches small and the others' plans
    where they were."""
    sink = Sink()
    join = processor(sink)
    held = {GPU: [pod("a")]}
    for second in range(0, 90, 15):
        feed(join, pods(at(second), A), holders(at(second), held), activity(at(second + 1)))
        feed(join, processes(at(second + 2), Proc(7, UID_A, BOX_A, memory=second)))
    settled = [batch for batch in sink.batches if batch.latest_ns() >= at(30) * NS]
    for stream in ("nvml/processes", "nvml", "k8s_pods", "attribution"):
        assert len({id(batch.layout) for batch in settled if batch.stream == stream}) == 1
    kept = {id(batch.layout) for batch in settled if batch.stream == "nvml"}
    misses = 0
    for second in range(90, 15_000, 15):
        feed(join, pods(at(second), A), holders(at(second), held), activity(at(second + 1)))
        before = join._plans.entries.misses
        feed(join, processes(at(second + 2), *(Proc(second + each, UID_A, BOX_A) for each in range(20))))
        misses += join._plans.entries.misses - before
        assert {id(batch.layout) for batch in sink.batches if batch.stream == "nvml"} == kept
        sink.batches = sink.batches[-1:]
    assert misses <= 1000
    for cache in (join._plans.entries, join._mappings.entries):
        assert len(cache) < 60


def test_a_recording_gives_the_same_bytes() -> None:
    """Straight from the receivers or read back from a recording: the same processes stand at the same place."""
    batches = []
    for second in range(0, 120, 10):
        known = [A, B] if second % 40 else [A]
        seen = [Proc(7, UID_A, BOX_A), Proc(8, UID_B, BOX_B), Proc(second, UID_B, device=OTHER), Proc(1)]
        held = {GPU: [pod("a")], OTHER: [pod("a")]}
        batches += [pods(at(second), *known), processes(at(second + 1), *seen), holders(at(second + 2), held)]
        batches.append(activity(at(second + 3), second / 100))
    decoder = Decoder()
    recorded = [each for batch in batches for each in decoder.decode(record_request(batch), "recording")]
    results = []
    for run in (batches, batches, recorded):
        sink = Sink()
        feed(processor(sink), *run)
        results.append([record_request(batch).SerializeToString() for batch in sink.batches])
    assert results[0] == results[1] == results[2]


# --- whatever happens

_UIDS = (UID_A, UID_B, HASH, "")
_BOXES = (BOX_A, BOX_B, BOX_C, BOX_A[:12], "")
_procs = st.builds(
    Proc,
    pid=st.integers(1, 3),
    uid=st.sampled_from(_UIDS),
    container=st.sampled_from(_BOXES),
    device=st.sampled_from((GPU, OTHER)),
)
_known = st.builds(
    Known,
    name=st.sampled_from(("a", "b", "c")),
    uid=st.sampled_from(_UIDS[:2]),
    containers=st.dictionaries(st.sampled_from(_BOXES[:4]), st.sampled_from(("main", "side")), max_size=2),
    config_hash=st.sampled_from((HASH, "", "no hash", UID_B)),
)
_held = st.dictionaries(
    st.sampled_from((GPU, OTHER)),
    st.lists(st.builds(pod, st.sampled_from(("a", "b", "c")), container=st.sampled_from(("main", "side"))), max_size=2),
)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.lists(_known, max_size=3), _held, st.lists(_procs, max_size=5)), max_size=12))
def test_no_process_ever_lands_on_a_pod_that_is_not_its_own(steps: list[list[Known] | list[Proc] | object]) -> None:
    """Whatever pods, allocations and processes there are: a named series has the names of a pod with the UID (or
    hash) that the process told, and of a container with its id wherever a container of that id is known."""
    sink = Sink()
    join = processor(sink)
    known: list[Known] = []
    for number, step in enumerate(steps):
        moment = at(10 * number)
        if isinstance(step, dict):
            feed(join, holders(moment, step))
        elif isinstance(step, list) and step and isinstance(step[0], Known):
            known = [each for each in step if isinstance(each, Known)]
            feed(join, pods(moment, *known))
        elif isinstance(step, list):
            seen = [each for each in step if isinstance(each, Proc)]
            unique = {(each.pid, each.uid, each.container, each.device): each for each in seen}
            mark = len(sink.batches)
            feed(join, processes(moment, *unique.values()))
            found = [
                (resource, series)
                for batch in sink.batches[mark:]
                for resource, _, series in batch.layout.identities()
                if series.metric.name == MEMORY
            ]
            assert len(found) == len(set(found)) == len(unique)
            for resource, series in found:
                if resource.text("k8s.pod.name"):
                    assert any(_fits(resource, str(series.map["process.pid"]), each, known) for each in unique.values())


def _fits(resource: Resource, pid: str, process: Proc, known: Sequence[Known]) -> bool:
    """The process may stand on this resource."""
    if str(process.pid) != pid:
        return False
    for each in known:
        if each.name != resource.text("k8s.pod.name"):
            continue
        by_uid = process.uid in (each.uid, each.config_hash) if process.uid else process.container in each.containers
        shown = resource.text("k8s.container.name")
        by_box = not shown or each.containers.get(process.container, shown) == shown
        elsewhere = any(process.container in other.containers for other in known if other.uid != each.uid)
        if by_uid and by_box and not (elsewhere and process.container not in each.containers):
            return True
    return False
