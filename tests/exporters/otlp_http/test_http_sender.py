from __future__ import annotations

import asyncio
import gzip
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from pydantic import ValidationError

from gpulens.exporters.otlp_http import FACTORY
from gpulens.exporters.otlp_http.config import OtlpHttpConfig
from gpulens.exporters.otlp_http.sender import ANSWER_LIMIT, HttpPusher, retry_after
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Exporter
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import ExportError, PermanentError, RetryableError, StartError
from gpulens.pipeline.otlp import encode
from gpulens.pipeline.otlp_json import decode_json
from gpulens.pipeline.otlp_sending import USER_AGENT
from tests.exporters.otlp.rig import Rig, make_certificate, node, pod, tick, until
from tests.pipeline.export_bench import NoExtensions

PROTO = "application/x-protobuf"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _fine(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"", content_type=request.content_type)


def _always(status: int, body: bytes = b"", kind: str = PROTO, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, content_type=kind, headers=named)

    return answer


@dataclass
class Server:
    """A real HTTP server that keeps what it gets; aiohttp takes the compression off."""

    answer: Answer = _fine
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.read())
        return await self.answer(request)


@asynccontextmanager
async def serving(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Runs the server; gives its base URL."""
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.05)  # 0 would wait for ever
    await runner.setup()
    site = web.TCPSite(runner, "localhost", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"{'http' if context is None else 'https'}://localhost:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pushing(rig: Rig, **keys: object) -> AsyncIterator[HttpPusher]:
    """An open pusher."""
    pusher = HttpPusher(OtlpHttpConfig.model_validate(keys), rig.settings)
    await pusher.open()
    try:
        yield pusher
    finally:
        await pusher.close()


@asynccontextmanager
async def exporting(rig: Rig, **keys: object) -> AsyncIterator[Exporter[Batch]]:
    """A running exporter, made as the graph makes it."""
    assert FACTORY.metrics is not None
    exporter = FACTORY.metrics(
        rig.settings, FACTORY.config.model_validate({"sending_queue": {"num_consumers": 1}, **keys})
    )
    await exporter.start(NoExtensions())
    try:
        yield exporter
    finally:
        await exporter.shutdown()


@pytest.mark.parametrize("encoding", ["proto", "json"])
@pytest.mark.parametrize("compression", ["gzip", "none"])
async def test_a_batch_arrives_as_it_was(encoding: str, compression: str) -> None:
    """Both encodings, with and without gzip, bring the message, our user agent and the configured headers."""
    server, rig, batch = Server(), Rig("otlp_http"), tick(pod("a", "GPU-1", "GPU-2"), node("GPU-1"))
    headers = {"X-Scope-OrgID": "t0ken"}
    async with (
        serving(server) as url,
        exporting(rig, endpoint=url, encoding=encoding, compression=compression, headers=headers) as exporter,
    ):
        exporter.consume(batch, Ack())
        await until(lambda: rig.count("otelcol_exporter_sent_metric_points") == 3)
    [body] = server.bodies
    expected = ExportMetricsServiceRequest.FromString(encode(batch))
    got = decode_json(body) if encoding == "json" else ExportMetricsServiceRequest.FromString(body)
    assert got == expected
    assert server.paths == ["POST /v1/metrics"]
    seen = {name.lower(): value for name, value in server.headers[0].items()}
    assert seen["user-agent"] == USER_AGENT
    assert seen["x-scope-orgid"] == "t0ken"
    assert seen["content-type"] == f"application/{'json' if encoding == 'json' else 'x-protobuf'}"
    assert seen.get("content-encoding") == ("gzip" if compression == "gzip" else None)


async def test_metrics_endpoint_is_taken_as_it_is() -> None:
    """`endpoint` gets /v1/metrics behind it, `metrics_endpoint` nothing."""
    server = Server()
    async with serving(server) as url:
        for keys in ({"endpoint": f"{url}/otlp/"}, {"metrics_endpoint": f"{url}/own/path"}):
            async with pushing(Rig(), **keys) as pusher:
                await pusher.push(b"", 0, 5)
    assert server.paths == ["POST /otlp/v1/metrics", "POST /own/path"]


@pytest.mark.parametrize("status", [300, 302, 400, 401, 403, 404, 408, 413, 429, 500, 501, 502, 503, 504])
async def test_statuses_are_retryable_by_the_specification(status: int) -> None:
    """429, 502, 503 and 504 may be tried again and nothing else; the Status' message is shown."""
    body = RpcStatus(code=3, message="bad data").SerializeToString()
    server = Server(_always(status, body, Location="/elsewhere"))
    async with serving(server) as url, pushing(Rig(), endpoint=url) as pusher:
        with pytest.raises(ExportError, match=f"/v1/metrics: {status}: bad data") as caught:
            await pusher.push(b"", 0, 5)
    assert isinstance(caught.value, RetryableError) == (status in {429, 502, 503, 504})
    assert isinstance(caught.value, PermanentError) != (status in {429, 502, 503, 504})
    assert len(server.paths) == 1


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        (b'{"code": 3, "message": "json says"}', "application/json", "json says"),
        (b"not json", "application/json", "not json"),
        (b"plain\n  words", "text/plain", "plain words"),
        (b"\xff\xfe", PROTO, "\ufffd\ufffd"),
        (b"", "text/plain", "no details"),
        (b"x" * 5000, "text/html", "x" * 300),
    ],
)
async def test_the_servers_words_are_shown(body: bytes, kind: str, shown: str) -> None:
    """A Status in either encoding, or the beginning of whatever came, is in the error."""
    async with serving(Server(_always(400, body, kind))) as url, pushing(Rig(), endpoint=url) as pusher:
        with pytest.raises(PermanentError) as caught:
            await pusher.push(b"", 0, 5)
    assert str(caught.value).endswith(f"400: {shown}")


@pytest.mark.parametrize(("status", "delay"), [(429, 2.0), (503, 2.0), (502, None)])
async def test_retry_after_is_read_where_it_counts(status: int, delay: float | None) -> None:
    """429 and 503 may say when to come back."""
    async with serving(Server(_always(status, Retry_After="2"))) as url, pushing(Rig(), endpoint=url) as pusher:
        with pytest.raises(RetryableError) as caught:
            await pusher.push(b"", 0, 5)
    assert caught.value.delay_s == delay


def test_retry_after_is_seconds_or_a_date() -> None:
    """Both forms of the header are read, a date in the past is now, nonsense is nothing."""
    clock = VirtualClock(784_111_777 * 10**9)  # Sun, 06 Nov 1994 08:49:37 GMT
    assert retry_after("120", clock) == 120
    assert retry_after("Sun, 06 Nov 1994 08:50:07 GMT", clock) == 30
    assert retry_after("Sun, 06 Nov 1994 08:00:00 GMT", clock) == 0
    assert retry_after("Sun, 06 Nov 1994 08:50:07", clock) == 30
    for nonsense in ("", "soon", "-5", "1.5", "٣"):
        assert retry_after(nonsense, clock) is None


async def test_a_partial_success_is_counted_and_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """Rejected points are counted at each answer and logged once while the message is the same."""
    response = ExportMetricsServiceResponse()
    response.partial_success.rejected_data_points = 1
    response.partial_success.error_message = "too old"
    server, rig = Server(_always(200, response.SerializeToString())), Rig("otlp_http")
    with caplog.at_level(logging.INFO, "gpulens"):
        async with serving(server) as url, exporting(rig, endpoint=url) as exporter:
            for second in range(3):
                exporter.consume(tick(pod("a", "GPU-1"), second=second), Ack())
            await until(lambda: rig.count("otelcol_exporter_sent_metric_points") == 3)
    assert len(server.bodies) == 3
    assert rig.count("gpulens_exporter_rejected_metric_points", reason="partial_success") == 3
    assert [record.getMessage() for record in caplog.records] == ["Partial success."]


async def test_a_partial_success_in_json_is_read() -> None:
    """The answer comes in the request's encoding."""
    body = b'{"partialSuccess": {"rejectedDataPoints": "4", "errorMessage": "no"}}'
    rig = Rig("otlp_http")
    server = Server(_always(200, body, "application/json"))
    async with serving(server) as url, pushing(rig, endpoint=url, encoding="json") as pusher:
        await pusher.push(b"", 0, 5)
    assert rig.count("gpulens_exporter_rejected_metric_points") == 4


@pytest.mark.parametrize("body", [b"\xff\xff", bytes(ANSWER_LIMIT + 1)])
async def test_an_answer_that_is_not_understood_is_a_success(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """After a 2xx nothing is sent again, whatever the body is; an endless one is not read to its end."""
    with caplog.at_level(logging.INFO, "gpulens"):
        async with serving(Server(_always(200, body))) as url, pushing(Rig(), endpoint=url) as pusher:
            await pusher.push(b"", 0, 5)
    assert [record.getMessage() for record in caplog.records] == ["Answer not understood."]


async def test_a_compressed_answer_is_limited_after_decompression() -> None:
    """A small body that unpacks to more than the limit is not read to its end."""

    async def bomb(request: web.Request) -> web.StreamResponse:
        body = gzip.compress(bytes(64 * 2**20))
        return web.Response(body=body, content_type=PROTO, headers={"Content-Encoding": "gzip"})

    async with serving(Server(bomb)) as url, pushing(Rig(), endpoint=url) as pusher:
        await pusher.push(b"", 0, 20)


async def test_an_endpoint_nobody_listens_on_may_come_back(free_port: Callable[[], int]) -> None:
    """The error names the URL and the cause."""
    async with pushing(Rig(), endpoint=f"http://127.0.0.1:{free_port()}") as pusher:
        with pytest.raises(RetryableError, match=r"http://127\.0\.0\.1:.*/v1/metrics: Cannot connect"):
            await pusher.push(b"", 0, 5)


async def test_a_server_that_hangs_is_a_timeout() -> None:
    """A try ends at its deadline and may be repeated."""

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(Server(hang)) as url, pushing(Rig(), endpoint=url) as pusher:
        with pytest.raises(RetryableError, match=r"no answer within 0\.05s"):
            await pusher.push(b"", 0, 0.05)


async def test_a_connection_that_breaks_may_be_tried_again() -> None:
    """No answer is no refusal."""

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(Server(cut)) as url, pushing(Rig(), endpoint=url) as pusher:
        with pytest.raises(RetryableError, match="/v1/metrics"):
            await pusher.push(b"", 0, 5)


async def test_tls_needs_the_right_authority(tmp_path: Path) -> None:
    """`ca_file` and `insecure_skip_verify` let the request through, an unknown authority does not."""
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = Server()
    async with serving(server, context) as url:
        for tls in ({"ca_file": str(cert)}, {"insecure_skip_verify": True}):
            async with pushing(Rig(), endpoint=url, tls=tls) as pusher:
                await pusher.push(b"", 0, 5)
        async with pushing(Rig(), endpoint=url) as pusher:
            with pytest.raises(RetryableError, match="CERTIFICATE_VERIFY_FAILED"):
                await pusher.push(b"", 0, 5)
    assert len(server.paths) == 2


@pytest.mark.parametrize("name", ["ca_file", "cert_file"])
async def test_a_certificate_that_can_not_be_read_ends_the_start(name: str, tmp_path: Path) -> None:
    """The message names the file, whether it is missing or no certificate."""
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for path in (broken, tmp_path / "none.pem"):
        tls = {name: str(path)} | ({"key_file": str(path)} if name == "cert_file" else {})
        config = OtlpHttpConfig.model_validate({"endpoint": "https://h", "tls": tls})
        with pytest.raises(StartError, match=path.name):
            await HttpPusher(config, Rig().settings).open()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "at least one endpoint must be specified"),
        ({"endpoint": "otel-collector:4318"}, "is not a URL"),
        ({"endpoint": "http://"}, "is not a URL"),
        ({"endpoint": "http://h", "headers": {"a b": "c"}}, "can't be the name of an HTTP header"),
        ({"endpoint": "http://h", "headers": {"a": "b\r\nc"}}, "has line breaks"),
        ({"endpoint": "http://h", "encoding": "xml"}, "encoding"),
    ],
)
def test_config_errors_say_what_to_do(keys: dict[str, object], text: str) -> None:
    """Each mistake has a text of its own."""
    with pytest.raises(ValidationError, match=text):
        OtlpHttpConfig.model_validate(keys)


def test_the_timeout_is_the_collectors() -> None:
    """30 s for HTTP, unlike gRPC's 5 s."""
    assert OtlpHttpConfig(endpoint="http://h").timeout == 30
