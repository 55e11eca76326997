"""The main thread of the child: frames in, and an eye on every call's deadline.

Invariant: this thread never calls NVML, so it always answers. The end of its input is the order to stop.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulens.nvml.containers import Containers
from gpulens.nvml.context import Context, Wish, Writer, sees_all_pids
from gpulens.nvml.control import Control
from gpulens.nvml.events import Events
from gpulens.nvml.gateway import Gateway, Line
from gpulens.nvml.hangs import Hangs
from gpulens.nvml.posts import Post, add_calls
from gpulens.nvml.protocol import HEADER, Do, Json, Message, ProtocolError, Say, Tier, message, size

_CHUNK: Final = 65536
_CLOSE_S: Final = 1.0
_SHUTDOWN_S: Final = 3.0
_MOST_PAUSE_S: Final = 1.0


class Inbox:
    """Frames out of a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole by now. Raises ProtocolError."""
        self._bytes += data
        found: list[Message] = []
        while len(self._bytes) >= HEADER.size:
            length = size(bytes(self._bytes[: HEADER.size]))
            if len(self._bytes) < HEADER.size + length:
                break
            found.append(message(bytes(self._bytes[HEADER.size : HEADER.size + length])))
            del self._bytes[: HEADER.size + length]
        return found


class Agent:
    """The child, from `configure` on."""

    def __init__(self, wish: Wish, writer: Writer, clock: Callable[[], float] = time.monotonic) -> None:
        hangs = Hangs(clock, first_s=wish.first_retry_s, longest_s=wish.longest_retry_s)
        hangs.inherit(wish.hung)
        self._wish = wish
        self._context = Context(
            wish=wish,
            gateway=Gateway(hangs, clock=clock),
            writer=writer,
            containers=Containers(Path(wish.proc)),
            pids_visible=sees_all_pids(wish.host_pid),
        )
        quiet = threading.Event()
        quiet.set()
        self._control = Control(self._context, quiet)
        self._events = Events(self._context, self._control, quiet)

    def start(self) -> None:
        """Starts the control thread and the one for events."""
        self._control.post.start()
        self._events.post.start()

    @property
    def pause_s(self) -> float:
        """How often `look` must be called for deadlines to hold."""
        return min(self._wish.call_timeout_s / 5, _MOST_PAUSE_S)

    @property
    def leaves(self) -> bool:
        """Whether this process is of no use any more and another one should be started."""
        return self._context.leaving.is_set()

    def look(self) -> None:
        """Watches all deadlines."""
        limit = self._wish.call_timeout_s
        self._control.post.look(limit)
        self._events.post.look(limit)
        for worker in self._control.workers:
            worker.look(limit)

    def read(self, tick: int, tier: Tier) -> None:
        """Asks every GPU for a tier."""
        up = self._context.gateway.up
        workers = self._control.workers if up and (tier is not Tier.PROCESSES or self._wish.processes) else ()
        gpus: list[Json] = [one.uuid for one in workers]
        self._context.say(Say.ASKED, tick=tick, tier=tier, gpus=gpus, up=up)
        for worker in workers:
            worker.read(tick, tier)
        if tier is Tier.INVENTORY:
            self._context.say(Say.CALLS, calls=self._calls())
            self._control.kick()

    def _posts(self) -> list[Post]:
        return [self._control.post, self._events.post, *(one.post for one in self._control.workers)]

    def _calls(self) -> dict[str, Json]:
        total: dict[str, list[float]] = {}
        for post in self._posts():
            add_calls(total, post.calls())
        return {
            call: [int(count), round(all_s, 6), round(longest_s, 6)]
            for call, (count, all_s, longest_s) in total.items()
        }

    def stop(self) -> None:
        """Frees what the library gave and shuts it down; who hangs is not waited for."""
        self._context.stopping.set()
        self._control.kick()
        for worker in self._control.workers:
            worker.close()
        until = self._context.gateway.clock() + _CLOSE_S
        for post in self._posts():
            post.end()
            post.join(max(0.0, until - self._context.gateway.clock()))
        if self._context.gateway.up:
            ending = threading.Thread(target=self._shut_down, name="shutdown", daemon=True)
            ending.start()
            ending.join(_SHUTDOWN_S)
        self._context.say(Say.GONE)

    def _shut_down(self) -> None:
        Line(self._context.gateway).ask(lambda _: None, "nvmlShutdown", down=True)


def serve(source: int, sink: int) -> None:
    """Serves one receiver until its frames end. Raises ProtocolError when what comes are no frames."""
    inbox, writer = Inbox(), Writer(sink)
    agent: Agent | None = None
    try:
        while True:
            ready, _, _ = select.select([source], [], [], None if agent is None else agent.pause_s)
            if ready:
                data = os.read(source, _CHUNK)
                if not data:
                    return
                for one in inbox.feed(data):
                    do = one.get("do")
                    if do == Do.STOP:
                        return
                    if do == Do.CONFIGURE and agent is None:
                        agent = Agent(Wish.of(one), writer)
                        agent.start()
                    elif do == Do.READ and agent is not None:
                        agent.read(*_asked(one))
            if agent is not None:
                agent.look()
                if agent.leaves:
                    return
    finally:
        if agent is not None:
            agent.stop()


def _asked(one: Message) -> tuple[int, Tier]:
    tick, tier = one.get("tick"), one.get("tier")
    if not isinstance(tick, int) or tier not in {str(known) for known in Tier}:
        raise ProtocolError(f"a read of tick {tick!r} and tier {tier!r}")
    return tick, Tier(str(tier))
