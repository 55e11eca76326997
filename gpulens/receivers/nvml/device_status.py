"""Says of each GPU whether it is ok, degraded or failed.

Invariant: a state set is sparse: the state that holds is 1, one that was left is 0 for ten minutes and then gone. Of a
GPU that does not answer nothing is said, unless the driver says that it is lost.

failed: lost, or a memory row could not be remapped. degraded: the driver names an action that is due, a row waits for
a reset, or calls fail with 'reset required'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import Series, Value
from gpulens.receivers.nvml.assembly import Extra, Row
from gpulens.receivers.nvml.messages import Attrs, Reading

KEEP_S: Final = 600.0
_RESET_REQUIRED: Final = 16
_FAILED: Final = frozenset({"gpu.rows.remap.failed"})
_DEGRADED: Final = frozenset({"gpu.rows.remap.pending", "gpu.recovery.action"})


class State(StrEnum):
    """hw.state of a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(slots=True)
class _Known:
    failed: bool = False
    degraded: bool = False
    """By the last reading of its error counters."""
    state: State | None = None
    left: dict[State, float] = field(default_factory=dict)
    """Until when a state that was left is told as 0."""
    made: tuple[dict[State, int], bool, Attrs, tuple[Extra, ...]] | None = None


class DeviceStatus:
    """The states of all GPUs."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self._failed = frozenset(key for key, row in rows.items() if row.metric in _FAILED)
        self._degraded = frozenset(key for key, row in rows.items() if row.metric in _DEGRADED)
        self._known: dict[str, _Known] = {}

    def learn_errors(self, gpu: str, reading: Reading) -> None:
        """Takes in what the error tier says of a GPU."""
        known = self._known.setdefault(gpu, _Known())
        said = {line.key: value for line, value in zip(reading.shape.lines, reading.values, strict=True)}
        known.failed = _holds(self._failed, said, known.failed)
        known.degraded = _holds(self._degraded, said, known.degraded)

    def learn(self, gpu: str, reading: Reading | None, lost: bool, now_s: float) -> None:
        """Takes in whether a GPU answered at this tick."""
        known = self._known.setdefault(gpu, _Known())
        state: State | None = None
        if lost or (reading is not None and known.failed):
            state = State.FAILED
        elif reading is not None:
            degraded = known.degraded or _RESET_REQUIRED in reading.codes
            state = State.DEGRADED if degraded else State.OK
        if known.state is not None and state is not None and state is not known.state:
            known.left[known.state] = now_s + KEEP_S
        if known.left:
            known.left = {each: until for each, until in known.left.items() if each is not state and now_s < until}
        if state is None and known.state is not None:
            return  # it may still be in it; `extras` says nothing meanwhile
        known.state = state

    def extras(self, gpu: str, device: Attrs, answered: bool) -> tuple[Extra, ...]:
        """The state set of a GPU; absent while it does not answer. The same object while nothing changes."""
        known = self._known.get(gpu)
        if known is None or known.state is None:
            return ()
        states = {known.state: 1, **dict.fromkeys(known.left, 0)}
        made = known.made
        if made is None or made[0] != states or made[1] != answered or made[2] != device:
            extras = tuple(_extra(state, value if answered else None, device) for state, value in states.items())
            made = known.made = (states, answered, device, extras)
        return made[3]

    def forget(self, gpu: str) -> None:
        """The GPU is gone."""
        self._known.pop(gpu, None)


def _holds(keys: frozenset[str], said: Mapping[str, Value | None], before: bool) -> bool:
    """A row that is not there is at 0; one that can't be read says nothing against what was known."""
    values = [said[key] for key in keys & said.keys()]
    return any(values) or (before and None in values)


def _extra(state: State, value: int | None, device: Attrs) -> Extra:
    return Extra(Series(metric("hw.status"), {**device, "hw.type": "gpu", "hw.state": str(state)}), value)
