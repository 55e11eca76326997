"""What becomes of the readings: layouts, times, counters, XIDs, states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.nvml.protocol import Tier
from gpulens.nvml.table import BY_KEY
from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.pipeline.data import Resource, Scope
from gpulens.pipeline.xids import COUNTED_FROM_START
from gpulens.receivers.nvml.assembly import WINDOWED, Assembly
from gpulens.receivers.nvml.config import NvmlConfig
from gpulens.receivers.nvml.messages import Line, Reading, Shape
from tests.receivers.nvml.kit import XID, A, B, Card, Rig, S, Stage, entity, rows, series_of, spelled, xids

T0 = 1_700_000_000 * S


def states(rig: Rig) -> dict[str, object]:
    """hw.state -> 0, 1 or None of A at the last tick."""
    return {
        series.text("hw.state"): value
        for _, series, value in series_of(rig.of()[-1])
        if series.metric.name == "hw.status" and series.text("hw.id") == A
    }


def windows(rig: Rig) -> list[object]:
    """gpu.source.window, tick by tick."""
    return [v for batch in rig.of() for (name, _), v, _ in rows(batch) if name == "gpu.source.window"]


# --- layouts and times


async def test_the_layout_stays_while_no_shape_changes() -> None:
    """One object tick after tick although numbers move; one block for each GPU on the node's resource."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        for tick in range(5):
            stage.cards[A].fast["sm"] = tick / 10
            await rig.advance(10)
    fast = rig.of()
    assert len({id(batch.layout) for batch in fast}) == 1
    assert [rows(batch)[3][1] for batch in fast] == [0.0, 0.1, 0.2, 0.3, 0.4]
    blocks = fast[0].layout.blocks
    assert len(blocks) == 3, "signs of life, A, B"
    assert {block.scope.name for block in blocks} == {"gpulens/nvml"}
    assert {block.resource.text("k8s.node.name") for block in blocks} == {"node-1"}
    for tier in ("errors", "inventory", "processes"):
        assert len({id(batch.layout) for batch in rig.of(tier)}) == 1


async def test_points_carry_the_device_and_nothing_else_of_it() -> None:
    """hw.id, hw.name and hw.model beside the row's own attributes."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(2)
    (sm,) = [series for _, series, _ in series_of(rig.of()[-1]) if series.metric.name == "gpu.sm.active"]
    assert sm.map == entity(A)
    assert sm.metric is CATALOGUE["gpu.sm.active"].metric


async def test_the_window_reaches_back_to_the_previous_question() -> None:
    """Before the first there is the start of the process; a tick that waited for a GPU makes the window longer."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        stage.cards[B].mute = True
        await rig.advance(15)
        stage.cards[B].mute = False
        await rig.advance(10)
    assert windows(rig) == [1.0, 10.0, 15.0, 10.0]
    assert [(batch.latest_ns() - T0) / S for batch in rig.of()] == [1, 11, 26, 31]


async def test_a_mean_that_reaches_back_beyond_the_window_is_left_out() -> None:
    """A GPU that gave no answer last time has windowed figures of two ticks: absent once; instants are there."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        stage.cards[B].silent = ("error", 999)
        await rig.advance(10)
        stage.cards[B].silent = None
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", B] is None
        assert rig.last()["hw.gpu.memory.usage", B] == 10
        assert rig.last()["gpu.sm.active", A] == 0.5
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", B] == 0.5


async def test_a_new_process_begins_its_windows_itself() -> None:
    """After a death between two ticks nothing is left out."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(15)
        stage.puppet.die(-9)
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", A] == 0.5


def test_every_windowed_metric_is_one_that_is_read() -> None:
    """The list names metrics of the fast tier only."""
    assert {row.metric for row in BY_KEY.values() if row.tier is Tier.FAST} >= WINDOWED


async def test_a_series_enters_with_its_first_number_and_leaves_after_ten_ticks_without() -> None:
    """In between it is absent, and the layout stays."""
    stage = Stage()
    stage.cards[A].fast["power"] = None
    async with Rig(stage.start) as rig:
        await rig.advance(2)
        assert ("hw.power", A) not in rig.last()
        stage.cards[A].fast["power"] = 300.0
        await rig.advance(10)
        assert rig.last()["hw.power", A] == 300
        layout = rig.of()[-1].layout
        stage.cards[A].fast["power"] = None
        await rig.advance(90)
        assert rig.of()[-1].layout is layout
        assert rig.last()["hw.power", A] is None
        await rig.advance(10)
        assert ("hw.power", A) not in rig.last()


async def test_a_series_that_left_its_shape_leaves_at_once() -> None:
    """A MIG instance that was destroyed is no quiet one."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(2)
        stage.cards[A].fast = {"memory.used": 11, "energy": 101.0}
        await rig.advance(10)
        assert ("gpu.sm.active", A) not in rig.last()
        assert rig.last()["hw.gpu.memory.usage", A] == 11
        assert rig.of()[-1].complete


async def test_numbers_that_do_not_fit_their_metric_are_absent() -> None:
    """A whole number that came as a float is one; half a byte is none."""
    stage = Stage()
    stage.cards[A].fast = {"memory.used": 5.0, "memory.total": 7.5, "sm": 1}
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        stage.cards[A].fast = {"memory.used": 5.5, "memory.total": 2**63, "sm": 1}
        await rig.advance(10)
    first, last = ({key: value for key, value, _ in rows(batch)} for batch in (rig.of()[1], rig.of()[-1]))
    assert first["hw.gpu.memory.usage", A] == 5
    assert first["hw.gpu.memory.limit", A] is None
    assert last["hw.gpu.memory.usage", A] is None
    assert last["gpu.sm.active", A] == 1


async def test_no_gpu_is_no_failure() -> None:
    """A driver without GPUs answers with nothing but signs of life."""
    stage = Stage()
    stage.cards.clear()
    async with Rig(stage.start) as rig:
        await rig.advance(12)
    assert rig.up == [1, 1]


# --- GPUs that go and come


async def test_a_lost_gpu_keeps_its_identity_its_state_and_its_xids() -> None:
    """hw.status failed=1, XIDs as counted, device.info from the inventory; everything else is absent."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say("event", gpu=A, kind="xid", code=79, gi=None, ci=None)
        inventory = stage.cards[A].inventory
        stage.cards[A].silent = ("lost", 15)
        await rig.advance(10)
        assert states(rig) == {"failed": 1, "ok": 0}
        assert xids(rig.of()[-1])["79"][0] == 1
        rest = [
            v for _, s, v in series_of(rig.of()[-1]) if s.text("hw.id") == A and s.metric.name not in (XID, "hw.status")
        ]
        assert set(rest) == {None}
        assert "lost" in rig.statuses[-1][1]
        assert rig.last("inventory")["gpu.device.info", A] == inventory["device.info"]
        stage.cards[A].silent = None
        await rig.advance(20)
        assert states(rig) == {"failed": 0, "ok": 1}
        await rig.advance(620)
        assert states(rig) == {"ok": 1}


async def test_a_gpu_that_is_not_listed_any_more_goes_with_the_inventory() -> None:
    """From all streams; when it comes back its XIDs begin anew."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say("event", gpu=A, kind="xid", code=13, gi=None, ci=None)
        await rig.advance(10)
        card = stage.cards.pop(A)
        stage.puppet.say("changed", gpu=None)
        await rig.advance(35)
        for tier in ("", "errors", "inventory", "processes"):
            assert A not in {gpu for _, gpu in rig.last(tier)}
        stage.cards[A] = card
        stage.puppet.say("changed", gpu=None)
        await rig.advance(10)
        assert set(xids(rig.of()[-1])) == {str(code) for code in COUNTED_FROM_START}


async def test_a_change_is_read_at_once() -> None:
    """Without waiting for the inventory's own interval, and as soon as the driver is up."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(0.5)
        assert len(rig.of("inventory")) == 1
        await rig.advance(5)
        before = len(rig.of("inventory"))
        stage.puppet.say("changed", gpu=A)
        await rig.advance(0.1)
        assert len(rig.of("inventory")) == before + 1


async def test_a_gpu_that_can_not_be_reached_is_told_of() -> None:
    """It has no name yet, so only the status can say it."""
    stage = Stage()
    stage.driver["unreachable"] = [[1, "permission", 4]]
    async with Rig(stage.start) as rig:
        await rig.advance(2)
        assert rig.statuses[-1][1] == "the GPU of index 1 can't be reached: permission"


# --- counters


async def test_counters_start_at_their_first_sight_and_keep_that() -> None:
    """Raw totals under one start, also across a death of the process, although its epochs count anew."""
    stage = Stage()
    stage.cards[A].epoch = 7
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        stage.puppet.die(-9)
        stage.cards[A].epoch = 1
        stage.cards[A].fast["energy"] = 250.0
        await rig.advance(10)
    energy = [(v, start - T0) for batch in rig.of() for (name, _), v, start in rows(batch) if name == "hw.energy"]
    assert energy == [(100.0, S), (100.0, S), (250.0, S)]


async def test_another_epoch_is_a_new_start_even_where_the_total_is_higher() -> None:
    """A driver that was reloaded long ago may have passed the old total; a fall alone is a reset too."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].fast["energy"], stage.cards[A].epoch = 500.0, 2
        await rig.advance(20)
        stage.cards[A].fast["energy"] = 3.0
        await rig.advance(10)
    energy = [(v, start - T0) for batch in rig.of() for (name, _), v, start in rows(batch) if name == "hw.energy"]
    ms = S // 1000
    assert energy == [(100.0, S), (500.0, S + ms), (500.0, S + ms), (3.0, 21 * S + ms)]


async def test_what_the_card_keeps_goes_on_through_another_epoch() -> None:
    """Errors of its whole life, rows and pages: neither a reset nor another driver starts them anew; a fall does."""
    stage = Stage()
    keys = ("errors.ecc_aggregate.corrected", "rows.corrected", "pages.corrected")
    stage.cards[A].errors = {**dict.fromkeys(keys, 5), "errors.ecc.corrected": 5}
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].epoch = 2
        stage.cards[A].errors = {**dict.fromkeys(keys, 6), "errors.ecc.corrected": 6}
        await rig.advance(30)
        stage.cards[A].errors = {**dict.fromkeys(keys, 1), "errors.ecc.corrected": 6}
        await rig.advance(30)
    starts = [batch.starts() for batch in rig.of("errors")]
    kept, volatile = [each[:3] for each in starts], [each[3] for each in starts]
    assert kept[0] == kept[1] != kept[2]
    assert volatile[0] < volatile[1] == volatile[2]


async def test_gauges_have_no_start() -> None:
    """Only counters do."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(2)
    for (name, _), _, start in rows(rig.of()[-1]):
        assert bool(start) == CATALOGUE[name].metric.is_counter


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 1000)), st.integers(1, 3), st.booleans()), min_size=1, max_size=30
    )
)
def test_a_counter_never_steps_back_under_one_start(ticks: list[tuple[int | None, int, bool]]) -> None:
    """Whatever comes: gaps, falls, other epochs, other processes."""
    assembly = Assembly(BY_KEY, Resource({"k8s.node.name": "n"}), Scope("gpulens/nvml"), "nvml")
    shape = Shape(A, Tier.ERRORS, ({"hw.id": A},), (Line(0, "pcie.replays", {}, None),))
    seen: dict[int, float] = {}
    process = 0
    for number, (raw, epoch, reborn) in enumerate(ticks, 1):
        process += reborn
        reading = Reading(shape, [raw], (process, epoch), frozenset(), 0)
        assembly.take(A, reading)
        batch = assembly.batch({A: reading}, {}, T0 + number * S)
        for _, value, start in rows(batch):
            if value is not None:
                assert start <= batch.latest_ns()
                assert value >= seen.get(start, 0)
                seen[start] = value


# --- states


@pytest.mark.parametrize(
    ("errors", "failures", "state"),
    [
        ({"rows.failed": 0, "rows.pending": 0}, [], "ok"),
        ({"rows.failed": 1, "rows.pending": 0}, [], "failed"),
        ({"rows.failed": 0, "rows.pending": 1}, [], "degraded"),
        ({"rows.failed": None, "rows.pending": None}, [], "ok"),
        ({"recovery.gpu_reset": 1}, [], "degraded"),
        ({"recovery.gpu_reset": 0}, [], "ok"),
        ({}, [["nvmlDeviceGetPowerUsage", "error", 16]], "degraded"),
        ({}, [["nvmlDeviceGetPowerUsage", "error", 999]], "ok"),
    ],
)
async def test_a_state_follows_from_what_is_known(
    errors: dict[str, int | None], failures: list[list[object]], state: str
) -> None:
    """Lost or unmappable rows: failed; an action that is due, or a reset: degraded."""
    stage = Stage()
    stage.cards[A].errors = dict(errors)
    stage.cards[A].failures = failures  # type: ignore[assignment]
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        assert {name for name, value in states(rig).items() if value == 1} == {state}


async def test_a_row_that_can_not_be_read_does_not_heal_a_gpu() -> None:
    """What was known of it holds until it is read again; a row that is gone was at 0 for long."""
    stage = Stage()
    stage.cards[A].errors = {"rows.failed": 1}
    async with Rig(stage.start) as rig:
        await rig.advance(12)
        stage.cards[A].errors = {"rows.failed": None}
        await rig.advance(40)
        assert states(rig)["failed"] == 1
        stage.cards[A].errors = {}
        await rig.advance(40)
        assert states(rig) == {"failed": 0, "ok": 1}


async def test_of_a_gpu_that_hangs_no_state_is_told() -> None:
    """Neither ok nor failed; when it answers again it is what it was. Who it is stays known."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].silent = ("hung", 0)
        await rig.advance(10)
        assert states(rig) == {"ok": None}
        await rig.advance(60)
        assert rig.last("inventory")["gpu.device.info", A] == 1
        stage.cards[A].silent = None
        await rig.advance(10)
        assert states(rig) == {"ok": 1}


# --- processes


async def test_processes_stand_on_the_resource_that_their_cgroup_tells() -> None:
    """Pod UID and container id, either of them, or the node's own where neither is known; the GPU's counts stay on
    the node's."""
    stage = Stage()
    pod, half = {"k8s.pod.uid": "u-1", "container.id": "c" * 64}, {"container.id": "d" * 64}
    stage.cards[A].processes = [
        ("process.count.compute", {}, None, 3),
        ("process.memory", {"process.pid": 7}, pod, 1 << 30),
        ("process.memory", {"process.pid": 8}, half, 2 << 30),
        ("process.memory", {"process.pid": 9}, None, None),
        ("process.utilization", {"process.pid": 7}, pod, 0.25),
        ("allocated", {}, pod, 1),
    ]
    async with Rig(stage.start) as rig:
        await rig.advance(2)
    node = {"k8s.node.name": "node-1", "service.instance.id": "node-1", "service.name": "gpulens"}
    found = [(resource.map, spelled(series), value) for resource, series, value in series_of(rig.of("processes")[-1])]
    assert found == [
        (node, "gpu.process.visible{nvml}", 1),
        (node, "gpu.process.count{compute}", 3),
        ({**node, **pod}, "gpu.process.memory.usage{7}", 1 << 30),
        ({**node, **pod}, "gpu.process.utilization{7}", 0.25),
        ({**node, **pod}, "gpu.allocated{process}", 1),
        ({**node, **half}, "gpu.process.memory.usage{8}", 2 << 30),
    ]


async def test_what_can_not_be_seen_is_not_visible() -> None:
    """Without the node's PID namespace an empty list says nothing."""
    stage = Stage()
    stage.driver["pids"] = False
    async with Rig(stage.start) as rig:
        await rig.advance(2)
    assert rig.last("processes") == {("gpu.process.visible", ""): 0}


async def test_processes_can_be_left_alone() -> None:
    """`processes: false` has no such stream, and the process is told."""
    stage = Stage()
    async with Rig(stage.start, processes=False) as rig:
        await rig.advance(40)
    assert rig.of("processes") == []
    assert stage.puppet.told[0]["processes"] is False


async def test_metrics_can_be_left_to_another_source() -> None:
    """`drop` takes names and patterns; XIDs and the state of the GPU are told all the same."""
    async with Rig(Stage().start, drop=["gpu.sm.*", "hw.energy"]) as rig:
        await rig.advance(2)
    names = {series.metric.name for _, series, _ in series_of(rig.of("")[-1])}
    assert "hw.gpu.memory.usage" in names
    assert {"hw.status", "gpu.xid.errors"} <= names
    assert not names & {"gpu.sm.active", "gpu.sm.occupancy", "hw.energy"}


def test_process_allocations_do_not_count_as_an_allocation_source() -> None:
    """Whoever has this receiver alone is still warned that nobody says who holds what."""
    assert not NvmlConfig.allocation_source
