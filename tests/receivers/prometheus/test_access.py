"""The receiver against a real server: TLS, tokens that are renewed, what is refused, and the whole path once."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from gpulens.config.ids import ComponentID
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Extension
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.pods import Pod, PodsSeen
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.pipeline.status import Status
from gpulens.receivers.prometheus import FACTORY
from gpulens.receivers.prometheus.config import PrometheusConfig
from tests.exporters.otlp.rig import make_certificate
from tests.receivers.page_server import Bench, Sink

PAGE = 'gpu_gfx_activity{serial_number="SN0",gpu_id="0"} 50\n'


class Host:
    """A host with one extension or none."""

    def __init__(self, extension: Extension | None = None) -> None:
        self._extension = extension

    def extension(self, component_id: ComponentID) -> Extension | None:
        """The extension, whatever its id."""
        return self._extension

    def stop(self, reason: str) -> None:
        """Never called."""
        raise AssertionError(reason)


@asynccontextmanager
async def serving(seen: list[str], context: ssl.SSLContext | None = None, token: str = "") -> AsyncIterator[int]:
    """Serves PAGE, to whom has the token; `seen` gets the Authorization headers."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        if token and seen[-1] != f"Bearer {token}":
            return web.Response(status=401, text="who are you?")
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        port: int = runner.addresses[0][1]
        yield port
    finally:
        await runner.cleanup()


class Run:
    """A started receiver whose ticks the test makes."""

    def __init__(self, **keys: object) -> None:
        self.bench = Bench("prometheus", VirtualClock())
        self.sink = Sink()
        assert FACTORY.metrics is not None
        made = FACTORY.metrics(self.bench.settings, PrometheusConfig.model_validate(keys), self.sink)
        assert isinstance(made, ScrapeReceiver)
        self.receiver = made

    async def tick(self) -> object:
        """One scrape; what gpu.source.up says."""
        await self.receiver.tick()
        return self.sink.last()["gpu.source.up"][0]


def server_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """TLS for `localhost` by a certificate of its own."""
    cert, key = make_certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context, cert


async def test_a_page_over_tls_with_a_token_that_is_renewed(tmp_path: Path) -> None:
    """The authority's file is trusted; the token's file is read again when it changed."""
    context, cert = server_context(tmp_path)
    token = tmp_path / "token"
    token.write_text("first\n")
    seen: list[str] = []
    async with serving(seen, context) as port:
        run = Run(
            endpoint=f"https://localhost:{port}",
            mapping="amd",
            bearer_token_file=str(token),
            tls={"ca_file": str(cert)},
        )
        await run.receiver.start(Host())
        assert await run.tick() == 1
        assert run.sink.last()["hw.gpu.utilization"] == [0.5]
        token.write_text("second")
        assert await run.tick() == 1
        token.unlink()
        assert await run.tick() == 0
        assert run.bench.status[0] is Status.RECOVERABLE
        assert str(token) in run.bench.status[1]
        assert "second" not in run.bench.status[1]
        await run.receiver.shutdown()
    assert seen == ["Bearer first", "Bearer second"]


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    """Unless the user says that any will do."""
    context, _ = server_context(tmp_path)
    async with serving([], context) as port:
        for tls, up in ((None, 0), ({"insecure_skip_verify": True}, 1)):
            run = Run(endpoint=f"https://localhost:{port}", tls=tls)
            await run.receiver.start(Host())
            assert await run.tick() == up
            await run.receiver.shutdown()


async def test_the_name_of_a_certificate_is_not_the_address_that_is_scraped(tmp_path: Path) -> None:
    """A pod is found by its address; its certificate has a name, which is checked all the same."""
    context, cert = server_context(tmp_path)
    async with serving([], context) as port:
        page = {"selector": "app=exporter", "port": port, "scheme": "https"}
        for where in ({"endpoint": f"https://127.0.0.1:{port}"}, {"discovery": page}):
            for name, up in (("", 0), ("localhost", 1), ("other.example", 0)):
                run = Run(**where, tls={"ca_file": str(cert), "server_name_override": name})
                await run.receiver.start(Host(Pods()))
                assert await run.tick() == up
                assert up or "certificate" in run.bench.status[1].lower(), run.bench.status[1]
                await run.receiver.shutdown()


async def test_a_wrong_token_is_told_and_never_shown() -> None:
    """The server's refusal is the status; the token is not in it."""
    seen: list[str] = []
    async with serving(seen, token="right") as port:
        wrong = Run(endpoint=f"http://127.0.0.1:{port}", bearer_token="wr0ng")
        assert await wrong.tick() == 0
        assert "401" in wrong.bench.status[1]
        assert "wr0ng" not in wrong.bench.status[1]
        right = Run(endpoint=f"http://127.0.0.1:{port}", bearer_token="right")
        assert await right.tick() == 1
        for run in (wrong, right):
            await run.receiver.shutdown()
    assert seen == ["Bearer wr0ng", "Bearer right"]


async def test_tls_files_are_read_at_the_start_and_not_before(tmp_path: Path) -> None:
    """Making a receiver touches nothing; a file that is missing ends the start with its name."""
    run = Run(endpoint="https://localhost:1", tls={"ca_file": str(tmp_path / "gone.pem")})
    with pytest.raises(StartError, match=r"gone\.pem"):
        await run.receiver.start(Host())
    await run.receiver.shutdown()


class Pods:
    """An observer that knows one pod."""

    async def start(self, host: object) -> None:
        """Nothing to start."""

    async def shutdown(self) -> None:
        """Nothing to stop."""

    def pods(self) -> PodsSeen:
        """The pod on 127.0.0.1."""
        pod = Pod("u", "amd", "exporter-1", ip="127.0.0.1", phase="Running", labels={"app": "exporter"})
        return PodsSeen({"u": pod}, synced=True, problem="")


async def test_the_page_of_a_pod_that_is_found() -> None:
    """By selector and port, through the observer."""
    async with serving([]) as port:
        run = Run(discovery={"selector": "app=exporter", "port": port}, mapping="amd")
        await run.receiver.start(Host(Pods()))
        assert await run.tick() == 1
        assert run.sink.last()["hw.gpu.utilization"] == [0.5]
        await run.receiver.shutdown()


async def test_nothing_is_said_of_a_page_that_names_nothing() -> None:
    """The wrong exporter's page is a failed scrape with a reason, not an empty success."""
    async with serving([]) as port:
        run = Run(endpoint=f"http://127.0.0.1:{port}", mapping="intel")
        assert await run.tick() == 0
        assert "is it the right exporter's page" in run.bench.status[1]
        await run.receiver.shutdown()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "needs either 'endpoint'"),
        ({"discovery": {}}, "needs a selector and a port"),
        ({"endpoint": "http://h", "bearer_token": "a", "bearer_token_file": "b"}, "exclude each other"),
        ({"endpoint": "http://h", "bearer_token": "a\r\nX: y"}, "printable ASCII"),
        ({"endpoint": "http://h", "bearer_token": "a", "headers": {"authorization": "x"}}, "Authorization of its own"),
        ({"endpoint": "http://h", "tls": {"insecure": True}}, "an http:// address"),
        ({"endpoint": "http://h", "mapping": "amd", "labels_drop": ["x"]}, "means nothing with a mapping"),
        ({"endpoint": "http://h", "mapping": "nope"}, "no mapping of this name"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], says: str) -> None:
    """With what to do about it."""
    with pytest.raises(ValidationError, match=says):
        PrometheusConfig.model_validate(keys)


def test_a_token_in_the_clear_is_doubted() -> None:
    """It is valid, and probably not meant."""
    (doubt,) = PrometheusConfig.model_validate({"endpoint": "http://h", "bearer_token": "a"}).doubts()
    assert doubt.startswith("'bearer_token' goes over http://")
    assert PrometheusConfig.model_validate({"endpoint": "https://h", "bearer_token": "a"}).doubts() == ()


def test_the_token_never_shows() -> None:
    """Not in the printed configuration, not in repr."""
    config = PrometheusConfig.model_validate({"endpoint": "https://h", "bearer_token": "s3cret", "mapping": "amd"})
    assert "s3cret" not in json.dumps(config.model_dump(mode="json"))
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize("content", [b"", b"two words", "tökén".encode(), b"x" * 70_000])
async def test_a_file_without_a_token_is_a_failed_scrape(content: bytes, tmp_path: Path) -> None:
    """Nothing is sent, and the message says what the file should hold."""
    token = tmp_path / "token"
    token.write_bytes(content)
    seen: list[str] = []
    async with serving(seen) as port:
        run = Run(endpoint=f"http://127.0.0.1:{port}", bearer_token_file=str(token))
        assert await run.tick() == 0
        assert "bearer_token_file" in run.bench.status[1]
        await run.receiver.shutdown()
    assert seen == []
