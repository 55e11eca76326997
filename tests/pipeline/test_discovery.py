"""Pages of pods on this node: selectors, resolving, and pods that are replaced while their page is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpulens.config.ids import ComponentID
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension, Host
from gpulens.pipeline.discovery import (
    DiscoveredPages,
    DiscoveringPageConfig,
    Operator,
    Requirement,
    Selector,
    Target,
    page_source,
    pod_url,
)
from gpulens.pipeline.errors import ScrapeError, StartError
from gpulens.pipeline.pods import Pod, PodsSeen
from gpulens.pipeline.scrape_client import HttpPages
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.pipeline.status import Status
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import create as create_dcgm
from gpulens.receivers.gke.config import GkeConfig
from gpulens.receivers.gke.scraper import create as create_gke
from tests.pipeline.pod_pages import PATIENCE_S, free_port, pages
from tests.receivers.page_server import Bench, Sink

# --- selectors

KEYS = st.sampled_from(["app", "k8s-app", "app.kubernetes.io/name", "in", "notin", "a.b_c-d", "x/y"])
VALUES = st.sampled_from(["", "a", "v1.2", "A_b-C", "in", "0"])
REQUIREMENTS = st.one_of(
    st.builds(Requirement, KEYS, st.sampled_from([Operator.EXISTS, Operator.MISSING])),
    st.builds(
        Requirement,
        KEYS,
        st.sampled_from([Operator.IN, Operator.NOT_IN]),
        st.frozensets(VALUES, min_size=1, max_size=3),
    ),
)
SELECTORS = st.builds(Selector, st.lists(REQUIREMENTS, max_size=5).map(tuple))


@given(SELECTORS)
def test_a_selector_is_read_back_as_it_is_written(selector: Selector) -> None:
    """Every form of requirement."""
    assert Selector.parse(str(selector)) == selector


@given(SELECTORS, st.dictionaries(KEYS, VALUES))
def test_a_selector_matches_when_each_requirement_holds(selector: Selector, labels: dict[str, str]) -> None:
    """Compared with the rules as they are documented."""

    def holds(requirement: Requirement) -> bool:
        there = requirement.key in labels
        if requirement.operator is Operator.EXISTS:
            return there
        if requirement.operator is Operator.MISSING:
            return not there
        among = there and labels[requirement.key] in requirement.values
        return among if requirement.operator is Operator.IN else not among

    assert selector.matches(labels) == all(map(holds, selector.requirements))


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_a_value_error(text: str) -> None:
    """Nothing else is raised, and what is read is written so that it reads the same."""
    try:
        selector = Selector.parse(text)
    except ValueError:
        return
    assert Selector.parse(str(selector)) == selector


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("", {"any": "thing"}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a = b , c", {"a": "b", "c": ""}, True),
        ("a!=b", {}, True),
        ("a!=b", {"a": "b"}, False),
        ("a in (x, y),!f", {"a": "y"}, True),
        ("a in (x,y),!f", {"a": "y", "f": ""}, False),
        ("a notin (x,y)", {}, True),
        ("a notin (x,y)", {"a": "x"}, False),
        ("app.kubernetes.io/name=dcgm-exporter", {"app.kubernetes.io/name": "dcgm-exporter"}, True),
        ("a=", {"a": ""}, True),
        ("a=", {}, False),
    ],
)
def test_selectors_as_kubectl_takes_them(text: str, labels: Mapping[str, str], matches: bool) -> None:
    """Equality and sets, with and without blanks."""
    assert Selector.parse(text).matches(labels) is matches


@pytest.mark.parametrize(
    "text", [",", "a=b,", "=b", "a b", "a in x", "a in (x", "a=b=c", "-a", "a=-b", "a > 1", "a/b/c"]
)
def test_a_wrong_selector_names_the_part(text: str) -> None:
    """The message quotes it and shows the forms."""
    with pytest.raises(ValueError, match="label selector"):
        Selector.parse(text)


# --- configuration


class AnyConfig(DiscoveringPageConfig):
    """A block without built-in targets."""


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, "either 'endpoint'"),
        ({"endpoint": ""}, "either 'endpoint'"),
        ({"discovery": {"enabled": False}}, "either 'endpoint'"),
        ({"endpoint": "http://h:1", "discovery": {}}, "exclude each other"),
        ({"discovery": {"selector": "a b"}}, "label selector"),
        ({"discovery": {"port": 0}}, "greater than or equal to 1"),
        ({"discovery": {"path": "metrics"}}, 'must begin with "/"'),
        ({"discovery": {"scheme": "ftp"}}, "'http' or 'https'"),
        ({"discovery": {"observer": "9x"}}, "invalid character"),
    ],
)
def test_a_block_has_exactly_one_source(block: dict[str, object], message: str) -> None:
    """Each mistake is told in words."""
    with pytest.raises(ValidationError, match=message):
        GkeConfig.model_validate(block)


@pytest.mark.parametrize("discovery", [{}, {"selector": "a=b"}, {"port": 80}])
def test_without_known_targets_selector_and_port_are_asked_for(discovery: dict[str, object]) -> None:
    """A page of any exporter: nothing can be guessed."""
    with pytest.raises(ValidationError, match="needs a selector and a port"):
        AnyConfig.model_validate({"discovery": discovery})
    whole = AnyConfig.model_validate({"discovery": {"selector": "a=b", "port": 80, "namespaces": "x,y"}})
    assert whole.targets() == (Target("a=b", 80, ("x", "y")),)


def test_what_the_user_writes_replaces_what_is_known() -> None:
    """Another selector means other pods, wherever they are; another port or namespace the same pods there."""
    managed, operator, chart = DcgmConfig.model_validate({"discovery": {}}).targets()
    assert managed == Target("app.kubernetes.io/name=gke-managed-dcgm-exporter", 9400, ("gke-managed-system",))
    assert (operator.namespaces, chart.namespaces) == ((), ())
    assert GkeConfig.model_validate({"discovery": None}).targets() == (
        Target("k8s-app=nvidia-gpu-device-plugin", 2112, ("kube-system",)),
    )

    def targets(**discovery: object) -> tuple[Target, ...]:
        return GkeConfig.model_validate({"discovery": discovery}).targets()

    assert targets(selector="a=b") == (Target("a=b", 2112),)
    assert targets(port=99) == (Target("k8s-app=nvidia-gpu-device-plugin", 99, ("kube-system",)),)
    assert targets(namespaces=["x"]) == (Target("k8s-app=nvidia-gpu-device-plugin", 2112, ("x",)),)


# --- pages of pods


@dataclass
class Observer:
    """An extension whose pods a test sets; also the host that has it."""

    seen: PodsSeen = field(default_factory=PodsSeen)

    def extension(self, component_id: ComponentID) -> Extension | None:
        return self if str(component_id) == "k8s_observer" else None

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)

    async def start(self, host: Host) -> None:
        """Has nothing to start."""

    async def shutdown(self) -> None:
        """Has nothing to stop."""

    def pods(self) -> PodsSeen:
        return self.seen

    def has(self, *pods: Pod, problem: str = "") -> None:
        """These are the node's pods from now on."""
        self.seen = PodsSeen({pod.uid: pod for pod in pods}, True, problem, self.seen.version + 1)


def plugin(name: str, ip: str, **changes: object) -> Pod:
    """A device plugin's pod."""
    pod = Pod(f"uid-{name}", "kube-system", name, ip, "Running", labels={"k8s-app": "nvidia-gpu-device-plugin"})
    return replace(pod, **changes)  # type: ignore[arg-type]


async def discovering(observer: Observer, port: int, **discovery: object) -> DiscoveredPages:
    """Opened pages by GKE's built-in target."""
    config = GkeConfig.model_validate({"discovery": {"port": port, **discovery}})
    source = page_source(config, lambda url: HttpPages(url, {}, 1000))
    assert isinstance(source, DiscoveredPages)
    await source.open(observer)
    return source


async def failure(source: DiscoveredPages) -> ScrapeError:
    """Why nothing can be read."""
    with pytest.raises(ScrapeError) as raised:
        await source.fetch()
    return raised.value


async def test_a_replaced_pod_is_followed_and_its_connection_dropped() -> None:
    """The page comes from whoever serves it at this fetch; the connection is kept while it is the same pod."""
    observer, port = Observer(), free_port()
    source = await discovering(observer, port)
    async with pages(port, ip2="two", ip3="three") as served:
        observer.has(plugin("a", "127.0.0.2"))
        for _ in range(3):
            body = await source.fetch()
            assert (body.data, body.origin) == (b"two", "uid-a")
        assert len(served["ip2"].open) == 1
        observer.has(plugin("a", "127.0.0.2", deleting=True), plugin("b", "127.0.0.3"))
        body = await source.fetch()
        assert (body.data, body.origin) == (b"three", "uid-b")
        assert served["ip2"].served == 3
        assert await served["ip2"].left()
        await source.close()
        await source.close()


async def test_a_pod_of_the_same_address_is_another_pod() -> None:
    """A DaemonSet's pod on the host's network keeps the address; its connection is a new one all the same."""
    observer, port = Observer(), free_port()
    source = await discovering(observer, port)
    async with pages(port, ip2="two") as served:
        observer.has(plugin("a", "127.0.0.2", host_network=True))
        await source.fetch()
        observer.has(plugin("b", "127.0.0.2", host_network=True))
        body = await source.fetch()
        assert body.origin == "uid-b"
        assert len(served["ip2"].open) == 2
        await source.close()


async def test_no_pod_says_what_was_looked_for() -> None:
    """Labels, namespace and port; pods that end, wait, have no address or stand elsewhere do not count."""
    observer = Observer()
    source = await discovering(observer, 2112)
    observer.has(
        plugin("pending", "127.0.0.2", phase="Pending"),
        plugin("done", "127.0.0.2", phase="Succeeded"),
        plugin("going", "127.0.0.2", deleting=True),
        plugin("new", ""),
        plugin("other", "127.0.0.2", namespace="default"),
        plugin("unlabelled", "127.0.0.2", labels={}),
    )
    error = await failure(source)
    assert error.reason == "no_pod"
    assert "k8s-app=nvidia-gpu-device-plugin in kube-system, port 2112" in str(error)
    observer.has(problem="the watch is broken")
    assert "the watch is broken" in str(await failure(source))


async def test_two_pods_are_reported_and_neither_is_read() -> None:
    """Both names are in the message."""
    observer, port = Observer(), free_port()
    source = await discovering(observer, port)
    async with pages(port, ip2="two", ip3="three") as served:
        observer.has(plugin("a", "127.0.0.2"), plugin("b", "127.0.0.3"))
        error = await failure(source)
        assert error.reason == "two_pods"
        assert "kube-system/a, kube-system/b" in str(error)
        assert [each.served for each in served.values()] == [0, 0]
        observer.has(plugin("b", "127.0.0.3"))
        assert (await source.fetch()).data == b"three"
        await source.close()


async def test_pods_that_are_not_known_yet_are_their_own_reason() -> None:
    """A missing pod says nothing before the first list."""
    error = await failure(await discovering(Observer(), 2112))
    assert error.reason == "pods_unknown"
    assert "have not been listed yet" in str(error)


async def test_a_broken_watch_does_not_stop_the_reading() -> None:
    """The last known pod is most likely still there."""
    observer, port = Observer(), free_port()
    source = await discovering(observer, port)
    async with pages(port, ip2="two"):
        observer.has(plugin("a", "127.0.0.2"), problem="the watch is broken")
        assert (await source.fetch()).data == b"two"
        await source.close()


async def test_a_failed_fetch_names_the_pod() -> None:
    """And keeps the reason."""
    observer, port = Observer(), free_port()
    source = await discovering(observer, port)
    observer.has(plugin("a", "127.0.0.2"))
    error = await failure(source)
    assert error.reason == "refused"
    assert str(error).startswith("pod kube-system/a: http://127.0.0.2:")
    await source.close()


def test_addresses_of_both_kinds() -> None:
    """IPv6 stands in brackets."""
    pod = plugin("a", "fd00::2")
    assert pod_url(pod, "https", 9400, "/m") == "https://[fd00::2]:9400/m"
    assert pod_url(replace(pod, ip="10.0.0.1"), "http", 80, "/metrics") == "http://10.0.0.1:80/metrics"


async def test_every_known_exporter_is_found_and_two_of_them_are_reported() -> None:
    """GKE's managed one, the GPU Operator's, the chart's; two kinds on one node measure the same GPUs twice."""
    observer, port = Observer(), free_port()
    config = DcgmConfig.model_validate({"discovery": {"port": port}})
    source = page_source(config, lambda url: HttpPages(url, {}, 1000))
    assert isinstance(source, DiscoveredPages)
    await source.open(observer)
    managed = Pod(
        "m", "gke-managed-system", "m", "127.0.0.2", "Running",
        labels={"app.kubernetes.io/name": "gke-managed-dcgm-exporter"},
    )  # fmt: skip
    operator = Pod("o", "gpu-operator", "o", "127.0.0.3", "Running", labels={"app": "nvidia-dcgm-exporter"})
    chart = Pod("c", "anywhere", "c", "127.0.0.4", "Running", labels={"app.kubernetes.io/name": "dcgm-exporter"})
    async with pages(port, ip2="managed", ip3="operator", ip4="chart"):
        for pod, text in ((chart, b"chart"), (operator, b"operator"), (managed, b"managed")):
            observer.has(pod)
            assert (await source.fetch()).data == text
        observer.has(operator, managed)
        error = await failure(source)
        assert (error.reason, "gke-managed-system/m, gpu-operator/o" in str(error)) == ("two_pods", True)
        # Labels of both kinds on one pod are one exporter.
        observer.has(replace(operator, labels={**operator.labels, "app.kubernetes.io/name": "dcgm-exporter"}))
        assert (await source.fetch()).data == b"operator"
        await source.close()
    observer.has()
    assert str(await failure(source)).count("; nor ") == 2


async def test_a_missing_observer_is_a_start_error() -> None:
    """It says where to write it; an extension that knows no pods is refused as well."""

    class Empty(Observer):
        def extension(self, component_id: ComponentID) -> Extension | None:
            return None

    class Other(Observer):
        def extension(self, component_id: ComponentID) -> Extension | None:
            return Bare()

    class Bare:
        async def start(self, host: Host) -> None:
            """Has nothing to start."""

        async def shutdown(self) -> None:
            """Has nothing to stop."""

    with pytest.raises(StartError, match="service::extensions"):
        await discovering(Empty(), 1)
    with pytest.raises(StartError, match="knows no pods"):
        await discovering(Other(), 1)


BY_HAND = {"initial_delay": "1h"}
"""The timer stays away: a test ticks by hand."""

GKE_PAGE = 'duty_cycle_gpu_node{make="nvidia",accelerator_id="GPU-1",model="L4",node_name="n"} %d\n'
DCGM_PAGE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="L4",Hostname="n"} %d\n'


async def test_gke_follows_its_pod() -> None:
    """Tick after tick: not known yet, read, gone, back as another pod."""
    clock, observer, port, sink = VirtualClock(), Observer(), free_port(), Sink()
    bench = Bench("gke", clock)
    config = GkeConfig.model_validate({"discovery": {"port": port}, **BY_HAND})
    receiver = create_gke(bench.settings, config, sink)
    assert isinstance(receiver, ScrapeReceiver)
    await receiver.start(observer)
    async with pages(port, ip2=GKE_PAGE % 40, ip3=GKE_PAGE % 50):
        await receiver.tick()
        assert sink.last()["gpu.source.up"] == [0]
        assert "not known yet" in bench.status[1]
        observer.has(plugin("a", "127.0.0.2"))
        await receiver.tick()
        assert sink.last()["gpu.duty_cycle"] == [0.4]
        assert bench.status == (Status.OK, "")
        observer.has()
        await receiver.tick()
        assert sink.last()["gpu.source.up"] == [0]
        assert "no running pod" in bench.status[1]
        observer.has(plugin("b", "127.0.0.3"))
        await receiver.tick()
        assert sink.last()["gpu.duty_cycle"] == [0.5]
    await receiver.shutdown()


async def test_a_page_that_does_not_come_says_where_it_was_looked_for() -> None:
    """The deadline's message names the pods that are meant, as the address where there is one."""
    clock, observer, port = VirtualClock(), Observer(), free_port()
    asked = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    looked = f"the pod on this node that matches k8s-app=nvidia-gpu-device-plugin in kube-system, port {port}"
    address = f"http://127.0.0.2:{port}/metrics"
    async with pages(port, ip2="") as served:
        served["ip2"].answer = hang  # type: ignore[method-assign]
        observer.has(plugin("a", "127.0.0.2"))
        for block, where in (({"discovery": {"port": port}}, looked), ({"endpoint": address}, address)):
            bench = Bench("gke", clock)
            receiver = create_gke(bench.settings, GkeConfig.model_validate({**block, **BY_HAND}), Sink())
            assert isinstance(receiver, ScrapeReceiver)
            await receiver.start(observer)
            tick = asyncio.create_task(receiver.tick())
            async with asyncio.timeout(PATIENCE_S):
                await asked.wait()
            asked.clear()
            await clock.advance(61)
            await tick
            assert bench.status[1].endswith(f"s from {where}")
            await receiver.shutdown()


async def test_dcgm_forgets_what_it_learned_of_a_pod_that_was_replaced() -> None:
    """The page's standing still is counted from the new pod's first page on, though it says the same."""
    clock, observer, port, sink = VirtualClock(), Observer(), free_port(), Sink()
    bench = Bench("dcgm", clock)
    config = DcgmConfig.model_validate({"discovery": {"port": port}, **BY_HAND})
    receiver = create_dcgm(bench.settings, config, sink)
    assert isinstance(receiver, ScrapeReceiver)
    await receiver.start(observer)
    pod = Pod("a", "gpu-operator", "a", "127.0.0.2", "Running", labels={"app": "nvidia-dcgm-exporter"})
    async with pages(port, ip2=DCGM_PAGE % 40, ip3=DCGM_PAGE % 40):
        observer.has(pod)
        await receiver.tick()
        await clock.advance(60)
        await receiver.tick()
        assert sink.last()["gpu.source.unchanged"] == [60.0]
        observer.has(replace(pod, uid="b", name="b", ip="127.0.0.3"))
        await receiver.tick()
        assert sink.last()["gpu.source.unchanged"] == [0.0]
        assert sink.last()["hw.gpu.utilization"] == [0.4]
    await receiver.shutdown()
