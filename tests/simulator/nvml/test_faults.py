"""Faults that are put in while the unmodified binding looks on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.simulator.nvml.build import BuildError, build
from gpulens.simulator.nvml.state import FakeNvml
from tests.simulator.nvml.child import Child

LOST, TIMEOUT = 15, 10


@pytest.mark.parametrize("code", [9, 18, 999])
def test_the_library_may_refuse_to_start(code: int, fake: FakeNvml) -> None:
    """No driver, a driver that does not fit, and revoked access are told at the start, and only until they end."""
    fake.add_gpu("H100")
    fake.init(code)
    with fake as environment, Child(environment) as child:
        assert child.code("n.nvmlInit()") == code
        fake.init(0)
        child.start()
        assert child.value("n.nvmlDeviceGetCount()") == 1
        child.do("n.nvmlShutdown()")
        assert child.code("n.nvmlDeviceGetCount()") == 1


@pytest.mark.parametrize("code", [3, 4, 6, 15, 16, 18, 26, 999])
def test_a_call_fails_as_often_as_told(code: int, fake: FakeNvml, started: Callable[[], Child]) -> None:
    """A fault hits its call of its GPU, so many times, and neither other calls nor other GPUs."""
    gpu = fake.add_gpu("H100")
    fake.add_gpu("H100")
    fake.fault("nvmlDeviceGetPowerUsage", code, gpu, times=2)
    child = started()
    asked = "n.nvmlDeviceGetPowerUsage(h{})"
    assert [child.code(asked.format(1))] + [child.code(asked.format(0)) for _ in range(3)] == [0, code, code, 0]
    assert child.code("n.nvmlDeviceGetTotalEnergyConsumption(h0)") == 0


def test_a_fault_may_hit_a_family_until_it_is_cleared(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """A name that ends in a star stands for all calls that begin so."""
    fake.add_gpu("H100")
    rule = fake.fault("nvmlGpm*", 4)
    child = started()
    assert child.code("n.nvmlGpmQueryDeviceSupport(h0)") == child.code("n.nvmlGpmSampleAlloc()") == 4
    assert child.code("n.nvmlDeviceGetName(h0)") == 0
    fake.clear(rule)
    assert child.code("n.nvmlGpmSampleAlloc()") == 0


def test_a_hang_holds_one_thread_and_no_other(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """While a call of one GPU hangs, another thread reads the other GPU; the hang ends when its rule goes."""
    gpu = fake.add_gpu("H100")
    fake.add_gpu("H100")
    rule = fake.delay("nvmlDeviceGetPowerUsage", 60_000, gpu)
    child = started()
    child.do("answers = []")
    child.do("stuck = threading.Thread(target=lambda: answers.append(n.nvmlDeviceGetPowerUsage(h0)), daemon=True)")
    child.do("stuck.start()")
    assert child.code("n.nvmlDeviceGetPowerUsage(h1)") == 0
    assert child.code("n.nvmlDeviceGetTotalEnergyConsumption(h0)") == 0
    assert child.value("[stuck.is_alive(), answers]") == [True, []]
    fake.clear(rule)
    child.do("stuck.join(10)")
    assert child.value("[stuck.is_alive(), answers]") == [False, [69_000]]


def test_an_xid_reaches_who_waits_for_it(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Only what happens after the registration is told, in order, with the GPU and the instance it came from."""
    gpu = fake.add_gpu("H100")
    fake.xid(gpu, 13)
    child = started()
    child.do("events = n.nvmlEventSetCreate()")
    child.do("mask = n.nvmlDeviceGetSupportedEventTypes(h0) & n.nvmlEventTypeXidCriticalError")
    child.do("n.nvmlDeviceRegisterEvents(h0, mask, events)")
    assert child.code("n.nvmlEventSetWait_v2(events, 0)") == TIMEOUT
    child.do("got = []")
    child.do("wait = threading.Thread(target=lambda: got.append(n.nvmlEventSetWait_v2(events, 10_000)))")
    child.do("wait.start()")
    fake.xid(gpu, 79)
    fake.event(gpu, 0x10, 0)
    fake.xid(gpu, 31, gi=3, ci=0)
    child.do("wait.join(10)")
    child.do("got.append(n.nvmlEventSetWait_v2(events, 1000))")
    assert child.value("[[e.eventType, e.eventData, e.gpuInstanceId, e.computeInstanceId] for e in got]") == [
        [8, 79, 0xFFFFFFFF, 0xFFFFFFFF],
        [8, 31, 3, 0],
    ]
    assert child.value("n.nvmlDeviceGetUUID(got[0].device)") == gpu
    assert child.code("n.nvmlEventSetWait_v2(events, 0)") == TIMEOUT
    assert child.code("n.nvmlEventSetFree(events)") == 0


def test_waiting_for_events_of_a_lost_gpu_fails_at_once(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """After its last event the wait says that the GPU is lost, again and again, without waiting."""
    gpu = fake.add_gpu("H100")
    child = started()
    child.do("events = n.nvmlEventSetCreate()")
    child.do("n.nvmlDeviceRegisterEvents(h0, n.nvmlEventTypeXidCriticalError, events)")
    with fake.batch():
        fake.xid(gpu, 79)
        fake.lose(gpu)
    assert child.value("n.nvmlEventSetWait_v2(events, 60_000).eventData") == 79
    assert [child.code("n.nvmlEventSetWait_v2(events, 60_000)") for _ in range(3)] == [LOST] * 3


def test_events_that_a_card_does_not_have_are_refused(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """A GeForce card has no ECC events: registering for them is not supported, and the set stays of use."""
    fake.add_gpu("RTX4080")
    child = started()
    child.do("events = n.nvmlEventSetCreate()")
    assert child.code("n.nvmlDeviceRegisterEvents(h0, n.nvmlEventTypeDoubleBitEccError, events)") == 3
    assert child.code("n.nvmlDeviceRegisterEvents(h0, n.nvmlEventTypeXidCriticalError, events)") == 0


def test_a_name_may_be_no_text(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Bytes that are no UTF-8 reach the binding as they are."""
    fake.set(fake.add_gpu("H100"), {"name": r"NVIDIA\xff\xfe"})
    child = started()
    child.do("""
try:
    n.nvmlDeviceGetName(h0)
    outcome = "decoded"
except UnicodeDecodeError:
    outcome = "refused"
""")
    assert child.value("outcome") == "refused"


def test_a_gpu_may_be_out_of_reach(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Without access to its device node an index gives 'no permission', and the others are there."""
    fake.add_gpu("H100")
    hidden = fake.add_gpu("H100")
    child = started()
    fake.set(hidden, {"access": 4})
    assert [child.code(f"n.nvmlDeviceGetHandleByIndex({i})") for i in range(2)] == [0, 4]


def test_every_call_is_logged_with_its_thread_and_gpu(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """The log has each call in order with its GPU and thread, refused and slow ones too."""
    gpu = fake.add_gpu("H100")
    child = started()
    child.do("n.nvmlDeviceGetPcieThroughput(h0, 0)")
    child.do("other = threading.Thread(target=lambda: n.nvmlDeviceGetPowerUsage(h0))")
    child.do("other.start(); other.join()")
    calls = fake.calls()
    assert [name for _, _, name, _ in calls] == [
        "nvmlInitWithFlags",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetPowerUsage",
    ]
    assert [device for _, _, _, device in calls] == ["", "", "", gpu, gpu]
    assert [at for at, *_ in calls] == sorted(at for at, *_ in calls)
    assert len({thread for _, thread, _, _ in calls}) == 2


def test_a_null_or_foreign_handle_is_refused(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """The fake takes what would end the process on hardware as a bad argument."""
    fake.add_gpu("H100")
    assert started().code("n.nvmlDeviceGetName(None)") == 2


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can compile, building says so instead of failing in the loader."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="no C compiler"):
        build(tmp_path / "library", cache=tmp_path / "cache")
