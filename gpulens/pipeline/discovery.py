"""Finds the pod on this node whose page a receiver reads, at every fetch anew.

Invariant: a page comes from the one running pod that matches, or from nobody: no match and two matches are both a
failed scrape that says what was looked for. A connection never outlives the pod that it was made to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from gpulens.config.ids import ComponentID
from gpulens.config.types import Block, OptionalBlock, StringList
from gpulens.pipeline.component import Host
from gpulens.pipeline.errors import ScrapeError, StartError
from gpulens.pipeline.pods import Pod, PodObserver, PodsSeen
from gpulens.pipeline.scrape_client import Body, PageScrapeConfig, PageSource, page_url

RUNNING: Final = "Running"

# The forms of keys and values: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_IN_SET = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EQUALITY = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_NAME})?")
_EXISTENCE = re.compile(rf"(!?)\s*({_KEY})")
_VALUE = re.compile(rf"(?:{_NAME})?")
_COMMA_OUTSIDE_SETS = re.compile(r",(?![^()]*\))")


class Operator(Enum):
    """What a requirement asks of a label."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One part of a selector. A label that is missing satisfies NOT_IN, as in Kubernetes."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels satisfy it."""
        value = labels.get(self.key)
        if self.operator is Operator.EXISTS:
            return value is not None
        if self.operator is Operator.MISSING:
            return value is None
        if self.operator is Operator.IN:
            return value in self.values
        return value not in self.values

    def __str__(self) -> str:
        if self.operator in (Operator.EXISTS, Operator.MISSING):
            return self.key if self.operator is Operator.EXISTS else f"!{self.key}"
        if len(self.values) == 1:
            (value,) = self.values
            return f"{self.key}{'=' if self.operator is Operator.IN else '!='}{value}"
        return f"{self.key} {self.operator.value} ({','.join(sorted(self.values))})"


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector: every requirement must hold; without any it matches every pod."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Reads `a=b,c!=d,e in (x,y),f notin (z),g,!h`. Raises ValueError that names the part that is wrong."""
        if not text.strip():
            return cls()
        return cls(tuple(_requirement(part.strip()) for part in _COMMA_OUTSIDE_SETS.split(text)))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels is meant."""
        return all(requirement.holds(labels) for requirement in self.requirements)

    def __str__(self) -> str:
        return ",".join(map(str, self.requirements))


def _requirement(part: str) -> Requirement:
    if found := _IN_SET.fullmatch(part):
        values = [value.strip() for value in found[3].split(",")]
        if not all(map(_VALUE.fullmatch, values)):
            raise ValueError(f'"{part}" in the label selector has a value that no label can have')
        return Requirement(found[1], Operator(found[2]), frozenset(values))
    if found := _EQUALITY.fullmatch(part):
        operator = Operator.NOT_IN if found[2] == "!=" else Operator.IN
        return Requirement(found[1], operator, frozenset({found[3] or ""}))
    if found := _EXISTENCE.fullmatch(part):
        return Requirement(found[2], Operator.MISSING if found[1] else Operator.EXISTS)
    raise ValueError(
        f'"{part}" is no part of a label selector; write "key=value", "key!=value", "key in (a,b)",'
        ' "key notin (a,b)", "key" or "!key", joined by commas'
    )


def _readable_selector(text: str) -> str:
    Selector.parse(text)
    return text


def _whole_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f'"{path}" must begin with "/"')
    return path


def _observer_id(text: str) -> str:
    ComponentID.parse(text)
    return text


class DiscoveryConfig(Block):
    """Which pod on this node serves the page."""

    namespaces: Annotated[StringList, Field(description="Namespaces in which the pod may be; none means any.")] = ()
    selector: Annotated[
        str,
        AfterValidator(_readable_selector),
        Field(description="Label selector of the pod, as kubectl takes it: `a=b,c!=d,e in (x,y),!f`."),
    ] = ""
    port: Annotated[int | None, Field(ge=1, le=65535, description="Port of the page on the pod's address.")] = None
    path: Annotated[str, AfterValidator(_whole_path), Field(description="Path of the page.")] = "/metrics"
    scheme: Annotated[Literal["http", "https"], Field(description="How the page is served.")] = "http"
    observer: Annotated[
        str, AfterValidator(_observer_id), Field(description="The extension that knows this node's pods.")
    ] = "k8s_observer"


@dataclass(frozen=True, slots=True)
class Target:
    """Pods that may serve a page: where they are, how they are labelled, and the port. `namespaces` empty is any."""

    selector: str
    port: int
    namespaces: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {' or '.join(self.namespaces)}" if self.namespaces else ""
        return f"{self.selector or 'any pod'}{where}, port {self.port}"


def _page_url_if_any(endpoint: str) -> str:
    return page_url(endpoint) if endpoint else ""


class DiscoveringPageConfig(PageScrapeConfig):
    """What every receiver's block has that reads one page, by its address or from a pod that it finds."""

    known_targets: ClassVar[tuple[Target, ...]] = ()
    """Where `discovery: {}` looks, the first that is there; without any, selector and port must be given."""

    endpoint: Annotated[
        str,
        AfterValidator(_page_url_if_any),
        Field(description="Address of the page; without a path it is `/metrics`. Either this or `discovery`."),
    ] = ""
    discovery: Annotated[
        OptionalBlock[DiscoveryConfig],
        Field(description="Finds the page's pod on this node; needs the extension `k8s_observer`."),
    ] = None

    @model_validator(mode="after")
    def _has_one_source(self) -> DiscoveringPageConfig:
        if self.discovery is None:
            if not self.endpoint:
                raise ValueError(
                    "needs either 'endpoint' (the page's address) or 'discovery' (the page's pod on this node)"
                )
            return self
        if self.endpoint:
            raise ValueError("'discovery' and 'endpoint' exclude each other: take one of them out")
        if not self.known_targets and (not self.discovery.selector or self.discovery.port is None):
            raise ValueError("'discovery' needs a selector and a port: there is no pod that it could mean without them")
        return self

    def needs_extensions(self) -> tuple[tuple[str, str], ...]:
        return () if self.discovery is None else (("discovery::observer", self.discovery.observer),)

    def where(self) -> str:
        """The page's address, or the pods among which its own is looked for."""
        return self.endpoint or f"the pod on this node that matches {'; or '.join(map(str, self.targets()))}"

    def targets(self) -> tuple[Target, ...]:
        """Where to look, in this order; what the user writes replaces what is known."""
        asked = self.discovery
        if asked is None:
            return ()
        known = self.known_targets
        if asked.selector:  # other labels: other pods, of whose namespace nothing is known
            port = asked.port or (known[0].port if known else 0)
            return (Target(asked.selector, port, asked.namespaces),)
        if asked.namespaces:
            known = tuple(replace(target, namespaces=asked.namespaces) for target in known)
        if asked.port:
            known = tuple(replace(target, port=asked.port) for target in known)
        return tuple(dict.fromkeys(known))


def find_observer(host: Host, extension: str) -> PodObserver:
    """The extension of this id that knows pods. Raises StartError with what to write."""
    found = host.extension(ComponentID.parse(extension))
    if found is None:
        raise StartError(
            f"there is no extension '{extension}' that runs: write it under 'extensions' and list it in"
            " 'service::extensions'"
        )
    if not isinstance(found, PodObserver):
        raise StartError(f"the extension '{extension}' knows no pods; 'observer' must name a k8s_observer")
    return found


def pod_url(pod: Pod, scheme: str, port: int, path: str) -> str:
    """Address of a page that a pod serves."""
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return f"{scheme}://{host}:{port}{path}"


class DiscoveredPages:
    """A page of whichever pod serves it now. `connect(url)` makes the source of one address."""

    def __init__(
        self, targets: Sequence[Target], discovery: DiscoveryConfig, connect: Callable[[str], PageSource]
    ) -> None:
        self._targets = [(target, Selector.parse(target.selector)) for target in targets]
        self._discovery = discovery
        self._connect = connect
        self._observer: PodObserver | None = None
        self._found: tuple[PodsSeen, Pod, str] | None = None
        self._served: tuple[str, str] | None = None
        self._source: PageSource | None = None

    async def open(self, host: Host) -> None:
        """Gets the observer. Raises StartError where the config has none."""
        self._observer = find_observer(host, self._discovery.observer)

    async def fetch(self) -> Body:
        """The page of the pod that serves it now. Raises ScrapeError: `pods_unknown`, `no_pod`, `two_pods`, or what
        the fetch itself raises."""
        pod, url = self._resolve()
        if self._served != (pod.uid, url):
            await self.close()
            self._source, self._served = self._connect(url), (pod.uid, url)
        assert self._source is not None
        try:
            body = await self._source.fetch()
        except ScrapeError as error:
            raise ScrapeError(f"pod {pod.namespace}/{pod.name}: {error}", error.reason) from error
        return replace(body, origin=pod.uid)

    async def close(self) -> None:
        """Lets go of the pod's connection."""
        source, self._source, self._served = self._source, None, None
        if source is not None:
            await source.close()

    def _resolve(self) -> tuple[Pod, str]:
        if self._observer is None:
            raise ScrapeError("the receiver was not started", "pods_unknown")
        seen = self._observer.pods()
        if self._found is None or self._found[0] is not seen:
            self._found = None
            self._found = (seen, *self._look(seen))
        return self._found[1], self._found[2]

    def _look(self, seen: PodsSeen) -> tuple[Pod, str]:
        if not seen.synced:
            raise ScrapeError(f"this node's pods are not known yet: {seen.problem}", "pods_unknown")
        # A pod may match several targets; the first says its port.
        found = {
            pod.uid: (pod, target)
            for target, selector in reversed(self._targets)
            for pod in seen.pods.values()
            if _serves(pod, target, selector)
        }
        if len(found) > 1:
            names = ", ".join(sorted(f"{pod.namespace}/{pod.name}" for pod, _ in found.values()))
            raise ScrapeError(
                f"{len(found)} running pods on this node match: {names}; none is read, since their devices would count"
                " twice: narrow 'discovery' to one of them",
                "two_pods",
            )
        for pod, target in found.values():
            return pod, pod_url(pod, self._discovery.scheme, target.port, self._discovery.path)
        looked = "; nor ".join(str(target) for target, _ in self._targets)
        doubt = f" (what is known of the pods may be old: {seen.problem})" if seen.problem else ""
        raise ScrapeError(f"no running pod on this node matches {looked}{doubt}", "no_pod")


def _serves(pod: Pod, target: Target, selector: Selector) -> bool:
    """The pod runs, stays, has an address and is one of those that are meant."""
    return (
        pod.phase == RUNNING
        and not pod.deleting
        and bool(pod.ip)
        and (not target.namespaces or pod.namespace in target.namespaces)
        and selector.matches(pod.labels)
    )


def page_source(config: DiscoveringPageConfig, connect: Callable[[str], PageSource]) -> PageSource:
    """The source of a block's page; `connect(url)` makes that of one address."""
    if config.discovery is None:
        return connect(config.endpoint)
    return DiscoveredPages(config.targets(), config.discovery, connect)
