"""Pages of pods: real servers on other loopback addresses, and who is connected to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

PATIENCE_S = 60.0
"""Of the machine's time; only a test that fails takes it."""


def free_port() -> int:
    """A port that nobody uses on any loopback address."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


class Exporter:
    """One pod's page, and who is connected to it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.served = 0
        self.open: set[asyncio.Transport] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """What the server calls; a test may put another `answer` in place."""
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.served += 1
        assert request.transport is not None
        self.open.add(request.transport)
        return web.Response(text=self.text)

    async def left(self) -> bool:
        """Whether nobody is connected any more, once the sockets had their turn."""
        for _ in range(round(PATIENCE_S / 0.002)):
            if all(transport.is_closing() for transport in self.open):
                return True
            await asyncio.sleep(0.002)
        return False


@asynccontextmanager
async def pages(port: int, **texts: str) -> AsyncIterator[dict[str, Exporter]]:
    """Pages on other loopback addresses, `ip2="..."` on 127.0.0.2, all on one port."""
    async with AsyncExitStack() as stack:
        exporters: dict[str, Exporter] = {}
        for name, text in texts.items():
            exporter = exporters[name] = Exporter(text)
            app = web.Application()
            app.router.add_get("/metrics", exporter.serve)
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, f"127.0.0.{name.removeprefix('ip')}", port).start()
        yield exporters
