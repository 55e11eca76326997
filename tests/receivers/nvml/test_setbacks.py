"""What outlives a process that dies, a clock that is set and a storm of events."""

from __future__ import annotations

from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs

from gpulens.nvml.protocol import Json
from gpulens.pipeline.clock import VirtualClock
from gpulens.receivers.nvml.xid_totals import MOST_RECORDS
from tests.receivers.nvml.kit import A, B, Card, Rig, Stage, rows, series_of

_NOT_REACHED = (0, "lost", 15)


class _SetClock(VirtualClock):
    """A clock of the day that can be set while waits go on."""

    off_s = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.off_s * 10**9


def _of(rig: Rig, tier: str, gpu: str) -> dict[str, object]:
    """metric and state or code -> number of a GPU at the last tick."""
    return {
        f"{each.metric.name} {each.text('hw.state') or each.text('gpu.xid') or ''}".strip(): value
        for _, each, value in series_of(rig.of(tier)[-1])
        if each.text("hw.id") == gpu and value is not None
    }


async def test_a_lost_gpu_outlives_the_process_that_knew_its_name() -> None:
    """The next process finds an index that can't be reached: the GPU known before stays failed, with its XIDs and its
    identity, until every GPU has a name again."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start, inventory_interval="20s") as rig:
        await rig.advance(12)
        stage.puppet.say("event", gpu=A, kind="xid", code=79, gi=None, ci=None)
        stage.cards[A].silent = ("lost", 15)
        await rig.advance(10)
        assert _of(rig, "", A)["hw.status failed"] == 1
        del stage.cards[A]
        unreachable: list[Json] = [list(_NOT_REACHED)]
        stage.driver = {**stage.driver, "unreachable": unreachable}
        stage.puppet.die(-9)
        await rig.advance(60)
        fast = _of(rig, "", A)
        assert (fast["hw.status failed"], fast["gpu.xid.errors 79"]) == (1, 1)
        assert "gpu.sm.active" not in fast
        assert _of(rig, "inventory", A) == {"gpu.device.info": 1}
        assert _of(rig, "", B)["gpu.sm.active"] == 0.5
        stage.puppet.say("driver", **{**stage.driver, "unreachable": []})
        await rig.advance(40)
        assert _of(rig, "", A) == _of(rig, "inventory", A) == {}


async def test_a_gpu_that_may_not_be_reached_is_not_called_lost() -> None:
    """After its device node was taken away, a new process has no permission: no state is better than a wrong one."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start, inventory_interval="20s") as rig:
        await rig.advance(12)
        del stage.cards[A]
        unreachable: list[Json] = [[0, "permission", 4]]
        stage.driver = {**stage.driver, "unreachable": unreachable}
        stage.puppet.die(-9)
        await rig.advance(60)
        assert not any(name.startswith("hw.status") for name in _of(rig, "", A))
        assert _of(rig, "", A)["gpu.xid.errors 79"] == 0


async def test_a_clock_that_is_set_moves_no_window() -> None:
    """The window is a length: neither an hour nor nothing because the clock of the day was set between two ticks, and a
    figure that reaches back too far is still left out."""
    stage, clock = Stage(), _SetClock()
    stage.cards[B] = Card()
    async with Rig(stage.start, clock) as rig:
        await rig.advance(12)
        clock.off_s = 3600
        await rig.advance(10)
        stage.cards[B].silent = ("error", 999)
        await rig.advance(10)
        clock.off_s = 0
        await rig.advance(10)
        stage.cards[B].silent = None
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", B] is None
    windows = [v for batch in rig.of() for (name, _), v, _ in rows(batch) if name == "gpu.source.window"]
    assert windows == [1.0, 10.0, 10.0, 10.0, 10.0, 10.0]


async def test_a_storm_of_xids_is_counted_whole_and_told_in_part() -> None:
    """A message of ten thousand records would be refused by the receiver behind it."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        for _ in range(10_000):
            stage.puppet.say("event", gpu=A, kind="xid", code=31, gi=None, ci=None)
        await rig.advance(10)
        assert _of(rig, "", A)["gpu.xid.errors 31"] == 10_000
        assert rig.telemetry.value("gpulens_nvml_events_dropped") == 10_000 - MOST_RECORDS
        (encoded,) = rig.of()[-1].events
        assert len(ResourceLogs.FromString(encoded).scope_logs[0].log_records) == MOST_RECORDS
        assert len(encoded) < 2**19
