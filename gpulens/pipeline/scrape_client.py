"""Fetches the pages that scraping receivers read, and says for how long a page has not changed.

Invariant: a page never takes more memory than its limit; what fits is still read, and the reading says that
it was cut. Every failure is a ScrapeError whose text stays the same while the cause does, so that it is
logged once.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from ssl import SSLContext
from typing import Annotated, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from pydantic import AfterValidator, Field

from gpulens.config.types import Duration, Secret
from gpulens.pipeline.component import Host
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.exposition import Page, PageParser
from gpulens.pipeline.scraping import Opens, ScrapeConfig

DEFAULT_MAX_PAGE_BYTES: Final = 16 * 2**20
"""A busy eight-GPU MIG node with per-pod rows serves about 10 MiB; a page is held twice while it is read,
and the agent's container is usually limited to some 100 MiB."""

_CHUNK: Final = 64 * 1024
_MAX_EXPLANATION: Final = 200
_ACCEPT: Final = "text/plain;version=0.0.4;q=0.9, */*;q=0.1"


def page_url(endpoint: str) -> str:
    """A page's address, with the usual path `/metrics` where none is given.

    Raises ValueError with what to write instead.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f'"{endpoint}" is not an http:// or https:// address; write "http://HOST:PORT/metrics"')
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address is printed and logged: put its credentials into 'headers' (Authorization)")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f'"{endpoint}" has no valid port') from None
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    return urlunsplit(parts._replace(path=path))


class PageScrapeConfig(ScrapeConfig):
    """What every receiver's block has that reads one page over HTTP."""

    endpoint: Annotated[
        str,
        AfterValidator(page_url),
        Field(description="Address of the page; without a path it is `/metrics`."),
    ]
    headers: Annotated[dict[str, Secret], Field(description="Headers of the request.")] = Field(default_factory=dict)
    initial_delay: Annotated[Duration, Field(description="Wait before the first scrape.")] = 1.0
    max_page_size: Annotated[
        int, Field(gt=0, description="Bytes of the page that are read; the rest is left out and reported.")
    ] = DEFAULT_MAX_PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Body:
    """A page as it came.

    - `cut` says why its end is missing, empty when it is whole.
    - `origin` tells apart who served it (a pod's UID); empty where that is not known.
    """

    data: bytes
    cut: str = ""
    origin: str = ""


class PageSource(Protocol):
    """Where pages come from."""

    async def fetch(self) -> Body:
        """The page as it is now. Raises ScrapeError."""

    async def close(self) -> None:
        """Lets go of connections; safe without a fetch and when called twice."""


class HttpPages:
    """A page over HTTP. `refused_hint` says what it means when nobody listens; `tls` is for https pages;
    `fresh_headers` gives, at each fetch, what may change meanwhile (a token that is renewed); `server_name` is the
    name that the certificate must have, the address' own where it is empty."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, Secret],
        max_bytes: int,
        refused_hint: str = "",
        tls: SSLContext | None = None,
        fresh_headers: Callable[[], Mapping[str, str]] | None = None,
        server_name: str = "",
    ) -> None:
        self._url = url
        self._headers = headers
        self._max_bytes = max_bytes
        self._refused_hint = refused_hint
        self._tls = tls
        self._fresh_headers = fresh_headers
        self._server_name = server_name or None
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self) -> Body:
        """The page, at most `max_bytes` of it. Raises ScrapeError; the deadline is the caller's."""
        headers = self._fresh_headers() if self._fresh_headers is not None else None
        try:
            # A redirect would carry the headers, and the secrets in them, to wherever the page says.
            async with self._open().get(
                self._url, headers=headers, server_hostname=self._server_name, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                return await self._read(response)
        except aiohttp.ClientConnectorError as error:
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ScrapeError(f"{self._url}: {type(error).__name__}: {error}", "connection") from error

    async def close(self) -> None:
        """Closes the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)  # the transport's close callbacks run at the loop's next turn

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # 'identity': the source is on this node, so bytes are cheaper than packing and unpacking them,
            # and no small body can unfold into a huge one
            headers = {"Accept": _ACCEPT, "Accept-Encoding": "identity", "User-Agent": "gpulens"}
            headers.update({name: value.reveal() for name, value in self._headers.items()})
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=1, ssl=True if self._tls is None else self._tls),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse) -> Body:
        parts: list[bytes] = []
        size = 0
        try:
            async for part in response.content.iter_chunked(_CHUNK):
                size += len(part)
                parts.append(part)
                if size > self._max_bytes:
                    response.close()
                    data = b"".join(parts)[: self._max_bytes]
                    return Body(data, f"{self._url}: the page is longer than max_page_size ({self._max_bytes} bytes)")
        except aiohttp.ClientPayloadError:
            return Body(b"".join(parts), f"{self._url}: the connection ended within the page")
        return Body(b"".join(parts))

    async def _refusal(self, response: aiohttp.ClientResponse) -> ScrapeError:
        """The error of an answer that is no page, with the first line of what the server says."""
        said = (await response.content.read(_MAX_EXPLANATION)).decode("utf-8", "replace").strip()
        first = said.splitlines()[0] if said else ""
        text = f"{self._url}: HTTP {response.status} {response.reason or ''}".rstrip()
        if "Location" in response.headers:
            first = f"it is at {response.headers['Location'][:_MAX_EXPLANATION]}; give that address, if you trust it"
        return ScrapeError(f"{text}: {first}" if first else text, f"http_{response.status}")

    def _unreachable(self, error: aiohttp.ClientConnectorError) -> ScrapeError:
        if error.os_error.errno == errno.ECONNREFUSED:
            hint = f"; {self._refused_hint}" if self._refused_hint else ""
            return ScrapeError(f"{self._url}: connection refused{hint}", "refused")
        return ScrapeError(f"{self._url}: {error.os_error.strerror or error}", "unreachable")


@dataclass(frozen=True, slots=True)
class Reading:
    """One page, read.

    - `unchanged_s`: for how long the page has been byte-identical; 0 when it is new.
    - `cut`: why its end is missing, empty when it is whole.
    - `origin`: another one means another process behind the page; empty where that is not known.
    """

    page: Page
    unchanged_s: float
    cut: str
    origin: str = ""


class PageReader:
    """Fetches and parses one source's page; a page that is byte-identical to the last one is not parsed
    again."""

    def __init__(self, source: PageSource, parser: PageParser) -> None:
        self._source = source
        self._parser = parser
        self._body = Body(b"")
        self._last: Reading | None = None
        self._since_ns = 0

    async def open(self, host: Host) -> None:
        """Gives the source what it needs of the host, where it needs anything. Raises StartError."""
        if isinstance(self._source, Opens):
            await self._source.open(host)

    async def read(self, now_ns: int) -> Reading:
        """The page as it is now. Raises ScrapeError."""
        body = await self._source.fetch()
        if self._last is None or body != self._body:
            self._last = Reading(self._parser.parse(body.data), 0.0, body.cut, body.origin)
            self._body, self._since_ns = body, now_ns
            return self._last
        return replace(self._last, unchanged_s=max(0, now_ns - self._since_ns) / 1e9)

    async def close(self) -> None:
        """Lets go of the source."""
        await self._source.close()
