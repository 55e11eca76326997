from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from pydantic import ValidationError

from gpulens.exporters.otlp_grpc import FACTORY
from gpulens.exporters.otlp_grpc.config import OtlpGrpcConfig, parse_target
from gpulens.exporters.otlp_grpc.sender import EXPORT_METRICS, GrpcPusher
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Exporter
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import ExportError, PermanentError, RetryableError, StartError
from gpulens.pipeline.otlp import encode
from gpulens.pipeline.otlp_sending import USER_AGENT
from gpulens.pipeline.status import Status
from tests.exporters.otlp.rig import Rig, make_certificate, node, pod, tick, until
from tests.pipeline.export_bench import NoExtensions

Context = grpc.aio.ServicerContext[ExportMetricsServiceRequest, ExportMetricsServiceResponse]
Answer = Callable[[Context], Awaitable[ExportMetricsServiceResponse]]


async def _fine(context: Context) -> ExportMetricsServiceResponse:
    return ExportMetricsServiceResponse()


@dataclass
class Service(metrics_service_pb2_grpc.MetricsServiceServicer):
    """A real OTLP service that keeps what it gets."""

    answer: Answer = _fine
    requests: list[ExportMetricsServiceRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)

    async def Export(  # noqa: N802 - the service's own spelling
        self, request: ExportMetricsServiceRequest, context: Context
    ) -> ExportMetricsServiceResponse:
        self.requests.append(request)
        self.metadata.append({str(key): value for key, value in context.invocation_metadata() or ()})
        return await self.answer(context)


@asynccontextmanager
async def serving(
    service: Service, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[int]:
    """Runs the service; gives its port."""
    server = grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def pushing(rig: Rig, **keys: object) -> AsyncIterator[GrpcPusher]:
    """An open pusher."""
    pusher = GrpcPusher(OtlpGrpcConfig.model_validate({"tls": {"insecure": True}, **keys}), rig.settings)
    await pusher.open()
    try:
        yield pusher
    finally:
        await pusher.close()


@asynccontextmanager
async def exporting(rig: Rig, **keys: object) -> AsyncIterator[Exporter[Batch]]:
    """A running exporter, made as the graph makes it."""
    assert FACTORY.metrics is not None
    config = FACTORY.config.model_validate({"tls": {"insecure": True}, "sending_queue": {"num_consumers": 1}, **keys})
    exporter = FACTORY.metrics(rig.settings, config)
    await exporter.start(NoExtensions())
    try:
        yield exporter
    finally:
        await exporter.shutdown()


async def test_a_batch_arrives_as_it_was() -> None:
    """The server gets the message of the batch, our user agent, the configured headers, gzip-compressed."""
    service, rig, batch = Service(), Rig(), tick(pod("a", "GPU-1", "GPU-2"), node("GPU-1"))
    async with (
        serving(service) as port,
        exporting(rig, endpoint=f"127.0.0.1:{port}", headers={"Authorization": "Bearer t0ken"}) as exporter,
    ):
        exporter.consume(batch, Ack())
        await until(lambda: rig.count("otelcol_exporter_sent_metric_points") == 3)
    assert service.requests == [ExportMetricsServiceRequest.FromString(encode(batch))]
    metadata = service.metadata[0]
    assert str(metadata["user-agent"]).startswith(USER_AGENT)
    assert metadata["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize("compression", ["gzip", "none", ""])
async def test_compression_is_gzip_or_none(compression: str) -> None:
    """The server reads every allowed compression."""
    service, batch = Service(), tick(pod("a", *map(str, range(50))))
    async with (
        serving(service) as port,
        pushing(Rig(), endpoint=f"127.0.0.1:{port}", compression=compression) as pusher,
    ):
        await pusher.push(encode(batch), 50, 5)
    assert service.requests == [ExportMetricsServiceRequest.FromString(encode(batch))]


RETRYABLE = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_codes_are_retryable_by_the_specification(code: grpc.StatusCode) -> None:
    """Six codes may be tried again; RESOURCE_EXHAUSTED without RetryInfo and all others may not."""

    async def fail(context: Context) -> ExportMetricsServiceResponse:
        await context.abort(code, "because")

    async with serving(Service(fail)) as port, pushing(Rig(), endpoint=f"127.0.0.1:{port}") as pusher:
        with pytest.raises(ExportError, match=f"127.0.0.1:{port}: {code.name}: because") as caught:
            await pusher.push(b"", 0, 5)
    assert isinstance(caught.value, RetryableError) == (code.name in RETRYABLE)
    assert isinstance(caught.value, PermanentError) != (code.name in RETRYABLE)
    assert caught.value.reason == code.name.lower()


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_retry_info_makes_a_delay(code: grpc.StatusCode) -> None:
    """A RetryInfo says when to come back, and makes RESOURCE_EXHAUSTED retryable."""

    async def fail(context: Context) -> ExportMetricsServiceResponse:
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(seconds=7, nanos=500_000_000)))
        status = RpcStatus(code=code.value[0], message="later", details=[detail])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        await context.abort(code, "later")

    async with serving(Service(fail)) as port, pushing(Rig(), endpoint=f"127.0.0.1:{port}") as pusher:
        with pytest.raises(RetryableError) as caught:
            await pusher.push(b"", 0, 5)
    assert caught.value.delay_s == 7.5


async def test_a_partial_success_is_counted_and_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """Rejected points are counted at each answer, logged once while the message is the same, and never resent."""

    async def partly(context: Context) -> ExportMetricsServiceResponse:
        response = ExportMetricsServiceResponse()
        response.partial_success.rejected_data_points = 2
        response.partial_success.error_message = "too old"
        return response

    service, rig = Service(partly), Rig()
    with caplog.at_level(logging.INFO, "gpulens"):
        async with serving(service) as port, exporting(rig, endpoint=f"127.0.0.1:{port}") as exporter:
            for second in range(3):
                exporter.consume(tick(pod("a", "GPU-1", "GPU-2"), second=second), Ack())
            await until(lambda: rig.count("otelcol_exporter_sent_metric_points") == 6)
    assert len(service.requests) == 3
    assert rig.count("gpulens_exporter_rejected_metric_points", reason="partial_success") == 6
    assert [record.getMessage() for record in caplog.records] == ["Partial success."]


async def test_an_answer_that_is_not_understood_is_a_success() -> None:
    """The server took the data; garbage in its answer must not make us send it twice."""

    async def handle(request: bytes, context: object) -> bytes:
        return b"\xff\xff"

    server = grpc.aio.server()
    service, _, method = EXPORT_METRICS[1:].partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with pushing(Rig(), endpoint=f"127.0.0.1:{port}") as pusher:
        await pusher.push(b"", 0, 5)
    await server.stop(None)


async def test_an_endpoint_nobody_listens_on_is_retried_and_named(free_port: Callable[[], int]) -> None:
    """The status names endpoint and cause; when a server comes, everything queued arrives, in order."""
    port, rig, service = free_port(), Rig(), Service()
    retry = {"initial_interval": "10ms", "max_interval": "50ms"}
    async with exporting(rig, endpoint=f"127.0.0.1:{port}", retry_on_failure=retry) as exporter:
        for second in range(3):
            exporter.consume(tick(pod("a", "GPU-1"), second=second), Ack())
        await until(lambda: rig.board.get("x").status is Status.RECOVERABLE)
        reason = rig.board.get("x").reason
        assert f"127.0.0.1:{port}: UNAVAILABLE: " in reason
        assert "refused" in reason.lower()
        async with serving(service, f"127.0.0.1:{port}"):
            await until(lambda: rig.count("otelcol_exporter_sent_metric_points") == 3)
    scopes = [request.resource_metrics[0].scope_metrics[0] for request in service.requests]
    times = [scope.metrics[0].gauge.data_points[0].time_unix_nano for scope in scopes]
    assert times == sorted(times)
    assert len(times) == 3
    assert rig.board.get("x").status is Status.OK


async def test_a_server_that_hangs_is_a_timeout() -> None:
    """A try ends at its deadline and may be repeated."""

    async def hang(context: Context) -> ExportMetricsServiceResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(Service(hang)) as port, pushing(Rig(), endpoint=f"127.0.0.1:{port}") as pusher:
        with pytest.raises(RetryableError, match="DEADLINE_EXCEEDED"):
            await pusher.push(b"", 0, 0.05)


async def test_unix_sockets_and_schemes_work(tmp_path: Path) -> None:
    """`unix:` names and `http://` reach the server; the latter needs no `insecure`."""
    service, path = Service(), tmp_path / "otlp.sock"
    async with serving(service, f"unix:{path}"), pushing(Rig(), endpoint=f"unix:{path}") as pusher:
        await pusher.push(b"", 0, 5)
    async with serving(service) as port, pushing(Rig(), endpoint=f"http://127.0.0.1:{port}", tls={}) as pusher:
        await pusher.push(b"", 0, 5)
    assert len(service.requests) == 2


async def test_tls_needs_the_right_authority(tmp_path: Path) -> None:
    """With `ca_file` the request arrives; with another authority it does not, and the error may pass."""
    cert, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "elsewhere")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    service = Service()
    async with serving(service, "localhost:0", credentials) as port:
        async with pushing(Rig(), endpoint=f"localhost:{port}", tls={"ca_file": str(cert)}) as pusher:
            await pusher.push(b"", 0, 10)
        async with pushing(Rig(), endpoint=f"https://localhost:{port}", tls={"ca_file": str(other)}) as pusher:
            with pytest.raises(RetryableError, match="UNAVAILABLE"):
                await pusher.push(b"", 0, 10)
    assert len(service.requests) == 1


async def test_a_certificate_that_can_not_be_read_ends_the_start(tmp_path: Path) -> None:
    """The message names the file."""
    config = OtlpGrpcConfig.model_validate({"endpoint": "h:1", "tls": {"ca_file": str(tmp_path / "none.pem")}})
    with pytest.raises(StartError, match=r"none\.pem: No such file"):
        await GrpcPusher(config, Rig().settings).open()


async def test_shutdown_comes_without_start_and_twice() -> None:
    """Both are allowed by the contract."""
    assert FACTORY.metrics is not None
    exporter = FACTORY.metrics(Rig().settings, OtlpGrpcConfig(endpoint="h:1"))
    await exporter.shutdown()
    await exporter.shutdown()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"endpoint": ""}, 'requires a non-empty "endpoint"'),
        ({"endpoint": "otel-collector"}, "is not host:port"),
        ({"endpoint": "h:99999"}, "is not host:port"),
        ({"endpoint": "http://h:1/path"}, "is not host:port"),
        ({"endpoint": "ftp://h:1"}, 'the scheme "ftp" is unknown'),
        ({"endpoint": "h:1", "tls": {"insecure_skip_verify": True}}, "'insecure_skip_verify' is not possible"),
        ({"endpoint": "h:1", "tls": {"cert_file": "c"}}, "provide both certificate and key, or neither"),
        ({"endpoint": "h:1", "headers": {"a b": "c"}}, "can't be the name of a gRPC header"),
        ({"endpoint": "h:1", "headers": {"a": "b\nc"}}, "characters that gRPC does not send"),
        ({"endpoint": "h:1", "compression": "zstd"}, "compression"),
        ({"endpoint": "h:1", "owner": "pod"}, "owner"),
    ],
)
def test_config_errors_say_what_to_do(keys: dict[str, object], text: str) -> None:
    """Each mistake has a text of its own."""
    with pytest.raises(ValidationError, match=text):
        OtlpGrpcConfig.model_validate(keys)


def test_endpoint_forms() -> None:
    """Every form that the Collector takes names the same target, and schemes decide about TLS."""
    assert [parse_target(e).address for e in ("h:1", "http://h:1", "https://h:1/", "[::1]:4317", "dns:///h:1")] == [
        "h:1",
        "h:1",
        "h:1",
        "[::1]:4317",
        "dns:///h:1",
    ]
    assert OtlpGrpcConfig.model_validate({"endpoint": "https://h:1", "tls": {"insecure": True}}).secure
    assert not OtlpGrpcConfig.model_validate({"endpoint": "http://h:1"}).secure
    assert OtlpGrpcConfig.model_validate({"endpoint": "h:1"}).secure
    assert OtlpGrpcConfig(endpoint="http://h:1").destination() == OtlpGrpcConfig(endpoint="h:1").destination()


def test_headers_are_never_printed() -> None:
    """A configuration's repr and dump show no header value."""
    config = OtlpGrpcConfig.model_validate({"endpoint": "h:1", "headers": {"authorization": "t0ken"}})
    assert "t0ken" not in repr(config) + config.model_dump_json()
