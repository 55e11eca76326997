"""What is asked of the NVML process and what it tells.

Invariant: an answer belongs to the tick it was asked for; what comes later than that is not passed off as newer than
it is. What a process told is forgotten with it, but for the calls that hung: the next one must not make them at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from gpulens.nvml.protocol import Do, Json, Message, ProtocolError, Say, Tier
from gpulens.nvml.reason import Reason
from gpulens.pipeline.clock import Clock
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.scraping import DeadlineError, within
from gpulens.pipeline.telemetry import Telemetry
from gpulens.receivers.nvml.messages import (
    Answer,
    Driver,
    Reading,
    Shape,
    Silence,
    Xid,
    driver_of,
    items,
    number,
    numbers_of,
    shape_of,
    text,
    whole,
    xid_of,
)
from gpulens.receivers.nvml.trouble import explain


@dataclass(slots=True)
class _Pending:
    answer: Answer
    done: asyncio.Future[None]
    tick: int
    asked: bool = False

    def expire(self, _timer: object) -> None:
        """Time is up."""
        if not self.done.done():
            self.done.set_result(None)

    def settle(self) -> None:
        answer = self.answer
        if self.asked and not self.done.done():
            answered = answer.readings.keys() | answer.silences.keys()
            if answered.issuperset(answer.gpus):
                self.done.set_result(None)


_STRIKES: Final = 2
"""So many ticks in a row without a word, and the process is taken for dead."""
_SETTLE_S: Final = 60.0
"""A driver that has just begun to be in trouble may get over it by itself."""
_LONGEST_PAUSE_S: Final = 600.0
_STUCK_CODES: Final = frozenset({18, 999})
"""Library and driver of different versions; unknown error, as after a lost device cgroup."""


class Conversation:
    """Asks the process for readings and keeps what it tells besides.

    `tell` sends it a message; `give_up` has it replaced. Both are the supervisor's.
    """

    def __init__(self, settings: Message, clock: Clock, telemetry: Telemetry, source: str) -> None:
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._source = source
        self._ticks = count(1)
        self._pending: dict[int, _Pending] = {}
        self._shapes: dict[int, Shape] = {}
        self._newest: dict[tuple[str, Tier], int] = {}
        self._takers: dict[Say, Callable[[Message], None]] = {
            Say.DRIVER: self._take_driver,
            Say.ASKED: self._take_asked,
            Say.SHAPE: self._take_shape,
            Say.READINGS: self._take_readings,
            Say.SILENT: self._take_silent,
            Say.CHANGED: self._take_changed,
            Say.EVENT: self._take_event,
            Say.HUNG: self._take_hung,
            Say.BACK: self._take_back,
            Say.CALLS: self._take_calls,
        }
        self._alive = False
        self._generation = 0
        self._strikes = 0
        self._trouble = "the NVML process has not started yet"
        self._told = asyncio.Event()
        self.born_s = self._told_s = 0.0
        self._hang_pause_s = 0.0
        self._hung_here: set[tuple[str, str]] = set()
        self.driver: Driver | None = None
        self.hung: set[tuple[str, str]] = set()
        self._read_at: dict[str, float] = {}
        self.changed = asyncio.Event()
        self.xids: list[Xid] = []
        self.tell: Callable[[Message], None] = lambda _message: None
        self.give_up: Callable[[str], None] = lambda _why: None

    @property
    def is_up(self) -> bool:
        """Whether a process is there and the driver answers it."""
        return self._alive and self.driver is not None and self.driver.up

    def take_xids(self) -> list[Xid]:
        """The events since the last time."""
        taken, self.xids = self.xids, []
        return taken

    # --- asking

    async def read(self, tier: Tier, limit_s: float) -> Answer:
        """Asks for a tier and waits for all GPUs that will answer, at most `limit_s`. Raises ScrapeError when nothing
        can be told at all: no process, no driver, or no answer to the question itself."""
        begin = self._clock.monotonic()
        if not self._told.is_set():
            try:
                await within(self._clock, limit_s, self._told.wait())
            except DeadlineError:
                self._blame_start()
                raise ScrapeError(self._trouble, "starting") from None
        if not self._alive:
            raise ScrapeError(self._trouble, "process")
        if self.driver is None or not self.driver.up:
            raise self._driver_error()
        pending = self._ask(tier)
        left = max(limit_s - (self._clock.monotonic() - begin), 0.001)
        timer = asyncio.ensure_future(self._clock.sleep(left))
        timer.add_done_callback(pending.expire)
        try:
            await pending.done
        finally:
            timer.cancel()
            self._pending.pop(pending.tick, None)
        if not pending.asked:
            self._strike(limit_s)
            raise ScrapeError(f"the NVML process did not answer within {limit_s:g}s", "timeout")
        return self._close(pending.answer)

    def _ask(self, tier: Tier) -> _Pending:
        tick = next(self._ticks)
        pending = _Pending(Answer(tier, self._clock.monotonic()), asyncio.get_running_loop().create_future(), tick)
        self._pending[tick] = pending
        self.tell({"do": str(Do.READ), "tick": tick, "tier": str(tier)})
        return pending

    def _close(self, answer: Answer) -> Answer:
        if not self._alive:
            raise ScrapeError(self._trouble, "process")
        if self.driver is None or not self.driver.up:
            raise self._driver_error()
        answered = answer.readings.keys() | answer.silences.keys()
        answer.missing = tuple(gpu for gpu in answer.gpus if gpu not in answered)
        self._blame_hang(answer)
        return answer

    def _blame_hang(self, answer: Answer) -> None:
        """Where every GPU hangs there is nothing to lose: the process is replaced. Only what hung in this very process
        counts; its successor keeps quiet about those calls until it may try them. If they hang there again, it is left
        in peace for longer each time."""
        known = {*answer.gpus, *answer.silences}
        alive = answer.readings.keys() | {g for g, s in answer.silences.items() if s.reason != Reason.HUNG}
        if not known or alive or not known <= {gpu for gpu, _ in self._hung_here}:
            return
        if self._age_s() >= self._hang_pause_s:
            self._hang_pause_s = min(max(_SETTLE_S, 2 * self._hang_pause_s), _LONGEST_PAUSE_S)
            calls = ", ".join(sorted({call for _, call in self._hung_here}))
            self.give_up(f"no GPU answers, {calls} hangs")

    def _blame_start(self) -> None:
        """A process that has not told the driver's state for so long will not do so any more."""
        if self._alive and self._age_s() >= _SETTLE_S:
            self.give_up("it has not told the driver's state")

    def _blame_driver(self, driver: Driver) -> None:
        """A library that does not fit the driver stays loaded in its process, and one that hangs hangs there: a new
        process may find another."""
        stuck = driver.reason == Reason.HUNG or driver.code in _STUCK_CODES
        if stuck and self._clock.monotonic() - self._told_s >= _SETTLE_S:
            self.give_up(explain(driver.reason, driver.code, driver.text))

    def _age_s(self) -> float:
        return self._clock.monotonic() - self.born_s

    def _strike(self, limit_s: float) -> None:
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self.give_up(f"it did not say a word in {self._strikes} ticks of {limit_s:g}s")

    def _driver_error(self) -> ScrapeError:
        driver = self.driver
        if driver is None:
            return ScrapeError(self._trouble, "starting")
        self._blame_driver(driver)
        return ScrapeError(explain(driver.reason, driver.code, driver.text), driver.reason or "driver")

    # --- the process's life (Peer)

    def began(self) -> Message:
        """What a new process is told first."""
        self._generation += 1
        self.born_s = self._clock.monotonic()
        self._hung_here.clear()
        self._read_at.clear()  # its windows begin with it
        self._alive = True
        self._strikes = 0
        self._trouble = "the NVML process has not told the driver's state yet"
        self._told.clear()
        self.driver = None
        hung: list[Json] = [[gpu, call] for gpu, call in sorted(self.hung)]
        return {**self._settings, "do": str(Do.CONFIGURE), "hung": hung}

    def ended(self, why: str) -> None:
        """Every open question fails now, not at its deadline."""
        self._alive = False
        self._trouble = f"the NVML process is gone: {why}"
        self._shapes.clear()
        self._newest.clear()
        self._told.set()
        for pending in self._pending.values():
            pending.asked = True
            if not pending.done.done():
                pending.done.set_result(None)

    def heard(self, message: Message) -> None:
        """Takes in what the process said. Raises ProtocolError."""
        try:
            self._take(Say(text(message["say"])), message)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"{message.get('say')!r}: {error!r}") from error

    def _take(self, say: Say, message: Message) -> None:
        self._strikes = 0
        take = self._takers.get(say)
        if take is not None:
            take(message)

    def _take_shape(self, message: Message) -> None:
        number, shape = whole(message["shape"]), shape_of(message)
        before = self._newest.get((shape.gpu, shape.tier))
        if before is not None:
            self._shapes.pop(before, None)
        self._newest[shape.gpu, shape.tier] = number
        self._shapes[number] = shape

    def _take_changed(self, message: Message) -> None:
        self.changed.set()

    def _take_hung(self, message: Message) -> None:
        gpu, call = text(message["gpu"]), text(message["call"])
        self.hung.add((gpu, call))
        self._hung_here.add((gpu, call))
        self._count_failure(call, Reason.HUNG)
        self._telemetry.count("gpulens_nvml_hung_calls", call=call, receiver=self._source)

    def _take_back(self, message: Message) -> None:
        gpu = text(message["gpu"])
        for known in (self.hung, self._hung_here):
            known.difference_update([each for each in known if each[0] == gpu])

    def _take_driver(self, message: Message) -> None:
        before, driver = self.driver, driver_of(message)
        if before is None or before.up or driver.up:
            self._told_s = self._clock.monotonic()
        self.driver = driver
        self._told.set()
        if driver.up:
            # What is no GPU's (or only an index's) has answered, or it would not be up.
            self.hung = {each for each in self.hung if each[0].startswith("GPU-")}
            if before is None or not before.up or before.epoch != driver.epoch:
                self.changed.set()

    def _take_asked(self, message: Message) -> None:
        pending = self._pending.get(whole(message["tick"]))
        if pending is None:
            return
        pending.answer.gpus = tuple(text(gpu) for gpu in items(message["gpus"]))
        pending.asked = True
        pending.settle()

    def _take_readings(self, message: Message) -> None:
        shape = self._shapes[whole(message["shape"])]
        values = numbers_of(message["values"], len(shape.lines))
        codes = set()
        for each in items(message.get("failures") or []):
            call, reason, code = items(each)
            self._count_failure(text(call), text(reason))
            codes.add(whole(code))
        epoch = (self._generation, whole(message.get("epoch") or 0))
        pending = self._pending.get(whole(message["tick"]))
        since_s = self._read_at.get(shape.gpu)
        if shape.tier is Tier.FAST:
            # An answer that came too late still moved the windows that the next one covers.
            self._read_at[shape.gpu] = self._clock.monotonic() if pending is None else pending.answer.asked_s
        if pending is not None:
            self._hang_pause_s = 0.0
            reading = Reading(shape, values, epoch, frozenset(codes), since_s)
            pending.answer.readings[shape.gpu] = reading
            pending.settle()

    def _take_silent(self, message: Message) -> None:
        pending = self._pending.get(whole(message["tick"]))
        call, reason = text(message.get("call") or ""), text(message["reason"])
        self._count_failure(call, reason)
        if pending is not None:
            silence = Silence(reason, call, whole(message.get("code") or 0))
            pending.answer.silences[text(message["gpu"])] = silence
            pending.settle()

    def _take_event(self, message: Message) -> None:
        if message.get("kind") == "xid":
            self.xids.append(xid_of(message, self._clock.now_ns()))

    def _take_calls(self, message: Message) -> None:
        calls = message["calls"]
        if not isinstance(calls, dict):
            raise TypeError("calls")
        for call, numbers in calls.items():
            times, total_s, _longest_s = items(numbers)
            self._telemetry.count("gpulens_nvml_calls", whole(times), call=call, receiver=self._source)
            spent = round(number(total_s) * 1e6)
            self._telemetry.count("gpulens_nvml_call_microseconds", spent, call=call, receiver=self._source)

    def _count_failure(self, call: str, reason: str) -> None:
        self._telemetry.count("gpulens_nvml_call_failures", call=call, reason=str(reason), receiver=self._source)
