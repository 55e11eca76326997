"""One GPU's rows at one tick, as the shape that names them and the numbers that fill it.

Invariant: a shape changes only when what exists changes; a slot without a value is null and its reason is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from gpulens.nvml.containers import Container
from gpulens.nvml.context import Context
from gpulens.nvml.gateway import Line
from gpulens.nvml.protocol import Json, Say, Tier
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.sight import Level, Sight
from gpulens.nvml.table import BY_TIER, Point, Presence, Row

_OF_THE_WHOLE: Final = frozenset({Reason.LOST, Reason.DRIVER, Reason.HUNG})


class TickError(Exception):
    """The whole GPU has nothing to say at this tick."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.call}: {failure.reason}")
        self.failure = failure


class Readings:
    """The rows of one GPU and its instances. `take` reads them; `tell` sends what was read."""

    def __init__(self, context: Context, gpu: str) -> None:
        self._context = context
        self._gpu = gpu
        self._told: dict[Tier, tuple[int, list[Json], list[Json]]] = {}
        self._seen: dict[tuple[str, str], float] = {}
        """When a sparse row was last other than zero."""
        self._entities: list[Json] = []
        self._series: list[Json] = []
        self._values: list[Json] = []
        self._failures: set[tuple[str, str, int]] = set()

    def forget(self, uuids: Iterable[str]) -> None:
        """These devices are gone: what was seen of them is no reason to expect it of others."""
        gone = set(uuids)
        self._seen = {key: at for key, at in self._seen.items() if key[0] not in gone}

    def take(self, line: Line, sights: list[Sight], tier: Tier) -> None:
        """Reads a tier. Raises TickError when a failure is of the whole GPU."""
        self._entities, self._series, self._values, self._failures = [], [], [], set()
        for number, sight in enumerate(sights):
            self._entities.append(_attributes(sight))
            for row in BY_TIER[tier]:
                if row.level & sight.level:
                    self._add(number, sight, row)
        self._failures |= {_told(failure) for failure in line.fresh}
        line.fresh.clear()

    def tell(self, tick: int, tier: Tier, epoch: int) -> None:
        """Sends what was taken last, after its shape where that is new."""
        before = self._told.get(tier)
        if before is None or before[1] != self._entities or before[2] != self._series:
            before = (self._context.number(), self._entities, self._series)
            self._told[tier] = before
            self._context.say(
                Say.SHAPE, shape=before[0], gpu=self._gpu, tier=tier, entities=self._entities, series=self._series
            )
        self._context.say(
            Say.READINGS,
            tick=tick,
            tier=tier,
            gpu=self._gpu,
            shape=before[0],
            values=self._values,
            epoch=epoch,
            failures=[list(one) for one in sorted(self._failures)],
        )

    def _add(self, number: int, sight: Sight, row: Row) -> None:
        for point in self._points(sight, row):
            value = point.value
            if isinstance(value, Failure):
                if self._absent(sight, row, value):
                    continue
                self._failures.add(_told(value))
            elif row.sparse and not self._exists(sight, row, value):
                continue
            self._series.append([number, row.key, dict(point.more), _owner(point.owner)])
            self._values.append(None if isinstance(value, Failure) else value)

    def _points(self, sight: Sight, row: Row) -> Iterator[Point]:
        reading = row.read(sight)
        if isinstance(reading, list):
            yield from reading
            return
        if isinstance(reading, Failure):
            _check(reading, sight)
            if row.many:
                if reading.reason is not Reason.UNSUPPORTED:
                    self._failures.add(_told(reading))
                return
        elif not math.isfinite(reading):
            reading = Failure(Reason.ERROR, 0, row.key)
        yield Point(reading)

    def _absent(self, sight: Sight, row: Row, failure: Failure) -> bool:
        """A row that the device does not have has no slot; one that fails now has an empty one."""
        return failure.reason is Reason.UNSUPPORTED or (row.sparse and not self._exists(sight, row, 0))

    def _exists(self, sight: Sight, row: Row, value: float) -> bool:
        key, now = (sight.on.uuid, row.key), sight.line.gateway.clock()
        if value:
            self._seen[key] = now
            return True
        at = self._seen.get(key)
        if at is None:
            return False
        if row.presence is Presence.COUNTED or now - at < self._context.wish.quiet_s:
            return True
        del self._seen[key]  # or months of small troubles would add up to a page of zeros
        return False


def _check(failure: Failure, sight: Sight) -> None:
    stale = failure.reason is Reason.STALE and sight.level is not Level.INSTANCE and "Gpm" not in failure.call
    if failure.reason in _OF_THE_WHOLE or stale:
        raise TickError(failure)


def _told(failure: Failure) -> tuple[str, str, int]:
    return failure.call, str(failure.reason), failure.code


def _attributes(sight: Sight) -> dict[str, Json]:
    who, one = sight.board.identity, sight.instance
    found: dict[str, Json] = {"hw.id": sight.on.uuid}
    if one is not None:
        found["hw.parent"] = who.uuid
        if one.profile:
            found["gpu.mig.profile"] = one.profile
    if who.minor is not None:
        found["hw.name"] = f"nvidia{who.minor}"
    if who.name:
        found["hw.model"] = who.name
    return found


def _owner(container: Container | None) -> dict[str, Json] | None:
    if container is None:
        return None
    found: dict[str, Json] = {}
    if container.pod_uid:
        found["k8s.pod.uid"] = container.pod_uid
    if container.id:
        found["container.id"] = container.id
    return found or None
