"""A Kubernetes API server of pods: real HTTP, list with pages, watch with versions, bookmarks, expiry and faults."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Json = dict[str, object]

NODE = "node-1"


def pod_json(name: str, **changes: object) -> Json:
    """A running pod of NODE as the API writes it; `changes` replace metadata, spec or status keys by their name."""
    parts: dict[str, dict[str, object]] = {
        "metadata": {"name": name, "namespace": "ml", "uid": f"uid-{name}", "labels": {"app": name}},
        "spec": {"nodeName": NODE, "containers": [{"name": "main", "image": "image"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "startTime": "2026-01-05T09:00:00Z",
            "conditions": [{"type": "Initialized", "status": "False"}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {
                    "name": "main",
                    "ready": True,
                    "containerID": "containerd://f00d",
                    "state": {"running": {"startedAt": "2026-01-05T09:00:30Z"}},
                }
            ],
        },
    }
    places = {
        "spec": ("nodeName", "hostNetwork"),
        "status": ("phase", "podIP", "startTime", "conditions", "containerStatuses", "initContainerStatuses"),
    }
    for key, value in changes.items():
        part = next((part for part, keys in places.items() if key in keys), "metadata")
        parts[part][key] = value
    return {"kind": "Pod", "apiVersion": "v1", **parts}


@dataclass
class Refusal:
    """An answer other than 200."""

    status: int
    message: str = "because"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Watcher:
    """One open watch."""

    request: web.Request
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class KubeApi:
    """The server and what it holds. `refuse_list`, `refuse_rest` (later pages of a list) and
    `refuse_watch` are used up one a request."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self.version = 10
        self.oldest = 0
        self.history: list[tuple[int, str, Json]] = []
        self.watchers: list[Watcher] = []
        self.lists: list[Mapping[str, str]] = []
        self.watches: list[Mapping[str, str]] = []
        self.tokens: list[str] = []
        self.refuse_list: deque[Refusal] = deque()
        self.refuse_watch: deque[Refusal] = deque()
        self.refuse_rest: deque[Refusal] = deque()
        self.gone_as_event = False
        self.watch_waits: asyncio.Event | None = None
        self.ends_at_once = False
        self.list_waits: asyncio.Event | None = None
        self.url = ""

    # --- what happens in the cluster

    def put(self, pod: Json) -> None:
        """A pod appears or changes."""
        meta = pod["metadata"]
        assert isinstance(meta, dict)
        kind = "MODIFIED" if meta["uid"] in self.pods else "ADDED"
        self.version += 1
        changed = {**pod, "metadata": {**meta, "resourceVersion": str(self.version)}}
        self.pods[meta["uid"]] = changed
        self._tell(kind, changed)

    def delete(self, name: str) -> None:
        """A pod is gone."""
        self.version += 1
        gone = self.pods.pop(f"uid-{name}")
        meta = gone["metadata"]
        assert isinstance(meta, dict)
        self._tell("DELETED", {**gone, "metadata": {**meta, "resourceVersion": str(self.version)}})

    def bookmark(self) -> None:
        """Time passes elsewhere in the cluster, and the server says so."""
        self.version += 100
        self.send("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}})

    def expire(self) -> None:
        """The server forgets every version until now."""
        self.version += 1
        self.oldest = self.version

    # --- what happens to connections

    def send(self, kind: str, thing: Json) -> None:
        """One event to every watch."""
        self.send_line(_json({"type": kind, "object": thing}))

    def send_line(self, line: bytes) -> None:
        """Raw bytes to every watch."""
        for watcher in self.watchers:
            watcher.lines.put_nowait(line)

    def send_odd(self) -> None:
        """An event about a pod that can't be read, without version and UID."""
        self.send("MODIFIED", {"metadata": {"labels": "none"}})

    def end_watches(self) -> None:
        """The server ends every watch in good order."""
        for watcher in self.watchers:
            watcher.lines.put_nowait(None)

    def drop(self) -> None:
        """Every watch's connection breaks."""
        for watcher in self.watchers:
            if watcher.request.transport is not None:  # else the client was faster
                watcher.request.transport.abort()

    # --- HTTP

    def _tell(self, kind: str, pod: Json) -> None:
        self.history.append((self.version, kind, pod))
        line = _json({"type": kind, "object": pod})
        for watcher in self.watchers:
            if _on_node(pod, watcher.request.query["fieldSelector"]):
                watcher.lines.put_nowait(line)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """GET /api/v1/pods."""
        self.tokens.append(request.headers.get("Authorization", ""))
        if request.query.get("watch") == "true":
            self.watches.append(dict(request.query))
            return await self._watch(request)
        self.lists.append(dict(request.query))
        return await self._list(request)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if self.list_waits is not None:
            await self.list_waits.wait()
        if self.refuse_list:
            return _refused(self.refuse_list.popleft())
        if self.refuse_rest and "continue" in request.query:
            return _refused(self.refuse_rest.popleft())
        found = [pod for pod in self.pods.values() if _on_node(pod, request.query["fieldSelector"])]
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        meta: Json = {"resourceVersion": str(self.version)}
        if first + limit < len(found):
            meta["continue"] = str(first + limit)
        return web.json_response({"kind": "PodList", "metadata": meta, "items": found[first : first + limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.watch_waits is not None:
            await self.watch_waits.wait()
        if self.refuse_watch:
            return _refused(self.refuse_watch.popleft())
        since = int(request.query["resourceVersion"])
        gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {since}"}
        if since < self.oldest and not self.gone_as_event:
            return web.json_response(gone, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.ends_at_once:
            return response
        watcher = Watcher(request)
        if since < self.oldest:
            watcher.lines.put_nowait(_json({"type": "ERROR", "object": gone}))
            watcher.lines.put_nowait(None)
        for version, kind, pod in self.history:
            if version > since and _on_node(pod, request.query["fieldSelector"]):
                watcher.lines.put_nowait(_json({"type": kind, "object": pod}))
        self.watchers.append(watcher)
        try:
            while (line := await watcher.lines.get()) is not None:
                await response.write(line)
        finally:
            self.watchers.remove(watcher)
        return response


def _json(event: Json) -> bytes:
    """A line of a watch; like Go's encoder, it leaves most characters as they are."""
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def _on_node(pod: Json, selector: str) -> bool:
    spec = pod["spec"]
    assert isinstance(spec, dict)
    return selector == f"spec.nodeName={spec['nodeName']}"


def _refused(refusal: Refusal) -> web.Response:
    status = {"kind": "Status", "code": refusal.status, "message": refusal.message}
    return web.json_response(status, status=refusal.status, headers=refusal.headers)


@asynccontextmanager
async def serving(api: KubeApi, listener: socket.socket | None = None) -> AsyncIterator[KubeApi]:
    """Serves it on 127.0.0.1, or on a socket that is bound already; `api.url` is its address."""
    app = web.Application()
    app.router.add_get("/api/v1/pods", api.answer)
    # Cancelled when the client goes, so that `watchers` are the open watches.
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await (web.SockSite(runner, listener) if listener else web.TCPSite(runner, "127.0.0.1", 0)).start()
        host, bound = runner.addresses[0][:2]
        api.url = f"http://{host}:{bound}"
        yield api
    finally:
        api.end_watches()
        await runner.cleanup()
