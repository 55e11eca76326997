"""This node's pods from the API server: one list, then a watch from where the list ended.

Invariant: a version that the server no longer has (410) costs a new list and nothing else; a watch that falls silent
is found out, since the server is asked to end it and we wait only a little longer. lightkube finds the server and
brings credentials and TLS; list and watch are spoken here, because its own watch asks for no bookmarks and goes on
without a pause when the server ends one. Importing this module needs the extra `k8s`.

Source of the protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Final

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster, User
from lightkube.core.exceptions import ConfigError

from gpulens.extensions.k8s_observer.config import K8sObserverConfig
from gpulens.extensions.k8s_observer.known import KnownPods, WatchError, bare_id, short_annotations
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.pods import Container, Pod
from gpulens.pipeline.scraping import DeadlineError, within

PODS: Final = "api/v1/pods"
PAGE_SIZE: Final = 100
"""Pods a list's page: some 2 MB of JSON, so that the list of a full node never stands in memory as a whole."""

GRACE_S: Final = 30.0
"""How long after its end a watch is still waited for; then the connection is taken for dead."""

MAX_EVENT: Final = 16 * 2**20
"""Bytes of one event; etcd holds no object above 1.5 MiB, and an answer without line ends must not fill the memory."""

_MAX_RETRY_AFTER_S: Final = 300.0
_SPREAD: Final = 0.1
_CONNECT_S: Final = 10.0
_MAX_SAID: Final = 300
_RIGHTS: Final = (
    "bind the agent's service account to a ClusterRole with the rule"
    ' {apiGroups: [""], resources: ["pods"], verbs: ["list", "watch"]}'
)


class _Owner(msgspec.Struct):
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class _Meta(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815 - the API's own spelling, here and below
    deletionTimestamp: str | None = None  # noqa: N815
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    ownerReferences: list[_Owner] | None = None  # noqa: N815


class _Spec(msgspec.Struct):
    hostNetwork: bool | None = None  # noqa: N815


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _Running(msgspec.Struct):
    startedAt: str | None = None  # noqa: N815


class _State(msgspec.Struct):
    running: _Running | None = None


class _ContainerStatus(msgspec.Struct):
    name: str = ""
    containerID: str | None = None  # noqa: N815
    ready: bool | None = None
    state: _State | None = None


class _Status(msgspec.Struct):
    phase: str | None = None
    podIP: str | None = None  # noqa: N815
    startTime: str | None = None  # noqa: N815
    conditions: list[_Condition] | None = None
    containerStatuses: list[_ContainerStatus] | None = None  # noqa: N815
    initContainerStatuses: list[_ContainerStatus] | None = None  # noqa: N815
    ephemeralContainerStatuses: list[_ContainerStatus] | None = None  # noqa: N815


class _Pod(msgspec.Struct):
    """The part of a pod that is read. Every key is optional and the rest is skipped without being decoded."""

    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _Key(msgspec.Struct):
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815


class _Keyed(msgspec.Struct):
    """What is still read of a pod that can't be read."""

    metadata: _Key


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815
    continue_: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Said(msgspec.Struct):
    """A Status: what the server says in place of what it was asked for."""

    message: str | None = None
    code: int | None = None


class ExpiredError(Exception):
    """The server no longer has the version from which to go on."""


class ApiServer:
    """Lists and watches one node's pods."""

    def __init__(
        self,
        node: str,
        clock: Clock,
        config: K8sObserverConfig,
        known: KnownPods,
        unreadable: Callable[[str], None],
    ) -> None:
        self._selector = f"spec.nodeName={node}"
        self._clock = clock
        self._config = config
        self._known = known
        self._unreadable = unreadable
        self._client: httpx2.AsyncClient | None = None
        self._version = ""

    async def follow(self) -> None:
        """One list where it is needed, then one watch to its end. Raises WatchError."""
        try:
            client = self._open()
            if not self._version:
                await self._list(client)
            await self._watch(client)
        except ExpiredError:
            self._version = ""
        except WatchError as error:
            if error.reason == "bad_answer":
                self._version = ""  # from there it would come again
            if error.reason == "unauthorized":
                await self.close()  # the kubeconfig may have a new token by now
            raise
        except ConfigError as error:
            raise WatchError(
                f"no way to the API server: {error}; run in a pod with a service account, or set 'kubeconfig'", "config"
            ) from error
        except DeadlineError as error:
            await self.close()  # a dead connection must not be taken again
            raise WatchError(f"the API server fell silent: {error}", "silent") from error
        except httpx2.HTTPError as error:
            said = str(error) or type(error).__name__
            raise WatchError(f"the API server{self._where()} can't be reached: {said}", "unreachable") from error
        except OSError as error:
            raise WatchError(f"no way to the API server: {error}", "config") from error

    async def close(self) -> None:
        """Closes the connections; the version to go on from is kept."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _where(self) -> str:
        """Its address, without what else may stand in a kubeconfig's URL."""
        if self._client is None:
            return ""
        url = self._client.base_url
        return f" {url.scheme}://{url.netloc.decode()}"

    def forget(self) -> None:
        """Somebody else told of the pods meanwhile: the next round begins with a list."""
        self._version = ""

    def _open(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Deadlines are the clock's; only the connection's own is httpx's.
            timeout = httpx2.Timeout(None, connect=_CONNECT_S)
            try:
                self._client = AsyncClient(_server(self._config), ConnectionParams(timeout=timeout))
            except (AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError, yaml.YAMLError) as error:
                # what lightkube lets through of a kubeconfig or a service account that is not whole
                raise ConfigError(f"its configuration can't be used ({error!r})") from error
        return self._client

    async def _list(self, client: httpx2.AsyncClient) -> None:
        pods: list[Pod] = []
        rest: str | None = ""
        version = ""
        while rest is not None:
            params = {"fieldSelector": self._selector, "limit": str(PAGE_SIZE)}
            if rest:
                params["continue"] = rest
            page = await within(self._clock, self._config.timeout, self._page(client, params))
            pods += [pod for raw in page.items or () if (pod := self._read(raw)) is not None]
            version, rest = page.metadata.resourceVersion, page.metadata.continue_ or None
        # Not before the last page: a watch must never go on from a list that was not read whole.
        self._version = version
        self._known.replace(pods)

    async def _page(self, client: httpx2.AsyncClient, params: Mapping[str, str]) -> _List:
        async with client.stream("GET", PODS, params=params) as response:
            await _check(response, "list")
            body = await response.aread()
        try:
            return msgspec.json.decode(body, type=_List)
        except msgspec.MsgspecError as error:
            raise WatchError(f"the API server's list of pods can't be read: {error}", "bad_answer") from error

    async def _watch(self, client: httpx2.AsyncClient) -> None:
        # Spread: the agents of all nodes, started together, should not come back together.
        timeout_s = max(1, round(self._config.watch_timeout * random.uniform(1 - _SPREAD, 1 + _SPREAD)))
        await within(self._clock, timeout_s + GRACE_S, self._events(client, timeout_s))

    async def _events(self, client: httpx2.AsyncClient, timeout_s: int) -> None:
        params = {
            "fieldSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(timeout_s),
        }
        sending = client.send(client.build_request("GET", PODS, params=params), stream=True)
        # The server answers a watch at once, before there is an event.
        response = await within(self._clock, self._config.timeout, sending)
        try:
            await self._check_watch(response)
            self._known.working()
            async for line in _lines(response):
                self._take(line)
        finally:
            await response.aclose()

    async def _check_watch(self, response: httpx2.Response) -> None:
        try:
            await _check(response, "watch")
        except WatchError as error:
            if _blames_version(response.status_code, str(error)):
                self._version = ""
            raise

    def _take(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line, type=_Event)
        except msgspec.MsgspecError as error:
            raise WatchError("the API server sent an event that can't be read", "bad_answer") from error
        if event.type == "ERROR":
            said = _said(bytes(event.object))
            if said.code == HTTPStatus.GONE:
                raise ExpiredError
            self._version = ""
            raise WatchError(f"the API server ended the watch: {said.message or said.code}", "ended")
        found = self._decode(event.object)
        if found is None:
            self._take_odd(event.object)
            return
        self._version = found.metadata.resourceVersion or self._version
        if event.type in ("ADDED", "MODIFIED"):
            self._known.put(slim(found))
        elif event.type == "DELETED":
            self._known.remove(found.metadata.uid)

    def _take_odd(self, raw: msgspec.Raw) -> None:
        """An event about a pod that can't be read: as in a list, the pod is not known, and the watch is past it."""
        try:
            key = msgspec.json.decode(raw, type=_Keyed).metadata
        except msgspec.MsgspecError:
            return
        self._version = key.resourceVersion or self._version
        self._known.remove(key.uid)

    def _read(self, raw: msgspec.Raw) -> Pod | None:
        found = self._decode(raw)
        return None if found is None else slim(found)

    def _decode(self, raw: msgspec.Raw) -> _Pod | None:
        """A pod; None, and counted, for what can't be read: one odd pod must not hide the others."""
        try:
            return msgspec.json.decode(raw, type=_Pod)
        except msgspec.MsgspecError as error:
            self._unreadable(str(error))
            return None


def _server(config: K8sObserverConfig) -> SingleConfig:
    """Where the API server is and how to speak to it. Raises lightkube's ConfigError."""
    if config.endpoint:
        found = KubeConfig.from_one(cluster=Cluster(server=config.endpoint), user=User()).get()
    elif config.kubeconfig:
        found = KubeConfig.from_file(config.kubeconfig).get()
    else:
        found = KubeConfig.from_env().get()
    if found is None:
        raise ConfigError("no cluster is configured")
    return found if found.user is not None else found._replace(user=User())


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines of an answer. httpx's own splitter takes U+0085 within a text for an end of line as well.

    Raises WatchError for one that does not end.
    """
    begun = bytearray()
    async for part in response.aiter_bytes():
        begun += part
        *whole, rest = begun.split(b"\n")
        for line in whole:
            if line:
                yield bytes(line)
        begun = bytearray(rest)
        if len(begun) > MAX_EVENT:
            raise WatchError(f"the API server sent an event of more than {MAX_EVENT} bytes", "bad_answer")


def _said(body: bytes) -> _Said:
    try:
        return msgspec.json.decode(body, type=_Said)
    except msgspec.MsgspecError:
        return _Said(body[:_MAX_SAID].decode("utf-8", "replace"))


async def _check(response: httpx2.Response, verb: str) -> None:
    """Raises what an answer other than 200 means."""
    status = response.status_code
    if status == HTTPStatus.OK:
        return
    if status == HTTPStatus.GONE:
        raise ExpiredError
    message = _said(await response.aread()).message or response.reason_phrase
    said = f"({status}): {message[:_MAX_SAID]}"
    if status == HTTPStatus.UNAUTHORIZED:
        raise WatchError(
            f"the API server does not know this agent {said}; its token is missing, expired or another cluster's",
            "unauthorized",
        )
    if status == HTTPStatus.FORBIDDEN:
        raise WatchError(f"the agent may not {verb} pods {said}; {_RIGHTS}", "forbidden")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        raise WatchError(f"the API server asks to wait {said}", "rate_limited", _retry_after_s(response))
    raise WatchError(f"the API server refuses to {verb} pods {said}", f"http_{status}", _retry_after_s(response))


def _blames_version(status: int, said: str) -> bool:
    """Whether a refused watch would be refused for ever from this version: it is no number to this server, or one
    that is ahead of it (a server that was restored from a backup)."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS):
        return False
    return status < HTTPStatus.INTERNAL_SERVER_ERROR or "too large resource version" in said.lower()


def _retry_after_s(response: httpx2.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def slim(pod: _Pod) -> Pod:
    """What is kept of a pod."""
    meta, status = pod.metadata, pod.status
    owner = next((each for each in meta.ownerReferences or () if each.controller), None)
    statuses = (
        *(status.containerStatuses or ()),
        *(status.initContainerStatuses or ()),
        *(status.ephemeralContainerStatuses or ()),
    )
    ready = [condition.status == "True" for condition in status.conditions or () if condition.type == "Ready"]
    return Pod(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        ip=status.podIP or "",
        phase=status.phase or "",
        ready=ready[0] if ready else None,
        start_s=_seconds(status.startTime),
        deleting=meta.deletionTimestamp is not None,
        host_network=bool(pod.spec.hostNetwork),
        owner_kind=owner.kind if owner is not None else "",
        owner_name=owner.name if owner is not None else "",
        labels=meta.labels or {},
        annotations=short_annotations(meta.annotations or {}),
        containers=tuple(map(_container, statuses)),
    )


def _container(status: _ContainerStatus) -> Container:
    running = status.state.running if status.state is not None else None
    started_s = _seconds(running.startedAt) if running is not None else None
    return Container(status.name, bare_id(status.containerID or ""), started_s, bool(status.ready))


def _seconds(text: str | None) -> float | None:
    """An RFC 3339 time as seconds since 1970; None where there is none, or none that can be read."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
