"""Random worlds in random order of arrival: no owner is ever wrong and no point is lost or doubled."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from gpulens.pipeline.data import Batch, Resource
from gpulens.pipeline.otlp import record_request
from tests.processors.attribution.kit import (
    GPU,
    NODE,
    NS,
    OTHER,
    Row,
    Sink,
    at,
    described,
    feed,
    message,
    pod,
    processor,
)

INSTANCE = f"{GPU}/gi7"
DEVICES = {GPU: ("nvidia1", GPU), OTHER: ("nvidia0", OTHER), INSTANCE: ("nvidia1/gi7", "MIG-1")}
"""A device as readings name it, and as kubelets do: GKE's id, NVIDIA's id."""

FACTS = (
    {"hw.id": GPU, "gpu.minor": "1"},
    {"hw.id": OTHER, "gpu.minor": "0"},
    {"hw.id": "MIG-1", "hw.parent": GPU, "gpu.mig.gi": "7"},
)
WINDOWS_S = {"nvml": 0.0, "dcgm": 30.0, "gke": 60.0}
HORIZON_S = 300
_delays = st.one_of(st.just(0.0), st.integers(0, 120).map(lambda quarter: quarter / 4))


@dataclass(frozen=True, slots=True)
class Hold:
    """A pod has a device during [start, end)."""

    device: str
    start_s: float
    end_s: float
    pod: str


@dataclass(frozen=True, slots=True)
class Poll:
    """One List: asked, true at some moment on the way, answered; `parts` are the devices that it could tell of."""

    asked_s: float
    true_s: float
    reply_s: float
    parts: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of a device by a witness; its value is its number, so that each can be told apart."""

    at_s: float
    device: str
    witness: str
    number: int


@st.composite
def _holds(draw: st.DrawFn) -> list[Hold]:
    """Pods on each device one after the other, often back to back; sometimes a second one shares it."""
    holds: list[Hold] = []
    for device in DEVICES:
        now_s = draw(st.integers(-20, 40)) / 1.0
        while now_s < HORIZON_S:
            end_s = now_s + draw(st.sampled_from([2.0, 7.5, 15.0, 40.0, 90.0, 200.0]))
            holds.append(Hold(device, now_s, end_s, f"p{len(holds)}"))
            if draw(st.integers(0, 5)) == 0:
                holds.append(Hold(device, now_s + 1, end_s + 10, f"p{len(holds)}"))
            now_s = end_s + draw(st.sampled_from([0.0, 0.0, 0.25, 5.0, 30.0]))
    return holds


@st.composite
def _polls(draw: st.DrawFn) -> list[Poll]:
    step_s = draw(st.sampled_from([5.0, 10.0, 25.0]))
    polls: list[Poll] = []
    asked_s = 0.0
    while asked_s < HORIZON_S:
        answer_s = draw(st.sampled_from([0.0, 0.0, 1.5, 4.0]))
        true_s = asked_s + answer_s * draw(st.sampled_from([0.0, 0.5, 1.0]))
        parts = draw(st.one_of(st.none(), st.none(), st.frozensets(st.sampled_from(sorted(DEVICES)))))
        polls.append(Poll(asked_s, true_s, asked_s + answer_s, parts if polls else None))
        asked_s += draw(st.sampled_from([step_s, step_s, step_s, 4 * step_s]))
    return polls


_NEAR_S = (-0.25, 0.0, 0.25, 1.0, 2.5, 30.0, 30.25, 60.0, 60.25)
_readings = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from(_NEAR_S),
        st.sampled_from(sorted(DEVICES)),
        st.sampled_from(sorted(WINDOWS_S)),
    ),
    min_size=5,
    max_size=60,
)
"""Readings shortly before or after something happens, or a window after: (which happening, how long after, ...)."""


def _happenings(holds: list[Hold], polls: list[Poll]) -> list[float]:
    edges = {each for hold in holds for each in (hold.start_s, hold.end_s)}
    edges |= {each for poll in polls for each in (poll.asked_s, poll.true_s, poll.reply_s)}
    return sorted(each for each in edges if 1 <= each < HORIZON_S)


def _names(holds: list[Hold], device: str, at_s: float) -> list[str]:
    return [hold.pod for hold in holds if hold.device == device and hold.start_s <= at_s < hold.end_s]


def _snapshot(poll: Poll, holds: list[Hold], spelling: int) -> Batch:
    rows: list[Row] = []
    for device, ids in DEVICES.items():
        if poll.parts is not None and device not in poll.parts:
            continue
        attrs = {"hw.id": ids[spelling], "gpu.allocation.source": "pod_resources"}
        owners: list[Resource] = [pod(name) for name in _names(holds, device, poll.true_s)]
        rows += [(owner, "gpu.allocated", attrs, 1) for owner in owners] or [(NODE, "gpu.allocated", attrs, 0)]
    complete = poll.parts is None
    return message("pod_resources", at(poll.reply_s), rows, complete=complete, asked_s=at(poll.asked_s))


def _batch(reading: Reading, holds: list[Hold]) -> Batch:
    """A reading; a page also names a holder, and always a wrong one."""
    rows: list[Row] = [(NODE, "gpu.sm.active", {"hw.id": reading.device}, reading.number)]
    if reading.witness != "nvml":
        claim = {"hw.id": reading.device, "gpu.allocation.source": reading.witness}
        rows.append((pod("liar"), "gpu.allocated", claim, 1))
    stream = f"{reading.witness}/{reading.number % 3}"
    return message(reading.witness, at(reading.at_s), rows, stream=stream, window_s=WINDOWS_S[reading.witness])


@settings(max_examples=100)
@given(_holds(), _polls(), _readings, st.integers(0, 1), st.sampled_from([-1.0, 100.0]), st.data())
def test_no_owner_is_ever_wrong_and_every_point_comes_out_once(
    holds: list[Hold],
    polls: list[Poll],
    drawn: list[tuple[int, float, str, str]],
    spelling: int,
    mapped_s: float,
    data: st.DataObject,
) -> None:
    """Whoever is charged with a reading held the device during all that it covers, whatever arrives when."""
    happenings = _happenings(holds, polls)
    readings = [
        Reading(happenings[which % len(happenings)] + after_s, device, witness, number)
        for number, (which, after_s, device, witness) in enumerate(drawn)
    ]
    arrivals: list[tuple[float, int, Batch]] = []
    for poll in polls[1:]:
        arrivals.append((poll.reply_s + data.draw(_delays), len(arrivals), _snapshot(poll, holds, spelling)))
    for reading in readings:
        arrivals.append((reading.at_s + data.draw(_delays), len(arrivals), _batch(reading, holds)))
    arrivals.append((mapped_s, len(arrivals), described(at(max(0.0, mapped_s)), *FACTS)))
    order = [_snapshot(polls[0], holds, spelling), *(batch for _, _, batch in sorted(arrivals, key=lambda x: x[:2]))]
    first, second = _run(order), _run(order)
    assert [record_request(batch) for batch in first.batches] == [record_request(batch) for batch in second.batches]
    points = first.points("gpu.sm.active")
    assert Counter(round(point[2]) for point in points) == Counter(range(len(readings)))
    for owner, _, number, _ in points:
        if owner:
            _check(owner, readings[round(number)], holds)
    assert all(point[0] != "liar" for point in first.points("gpu.allocated"))


def _check(owner: str, reading: Reading, holds: list[Hold]) -> None:
    (hold,) = [each for each in holds if each.pod == owner]
    assert hold.device == reading.device
    assert hold.start_s <= reading.at_s - WINDOWS_S[reading.witness]
    assert reading.at_s < hold.end_s


def _run(order: list[Batch]) -> Sink:
    sink = Sink()
    join = processor(sink)
    feed(join, *order)
    asyncio.run(join.shutdown())
    return sink


def test_the_model_owns_most_of_what_it_can() -> None:
    """The check above is no empty one: in a calm world nearly everything is owned."""
    holds = [Hold(device, -10.0, 400.0, f"p{number}") for number, device in enumerate(DEVICES)]
    order = [described(at(0), *FACTS)]
    readings: list[Reading] = []
    for second in range(0, HORIZON_S, 10):
        order.append(_snapshot(Poll(second, second, second, None), holds, 0))
        readings.append(Reading(second + 5.0, sorted(DEVICES)[second // 10 % 3], "dcgm", len(readings)))
        order.append(_batch(readings[-1], holds))
    sink = _run(order)
    points = sink.points("gpu.sm.active")
    for owner, _, number, _ in points:
        if owner:
            _check(owner, readings[round(number)], holds)
    assert sum(bool(point[0]) for point in points) >= len(readings) - 4
    assert sink.batches[-1].latest_ns() > at(0) * NS
