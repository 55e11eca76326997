"""Facts about pods as series."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.config.ids import ComponentID
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension, Host
from gpulens.pipeline.data import AttributeValue, Batch
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.pods import STATIC_POD_HASH, Container, Pod, PodsSeen
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.pipeline.status import Status
from gpulens.receivers.k8s_pods.config import K8sPodsConfig
from gpulens.receivers.k8s_pods.owners import top_owner
from gpulens.receivers.k8s_pods.scraper import allowed, create
from tests.receivers.page_server import Bench, Sink

Row = tuple[str, dict[str, AttributeValue], dict[str, AttributeValue], object]


@dataclass
class Observer:
    """An extension whose pods a test sets; also the host that has it."""

    seen: PodsSeen = field(default_factory=PodsSeen)
    name: str = "k8s_observer"

    def extension(self, component_id: ComponentID) -> Extension | None:
        return self if str(component_id) == self.name else None

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)

    async def start(self, host: Host) -> None:
        """Has nothing to start."""

    async def shutdown(self) -> None:
        """Has nothing to stop."""

    def pods(self) -> PodsSeen:
        return self.seen

    def has(self, *pods: Pod) -> None:
        """These are the node's pods from now on."""
        self.seen = PodsSeen({pod.uid: pod for pod in pods}, True, "", self.seen.version + 1)


class Node:
    """A started receiver that a test ticks by hand."""

    def __init__(self, **block: object) -> None:
        self.clock = VirtualClock()
        self.bench = Bench("k8s_pods", self.clock)
        self.observer = Observer()
        self.sink = Sink()
        config = K8sPodsConfig.model_validate({"initial_delay": "1h", **block})
        receiver = create(self.bench.settings, config, self.sink)
        assert isinstance(receiver, ScrapeReceiver)
        self.receiver = receiver

    async def tick(self, pass_s: float = 10.0) -> Batch:
        """The next batch."""
        if self.clock.monotonic() == 0:
            await self.receiver.start(self.observer)
        await self.clock.advance(pass_s)
        await self.receiver.tick()
        return self.sink.batches[-1]

    async def rows(self) -> list[Row]:
        """The next batch's facts about pods: (metric, the pod's resource, attributes, value)."""
        return facts(await self.tick())


def facts(batch: Batch) -> list[Row]:
    """The series of a batch that are about pods."""
    shared = ("k8s.node.name", "service.name", "service.instance.id")
    return [
        (
            series.metric.name,
            {key: value for key, value in resource.map.items() if key not in shared},
            series.map,
            value,
        )
        for (resource, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
        if series.metric.name.startswith("k8s.")
    ]


def up(batch: Batch) -> object:
    """What a batch says of its source."""
    return next(
        value
        for (_, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
        if series.metric.name == "gpu.source.up"
    )


POD = Pod("uid-a", "ml", "a", "10.0.0.1", "Running")
ON_POD = {"k8s.namespace.name": "ml", "k8s.pod.name": "a", "k8s.pod.uid": "uid-a"}


async def test_everything_that_is_told_of_a_pod() -> None:
    """Facts on the pod's resource, starts on the containers', allow-listed labels and annotations only."""
    node = Node(labels=["team", "app.kubernetes.io/*"], annotations=["gpulens.io/*"])
    node.observer.has(
        replace(
            POD,
            ready=True,
            start_s=1767603600.5,
            owner_kind="ReplicaSet",
            owner_name="web-7f9c",
            labels={"team": "x", "app.kubernetes.io/name": "web", "secret": "s", "pod-template-hash": "7f9c"},
            annotations={"gpulens.io/idle-timeout": "1h", "other": "o", STATIC_POD_HASH: "ab" * 16},
            containers=(Container("main", "f00d", 1767603630.0, True), Container("waits", "")),
        )
    )
    info = {
        "k8s.pod.start_time": "2026-01-05T09:00:00Z",
        "gpu.owner.kind": "Deployment",
        "gpu.owner.name": "web",
        "k8s.pod.label.team": "x",
        "k8s.pod.label.app.kubernetes.io/name": "web",
        "k8s.pod.annotation.gpulens.io/idle-timeout": "1h",
        f"k8s.pod.annotation.{STATIC_POD_HASH}": "ab" * 16,
    }
    assert await node.rows() == [
        ("k8s.pod.info", ON_POD, info, 1),
        ("k8s.pod.phase", ON_POD, {"k8s.pod.phase": "Running"}, 1),
        ("k8s.pod.ready", ON_POD, {}, 1),
        (
            "k8s.container.start_time",
            {**ON_POD, "k8s.container.name": "main"},
            {"container.id": "f00d"},
            1767603630.0,
        ),
    ]
    (block,) = {block.scope.name for block in node.sink.batches[-1].layout.blocks}
    assert block == "gpulens/k8s_pods"
    await node.receiver.shutdown()


async def test_what_is_not_known_is_absent() -> None:
    """No phase, no readiness, no start, no owner: no series and no attribute says otherwise."""
    node = Node()
    node.observer.has(Pod("uid-a", "ml", "a", labels={"team": "x"}))
    assert await node.rows() == [("k8s.pod.info", ON_POD, {}, 1)]
    await node.receiver.shutdown()


async def test_a_phase_that_was_left_is_zero_for_one_batch() -> None:
    """The current phase is 1 throughout; readiness follows."""
    node = Node()
    phases: list[dict[object, object]] = []
    for phase in ("Pending", "Pending", "Running", "Running", "Failed", "Failed"):
        node.observer.has(replace(POD, phase=phase))
        rows = await node.rows()
        phases.append({row[2]["k8s.pod.phase"]: row[3] for row in rows if row[0] == "k8s.pod.phase"})
    assert phases == [
        {"Pending": 1},
        {"Pending": 1},
        {"Running": 1, "Pending": 0},
        {"Running": 1},
        {"Failed": 1, "Running": 0},
        {"Failed": 1},
    ]
    await node.receiver.shutdown()


async def test_the_zero_goes_though_nothing_else_happens() -> None:
    """The observer's object stays the same after the change."""
    node = Node()
    node.observer.has(replace(POD, phase="Pending"))
    await node.tick()
    node.observer.has(POD)
    assert len(await node.rows()) == 3
    assert len(await node.rows()) == 2
    await node.receiver.shutdown()


async def test_blocks_and_layout_stay_while_pods_do() -> None:
    """The layout is the same object; when one pod changes, the others keep their blocks."""
    node = Node()
    other = replace(POD, uid="uid-b", name="b")
    node.observer.has(POD, other)
    first = await node.tick()
    assert (await node.tick()).layout is first.layout
    node.observer.has(POD, other)
    assert (await node.tick()).layout is first.layout
    node.observer.has(POD, replace(other, ready=True))
    changed = await node.tick()
    assert changed.layout is not first.layout
    assert changed.layout.blocks[1] is first.layout.blocks[1]
    assert changed.complete
    await node.receiver.shutdown()


async def test_a_pod_that_is_gone_is_no_longer_told() -> None:
    """A complete batch without it, also when it was the last."""
    node = Node()
    node.observer.has(POD)
    await node.tick()
    node.observer.has()
    batch = await node.tick()
    assert (facts(batch), batch.complete, up(batch)) == ([], True, 1)
    await node.receiver.shutdown()


async def test_two_pods_of_one_name_are_two() -> None:
    """A StatefulSet's pod and the one that it replaced, by their UIDs."""
    node = Node()
    node.observer.has(replace(POD, deleting=True), replace(POD, uid="uid-b"))
    assert [row[1]["k8s.pod.uid"] for row in await node.rows() if row[0] == "k8s.pod.info"] == ["uid-a", "uid-b"]
    await node.receiver.shutdown()


async def test_a_watch_that_does_not_work_is_a_failed_scrape() -> None:
    """Before the first list, and while what is known may be old; two intervals later it is taken back."""
    node = Node()
    batch = await node.tick()
    assert (up(batch), facts(batch)) == (0, [])
    assert "not known yet" in node.bench.status[1]
    node.observer.has(POD)
    assert up(await node.tick()) == 1
    assert node.bench.status == (Status.OK, "")
    node.observer.seen = replace(node.observer.seen, problem="the watch is broken")
    batch = await node.tick()
    assert (up(batch), batch.complete) == (0, False)
    assert "the watch is broken" in node.bench.status[1]
    batch = await node.tick()
    assert (up(batch), batch.complete) == (0, True)
    node.observer.seen = replace(node.observer.seen, problem="")
    assert up(await node.tick()) == 1
    await node.receiver.shutdown()


async def test_the_observer_is_the_one_that_is_named() -> None:
    """Another name than the default; none of that name is a StartError."""
    node = Node(observer="k8s_observer/mine")
    with pytest.raises(StartError, match="k8s_observer/mine"):
        await node.receiver.start(node.observer)
    node.observer.name = "k8s_observer/mine"
    node.observer.has(POD)
    assert up(await node.tick()) == 1
    await node.receiver.shutdown()


@pytest.mark.parametrize(
    ("kind", "name", "labels", "top"),
    [
        ("ReplicaSet", "web-7f9c", {"pod-template-hash": "7f9c"}, ("Deployment", "web")),
        ("ReplicaSet", "a-b-7f9c", {"rollouts-pod-template-hash": "7f9c"}, ("Rollout", "a-b")),
        ("ReplicaSet", "web-7f9c", {"pod-template-hash": "9999"}, ("ReplicaSet", "web-7f9c")),
        ("ReplicaSet", "web-7f9c", {}, ("ReplicaSet", "web-7f9c")),
        ("ReplicaSet", "-7f9c", {"pod-template-hash": "7f9c"}, ("ReplicaSet", "-7f9c")),
        ("ReplicaSet", "web-", {"pod-template-hash": ""}, ("ReplicaSet", "web-")),
        ("Job", "nightly-29391840", {}, ("Job", "nightly-29391840")),
        ("Job", "x-w-0", {"jobset.sigs.k8s.io/jobset-name": "x"}, ("JobSet", "x")),
        ("StatefulSet", "x-0", {"leaderworkerset.sigs.k8s.io/name": "x"}, ("LeaderWorkerSet", "x")),
        ("StatefulSet", "x", {"jobset.sigs.k8s.io/jobset-name": "y"}, ("StatefulSet", "x")),
        ("DaemonSet", "agent", {"pod-template-hash": "gent"}, ("DaemonSet", "agent")),
        ("Node", "node-1", {}, ("Node", "node-1")),
        ("", "", {}, ("", "")),
    ],
)
def test_the_top_owner_is_never_guessed(kind: str, name: str, labels: dict[str, str], top: tuple[str, str]) -> None:
    """Only a label that the upper controller sets says that there is one."""
    assert top_owner(kind, name, labels) == top


@given(st.lists(st.text(alphabet="ab.*/", max_size=4), max_size=3), st.text(alphabet="ab./", max_size=5))
def test_a_star_stands_for_any_text(patterns: list[str], key: str) -> None:
    """Compared with a matcher that tries every way."""

    def matches(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(matches(pattern[1:], text[begin:]) for begin in range(len(text) + 1))
        return text[:1] == pattern[0] and matches(pattern[1:], text[1:])

    assert allowed(patterns)(key) == any(matches(pattern, key) for pattern in patterns)
