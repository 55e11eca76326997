"""Random worlds of two sources: a kubelet that names devices only while somebody maps its ids, and a vendor's page."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from gpulens.pipeline.data import Batch
from gpulens.pipeline.otlp import record_request
from tests.processors.attribution.kit import NODE, Row, Sink, at, described, feed, message, pod, processor

CARD, TILE0, TILE1 = "SN2", "SN2/tile0", "SN2/tile1"
PARTS = {TILE0: CARD, TILE1: CARD}
KUBELET = {"SN0": "0000:c1:00.0", "SN1": "amdgpu_xcp_1", CARD: "card2", "SN3": "0000:c3:00.0"}
"""Devices that pods hold, by the kubelet's ids. SN3 is mapped from the first, and the page always lies about it."""

READ = ("SN0", "SN1", CARD, TILE0, TILE1, "SN3")
HORIZON_S = 300
WINDOWS_S = {"nvml": 0.0, "prometheus": 10.0}
_delays = st.one_of(st.just(0.0), st.integers(0, 80).map(lambda quarter: quarter / 4))


@dataclass(frozen=True, slots=True)
class Hold:
    """A pod has a device, and with it its parts, during [start, end)."""

    device: str
    start_s: float
    end_s: float
    pod: str


@st.composite
def _holds(draw: st.DrawFn) -> list[Hold]:
    holds: list[Hold] = []
    for device in KUBELET:
        now_s = float(draw(st.integers(-20, 40)))
        while now_s < HORIZON_S:
            end_s = now_s + draw(st.sampled_from([4.0, 15.0, 40.0, 90.0, 200.0]))
            holds.append(Hold(device, now_s, end_s, f"p{len(holds)}"))
            now_s = end_s + draw(st.sampled_from([0.0, 0.25, 5.0, 30.0]))
    return holds


def _held(holds: list[Hold], device: str, at_s: float) -> list[str]:
    whole = PARTS.get(device, device)
    return [hold.pod for hold in holds if hold.device == whole and hold.start_s <= at_s < hold.end_s]


_polls = st.lists(
    st.tuples(st.sampled_from([10.0, 10.0, 10.0, 30.0, 70.0]), st.sampled_from(["up", "up", "up", "up", "down"])),
    min_size=20,
    max_size=20,
)
"""(time to the next poll, how it goes)."""

_maps = st.lists(st.tuples(st.integers(0, HORIZON_S), st.frozensets(st.sampled_from(["SN0", "SN1", CARD]))), max_size=5)
"""(when, which of the kubelet's ids somebody maps from then on)."""

_readings = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from([-0.25, 0.0, 0.25, 1.0, 5.0, 9.75, 10.0, 10.25]),
        st.sampled_from(READ),
        st.sampled_from(sorted(WINDOWS_S)),
    ),
    min_size=10,
    max_size=60,
)


def _snapshot(at_s: float, holds: list[Hold], state: str) -> Batch:
    rows: list[Row] = []
    for device, name in KUBELET.items() if state == "up" else ():
        attrs = {"hw.id": name, "gpu.allocation.source": "pod_resources"}
        owners = [pod(each) for each in _held(holds, device, at_s)]
        rows += [(owner, "gpu.allocated", attrs, 1) for owner in owners] or [(NODE, "gpu.allocated", attrs, 0)]
    return message("pod_resources", at(at_s), rows, up=state == "up")


def _page(labelled: frozenset[str], at_s: float, holds: list[Hold], state: str) -> Batch:
    rows: list[Row] = []
    for device in READ if state == "up" else ():
        parent = {"hw.parent": PARTS[device]} if device in PARTS else {}
        rows.append((NODE, "gpu.device.info", {"hw.id": device, **parent}, 1))
        attrs = {"hw.id": device, "gpu.allocation.source": "prometheus"}
        names = ["liar"] if device == "SN3" else _held(holds, device, at_s) if device in labelled else []
        rows += [(pod(name), "gpu.allocated", attrs, 1) for name in names]
    return message("prometheus", at(at_s), rows, stream="prometheus/v", up=state == "up", window_s=10)


def _map(at_s: float, devices: frozenset[str]) -> Batch:
    facts = [{"hw.id": device, "gpu.device.plugin.id": KUBELET[device]} for device in sorted(devices | {"SN3"})]
    return described(at(at_s), *facts)


@settings(max_examples=60, deadline=None)
@given(_holds(), _polls, _polls, _maps, _readings, st.frozensets(st.sampled_from(READ)), st.floats(0, 9.75), st.data())
def test_no_owner_is_ever_wrong_while_both_sources_and_the_map_change(
    holds: list[Hold],
    kubelet: list[tuple[float, str]],
    pages: list[tuple[float, str]],
    maps: list[tuple[int, frozenset[str]]],
    drawn: list[tuple[int, float, str, str]],
    labelled: frozenset[str],
    offset_s: float,
    data: st.DataObject,
) -> None:
    """Whoever is charged with a reading held the device, or its card, during all that it covers; the page is believed
    as far as it could be seen, and never where the kubelet names the device."""
    arrivals: list[tuple[float, int, Batch]] = []
    seen: list[float] = []
    begin = _snapshot(0.5, holds, "up")  # before it nobody knows that the kubelet answers, and the page is elected
    for polls, first_s, build in (
        (kubelet, 1.0, _snapshot),
        (pages, 2.0 + round(4 * offset_s) / 4, partial(_page, labelled)),
    ):
        now_s = first_s
        for step_s, state in polls:
            if now_s < HORIZON_S:
                arrivals.append((now_s + data.draw(_delays), len(arrivals), build(now_s, holds, state)))
                seen.append(now_s)
            now_s += step_s
    arrivals += [(when, -1, _map(when, devices)) for when, devices in maps]
    edges = sorted({*seen, *(each for hold in holds for each in (hold.start_s, hold.end_s)), *(m[0] for m in maps)})
    edges = [each for each in edges if 1 <= each < HORIZON_S]
    readings: list[tuple[float, str, str]] = []
    for number, (which, after_s, device, witness) in enumerate(drawn):
        at_s = edges[which % len(edges)] + after_s
        readings.append((at_s, device, witness))
        rows: list[Row] = [(NODE, "gpu.sm.active", {"hw.id": device}, float(number))]
        batch = message(witness, at(at_s), rows, stream=f"readings/{number % 3}", up=None)
        arrivals.append((at_s + data.draw(_delays), len(arrivals), batch))
    arrivals.sort(key=lambda each: each[:2])
    order = [_map(0, frozenset()), begin, *(batch for *_, batch in arrivals)]
    first, second = _run(order), _run(order)
    assert [record_request(batch) for batch in first.batches] == [record_request(batch) for batch in second.batches]
    points = first.points("gpu.sm.active")
    assert Counter(round(point[2]) for point in points) == Counter(range(len(readings)))
    begun_s = next((_seconds(batch) for batch in order if _is_page(batch)), float(HORIZON_S))
    for owner, device, value, _ in points:
        if owner:
            at_s, read, witness = readings[round(value)]
            (hold,) = [each for each in holds if each.pod == owner]
            assert read == device
            assert hold.device == PARTS.get(device, device)
            # The first sight of a page is no change: a reading that covers it may reach back before it.
            sight_s = begun_s if begun_s <= at_s else -HORIZON_S
            assert hold.start_s <= max(at_s - WINDOWS_S[witness], sight_s)
            assert at_s < hold.end_s
    assert all(point[0] != "liar" for point in first.points("gpu.allocated"))


def _is_page(batch: Batch) -> bool:
    """A page that was read, not the sign of life of a scrape that failed."""
    named = {series.metric.name for _, _, series in batch.layout.identities()}
    return batch.stream == "prometheus/v" and "gpu.device.info" in named


def _seconds(batch: Batch) -> float:
    return batch.latest_ns() / 10**9 - at(0)


def _run(order: list[Batch]) -> Sink:
    sink = Sink()
    join = processor(sink)
    feed(join, *order)
    asyncio.run(join.shutdown())
    return sink


def test_both_sources_own_what_they_can() -> None:
    """The check above is no empty one: in a calm world each device is owned by one of the two, and by one only."""
    holds = [Hold(device, -10.0, 400.0, f"p{number}") for number, device in enumerate(KUBELET)]
    order = [_map(0, frozenset({CARD}))]
    for second in range(1, HORIZON_S, 10):
        order.append(_snapshot(second, holds, "up"))
        order.append(_page(frozenset({"SN0", "SN1"}), second + 3.0, holds, "up"))
        for number, device in enumerate(READ):
            rows: list[Row] = [(NODE, "gpu.sm.active", {"hw.id": device}, number)]
            order.append(message("prometheus", at(second + 5.0), rows, stream="readings", up=None))
    sink = _run(order)
    expected = {"SN0": "p0", "SN1": "p1", CARD: "p2", "SN3": "p3"}
    points = [point for point in sink.points("gpu.sm.active") if 40 < point[3] < 280]
    owned = {(device, owner) for owner, device, _, _ in points}
    # The first part of a card is not told apart from the card while `amdgpu_xcp_1` may be any part.
    assert owned == {*expected.items(), (TILE0, ""), (TILE1, "")}
    allocated = Counter(point[:2] for point in sink.points("gpu.allocated") if point[3] > 280)
    assert {(owner, device) for owner, device in allocated} >= {(owner, device) for device, owner in expected.items()}
    for device in expected:
        assert len({pair for pair in allocated if pair[1] == device}) == 1
