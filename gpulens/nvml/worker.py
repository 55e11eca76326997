"""Everything that is asked of one GPU, by one thread, in order.

Invariant: each read is answered once, by readings or by silence; a tick in which the GPU is lost, its driver gone or
its handle stale gives no readings at all, so that no value stands beside one of another life.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from gpulens.nvml import devices
from gpulens.nvml.context import Context
from gpulens.nvml.devices import Identity, Layout
from gpulens.nvml.fields import LinkSums
from gpulens.nvml.gateway import Line, Target
from gpulens.nvml.gpm import Windows
from gpulens.nvml.posts import Post
from gpulens.nvml.processes import BusyWindow
from gpulens.nvml.protocol import Say, Tier
from gpulens.nvml.readings import Readings, TickError
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.samples import SampleWindow
from gpulens.nvml.sight import Board, Sight

_REFRESH: Final = "refresh"
_PROBE: Final = "probe"
_CLOSE: Final = "close"

_ENERGY: Final = "nvmlDeviceGetTotalEnergyConsumption"

_PRESENT: Final = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetPerformanceState")
"""What a GPU that was lost must answer (if only by 'not supported') to count as back."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a GPU is to be found: what the last enumeration said. `epoch` is the driver's."""

    handle: object
    index: int
    epoch: int


class Worker:
    """One GPU. `read`, `look` and `close` are for the main thread; `adopt`, `lose` and `end` for the control thread.

    `lives` rises each time the GPU answers again after it was lost or hung: who keeps something of it asks anew.

    `trouble` is told, from the worker's own thread, when the driver (True) or only this GPU's handle (False) must be
    looked for again, with the driver's epoch that the finding belongs to.
    """

    def __init__(self, uuid: str, place: Place, context: Context, trouble: Callable[[int, bool], None]) -> None:
        self.uuid = uuid
        self.lost: Failure | None = None
        self.wants_handle = False
        self.place = place
        self.lives = 1
        self._context = context
        self._trouble = trouble
        self._jobs: OrderedDict[str, int] = OrderedDict()
        self._doing: tuple[str, int] | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._hung = False
        self._coming: Place | None = place
        self._known = False
        self._epoch = context.number()
        self._driver_epoch = place.epoch
        self._energy = 0
        self._readings = Readings(context, uuid)
        self._board = Board(
            here=Target(uuid, uuid, place.handle),
            identity=Identity(uuid, place.index),
            windows=Windows(context.wish.gpm_window_s),
            containers=context.containers,
            pids_visible=context.pids_visible,
        )
        hangs, clock = context.gateway.hangs, context.gateway.clock
        self.post = Post(
            f"gpu-{place.index}",
            context.gateway,
            self._work,
            hung=self._left,
            died=lambda: self._answer_all(Failure(Reason.ERROR, 0, "")),
            free=lambda: clock() >= hangs.retry_at(uuid),
        )
        self._put(_REFRESH, 0)

    # ---- from other threads ----

    def read(self, tick: int, tier: Tier) -> None:
        """Asks for readings; the answer comes from this GPU's thread, or at once where it can't answer."""
        refused = self._refused(tier)
        if refused is not None:
            self._context.silent(tick, tier, self.uuid, refused)
            return
        before = self._put(tier, tick)
        if before is not None:
            busy = self.post.busy
            self._context.silent(before, tier, self.uuid, Failure(Reason.EMPTY, 0, busy[1] if busy else ""))

    def _refused(self, tier: Tier) -> Failure | None:
        hung = self._context.gateway.hangs.of(self.uuid)
        if hung is not None:
            return Failure(Reason.HUNG, 0, hung)
        if tier is Tier.INVENTORY:
            return None  # who it is stays known
        if self.lost is not None:
            return self.lost
        return None if self._context.gateway.up else Failure(Reason.DRIVER, 0, "")

    def look(self, limit_s: float) -> None:
        """Watches the deadline of the call under way; tells that calls hang, and that they answer again."""
        self.post.look(limit_s)
        hangs = self._context.gateway.hangs
        hung = hangs.of(self.uuid)
        if hung is not None and not self._hung:
            self._hung = True
            self._answer_all(Failure(Reason.HUNG, 0, hung))
        elif hung is None and self._hung:
            self._hung = False
            self._live_again()
            self._context.note(f"{self.uuid} answers again")
        if hung is not None and self._context.gateway.clock() >= hangs.retry_at(self.uuid):
            self._put(_PROBE, 0)

    def _live_again(self) -> None:
        self.lives += 1
        self._context.say(Say.BACK, gpu=self.uuid)
        self._trouble(self.place.epoch, False)

    def adopt(self, place: Place) -> None:
        """The GPU was found (again), maybe elsewhere or under another driver."""
        with self._changed:
            self._coming = place
        self.place = place
        self.wants_handle = False
        self._put(_REFRESH, 0)

    def refresh(self) -> None:
        """The driver says that this GPU's partitioning changed."""
        self._put(_REFRESH, 0)

    def lose(self, failure: Failure) -> None:
        """The GPU is there no more, but is remembered."""
        if self.lost is None:
            self.lost = failure
            self._context.note(f"{self.uuid} was lost{_told_by(failure)}")

    def close(self) -> None:
        """Frees what the library gave and ends the thread."""
        self._put(_CLOSE, 0)
        self.post.end()

    def end(self) -> None:
        """Ends the thread of a GPU that is not listed any more."""
        self.post.end()
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._answer_all(Failure(Reason.LOST, 0, ""))

    def _put(self, kind: str, tick: int) -> int | None:
        """Queues a job. Of each kind one waits at most; the tick of the one that it replaces is given back."""
        with self._changed:
            if kind == _PROBE and (_PROBE in self._jobs or (self._doing and self._doing[0] == _PROBE)):
                return None
            before = self._jobs.get(kind)
            self._jobs[kind] = tick
            self._changed.notify()
        return before

    def _left(self, gpu: str, call: str) -> None:
        """The thread was left behind in a call."""
        self._context.hung(gpu, call)
        self._hung = True
        self._answer_all(Failure(Reason.HUNG, 0, call))

    def _answer_all(self, failure: Failure) -> None:
        with self._changed:
            waiting = [*([self._doing] if self._doing else []), *self._jobs.items()]
            self._doing = None
            self._jobs.clear()
        for kind, tick in waiting:
            if kind in _TIERS:
                self._context.silent(tick, kind, self.uuid, failure)

    # ---- the thread ----

    def _work(self, line: Line, again: bool) -> None:
        if again:
            # the thread left behind may hold samples of the windows
            self._board.windows = Windows(self._context.wish.gpm_window_s)
        while (job := self._next()) is not None:
            kind, tick = job
            if kind == _CLOSE:
                self._board.windows.clear(line)
                return
            if kind == _REFRESH:
                self._guard(lambda: self._refresh(line))
            elif kind == _PROBE:
                self._probe(line)
            else:
                self._read(line, tick, Tier(kind))

    def _next(self) -> tuple[str, int] | None:
        with self._changed:
            self._doing = None
            while not self._jobs:
                if self._ended:
                    return None
                self._changed.wait()
            if self._ended:
                return None
            self._doing = self._jobs.popitem(last=False)
            return self._doing

    def _taken(self) -> bool:
        """Whether the answer to the job at hand is still ours to give."""
        with self._changed:
            taken, self._doing = self._doing is not None, None
        return taken

    def _guard(self, act: Callable[[], None]) -> Failure | None:
        """Does something that a whole-GPU failure interrupts, and looks after the failure."""
        try:
            act()
        except TickError as error:
            self._suffer(error.failure)
            return error.failure
        return None

    def _suffer(self, failure: Failure) -> None:
        epoch = self.place.epoch
        if failure.reason is Reason.LOST:
            self.lose(failure)
            self._trouble(epoch, False)
        elif failure.reason is Reason.DRIVER:
            self._trouble(epoch, True)
        elif failure.reason is Reason.STALE:
            self.wants_handle = True
            self._trouble(epoch, False)

    def _read(self, line: Line, tick: int, tier: Tier) -> None:
        line.fresh.clear()

        def act() -> None:
            if self.lost is None and self._context.gateway.up:
                if tier is Tier.INVENTORY:
                    self._refresh(line)
                elif tier is not Tier.ERRORS:
                    self._relayout(line)
            elif tier is not Tier.INVENTORY:
                raise TickError(self.lost or Failure(Reason.DRIVER))
            sights = self._sights(line)
            if tier is Tier.FAST:
                self._notice_reset(line, sights[0])
            self._readings.take(line, sights, tier)

        failure = self._guard(act)
        if failure is not None and tier is Tier.INVENTORY and failure.reason is not Reason.HUNG and self._known:
            failure = self._guard(lambda: self._readings.take(line, self._sights(line), tier))
        if not self._taken():
            return
        if failure is None:
            self._readings.tell(tick, tier, self._epoch)
        else:
            self._context.silent(tick, tier, self.uuid, failure)

    def _probe(self, line: Line) -> None:
        """Asks everything once, for nobody: whatever hung would hang again."""

        def act() -> None:
            self._refresh(line)
            for tier in Tier:
                self._readings.take(line, self._sights(line), tier)

        self._guard(act)
        hangs = self._context.gateway.hangs
        if self._context.gateway.clock() >= hangs.retry_at(self.uuid):
            hangs.clear(self.uuid)

    def _sights(self, line: Line) -> list[Sight]:
        instances = self._board.layout.instances
        return [Sight(line, self._board), *(Sight(line, self._board, one) for one in instances)]

    # ---- who it is ----

    def _refresh(self, line: Line) -> None:
        with self._changed:
            coming, self._coming = self._coming, None
        board = self._board
        if coming is not None:
            board.here = Target(self.uuid, self.uuid, coming.handle, board.here.mig)
            if self.lost is not None or self._known:
                self._begin_anew(line, coming.epoch)
        self._present(line)
        index = self.place.index
        board.identity = devices.identify(line, board.here, index, board.identity)
        board.driver = self._context.driver
        self._relayout(line)
        if coming is not None:
            self._seed(line)
        self._known = True

    def _begin_anew(self, line: Line, epoch: int) -> None:
        """Another life of the GPU or its driver: windows of before mean nothing, counters begin again."""
        board = self._board
        if epoch == self._driver_epoch:
            board.windows.clear(line)
        else:
            board.windows.drop()
            self._driver_epoch = epoch
        board.samples = SampleWindow()
        board.busy = BusyWindow()
        board.links = LinkSums()
        line.gateway.capabilities.forget({self.uuid})
        self._epoch = self._context.number()
        self._energy = 0

    def _notice_reset(self, line: Line, sight: Sight) -> None:
        """A GPU may be reset while its handle stays good. Its energy in mJ has 64 bits and never wraps: where it fell,
        and is found so when asked again, everything that the driver counts began anew."""
        before, found = self._energy, sight.number(_ENERGY)
        if isinstance(found, Failure):
            return
        if found < before:
            again = Sight(line, self._board).number(_ENERGY)
            if isinstance(again, Failure) or again >= before:
                return
            self._begin_anew(line, self._driver_epoch)
            self._context.note(f"{self.uuid} was reset: its counters begin anew")
        self._energy = found

    def _present(self, line: Line) -> None:
        """Ends the state of being lost once the GPU answers."""
        for call in _PRESENT:
            found = line.ask(int, call, self._board.here.handle, on=self._board.here)
            if isinstance(found, Failure) and found.reason in _GONE:
                raise TickError(found)
        if self.lost is not None:
            self.lost = None
            self._live_again()
            self._context.say(Say.CHANGED, gpu=self.uuid)
            self._context.note(f"{self.uuid} is back")

    def _seed(self, line: Line) -> None:
        """The first sample of each window, so that the first tick has one."""
        if not self._board.layout.partitioned:
            self._board.samples.seed(line, self._board.here)
        for sight in self._sights(line):
            if not (sight.instance is None and self._board.layout.partitioned):
                sight.gpm(1)

    def _relayout(self, line: Line) -> None:
        """Looks at the partitioning. Handles are taken anew each time; what was learned goes when the layout does."""
        board = self._board
        found = devices.layout(line, board.here)
        if isinstance(found, Failure):
            raise TickError(found)
        changed = found.fingerprint != board.layout.fingerprint
        if changed:
            board.windows.clear(line)
            board.samples, board.busy = SampleWindow(), BusyWindow()
            board.ran.clear()
            board.here = Target(self.uuid, self.uuid, board.here.handle, found.fingerprint)
            line.gateway.capabilities.forget({self.uuid, *_uuids(board.layout)})
            self._readings.forget(_uuids(board.layout))
        board.layout = found
        if changed and self._known:
            self._context.say(Say.CHANGED, gpu=self.uuid)
            self._context.note(f"{self.uuid} {_partitioning(found)}")
            self._seed(line)


_TIERS: Final = frozenset(str(tier) for tier in Tier)
_GONE: Final = frozenset({Reason.LOST, Reason.DRIVER, Reason.STALE})


def _told_by(failure: Failure) -> str:
    return f" ({failure.call}, code {failure.code})" if failure.call else ""


def _partitioning(layout: Layout) -> str:
    if not layout.partitioned:
        return "is not partitioned any more"
    count = len(layout.instances)
    return f"has {count or 'no'} MIG instance{'' if count == 1 else 's'} now"


def _uuids(layout: Layout) -> Iterator[str]:
    return (one.target.uuid for one in layout.instances)
