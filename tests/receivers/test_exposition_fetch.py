"""Fetching pages: limits, failures that say what is wrong, and pages that stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from gpulens.config.types import Secret
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.scrape_client import Body, HttpPages, PageReader, page_url
from tests.receivers.page_server import serving


async def fetch(url: str, max_bytes: int = 1 << 20, hint: str = "", **headers: str) -> Body:
    """One fetch, and the connection closed behind it."""
    pages = HttpPages(url, {name: Secret(text) for name, text in headers.items()}, max_bytes, hint)
    try:
        return await pages.fetch()
    finally:
        await pages.close()


async def test_fetches_a_page() -> None:
    """The body comes as it is."""
    async with serving("a 1\n") as url:
        assert await fetch(url) == Body(b"a 1\n")


async def test_headers_are_sent() -> None:
    """What the config names reaches the server, and the body is not asked for packed."""
    seen: dict[str, str] = {}

    async def answer(request: web.Request) -> web.Response:
        seen.update(request.headers)
        return web.Response(text="a 1\n")

    async with serving(answer) as url:
        await fetch(url, Authorization="Bearer x")
    assert seen["Authorization"] == "Bearer x"
    assert seen["Accept-Encoding"] == "identity"


async def test_a_redirect_is_told_and_not_followed() -> None:
    """The headers of a request hold secrets: they go to the address in the config and nowhere else."""
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=302, headers={"Location": "/other"})

    async with serving(elsewhere) as url:
        with pytest.raises(ScrapeError, match=r"HTTP 302 Found: it is at /other; give that address"):
            await fetch(url, Authorization="Bearer x")
    assert len(asked) == 1


async def test_a_page_over_the_limit_is_cut_and_says_so() -> None:
    """What fits is kept; the last line, which may be cut within a number, is not trusted."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        sent = 0
        while sent < 100 << 20:
            chunk = b"".join(b'a{i="%d"} 12345\n' % (sent + i) for i in range(1000))
            try:
                await response.write(chunk)
            except ConnectionError:
                break
            sent += len(chunk)
        return response

    async with serving(endless) as url:
        body = await fetch(url, max_bytes=100_000)
    assert len(body.data) == 100_000
    assert "longer than max_page_size (100000 bytes)" in body.cut
    page = PageParser().parse(body.data)
    assert set(page.values) == {12345.0}
    assert page.errors.keys() <= {"truncated"}


async def test_a_connection_that_ends_within_the_page_is_a_cut_page() -> None:
    """The exporter dies while it answers: what came is kept, and it is said."""

    async def dies(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"a 1\nb 2")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(dies) as url:
        body = await fetch(url)
    assert body.data == b"a 1\nb 2"
    assert "ended within the page" in body.cut


async def test_nobody_listening_is_refused_with_the_hint(free_port: Callable[[], int]) -> None:
    """The error names the address and what it may mean, in the same words each time."""
    url = f"http://127.0.0.1:{free_port()}/metrics"
    texts = set()
    for _ in range(2):
        with pytest.raises(ScrapeError) as caught:
            await fetch(url, hint="is it running?")
        texts.add(str(caught.value))
        assert caught.value.reason == "refused"
    assert texts == {f"{url}: connection refused; is it running?"}


async def test_an_error_answer_is_reported_with_what_the_server_says() -> None:
    """The status and the first line of the body: the exporter explains itself there."""

    async def fails(request: web.Request) -> web.Response:
        return web.Response(status=500, text="internal server error: kubelet\nmore\n")

    async with serving(fails) as url:
        with pytest.raises(ScrapeError, match=r"HTTP 500 .*: internal server error: kubelet$") as caught:
            await fetch(url)
    assert caught.value.reason == "http_500"


async def test_closing_is_safe_at_any_time() -> None:
    """Before a fetch and twice."""
    pages = HttpPages("http://127.0.0.1:9/metrics", {}, 10)
    await pages.close()
    await pages.close()


async def test_a_fetch_that_is_given_up_leaves_the_client_usable() -> None:
    """A deadline of the caller's cancels one fetch, not the next one."""
    hang = True

    async def answer(request: web.Request) -> web.Response:
        if hang:
            await asyncio.Event().wait()
        return web.Response(text="a 1\n")

    async with serving(answer) as url:
        pages = HttpPages(url, {}, 1000)
        task = asyncio.ensure_future(pages.fetch())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hang = False
        assert (await pages.fetch()).data == b"a 1\n"
        await pages.close()


class Pages:
    """Bodies one after the other."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)

    async def fetch(self) -> Body:
        """The next one."""
        return Body(self.bodies.pop(0))

    async def close(self) -> None:
        """Nothing to close."""


async def test_a_page_that_stands_still_is_told_and_not_parsed_again() -> None:
    """The same bytes: the same page object, and the time since they came."""
    reader = PageReader(Pages(b"a 1\n", b"a 1\n", b"a 1\n", b"a 2\n"), PageParser())
    readings = [await reader.read(second * 10**9) for second in (100, 130, 160, 190)]
    assert [reading.unchanged_s for reading in readings] == [0.0, 30.0, 60.0, 0.0]
    assert readings[0].page is readings[1].page is readings[2].page
    assert readings[3].page.values == [2.0]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:9400", "http://h:9400/metrics"),
        ("http://h:9400/", "http://h:9400/metrics"),
        ("https://h/federate?match[]=x", "https://h/federate?match[]=x"),
        ("http://[::1]:9400/m", "http://[::1]:9400/m"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    """`/metrics` is where exporters serve."""
    assert page_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["", "h:9400", "localhost", "ftp://h/metrics", "http://", "http://h:99999/"])
def test_an_address_that_can_not_work_is_refused_with_an_example(endpoint: str) -> None:
    """The text says what to write."""
    with pytest.raises(ValueError, match=r"http://HOST:PORT/metrics|no valid port"):
        page_url(endpoint)
