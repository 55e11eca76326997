"""The simulated node's pages and socket, on real ports.

Invariant: what is served at any moment is the world's answer for `now()`; the servers add nothing but faults
of transport (a closed port, a socket file that is gone, a call that hangs), and those follow from the world
too.

Faults begin and end when `settle` is called: by `serve`'s own ticker in real time, or by a test after it has
moved its virtual clock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
from aiohttp import web

from gpulens.pipeline.errors import StartError
from gpulens.receivers.pod_resources import podresources_pb2 as pb
from gpulens.simulator.pods_api import SERVICE as PODS_SERVICE
from gpulens.simulator.pods_api import pod_events, pods_at, pods_reply
from gpulens.simulator.schema import FaultKind
from gpulens.simulator.world import World

Now: TypeAlias = Callable[[], float]
_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
_Service: TypeAlias = "grpc.GenericRpcHandler[bytes, bytes]"

PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TICK_S = 0.02
_PATH_LIMIT = 100
_ABSENT: tuple[FaultKind, ...] = ("kubelet_gone", "kubelet_restart")


class _Waits:
    """Lets calls wait for a condition that only `settle` can change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0

    async def until(self, done: Callable[[], bool]) -> None:
        self.count += 1
        try:
            while not done():
                await self._event.wait()
        finally:
            self.count -= 1

    def wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class _Page:
    """One HTTP server that can be closed and opened again on the port that it had first."""

    def __init__(self, address: str, routes: dict[str, _Handler]) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise StartError(f"simulate: {address!r} is no address; write host:port, as in 127.0.0.1:9400")
        self._host = host.strip("[]") or "127.0.0.1"
        self._port = int(port)
        self._routes = routes
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it is, or was before it was closed."""
        return f"http://{self._host}:{self._port}"

    async def open(self) -> None:
        if self._runner is not None:
            return
        app = web.Application()
        for path, handler in self._routes.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise StartError(f"simulate: can't listen on {self._host}:{self._port}: {error}") from error
        self._port = int(runner.addresses[0][1])
        self._runner = runner

    async def close(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()


class _Socket:
    """The kubelet's socket; the file goes with the server, as a real kubelet's does."""

    def __init__(self, path: Path, handlers: Callable[[], list[_Service]]) -> None:
        if len(str(path)) > _PATH_LIMIT:
            raise StartError(f"simulate: the socket's path is too long for a unix socket: {path}")
        self.path = path
        self._handlers = handlers
        self._server: grpc.aio.Server | None = None

    async def open(self) -> None:
        if self._server is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise StartError(f"simulate: can't make the socket {self.path}: {error}") from error
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(tuple(self._handlers()))
        try:
            server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            raise StartError(f"simulate: can't listen on {self.path}: {error}") from error
        await server.start()
        self._server = server

    async def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
            self.path.unlink(missing_ok=True)


class Simulator:
    """Serves one world. `now` gives simulated seconds since 1970; addresses are host:port, 0 = any free port.

    What is None is not served. Raises StartError where something can't be listened on.
    """

    def __init__(
        self,
        world: World,
        now: Now,
        *,
        dcgm: str | None = "127.0.0.1:0",
        gke: str | None = "127.0.0.1:0",
        kubelet: Path | str | None = None,
        pods: Path | str | None = None,
    ) -> None:
        self.world = world
        self._now = now
        self._waits = _Waits()
        self._lock = asyncio.Lock()
        self._settled_s = now()
        self._dcgm = _Page(dcgm, {"/metrics": self._dcgm_metrics, "/health": self._health}) if dcgm else None
        self._gke = _Page(gke, {"/metrics": self._gke_metrics}) if gke else None
        self._kubelet = _Socket(Path(kubelet), self._services) if kubelet else None
        self._pods = _Socket(Path(pods), self._pods_services) if pods else None

    @property
    def dcgm_url(self) -> str:
        """Of the exporter's page; empty when it isn't served."""
        return f"{self._dcgm.url}/metrics" if self._dcgm else ""

    @property
    def gke_url(self) -> str:
        """Of the page of GKE's collector; empty when it isn't served."""
        return f"{self._gke.url}/metrics" if self._gke else ""

    @property
    def kubelet_endpoint(self) -> str:
        """Of the Pod Resources socket, as gRPC wants it; empty when it isn't served."""
        return f"unix://{self._kubelet.path.absolute()}" if self._kubelet else ""

    @property
    def pods_endpoint(self) -> str:
        """Of the kubelet's Pods API; empty when it isn't served."""
        return f"unix://{self._pods.path.absolute()}" if self._pods else ""

    @property
    def waiting(self) -> int:
        """How many calls hang or are slow right now."""
        return self._waits.count

    async def start(self) -> None:
        """Opens everything once, so that ports are known, then lets the world's faults have their way."""
        for part in (self._dcgm, self._gke, self._kubelet, self._pods):
            if part is not None:
                await part.open()
        await self.settle()

    async def stop(self) -> None:
        """Closes everything; calls that hang are dropped. Safe to call twice."""
        async with self._lock:
            for part in (self._dcgm, self._gke, self._kubelet, self._pods):
                if part is not None:
                    await part.close()

    async def settle(self) -> None:
        """Brings ports and socket into the state that the world has now, and lets waiting calls look again.

        A restart that lies wholly between two calls is still carried out.
        """
        async with self._lock:
            before, self._settled_s = self._settled_s, self._now()
            now = self._settled_s
            if self._dcgm is not None:
                await _switch(self._dcgm, on=not self.world.fault("dcgm_down", now))
            if self._gke is not None:
                await _switch(self._gke, on=not (self.world.gke_refuses() or self.world.fault("gke_down", now)))
            for socket in (self._kubelet, self._pods):
                if socket is None:
                    continue
                if self._restarted(before, now):
                    await socket.close()
                await _switch(socket, on=not any(self.world.fault(kind, now) for kind in _ABSENT))
        self._waits.wake()

    def _restarted(self, before_s: float, now_s: float) -> bool:
        begins = (self.world.start_s + f.from_ for f in self.world.spec.faults if f.kind in _ABSENT)
        return any(before_s < begin <= now_s for begin in begins)

    def _faulty(self, kind: FaultKind) -> bool:
        return self.world.fault(kind, self._now()) is not None

    async def _pause(self, hung: FaultKind, slow: FaultKind) -> None:
        fault = self.world.fault(slow, self._now())
        if fault is not None:
            due = self._now() + fault.delay
            await self._waits.until(lambda: self._now() >= due)
        await self._waits.until(lambda: not self._faulty(hung))

    async def _dcgm_metrics(self, request: web.Request) -> web.StreamResponse:
        await self._pause("dcgm_hung", "dcgm_slow")
        if self._faulty("dcgm_error"):
            return web.Response(status=500, text="internal server error")
        return _page(self.world.dcgm_page(self._now()))

    async def _gke_metrics(self, request: web.Request) -> web.StreamResponse:
        await self._pause("gke_hung", "gke_slow")
        if self._faulty("gke_error"):
            return web.Response(status=500, text="internal server error")
        response = _page(self.world.gke_page(self._now()))
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="OK")

    def _services(self) -> list[_Service]:
        def service(name: str, **methods: Callable[[bytes, _Context], Awaitable[bytes]]) -> _Service:
            handlers = {method: grpc.unary_unary_rpc_method_handler(call) for method, call in methods.items()}
            return grpc.method_handlers_generic_handler(name, handlers)

        return [
            service(
                "v1.PodResourcesLister",
                List=self._list_v1,
                GetAllocatableResources=self._allocatable_v1,
                Get=self._get_v1,
            ),
            service("v1alpha1.PodResourcesLister", List=self._list_any),
        ]

    def _pods_services(self) -> list[_Service]:
        methods = {
            "ListPods": grpc.unary_unary_rpc_method_handler(self._list_pods),
            "WatchPods": grpc.unary_stream_rpc_method_handler(self._watch_pods),
        }
        return [grpc.method_handlers_generic_handler(PODS_SERVICE, methods)]

    async def _list_pods(self, request: bytes, context: _Context) -> bytes:
        await self._admit(context)
        return pods_reply(self.world, self._now())

    async def _watch_pods(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:
        await self._admit(context)
        async for event in pod_events(lambda: pods_at(self.world, self._now()), self._waits.until):
            yield event

    async def _list_v1(self, request: bytes, context: _Context) -> bytes:
        await self._refuse_v1(context)
        return await self._list_any(request, context)

    async def _allocatable_v1(self, request: bytes, context: _Context) -> bytes:
        await self._refuse_v1(context)
        await self._admit(context)
        return self.world.allocatable(self._now())

    async def _get_v1(self, request: bytes, context: _Context) -> bytes:
        await self._refuse_v1(context)
        await self._admit(context)
        wanted = pb.GetPodResourcesRequest.FromString(request)
        found = self.world.pod_resources_of(self._now(), wanted.pod_namespace, wanted.pod_name)
        if found is None:
            name = f"{wanted.pod_namespace}/{wanted.pod_name}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no pod {name} on this node")
            raise AssertionError  # abort always raises
        return found

    async def _list_any(self, request: bytes, context: _Context) -> bytes:
        await self._admit(context)
        return self.world.pod_resources(self._now())

    async def _refuse_v1(self, context: _Context) -> None:
        if self._faulty("kubelet_v1alpha1_only"):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service v1.PodResourcesLister")

    async def _admit(self, context: _Context) -> None:
        await self._waits.until(lambda: not self._faulty("kubelet_hung"))
        if self._faulty("kubelet_rate_limited"):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")


async def _switch(part: _Page | _Socket, *, on: bool) -> None:
    await (part.open() if on else part.close())


def _page(text: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": PAGE_TYPE})


@contextlib.asynccontextmanager
async def serve(
    world: World,
    now: Now,
    *,
    dcgm: str | None = "127.0.0.1:0",
    gke: str | None = "127.0.0.1:0",
    kubelet: Path | str | None = None,
    pods: Path | str | None = None,
    tick_s: float | None = _TICK_S,
) -> AsyncIterator[Simulator]:
    """Serves the world while the context lasts, following `now` every `tick_s` real seconds.

    With `tick_s` None nothing follows the clock and the caller settles. Raises StartError as Simulator does.
    """
    simulator = Simulator(world, now, dcgm=dcgm, gke=gke, kubelet=kubelet, pods=pods)
    ticker: asyncio.Task[None] | None = None
    try:
        await simulator.start()
        if tick_s is not None:
            ticker = asyncio.create_task(_follow(simulator, tick_s), name="gpulens-simulator")
        yield simulator
    finally:
        if ticker is not None:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
        await simulator.stop()


async def _follow(simulator: Simulator, tick_s: float) -> None:
    while True:
        await asyncio.sleep(tick_s)
        # A port that somebody else took during an outage is tried again at the next tick.
        with contextlib.suppress(StartError):
            await simulator.settle()
