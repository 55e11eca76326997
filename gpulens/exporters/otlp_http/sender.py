"""Sends requests over HTTP and reads what the server says.

Invariant: 429, 502, 503, 504 and a missing answer are retryable and nothing else is; a request that was answered by
a 2xx is never sent again, whatever the body says.
"""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from gpulens.config.ids import Signal
from gpulens.exporters.otlp_http.config import Encoding, OtlpHttpConfig
from gpulens.pipeline.client_tls import ssl_context
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.component import Exporter, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import DecodeError, ExportError, PermanentError, RetryableError
from gpulens.pipeline.exporting import QueuedExporter
from gpulens.pipeline.otlp_json import decode_json_message, encode_json
from gpulens.pipeline.otlp_sending import (
    USER_AGENT,
    Answers,
    Compression,
    OtlpEncoding,
    parse_answer,
    parse_status,
)

ANSWER_LIMIT: Final = 4 * 2**20
"""Bytes of an answer that are read, decompressed (OTLP specification)."""

_RETRYABLE: Final = frozenset({429, 502, 503, 504})
_THROTTLING: Final = frozenset({429, 503})
_TYPES: Final = {Encoding.PROTO: "application/x-protobuf", Encoding.JSON: "application/json"}
_SHOWN: Final = 300


class HttpPusher:
    """One session with one server."""

    def __init__(self, config: OtlpHttpConfig, settings: Settings) -> None:
        self._config = config
        self._clock = settings.clock
        self._answers = Answers(settings)
        self._session: aiohttp.ClientSession | None = None
        self._ssl: ssl.SSLContext | bool = True

    async def open(self) -> None:
        """Makes the session, which connects at the first request. Raises StartError."""
        if urlsplit(self._config.url).scheme == "https":
            self._ssl = ssl_context(self._config.tls)
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers())

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": USER_AGENT, "Content-Type": _TYPES[self._config.encoding]}
        if self._config.compression is Compression.GZIP:
            headers["Content-Encoding"] = "gzip"
        own = {name.lower(): value.reveal() for name, value in self._config.headers.items()}
        return {**{name: value for name, value in headers.items() if name.lower() not in own}, **own}

    async def push(self, request: bytes, items: int, timeout_s: float) -> None:
        """Sends one request. Raises PermanentError or RetryableError."""
        if self._session is None:
            raise PermanentError("the exporter is not started", "not_started")
        body = encode_json(request) if self._config.encoding is Encoding.JSON else request
        if self._config.compression is Compression.GZIP:
            body = gzip.compress(body, compresslevel=6, mtime=0)
        try:
            async with self._session.post(
                self._config.url,
                data=body,
                ssl=self._ssl,
                server_hostname=self._config.tls.server_name_override or None,
                timeout=aiohttp.ClientTimeout(total=timeout_s or None),
                allow_redirects=False,  # aiohttp would follow a 302 with a GET
            ) as response:
                status, headers = response.status, response.headers
                answer, problem = await _read(response)
        except TimeoutError as error:
            raise RetryableError(f"{self._config.url}: no answer within {timeout_s:g}s", "timeout") from error
        except aiohttp.ClientError as error:
            raise RetryableError(f"{self._config.url}: {str(error) or type(error).__name__}", "unreachable") from error
        if 200 <= status < 300:
            self._take(headers, answer, problem)
        else:
            raise export_error(self._config.url, status, headers, answer, self._clock)

    def _take(self, headers: Mapping[str, str], answer: bytes, problem: str) -> None:
        if not problem:
            try:
                self._answers.take(_parse(headers, answer))
            except (DecodeError, ValueError) as error:
                problem = str(error)
        if problem:
            self._answers.unreadable(problem)

    async def close(self) -> None:
        """Closes the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, str]:
    """The body, and what was wrong with it. The status is what counts: a body that breaks off changes nothing."""
    body = bytearray()
    try:
        async for chunk in response.content.iter_chunked(64 * 1024):
            body += chunk
            if len(body) > ANSWER_LIMIT:
                response.close()
                return b"", f"the answer is larger than {ANSWER_LIMIT} bytes"
    except aiohttp.ClientError as error:
        return b"", f"the answer can't be read: {str(error) or type(error).__name__}"
    return bytes(body), ""


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _parse(headers: Mapping[str, str], answer: bytes) -> ExportMetricsServiceResponse:
    """Raises DecodeError or ValueError."""
    if _content_type(headers) == _TYPES[Encoding.JSON]:
        return decode_json_message(answer, ExportMetricsServiceResponse)
    return parse_answer(answer)


def export_error(url: str, status: int, headers: Mapping[str, str], answer: bytes, clock: Clock) -> ExportError:
    """What an HTTP status means for the request (reference: OTLP specification, "Failures")."""
    text = f"{url}: {status}: {_message(headers, answer) or 'no details'}"
    reason = f"http_{status}"
    if status not in _RETRYABLE:
        return PermanentError(text, reason)
    delay = retry_after(headers.get("Retry-After", ""), clock) if status in _THROTTLING else None
    return RetryableError(text, reason, delay)


def _message(headers: Mapping[str, str], answer: bytes) -> str:
    """The message of a google.rpc.Status, else the body's beginning."""
    status: RpcStatus | None = None
    kind = _content_type(headers)
    if kind == _TYPES[Encoding.PROTO]:
        status = parse_status(answer)
    elif kind == _TYPES[Encoding.JSON]:
        try:
            status = decode_json_message(answer, RpcStatus)
        except DecodeError:
            status = None
    if status is not None:
        return status.message[:_SHOWN]
    return " ".join(answer[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN]


def retry_after(value: str, clock: Clock) -> float | None:
    """Seconds of a Retry-After header, given as seconds or as a date; None when there is none or it can't be
    read."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - clock.now_ns() / 1e9)


def create(settings: Settings, config: OtlpHttpConfig) -> Exporter[Batch]:
    """The exporter of metrics."""
    encoding = OtlpEncoding(settings, config.owner)
    return QueuedExporter(settings, config, Signal.METRICS, encoding.encode, HttpPusher(config, settings))
