"""XIDs as counters and as events."""

from __future__ import annotations

from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs

from gpulens.pipeline.xids import COUNTED_FROM_START
from gpulens.receivers.nvml.xid_totals import MOST_FURTHER
from tests.receivers.nvml.kit import A, Rig, S, Stage, series_of, xids

T0 = 1_700_000_000 * S


async def test_the_codes_that_matter_exist_from_the_start() -> None:
    """At 0 for each GPU, with the time of its first sight as the start."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(25)
    assert xids(rig.of()[0]) == {str(code): (0, T0 + S) for code in COUNTED_FROM_START}
    assert xids(rig.of()[-1]) == xids(rig.of()[0])


async def test_another_code_is_sent_as_0_before_its_first_1() -> None:
    """In a partial batch of its own, under the same start, which is when it happened."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say("event", gpu=A, kind="xid", code=31, gi=None, ci=None)
        stage.puppet.say("event", gpu=A, kind="xid", code=31, gi=None, ci=None)
        await rig.advance(20)
    _, zero, first, later = rig.of()
    begin = T0 + 5 * S - 1_000_000
    assert not zero.complete
    assert zero.latest_ns() == begin
    assert xids(zero) == {"31": (0, begin)}
    assert xids(first)["31"] == xids(later)["31"] == (2, begin)
    (series,) = [s for _, s, _ in series_of(first) if s.text("gpu.xid") == "31"]
    assert series.text("gpu.xid.class") == "application"
    assert first.complete


async def test_codes_past_the_thirty_second_further_one_are_counted_together() -> None:
    """As `other`, of an unknown class, sent as 0 first; a code that has its counter keeps it, and records tell each."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        for code in (*range(1000, 1040), 1000, 79):
            stage.puppet.say("event", gpu=A, kind="xid", code=code, gi=None, ci=None)
        await rig.advance(10)
    *_, zero, last = rig.of()
    found = xids(last)
    assert len(found) == len(COUNTED_FROM_START) + MOST_FURTHER + 1
    assert (found["other"][0], found["1000"][0], found["1031"][0], found["79"][0]) == (8, 2, 1, 1)
    assert xids(zero)["other"][0] == 0
    (other,) = [s for _, s, _ in series_of(last) if s.text("gpu.xid") == "other"]
    assert other.text("gpu.xid.class") == "unknown"
    assert len(ResourceLogs.FromString(last.events[0]).scope_logs[0].log_records) == 42


async def test_an_xid_before_the_first_tick_is_an_increase_too() -> None:
    """Also of a code that exists from the start: its first point would be 1 otherwise."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(0.5)
        stage.puppet.say("event", gpu=A, kind="xid", code=79, gi=None, ci=None)
        await rig.advance(1)
    zero, first = rig.of()
    assert xids(zero) == {"79": (0, T0 + S // 2)}
    assert xids(first)["79"] == (1, T0 + S // 2)


async def test_totals_outlive_the_process_that_saw_the_events() -> None:
    """They are ours; they neither fall nor start anew when it dies, or the driver is loaded anew."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say("event", gpu=A, kind="xid", code=79, gi=None, ci=None)
        stage.puppet.die(-9)
        await rig.advance(10)
        assert xids(rig.of()[-1])["79"] == (1, T0 + S)
        stage.cards[A].epoch = 9
        stage.puppet.say("event", gpu=A, kind="xid", code=79, gi=None, ci=None)
        await rig.advance(10)
        assert xids(rig.of()[-1])["79"] == (2, T0 + S)


async def test_each_xid_is_an_event_with_its_evidence() -> None:
    """One OTLP log record each, once, stamped with the time at which it was told."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say("event", gpu=A, kind="xid", code=94, gi=3, ci=0)
        stage.puppet.say("event", gpu=A, kind="mig", code=1)
        await rig.advance(20)
    events = [batch.events for batch in rig.of()]
    assert [len(each) for each in events] == [0, 1, 0]
    message = ResourceLogs.FromString(events[1][0])
    (record,) = message.scope_logs[0].log_records
    assert {pair.key: pair.value.string_value for pair in record.attributes} == {
        "hw.id": A, "gpu.xid": "94", "gpu.xid.class": "hardware", "gpu.mig.gi": "3", "gpu.mig.ci": "0",
    }  # fmt: skip
    assert record.event_name == "gpu.xid"
    assert record.time_unix_nano == T0 + 5 * S
    assert record.severity_text == "ERROR"
    assert {pair.key for pair in message.resource.attributes} >= {"k8s.node.name"}
    assert message.scope_logs[0].scope.name == "gpulens/nvml"
