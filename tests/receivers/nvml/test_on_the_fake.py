"""The receiver with its real process on the fake driver library, by model and through a GPU's troubles."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpulens.nvml.launch import COMMAND, environment
from gpulens.pipeline.catalogue import CATALOGUE, MetricScope, scope_of
from gpulens.pipeline.data import Value
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.profiles import PROFILES
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.receivers.nvml.kit import TIERS, Live, rows, series_of, spelled, until

BASE = """
hw.gpu.utilization{general} hw.gpu.utilization{encoder} hw.gpu.utilization{decoder} hw.gpu.utilization.max{general}
hw.gpu.utilization.p95{general} gpu.memory.copy.utilization hw.power hw.energy hw.temperature{gpu}
gpu.clock.frequency{sm} gpu.clock.throttle.time{power} gpu.clock.throttle.time{thermal}
hw.status{ok} gpu.process.count{compute} gpu.info gpu.device.info
"""
MEMORY = """
hw.gpu.memory.usage hw.gpu.memory.limit hw.gpu.memory.utilization gpu.memory.reserved gpu.clock.frequency{memory}
"""
CARD = MEMORY + " gpu.power.limit{enforced} hw.gpu.io{transmit} hw.gpu.io{receive} gpu.pcie.replays "
ECC = " hw.errors{corrected,ecc} hw.errors{uncorrected,ecc} "
REMAP = """
gpu.rows.remapped{corrected} gpu.rows.remapped{uncorrected}
"""
RETIRED = " gpu.pages.retired{corrected} gpu.pages.retired{uncorrected} gpu.pages.retire.pending "
ABSOLUTE = " hw.temperature.limit{throttled} hw.temperature.limit{critical} "
MARGIN = " gpu.temperature.margin "
HBM = " hw.temperature{memory} "
LINKS = """
gpu.nvlink.errors{crc_flit} gpu.nvlink.errors{crc_data} gpu.nvlink.errors{replay} gpu.nvlink.errors{recovery}
"""
LINK_IO = " gpu.nvlink.io{transmit} gpu.nvlink.io{receive} "
LINKS5 = " gpu.nvlink.errors{recovery} gpu.nvlink.errors{symbol} "
GPM = """
gpu.engine.active gpu.sm.active gpu.sm.occupancy gpu.pipe.active{tensor} gpu.pipe.active{fp32}
gpu.pipe.active{fp16} gpu.memory.bandwidth.utilization
"""
AMPERE = BASE + CARD + ECC + REMAP + ABSOLUTE + HBM + LINKS + LINK_IO
HOPPER = BASE + CARD + ECC + REMAP + MARGIN + HBM + LINKS + LINK_IO + GPM

GOLDEN = {
    "T4": BASE + CARD + ECC + RETIRED + ABSOLUTE,
    "V100": BASE + CARD + ECC + RETIRED + ABSOLUTE + HBM + LINKS,
    "A100": AMPERE,
    "A100-80": AMPERE,
    "L4": BASE + CARD + ECC + REMAP + MARGIN,
    "H100": HOPPER,
    "H200": HOPPER,
    "B200": BASE + CARD + ECC + REMAP + MARGIN + HBM + LINKS5 + LINK_IO + GPM,
    "RTX4080": BASE + CARD + ABSOLUTE,
    "GB10": BASE,
}
"""The whole idle card, XIDs aside: what each model has and nothing else (reference: NVML's availability by model)."""

INSTANCE = MEMORY.replace("gpu.clock.frequency{memory}", "") + GPM
INSTANCE += " gpu.process.count{compute} gpu.device.info hw.errors{uncorrected,ecc} "
"""A MIG instance of a Hopper."""


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """A fake driver without GPUs."""
    made = FakeNvml(tmp_path / "nvml")
    try:
        made.install()
    except BuildError as error:
        pytest.skip(f"the fake library can't be built here: {error}")
    return made


def live(fake: FakeNvml, **changes: object) -> Live:
    """The receiver on that driver."""
    env = environment({**os.environ, **fake.environment}, [str(fake.folder)])
    return Live(COMMAND, env, **{"host_pid": True, **changes})


def series(rig: Live, device: str) -> set[str]:
    """The series of a device in the newest batches of all streams that have a number, XIDs aside."""
    found = {
        spelled(each).partition("{")[0] if each.metric.name.endswith(".info") else spelled(each)
        for tier in TIERS
        for _, each, value in series_of(rig.of(tier)[-1])
        if each.text("hw.id") == device and value is not None
    }
    return {each for each in found if not each.startswith("gpu.xid")}


def count(rig: Live, device: str) -> int:
    """How many series of a device the newest layouts hold."""
    return sum(s.text("hw.id") == device for t in TIERS for _, s, _ in series_of(rig.of(t)[-1]))


def counters_hold(rig: Live) -> None:
    """No counter steps back under one start, over all that was sent."""
    seen: dict[object, tuple[int, Value]] = {}
    for batch in rig.batches:
        for (resource, _, each), value, start in zip(
            batch.layout.identities(), batch.readings(), batch.starts(), strict=True
        ):
            if each.metric.is_counter and value is not None:
                before = seen.get((resource, each), (0, 0))
                assert start > before[0] or (start == before[0] and value >= before[1]), each
                seen[resource, each] = (start, value)


@pytest.mark.parametrize("model", sorted(PROFILES))
async def test_a_model_has_exactly_these_series(model: str, fake: FakeNvml) -> None:
    """None is invented, none is missing; GPM on Hopper and newer only; 60 with the 12 XIDs at most."""
    gpu = fake.add_gpu(model, minor=0)
    async with live(fake) as rig:
        await rig.first()
        await rig.fresh()
        assert series(rig, gpu) == set(GOLDEN[model].split())
        assert count(rig, gpu) == len(GOLDEN[model].split()) + 12 <= 60
        assert rig.up == [1, 1]
    for batch in rig.batches:
        for _, each, value in series_of(batch):
            assert each.metric == CATALOGUE[each.metric.name].metric
            assert value != -1
    called = {call for _, _, call, _ in fake.calls()}
    assert "nvmlDeviceGetFieldValues" in called
    assert "nvmlDeviceGetPcieThroughput" not in called


async def test_a_gpu_in_the_middle_of_it_is_within_the_budget(fake: FakeNvml) -> None:
    """At work against its power cap, with corrected errors in its history, an XID of a program and a process: 60."""
    gpu = fake.add_gpu("H100", minor=0)
    fake.set(gpu, {"utilization.gpu": 100, "clock.reasons": 0x4, "ecc.0.1": 7, "memory.used": 1 << 36})
    fake.gpm(gpu, {1: 97, 2: 62, 3: 21, 5: 33, 10: 40, 12: 4, 13: 2})
    fake.processes(gpu, [FakeProcess(os.getpid(), 1 << 36, sm=97)])
    async with live(fake) as rig:
        await rig.first()
        fake.xid(gpu, 31)
        await until(lambda: rig.conversation.xids)
        await rig.fresh()
        assert {"gpu.clock.throttle.reason{sw_power_cap}", "hw.errors{corrected,ecc_aggregate}"} < series(rig, gpu)
        assert "31" in {s.text("gpu.xid") for _, s, _ in series_of(rig.of()[-1])}
        owned = sum(
            s.text("hw.id") == gpu and scope_of(s.metric.name) is MetricScope.OWNER
            for _, s, _ in series_of(rig.of("processes")[-1])
        )
        assert owned == 2
        assert count(rig, gpu) - owned <= 60


async def test_a_reset_starts_what_the_driver_counts_and_not_what_the_card_keeps(fake: FakeNvml) -> None:
    """The energy fell under a good handle: counters of both tiers have a new start although others rose; rows and
    errors of the card's whole life go on."""
    gpu = fake.add_gpu("H100", minor=0)
    fake.set(gpu, {"energy_mj": 500_000, "pcie.replay": 2, "remap.corrected": 3, "ecc.0.1": 7})
    volatile = {("hw.energy", ""), ("gpu.pcie.replays", ""), ("hw.errors", "ecc")}
    kept = {("hw.errors", "ecc_aggregate"), ("gpu.rows.remapped", "")}

    def starts() -> dict[tuple[str, str], set[int]]:
        found: dict[tuple[str, str], set[int]] = {}
        for batch in (rig.of()[-1], rig.of("errors")[-1]):
            for (_, _, each), start in zip(batch.layout.identities(), batch.starts(), strict=True):
                found.setdefault((each.metric.name, each.text("gpu.error.source")), set()).add(start)
        return found

    async with live(fake) as rig:
        await rig.first()
        await rig.tick()
        before = starts()
        fake.set(gpu, {"energy_mj": 1_000, "pcie.replay": 9})
        await rig.tick(2)
        after = starts()
        assert set(rig.up) == {1}
    assert {key for key in volatile if after[key] != before[key]} == volatile
    assert {key for key in kept if after[key] == before[key]} == kept
    counters_hold(rig)


async def test_numbers_are_in_base_units(fake: FakeNvml) -> None:
    """Percent is a ratio, mW are W, MHz are Hz, GPM the mean of its window."""
    gpu = fake.add_gpu("H100", minor=0)
    fake.set(gpu, {"memory.used": 3 << 30, "power.usage_mw": 512_000, "clock.1": 1980})
    fake.gpm(gpu, {2: 15.25, 10: 30})
    async with live(fake) as rig:
        await rig.first()
        await rig.fresh()
    last = rig.last()
    assert last["gpu.sm.active", gpu] == pytest.approx(0.1525, abs=1e-4)
    assert last["gpu.memory.bandwidth.utilization", gpu] == pytest.approx(0.3, abs=1e-4)
    assert last["hw.power", gpu] == 512
    assert last["hw.gpu.memory.usage", gpu] == 3 << 30
    clocks = {s.text("gpu.clock"): v for _, s, v in series_of(rig.of()[-1]) if s.metric.name == "gpu.clock.frequency"}
    assert clocks["sm"] == 1.98e9


async def test_mig_is_followed_while_it_changes(fake: FakeNvml) -> None:
    """Created, re-partitioned, destroyed: instances come and go with their own series, the GPU loses what it has not
    with MIG on, and nothing is said of an instance that is no more."""
    gpu = fake.add_gpu("H100", minor=0)
    async with live(fake) as rig:
        await rig.first()
        first = fake.set_mig(gpu, ["3g.40gb", "1g.10gb"])
        await rig.fresh(2)
        for instance in first:
            assert series(rig, instance.uuid) == set(INSTANCE.split())
            assert count(rig, instance.uuid) <= 30
        assert "gpu.sm.active" not in series(rig, gpu)
        assert not {each for each in series(rig, gpu) if each.startswith("hw.gpu.utilization")}
        info = {s.text("hw.id"): s.map for _, s, _ in series_of(rig.of("inventory")[-1]) if "device" in s.metric.name}
        assert set(info) == {gpu, *(one.uuid for one in first)}
        assert info[first[0].uuid]["hw.parent"] == gpu
        assert info[first[0].uuid]["gpu.mig.gi"] == str(first[0].gi)
        second = fake.set_mig(gpu, ["7g.80gb"])
        assert second is not None
        await rig.fresh(2)
        assert not set().union(*(series(rig, one.uuid) for one in first))
        assert series(rig, second[0].uuid) == set(INSTANCE.split())
        fake.set_mig(gpu, None)
        await rig.fresh(3)
        assert series(rig, gpu) == set(GOLDEN["H100"].split())
        assert series(rig, second[0].uuid) == set()
    assert set(rig.up) == {1}
    counters_hold(rig)


async def test_a_gpu_is_lost_and_comes_back(fake: FakeNvml) -> None:
    """The other is read at every tick; the lost one keeps identity, state and XIDs; after its return its counters
    have a new start."""
    gone, other = fake.add_gpu("H100", minor=0), fake.add_gpu("H100", minor=1)
    fake.set(gone, {"energy_mj": 500_000})
    async with live(fake) as rig:
        await rig.first()
        before = rig.of()[-1].latest_ns()
        fake.xid(gone, 79)
        await until(lambda: rig.conversation.xids)
        fake.lose(gone)
        await rig.tick(2)
        assert series(rig, gone) == {"hw.status{failed}", "hw.status{ok}", "gpu.device.info", "gpu.info"}
        assert rig.last()["hw.power", other] is not None
        fake.restore(gone)
        inventories = len(rig.of("inventory"))
        await until(lambda: len(rig.of("inventory")) > inventories)  # a change is read at once
        await rig.tick(3)
        assert rig.last()["hw.power", gone] is not None
        assert {start for (name, gpu), _, start in rows(rig.of()[-1]) if name == "hw.energy" and gpu == gone} != {
            before
        }
        events = [batch.events for batch in rig.of() if batch.events]
        assert len(events) == 1
    assert set(rig.up) == {1}
    counters_hold(rig)


async def test_the_driver_is_loaded_anew(fake: FakeNvml) -> None:
    """Ticks while it is away fail with the reason; afterwards counters have new starts, and the version is told."""
    gpu = fake.add_gpu("H100", minor=0)
    fake.set(gpu, {"energy_mj": 500_000, "pcie.replay": 5})
    async with live(fake) as rig:
        await rig.first()
        fake.init(9)
        fake.reload_driver("590.48.01")
        await rig.tick(tiers=[""])
        await until(lambda: rig.conversation.driver and rig.conversation.driver.code == 9)
        await rig.tick(tiers=[""])
        assert rig.up[-1] == 0
        assert "not loaded" in rig.statuses[-1][1]
        fake.init(0)
        await until(lambda: rig.gauge("gpulens_nvml_up"))
        await rig.tick(2)
        assert rig.up[-1] == 1
        info = [s for _, s, _ in series_of(rig.of("inventory")[-1]) if s.metric.name == "gpu.device.info"]
        assert info[0].text("gpu.driver.version") == "590.48.01"
    counters_hold(rig)


async def test_a_call_that_hangs_silences_its_gpu_only(fake: FakeNvml) -> None:
    """The other's ticks go on at once; the process stays; when the call comes back, so does the GPU."""
    stuck, other = fake.add_gpu("H100", minor=0), fake.add_gpu("H100", minor=1)
    async with live(fake, call_timeout="300ms", timeout="5s") as rig:
        await rig.first()
        rule = fake.delay("nvmlDeviceGetPowerUsage", 60_000, stuck)
        await rig.tick(3)
        assert rig.last()["hw.power", stuck] is None
        assert rig.last()["hw.power", other] is not None
        assert "hung (nvmlDeviceGetPowerUsage)" in rig.statuses[-1][1]
        assert rig.failures()["hung"] >= 1
        assert len(rig.children) == 1
        fake.clear(rule)
        await until(lambda: not rig.conversation.hung)
        await rig.tick(2)
        assert rig.last()["hw.power", stuck] is not None
    assert set(rig.up) == {1}
    counters_hold(rig)


async def test_a_killed_process_misses_one_tick_at_most(fake: FakeNvml) -> None:
    """Also on the fake, with GPM: the first sample was taken when the new process found the GPU."""
    gpu = fake.add_gpu("H100", minor=0)
    fake.set(gpu, {"energy_mj": 500_000})
    fake.xid(gpu, 48)
    async with live(fake) as rig:
        await rig.first()
        pid = rig.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(rig.children) == 2 and rig.gauge("gpulens_nvml_up"))
        await rig.fresh()
        assert rig.last()["gpu.sm.active", gpu] is not None
    assert rig.up == [1, 1]
    counters_hold(rig)
    starts = {start for batch in rig.of() for (name, _), _, start in rows(batch) if name == "hw.energy"}
    assert len(starts) == 1, "the totals went on, so does the start"


async def test_processes_are_found_with_their_containers(fake: FakeNvml, tmp_path: Path) -> None:
    """By the cgroup under `host_proc`; one that is of no container stays on the node's resource."""
    gpu = fake.add_gpu("H100", minor=0)
    uid, box = "11111111-2222-3333-4444-555555555555", "c" * 64
    proc = tmp_path / "proc"
    for pid, path in ((4242, f"/kubepods/burstable/pod{uid}/{box}"), (77, "/system.slice/x.service")):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(f"0::{path}\n", encoding="utf-8")
        (proc / str(pid) / "stat").write_text(f"{pid} (python) S " + "0 " * 18 + "100 0\n", encoding="utf-8")
    fake.processes(gpu, [FakeProcess(4242, 448 << 20, sm=30), FakeProcess(77, 1 << 20)])
    async with live(fake, host_proc=str(proc)) as rig:
        await rig.first()
    found = {
        (spelled(each), resource.text("k8s.pod.uid"), resource.text("container.id")): value
        for resource, each, value in series_of(rig.of("processes")[-1])
    }
    assert found["gpu.process.memory.usage{4242}", uid, box] == 448 << 20
    assert found["gpu.process.memory.usage{77}", "", ""] == 1 << 20
    assert found["gpu.allocated{process}", uid, box] == 1
    assert found["gpu.allocated{process}", "", ""] == 1, "somebody else is there"
    assert found["gpu.process.count{compute}", "", ""] == 2
    assert found["gpu.process.visible{nvml}", "", ""] == 1


async def test_without_hostpid_an_empty_list_says_nothing(fake: FakeNvml) -> None:
    """No count of 0, and `visible` is 0."""
    fake.add_gpu("H100", minor=0)
    async with live(fake, host_pid=False) as rig:
        await rig.first()
    assert rig.last("processes") == {("gpu.process.visible", ""): 0}


@pytest.mark.parametrize(("code", "words"), [(9, "not loaded"), (18, "different versions"), (999, "daemon-reload")])
async def test_a_driver_that_does_not_start_is_explained(code: int, words: str, fake: FakeNvml) -> None:
    """The code in the driver's words becomes what to do."""
    fake.add_gpu("H100", minor=0)
    fake.init(code)
    async with live(fake) as rig:
        await rig.advance(1)
        await until(lambda: rig.up)
        assert rig.up == [0]
        assert words in rig.statuses[-1][1]


async def test_without_the_library_the_status_names_the_mount(tmp_path: Path) -> None:
    """On a machine without a driver; where there is one, this has nothing to show."""
    rig = Live(COMMAND, environment(os.environ, [str(tmp_path)]))
    async with rig:
        await rig.advance(1)
        await until(lambda: rig.up)
        if rig.up == [1]:
            pytest.skip("this machine has a driver")
        assert "/home/kubernetes/bin/nvidia" in rig.statuses[-1][1]


async def test_eight_gpus_answer_in_one_tick(fake: FakeNvml) -> None:
    """One block each, on one layout that stays."""
    gpus = [fake.add_gpu("H100", minor=number) for number in range(8)]
    async with live(fake) as rig:
        await rig.first()
        await rig.fresh(3)
        assert {gpu for _, gpu in rig.last() if gpu} == set(gpus)
        assert len(rig.of()[-1].layout.blocks) == 9
    assert len({id(batch.layout) for batch in rig.of()[-2:]}) == 1
