"""One named daemon thread that does blocking calls for the loop.

Invariant: calls run one after the other; a call that hangs blocks nobody but its own caller, and never the
process's end (which an executor's thread would).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread with a queue of calls; started by the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread; its result, or its exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put(partial(_run_for, loop, future, function))
        return await future

    def close(self) -> None:
        """Lets the thread end after the call it is in."""
        if self._thread is not None:
            self._thread = None
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _run_for(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], function: Callable[[], T]) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(_settle, future, function())
    except Exception as error:  # noqa: BLE001 - it is raised where the call was made
        settle = partial(_fail, future, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # the caller may have gone
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
