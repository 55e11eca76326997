"""Sends requests over gRPC and reads what the server says.

Invariant: a code is retryable or permanent by the OTLP specification's table alone, and a request that was taken,
wholly or in part, is never sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import grpc

from gpulens.config.ids import Signal
from gpulens.exporters.otlp_grpc.config import OtlpGrpcConfig, parse_target
from gpulens.pipeline.client_tls import grpc_credentials
from gpulens.pipeline.component import Exporter, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import ExportError, PermanentError, RetryableError
from gpulens.pipeline.exporting import QueuedExporter
from gpulens.pipeline.otlp_sending import (
    USER_AGENT,
    Answers,
    Compression,
    OtlpEncoding,
    parse_answer,
    parse_status,
    retry_delay,
)

EXPORT_METRICS: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_ANSWER_LIMIT: Final = 4 * 2**20
# gRPC's own waits between connection attempts grow to two minutes; ours decide when to try, so they must not.
_RECONNECT_MS: Final = 5_000


class GrpcPusher:
    """One channel to one server."""

    def __init__(self, config: OtlpGrpcConfig, settings: Settings) -> None:
        self._config = config
        self._answers = Answers(settings)
        self._channel: grpc.aio.Channel | None = None
        self._metadata = tuple((name.lower(), value.reveal()) for name, value in config.headers.items())

    async def open(self) -> None:
        """Makes the channel, which connects at the first request. Raises StartError."""
        config = self._config
        address = parse_target(config.endpoint).address
        if config.secure:
            credentials = grpc_credentials(config.tls)
            self._channel = grpc.aio.secure_channel(address, credentials, options=self._options())
        else:
            self._channel = grpc.aio.insecure_channel(address, options=self._options())

    def _options(self) -> list[tuple[str, str | int]]:
        config = self._config
        options: list[tuple[str, str | int]] = [
            ("grpc.primary_user_agent", USER_AGENT),
            ("grpc.max_receive_message_length", _ANSWER_LIMIT),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 1_000),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.enable_retries", 0),
        ]
        if config.authority:
            options.append(("grpc.default_authority", config.authority))
        if config.tls.server_name_override:
            options.append(("grpc.ssl_target_name_override", config.tls.server_name_override))
        if config.keepalive is not None:
            options += [
                ("grpc.keepalive_time_ms", round(config.keepalive.time * 1000)),
                ("grpc.keepalive_timeout_ms", round(config.keepalive.timeout * 1000)),
                ("grpc.keepalive_permit_without_calls", int(config.keepalive.permit_without_stream)),
            ]
        return options

    async def push(self, request: bytes, items: int, timeout_s: float) -> None:
        """Sends one request. Raises PermanentError or RetryableError."""
        if self._channel is None:
            raise PermanentError("the exporter is not started", "not_started")
        call = self._channel.unary_unary(EXPORT_METRICS, _as_it_is, _as_it_is)
        gzip = self._config.compression is Compression.GZIP
        try:
            answer = await call(
                request,
                timeout=timeout_s or None,
                metadata=self._metadata,
                wait_for_ready=self._config.wait_for_ready,
                compression=grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression,
            )
        except grpc.aio.AioRpcError as error:
            raise export_error(error, self._config.endpoint) from error
        try:
            self._answers.take(parse_answer(answer))
        except ValueError as error:
            self._answers.unreadable(str(error))

    async def close(self) -> None:
        """Closes the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


def _as_it_is(data: bytes) -> bytes:
    return data


def export_error(error: grpc.aio.AioRpcError, endpoint: str) -> ExportError:
    """What a gRPC status means for the request (reference: OTLP specification, "Failures")."""
    code = error.code()
    delay = None
    # The stubs know this metadata as something else than the pairs that it is.
    trailer = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for name, value in trailer:
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            status = parse_status(value)
            delay = None if status is None else retry_delay(status)
    text = f"{endpoint}: {code.name}: {error.details() or 'no details'}"
    reason = code.name.lower()
    if code in _RETRYABLE or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and delay is not None):
        return RetryableError(text, reason, delay)
    return PermanentError(text, reason)


def create(settings: Settings, config: OtlpGrpcConfig) -> Exporter[Batch]:
    """The exporter of metrics."""
    encoding = OtlpEncoding(settings, config.owner)
    return QueuedExporter(settings, config, Signal.METRICS, encoding.encode, GrpcPusher(config, settings))
