"""The observer under a real API server of pods, through lightkube's client."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gpulens.extensions.k8s_observer import kubernetes
from gpulens.extensions.k8s_observer.known import MAX_ANNOTATION
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.pods import Container, Pod
from gpulens.pipeline.status import Status
from tests.extensions.kube_api import KubeApi, Refusal, pod_json, serving
from tests.extensions.watching import NoHost, Watching, watching


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    """A served API with two pods on the node and one elsewhere."""
    server = KubeApi()
    for name in ("a", "b"):
        server.put(pod_json(name))
    server.put(pod_json("elsewhere", nodeName="node-2"))
    async with serving(server):
        yield server


def asking(api: KubeApi) -> dict[str, object]:
    """The block of an observer that asks this server."""
    return {"source": "kubernetes", "endpoint": api.url}


async def test_it_lists_and_then_follows_what_happens(api: KubeApi) -> None:
    """Added, changed and deleted pods of this node, and no other node's; one list and one watch are all it takes."""
    async with watching(**asking(api)) as on:
        assert not on.seen.synced
        await on.knows("a", "b")
        api.put(pod_json("c", phase="Pending"))
        api.put(pod_json("other", nodeName="node-2"))
        await on.knows("a", "b", "c")
        api.put(pod_json("c"))
        await on.until(lambda: on.seen.pods["uid-c"].phase == "Running")
        api.delete("a")
        await on.knows("b", "c")
        assert (len(api.lists), len(api.watches)) == (1, 1)
        assert api.watches[0]["allowWatchBookmarks"] == "true"
        assert on.status == (Status.OK, "")


async def test_what_is_kept_of_a_pod(api: KubeApi) -> None:
    """Names, owner, phase, readiness, times, labels, annotations up to a size, and every container."""
    init = {"name": "sidecar", "containerID": "cri-o://beef", "state": {"terminated": {"exitCode": 0}}}
    owners = [
        {"kind": "Other", "name": "no", "controller": False},
        {"kind": "ReplicaSet", "name": "web-7f", "controller": True},
    ]
    notes = {"short": "x", "kubectl.kubernetes.io/last-applied-configuration": "x" * (MAX_ANNOTATION + 1)}
    api.put(
        pod_json(
            "c",
            annotations=notes,
            ownerReferences=owners,
            initContainerStatuses=[init],
            hostNetwork=True,
            deletionTimestamp="2026-01-05T10:00:00Z",
        )
    )
    async with watching(**asking(api)) as on:
        await on.knows("a", "b", "c")
        assert on.seen.pods["uid-c"] == Pod(
            uid="uid-c",
            namespace="ml",
            name="c",
            ip="10.0.0.1",
            phase="Running",
            ready=True,
            start_s=1767603600.0,
            deleting=True,
            host_network=True,
            owner_kind="ReplicaSet",
            owner_name="web-7f",
            labels={"app": "c"},
            annotations={"short": "x"},
            containers=(Container("main", "f00d", 1767603630.0, True), Container("sidecar", "beef")),
        )


async def test_a_pod_that_has_hardly_begun_says_what_it_can(api: KubeApi) -> None:
    """No status at all: nothing is made up."""
    api.put({"metadata": {"name": "c", "namespace": "ml", "uid": "uid-c"}, "spec": {"nodeName": "node-1"}})
    async with watching(**asking(api)) as on:
        await on.knows("a", "b", "c")
        assert on.seen.pods["uid-c"] == Pod("uid-c", "ml", "c")


async def test_the_same_object_comes_back_while_nothing_changes(api: KubeApi) -> None:
    """Also when an event changes what is not kept; a change elsewhere leaves each other pod's object."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        await on.hears(api.watchers, api.send_odd)
        before = on.seen
        api.put(pod_json("a", generation=7))
        api.bookmark()
        await on.hears(api.watchers, api.send_odd)
        assert on.seen is before
        api.put(pod_json("b", phase="Failed"))
        await on.until(lambda: on.seen is not before)
        assert on.seen.version == before.version + 1
        assert on.seen.pods["uid-a"] is before.pods["uid-a"]
        assert before.pods["uid-b"].phase == "Running"


async def test_a_full_node_is_listed_in_pages(api: KubeApi) -> None:
    """500 pods come as six pages, as one list."""
    names = [f"p{number}" for number in range(500)]
    for name in names:
        api.put(pod_json(name))
    async with watching(**asking(api)) as on:
        await on.knows("a", "b", *names)
        assert len(api.lists) == 6
        assert on.seen.version == 1


@pytest.mark.parametrize("as_event", [False, True])
async def test_a_version_that_is_too_old_costs_a_new_list(api: KubeApi, as_event: bool) -> None:
    """410 Gone, as the answer or as an event: what was missed meanwhile is known, what ended is gone."""
    api.gone_as_event = as_event
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        await on.hears(api.watchers, api.send_odd)
        await on.clock.advance(60)
        api.pods.pop("uid-a")
        api.pods["uid-c"] = pod_json("c")
        api.expire()
        api.end_watches()
        await on.until(lambda: on.names == {"b", "c"}, resuming=True)
        assert len(api.lists) == 2
        assert on.status == (Status.OK, "")


async def test_a_list_that_expires_between_pages_begins_anew(api: KubeApi) -> None:
    """410 on a continue token is no failure."""
    for number in range(150):
        api.put(pod_json(f"p{number}"))
    api.refuse_rest.append(Refusal(410))
    async with watching(**asking(api)) as on:
        await on.until(lambda: on.seen.synced, resuming=True)
        assert len(on.names) == 152
        assert [("continue" in query) for query in api.lists] == [False, True, False, True]
        assert on.status == (Status.OK, "")


async def test_a_list_that_fails_between_pages_is_no_list(api: KubeApi) -> None:
    """No watch goes on from the version of its first page: what stood on the others would never be known."""
    for number in range(150):
        api.put(pod_json(f"p{number}"))
    api.refuse_rest.append(Refusal(500))
    async with watching(**asking(api)) as on:
        await on.until(lambda: "refuses to list" in on.seen.problem)
        assert not on.seen.synced
        await on.until(lambda: on.seen.synced, resuming=True)
        assert len(on.names) == 152
        assert [("continue" in query) for query in api.lists] == [False, True, False, True]


@pytest.mark.parametrize("refusal", [Refusal(400, "invalid version"), Refusal(504, "Too large resource version: 13")])
async def test_a_version_that_the_server_can_not_use_costs_a_new_list(api: KubeApi, refusal: Refusal) -> None:
    """A server restored from a backup: the watch would be refused for ever from there."""
    api.refuse_watch.append(refusal)
    async with watching(**asking(api)) as on:
        await on.until(lambda: "refuses to watch" in on.seen.problem)
        await on.until(lambda: not on.seen.problem, resuming=True)
        assert len(api.lists) == 2


async def test_an_event_without_an_end_is_given_up(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not fill the memory."""
    monkeypatch.setattr(kubernetes, "MAX_EVENT", 10_000)
    async with watching(**asking(api)) as on:
        await on.hears(api.watchers, api.send_odd)
        api.send_line(b"x" * 20_000)
        await on.until(lambda: "more than 10000 bytes" in on.seen.problem)
        await on.until(lambda: not on.seen.problem, resuming=True)
        assert len(api.lists) == 2


async def test_a_broken_connection_is_taken_up_where_it_was(api: KubeApi) -> None:
    """The pods stay known and `problem` says why they may be old, until the watch goes on from its version."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        api.put(pod_json("c"))
        await on.knows("a", "b", "c")
        api.drop()
        await on.until(lambda: bool(on.seen.problem))
        assert on.names == {"a", "b", "c"}
        assert on.status[0] is Status.RECOVERABLE
        api.delete("a")
        await on.until(lambda: on.names == {"b", "c"}, resuming=True)
        assert on.seen.problem == ""
        assert on.status == (Status.OK, "")
        assert len(api.lists) == 1


async def test_a_watch_that_ends_in_order_goes_on_from_the_last_bookmark(api: KubeApi) -> None:
    """No list, no problem, no report: that is how watches are."""
    async with watching(**asking(api)) as on:
        await on.hears(api.watchers, api.send_odd)
        api.bookmark()
        version = api.version
        await on.hears(api.watchers, api.send_odd)
        await on.clock.advance(200)
        changes = on.bench.changes
        api.end_watches()
        await on.until(lambda: len(api.watches) == 2)
        assert api.watches[1]["resourceVersion"] == str(version)
        assert (len(api.lists), on.bench.changes, on.seen.problem) == (1, changes, "")


async def test_a_server_that_ends_every_watch_at_once_is_not_flooded(api: KubeApi) -> None:
    """The pauses grow: ten minutes of it are some 25 watches, not thousands."""
    api.ends_at_once = True
    async with watching(**asking(api)) as on:
        while on.clock.monotonic() < 600:
            await on.resume()
        assert 15 <= len(api.watches) <= 35
        assert len(api.lists) == 1


async def test_a_watch_that_fell_silent_is_found_out(api: KubeApi) -> None:
    """The server was asked to end it and did not: the connection is dead, and a new one goes on."""
    async with watching(**asking(api), watch_timeout="60s") as on:
        await on.knows("a", "b")
        await on.hears(api.watchers, api.send_odd)
        asked_s = int(api.watches[0]["timeoutSeconds"])
        assert 54 <= asked_s <= 66
        await on.clock.advance(asked_s + 20)
        assert on.seen.problem == ""
        await on.clock.advance(10.5)
        await on.until(lambda: "fell silent" in on.seen.problem)
        await on.until(lambda: not on.seen.problem, resuming=True)
        assert len(api.watches) == 2


@pytest.mark.parametrize(
    ("refusal", "parts"),
    [
        (Refusal(403, "pods is forbidden"), ["may not list pods", "pods is forbidden", 'verbs: ["list", "watch"]']),
        (Refusal(401, "Unauthorized"), ["does not know this agent", "token"]),
        (Refusal(500, "etcd is away"), ["refuses to list", "etcd is away"]),
    ],
)
async def test_a_refused_list_says_what_to_do(api: KubeApi, refusal: Refusal, parts: list[str]) -> None:
    """The status names the rule that is missing; when it is granted, all is well without a restart."""
    api.refuse_list.append(refusal)
    async with watching(**asking(api)) as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert all(part in on.status[1] for part in parts), on.status[1]
        assert on.seen.problem == on.status[1]
        await on.until(lambda: on.names == {"a", "b"}, resuming=True)
        assert on.status == (Status.OK, "")


async def test_a_watch_that_is_forbidden_names_the_verb(api: KubeApi) -> None:
    """The rights may have `list` and lack `watch`."""
    api.refuse_watch.append(Refusal(403, "no"))
    async with watching(**asking(api)) as on:
        await on.until(lambda: "may not watch pods" in on.seen.problem)
        assert on.names == {"a", "b"}
        await on.until(lambda: not on.seen.problem, resuming=True)
        assert len(api.lists) == 1


async def test_retry_after_is_honoured(api: KubeApi) -> None:
    """429: not before the time that the server asks for."""
    api.refuse_list.append(Refusal(429, "slow down", {"Retry-After": "20"}))
    async with watching(**asking(api)) as on:
        await on.until(lambda: "asks to wait" in on.seen.problem)
        await on.until(lambda: on.pausing)
        await on.clock.advance(19)
        assert on.pausing
        await on.clock.advance(2)
        await on.knows("a", "b")


async def test_a_list_that_does_not_come_is_given_up(api: KubeApi) -> None:
    """`timeout` is the list's deadline."""
    api.list_waits = asyncio.Event()
    async with watching(**asking(api), timeout="5s") as on:
        await on.until(lambda: bool(api.lists))
        await on.clock.advance(6)
        await on.until(lambda: "fell silent" in on.seen.problem)
        api.list_waits.set()
        await on.until(lambda: on.names == {"a", "b"}, resuming=True)


async def test_a_server_that_is_away_keeps_nothing_from_starting() -> None:
    """Its pods are known once it is there; until then the pauses grow to 30 s and no more."""
    api = KubeApi()
    api.put(pod_json("a"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody listens there yet, and nobody else can
    api.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with watching(**asking(api)) as on:
        await on.until(lambda: f"the API server {api.url} can't be reached" in on.seen.problem)
        assert on.status[0] is Status.RECOVERABLE
        assert not on.seen.synced
        pauses: list[float] = []
        for _ in range(12):
            began_s = on.clock.monotonic()
            await on.resume()
            pauses.append(on.clock.monotonic() - began_s)
        assert pauses[0] <= 1.3
        assert 20 <= max(pauses) <= 37.6
        async with serving(api, listener):
            await on.until(lambda: on.names == {"a"}, resuming=True)
            assert on.status == (Status.OK, "")


async def test_one_odd_pod_does_not_hide_the_others(api: KubeApi) -> None:
    """It is counted and skipped, in the list and in the watch."""
    api.put(pod_json("odd", labels="none"))
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        api.put(pod_json("odd2", phase=7))
        api.put(pod_json("c"))
        await on.knows("a", "b", "c")
        assert on.odd_events == 2


async def test_a_pod_that_turns_odd_is_not_known_any_more(api: KubeApi) -> None:
    """As in a list: what it was before is not what it is now. The watch goes on behind it all the same."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        api.put(pod_json("a", labels="none"))
        await on.knows("b")
        api.put(pod_json("b", labels="none"))
        api.delete("b")
        await on.knows()
        await on.until(lambda: on.odd_events == 3)
        await on.clock.advance(60)
        api.end_watches()
        await on.until(lambda: len(api.watches) == 2)
        assert api.watches[1]["resourceVersion"] == str(api.version)


@pytest.mark.parametrize("line", [b'{"type": "ADDED", "obj\n', b"nonsense\n", b'{"object": {}}\n'])
async def test_a_line_that_is_no_event_costs_a_new_list(api: KubeApi, line: bytes) -> None:
    """Going on from the same version would bring the same line."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        await on.hears(api.watchers, api.send_odd)
        api.send_line(line)
        await on.until(lambda: "can't be read" in on.seen.problem)
        api.put(pod_json("c"))
        await on.until(lambda: on.names == {"a", "b", "c"} and not on.seen.problem, resuming=True)
        assert len(api.lists) == 2


async def test_unicode_line_ends_within_a_text_end_no_line(api: KubeApi) -> None:
    """Go writes U+0085 and others as they are."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        text = "x\x85y\u2028z"
        api.put(pod_json("c", annotations={"text": text}))
        await on.knows("a", "b", "c")
        assert on.seen.pods["uid-c"].annotations == {"text": text}


async def test_a_watch_that_is_not_answered_is_given_up(api: KubeApi) -> None:
    """`timeout` is the deadline of its answer too, not of its events."""
    api.watch_waits = asyncio.Event()
    async with watching(**asking(api), timeout="5s") as on:
        await on.until(lambda: bool(api.watches))
        await on.clock.advance(5.5)
        await on.until(lambda: "fell silent" in on.seen.problem)
        api.watch_waits.set()
        await on.until(lambda: not on.seen.problem, resuming=True)


async def test_an_error_event_other_than_gone_is_told(api: KubeApi) -> None:
    """What the server says is in `problem`."""
    async with watching(**asking(api)) as on:
        await on.knows("a", "b")
        await on.hears(api.watchers, api.send_odd)
        api.send("ERROR", {"kind": "Status", "code": 500, "message": "etcd is away"})
        await on.until(lambda: "etcd is away" in on.seen.problem)


async def test_a_kubeconfig_brings_server_and_token(api: KubeApi, tmp_path: Path) -> None:
    """As kubectl reads it; a token that is refused is looked up there again."""
    kubeconfig = tmp_path / "config"
    content = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": api.url}}],
        "users": [{"name": "it", "user": {"token": "let-me-in"}}],
    }
    kubeconfig.write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    async with watching(source="kubernetes", kubeconfig=str(kubeconfig)) as on:
        await on.knows("a", "b")
        assert set(api.tokens) == {"Bearer let-me-in"}
        await on.hears(api.watchers, api.send_odd)
        kubeconfig.write_text(kubeconfig.read_text().replace("let-me-in", "renewed"))
        api.refuse_watch.append(Refusal(401, "expired"))
        api.end_watches()
        await on.until(lambda: "does not know this agent" in on.seen.problem, resuming=True)
        await on.until(lambda: not on.seen.problem, resuming=True)
        assert api.tokens[-1] == "Bearer renewed"


async def test_a_kubeconfig_that_is_not_there_is_no_failed_start(tmp_path: Path) -> None:
    """The status says which file."""
    async with watching(source="kubernetes", kubeconfig=str(tmp_path / "gone")) as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert str(tmp_path / "gone") in on.status[1]


@pytest.mark.parametrize("text", ["{}", "[]", "clusters: {", "{contexts: 1, clusters: 2}"])
async def test_a_kubeconfig_that_is_not_whole_is_no_failed_start(text: str, tmp_path: Path) -> None:
    """The status says that it can't be used."""
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(text)
    async with watching(source="kubernetes", kubeconfig=str(kubeconfig)) as on:
        await on.until(lambda: on.status[0] is Status.RECOVERABLE)
        assert "no way to the API server: its configuration can't be used" in on.status[1]


async def test_another_node_may_be_watched(api: KubeApi) -> None:
    """`node` wins over the service's node."""
    async with watching(**asking(api), node="node-2") as on:
        await on.knows("elsewhere")


async def test_a_missing_extra_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.delitem(sys.modules, "gpulens.extensions.k8s_observer.kubernetes", raising=False)
    monkeypatch.setitem(sys.modules, "lightkube.config.client_adapter", None)
    with pytest.raises(StartError, match=r"pip install '\.\[k8s\]'"):
        await Watching(source="kubernetes", endpoint="http://127.0.0.1:1").observer.start(NoHost())


async def test_a_node_without_pods_is_probably_misnamed(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    """The agent's own pod should be there; the log says which name was asked for."""
    with caplog.at_level("INFO", logger="gpulens"):
        async with watching(**asking(api), node="nobody") as on:
            await on.knows()
    assert "No pod was found on this node. Check its name." in caplog.messages


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_it_arrives_at_the_truth(api: KubeApi, seed: int) -> None:
    """Pods come, change and go while connections break, versions expire and the server refuses."""
    chance = random.Random(seed)
    faults = (
        api.drop,
        api.expire,
        api.end_watches,
        api.bookmark,
        lambda: api.send_line(b"{\n"),
        lambda: api.refuse_watch.append(Refusal(503)),
        lambda: api.refuse_list.append(Refusal(429, headers={"Retry-After": "3"})),
    )
    async with watching(**asking(api)) as on:
        for step in range(80):
            name = f"p{chance.randrange(8)}"
            if f"uid-{name}" in api.pods and chance.random() < 0.4:
                api.delete(name)
            else:
                api.put(pod_json(name, phase=chance.choice(["Pending", "Running", "Failed"])))
            if chance.random() < 0.2:
                chance.choice(faults)()
            if step % 4 == 0:
                await asyncio.sleep(0.01)  # any of these may be on its way while time passes
                await on.clock.advance(chance.choice([0.1, 1.0, 40.0]))

        def arrived() -> bool:
            truth = {uid: pod["status"] for uid, pod in api.pods.items() if pod["spec"] == pod_json("x")["spec"]}
            told = {uid: pod.phase for uid, pod in on.seen.pods.items()}
            return not on.seen.problem and told == {
                uid: status["phase"] for uid, status in truth.items() if isinstance(status, dict)
            }

        await on.until(arrived, resuming=True)
        assert on.status == (Status.OK, "")
