"""Tells what the observer knows of this node's pods, at every tick the whole of it.

Invariant: a pod that does not change keeps its block, and while none does, the layout is the same object. What is
not known for certain now (never listed, watch broken) is a failed scrape, not a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.component import Host, Metrics, Receiver, Settings
from gpulens.pipeline.data import EMPTY_LAYOUT, Batch, Block, Layout, Resource, Scope, Series, Value
from gpulens.pipeline.discovery import find_observer
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.pods import STATIC_POD_HASH, Container, Pod, PodObserver, PodsSeen
from gpulens.pipeline.scraping import Scraped, ScrapeReceiver, node_resource
from gpulens.receivers.k8s_pods.config import K8sPodsConfig
from gpulens.receivers.k8s_pods.owners import top_owner

SOURCE: Final = "k8s_pods"


def allowed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a key is in an allow-list; `*` stands for any text."""
    either = "|".join(".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    found = re.compile(either if patterns else r"(?!)", re.DOTALL).fullmatch
    return lambda key: found(key) is not None


@dataclass(frozen=True, slots=True)
class _Told:
    """A pod as it was last told. `phase` is the one that it was in then."""

    pod: Pod
    left: str
    blocks: tuple[Block, ...]
    values: tuple[Value, ...]


class PodsScraper:
    """The node's pods as a stream of facts."""

    def __init__(self, config: K8sPodsConfig, node: str, stream: str) -> None:
        self._observer_id = config.observer
        self._stream = stream
        self._facts = PodFacts(node, allowed(config.labels), allowed((*config.annotations, STATIC_POD_HASH)))
        self._observer: PodObserver | None = None
        self._seen: PodsSeen | None = None
        self._told: dict[str, _Told] = {}
        self._layout: Layout = EMPTY_LAYOUT
        self._values: tuple[Value, ...] = ()

    async def open(self, host: Host) -> None:
        """Gets the observer. Raises StartError where the config has none."""
        self._observer = find_observer(host, self._observer_id)

    async def scrape(self, now_ns: int) -> Scraped:
        """All pods as they are now. Raises ScrapeError: `not_synced`, `stale`."""
        if self._observer is None:
            raise ScrapeError("the receiver was not started", "not_synced")
        seen = self._observer.pods()
        if not seen.synced:
            raise ScrapeError(f"this node's pods are not known yet: {seen.problem}", "not_synced")
        if seen.problem:
            raise ScrapeError(f"what is known of this node's pods may be old: {seen.problem}", "stale")
        if seen is not self._seen or any(told.left for told in self._told.values()):
            self._take_up(seen)
        return Scraped(Batch.of(self._layout, self._values, now_ns, self._stream))

    async def close(self) -> None:
        """Holds nothing."""

    def _take_up(self, seen: PodsSeen) -> None:
        self._told = {uid: self._tell(pod) for uid, pod in sorted(seen.pods.items())}
        blocks = [block for told in self._told.values() for block in told.blocks]
        if blocks != list(self._layout.blocks):
            self._layout = Layout(blocks)
        self._values = tuple(value for told in self._told.values() for value in told.values)
        self._seen = seen

    def _tell(self, pod: Pod) -> _Told:
        known = self._told.get(pod.uid)
        left = "" if known is None or known.pod.phase == pod.phase else known.pod.phase
        if known is not None and known.pod is pod and known.left == left:
            return known
        blocks, values = self._facts.of(pod, left)
        return _Told(pod, left, tuple(blocks), tuple(values))


class PodFacts:
    """Turns a pod into series."""

    def __init__(self, node: str, label: Callable[[str], bool], annotation: Callable[[str], bool]) -> None:
        self._node = node_resource(node).map
        self._scope = Scope(f"gpulens/{SOURCE}")
        self._label = label
        self._annotation = annotation

    def of(self, pod: Pod, left: str) -> tuple[list[Block], list[Value]]:
        """The pod's blocks and one number a slot; `left` is a phase that it was in until now."""
        names = {"k8s.namespace.name": pod.namespace, "k8s.pod.name": pod.name, "k8s.pod.uid": pod.uid}
        resource = {**self._node, **names}
        rows = list(self._pod(pod, left))
        blocks = [self._block(Resource(resource), rows)]
        values = [value for _, value in rows]
        for container in pod.containers:
            if container.started_s is not None:
                of_container = Resource({**resource, "k8s.container.name": container.name})
                blocks.append(self._block(of_container, [(_start(container), container.started_s)]))
                values.append(container.started_s)
        return blocks, values

    def _block(self, resource: Resource, rows: Iterable[tuple[Series, Value]]) -> Block:
        return Block(resource, self._scope, [series for series, _ in rows])

    def _pod(self, pod: Pod, left: str) -> Iterator[tuple[Series, Value]]:
        yield Series(metric("k8s.pod.info"), self._info(pod)), 1
        if pod.phase:
            yield Series(metric("k8s.pod.phase"), {"k8s.pod.phase": pod.phase}), 1
        if left:
            yield Series(metric("k8s.pod.phase"), {"k8s.pod.phase": left}), 0
        if pod.ready is not None:
            yield Series(metric("k8s.pod.ready")), int(pod.ready)

    def _info(self, pod: Pod) -> dict[str, str]:
        kind, name = top_owner(pod.owner_kind, pod.owner_name, pod.labels)
        named = {"gpu.owner.kind": kind, "gpu.owner.name": name, "k8s.pod.start_time": _rfc3339(pod.start_s)}
        info = {key: text for key, text in named.items() if text}
        info |= {f"k8s.pod.label.{key}": text for key, text in pod.labels.items() if self._label(key)}
        info |= {f"k8s.pod.annotation.{key}": text for key, text in pod.annotations.items() if self._annotation(key)}
        return info


def _start(container: Container) -> Series:
    ids = {"container.id": container.id} if container.id else {}
    return Series(metric("k8s.container.start_time"), ids)


def _rfc3339(seconds: float | None) -> str:
    """A time as Kubernetes writes it, to the second; empty where there is none."""
    return "" if seconds is None else f"{datetime.fromtimestamp(int(seconds), UTC):%Y-%m-%dT%H:%M:%SZ}"


def create(settings: Settings, config: K8sPodsConfig, consumer: Metrics) -> Receiver:
    """The receiver of one `k8s_pods:` block."""
    scraper = PodsScraper(config, settings.node, str(settings.id))
    return ScrapeReceiver(settings, config, SOURCE, scraper, consumer)
