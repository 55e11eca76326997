"""What changes while the unmodified binding looks on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.simulator.nvml.child import Child

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, LOST = 2, 3, 6, 15


def test_a_gpm_window_is_the_exact_mean_of_what_was(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """A change in the middle of a window counts for the time that it lasted, however seldom the library looks."""
    gpu = fake.add_gpu("H100")
    fake.gpm(gpu, {2: 10.0, 3: 100.0})
    child = started()
    child.do("a = sample(h0)")
    fake.advance(3.0)
    fake.gpm(gpu, {2: 90.0})
    fake.advance(1.0)
    fake.gpm(gpu, {2: 50.0})
    fake.advance(6.0)
    child.do("b = sample(h0)")
    sm, occupancy, tensor, unknown = child.value("gpm(a, b, [2, 3, 5, 99])")
    assert sm == pytest.approx((3 * 10 + 1 * 90 + 6 * 50) / 10, abs=1e-9)
    assert occupancy == pytest.approx(100.0, abs=1e-9)
    assert tensor == 0.0
    assert unknown is None


def test_gpm_tells_nothing_for_a_window_that_is_too_short(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Two samples less than 100 ms apart give no metrics, those 100 ms apart do, and none in the wrong order."""
    fake.add_gpu("H100")
    child = started()
    child.do("a = sample(h0)")
    fake.advance(0.05)
    child.do("b = sample(h0)")
    assert child.code("gpm(a, b, [2])") == 21
    fake.advance(0.05)
    child.do("c = sample(h0)")
    assert child.code("gpm(a, c, [2])") == 0
    assert child.code("gpm(c, a, [2])") == INVALID_ARGUMENT


def test_a_metric_may_fail_alone(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """One metric without a value leaves the others of the same request."""
    gpu = fake.add_gpu("H100")
    fake.gpm(gpu, {3: 25.0})
    fake.set(gpu, {"gpm.2": "!4"})
    child = started()
    child.do("a = sample(h0)")
    fake.advance(1.0)
    child.do("b = sample(h0)")
    assert child.value("gpm(a, b, [2, 3])") == [None, pytest.approx(25.0)]


def test_counters_rise_and_keep_what_they_had(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Energy and violation times go on from their last value when their rate changes."""
    gpu = fake.add_gpu("H100")
    fake.count(gpu, {"energy_mj": 700_000, "violation.0": 1e9})
    child = started()
    fake.advance(10.0)
    assert child.value("n.nvmlDeviceGetTotalEnergyConsumption(h0)") == 7_000_000
    fake.count(gpu, {"energy_mj": 100_000})
    fake.advance(10.0)
    assert child.value("n.nvmlDeviceGetTotalEnergyConsumption(h0)") == 8_000_000
    assert child.value("fields(h0, [74, 83])") == [[0, 20 * 10**9], [0, 8_000_000]]
    assert child.value("n.nvmlDeviceGetViolationStatus(h0, 0).violationTime") == 20 * 10**9


def test_samples_are_those_since_the_last_one_seen(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """The ring gives what is newer than the time stamp given, and 'not found' where nothing is."""
    gpu = fake.add_gpu("L4")
    fake.set(gpu, {"samples.1": "0,100", "samples.period_us": 200_000})
    child = started()
    child.do("kind, found = n.nvmlDeviceGetSamples(h0, n.NVML_GPU_UTILIZATION_SAMPLES, 998_000_000)")
    assert child.value("[s.sampleValue.uiVal for s in found]") == [100, 0] * 5
    assert child.value("[found[0].timeStamp, found[-1].timeStamp, kind]") == [998_200_000, 1_000_000_000, 1]
    last = "n.nvmlDeviceGetSamples(h0, n.NVML_GPU_UTILIZATION_SAMPLES, found[-1].timeStamp)"
    assert child.code(last) == NOT_FOUND
    fake.advance(1.0)
    assert child.value(f"len({last}[1])") == 5
    assert child.value("len(n.nvmlDeviceGetSamples(h0, n.NVML_GPU_UTILIZATION_SAMPLES, 0)[1])") == 100


def test_processes_come_in_their_lists(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Compute, graphics and MPS processes each have a list; memory that is not known is None."""
    gpu = fake.add_gpu("H100")
    fake.processes(
        gpu,
        [
            FakeProcess(101, 448 << 20, sm=30, memory_utilization=7),
            FakeProcess(102, None, kind="graphics"),
            FakeProcess(103, 1 << 30, kind="mps", sm=250),
        ],
    )
    child = started()
    rows = "[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGet{}RunningProcesses(h0)]"
    assert child.value(rows.format("Compute")) == [[101, 448 << 20]]
    assert child.value(rows.format("Graphics")) == [[102, None]]
    assert child.value(rows.format("MPSCompute")) == [[103, 1 << 30]]
    used = "[[s.pid, s.smUtil, s.memUtil] for s in n.nvmlDeviceGetProcessUtilization(h0, {})]"
    assert child.value(used.format(0)) == [[101, 30, 7], [103, 250, 0]]
    assert child.code(used.format(999_900_000)) == NOT_FOUND


def test_a_list_may_grow_between_its_size_and_its_contents(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """The binding's spare room takes a few new processes, and more of them are 'insufficient size'."""
    gpu = fake.add_gpu("H100")
    fake.processes(gpu, [FakeProcess(100 + n, 1 << 20) for n in range(8)])
    fake.set(gpu, {"process.compute.grow": 6})
    child = started()
    assert child.value("len(n.nvmlDeviceGetComputeRunningProcesses(h0))") == 8
    fake.processes(gpu, [FakeProcess(100 + n, 1 << 20) for n in range(20)])
    fake.set(gpu, {"process.compute.grow": 18})
    assert child.code("n.nvmlDeviceGetComputeRunningProcesses(h0)") == 7


def test_mig_comes_is_cut_anew_and_goes(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Instances have ids, names, memory, processes and GPM of their own; the parent loses its utilisation."""
    gpu = fake.add_gpu("H100")
    child = started()
    slots = "[i for i in range(n.nvmlDeviceGetMaxMigDeviceCount(h0)) if not slot_code(i)]"
    child.do("""
def slot_code(i):
    try:
        n.nvmlDeviceGetMigDeviceHandleByIndex(h0, i)
    except n.NVMLError as error:
        return error.value
    return 0
""")
    assert child.value(slots) == []
    first = fake.set_mig(gpu, ["3g.40gb", "1g.10gb", "1g.10gb"])
    fake.processes(gpu, [FakeProcess(7, 5 << 20, instance=first[1].uuid)])
    assert child.value(slots) == [0, 1, 2]
    for refused in (
        "n.nvmlDeviceGetUtilizationRates(h0)",
        "n.nvmlDeviceGetEncoderUtilization(h0)",
        "n.nvmlDeviceGetProcessUtilization(h0, 0)",
        "n.nvmlDeviceGetNvLinkState(h0, 0)",
        "n.nvmlDeviceGetRemappedRows(h0)",
        "n.nvmlDeviceGetSamples(h0, 1, 0)",
    ):
        assert child.code(refused) == NOT_SUPPORTED, refused
    assert child.value("fields(h0, [(163, 0)])")[0][0] == NOT_SUPPORTED
    assert child.code("n.nvmlDeviceGetPowerUsage(h0)") == 0
    assert child.code("n.nvmlDeviceGetRowRemapperHistogram(h0)") == 0
    child.do("m1 = n.nvmlDeviceGetMigDeviceHandleByIndex(h0, 1)")
    assert child.value("[n.nvmlDeviceGetUUID(m1), n.nvmlDeviceGetName(m1)]") == [
        first[1].uuid,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ]
    assert child.value("[n.nvmlDeviceGetGpuInstanceId(m1), n.nvmlDeviceGetComputeInstanceId(m1)]") == [first[1].gi, 0]
    assert child.value("n.nvmlDeviceGetAttributes(m1).multiprocessorCount") == 16
    assert child.value("n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m1))") == gpu
    assert child.value("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(m1)))") == first[1].uuid
    rows = "[[p.pid, p.gpuInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses({})]"
    assert child.value(rows.format("m1")) == child.value(rows.format("h0")) == [[7, first[1].gi]]
    fake.destroy_instance(first[0].uuid)
    assert child.value(slots) == [1, 2]
    assert child.code("n.nvmlDeviceGetMigDeviceHandleByIndex(h0, 0)") == NOT_FOUND
    second = fake.set_mig(gpu, ["2g.20gb", "1g.10gb"])
    assert second[1].gi == first[1].gi
    assert child.code("n.nvmlDeviceGetName(m1)") == INVALID_ARGUMENT
    assert child.value("n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(h0, 1))") == second[1].uuid
    fake.set_mig(gpu, None)
    assert child.value(slots) == []
    assert child.code("n.nvmlDeviceGetUtilizationRates(h0)") == 0


def test_uncorrected_errors_outside_dram_are_told_by_instances(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Of a partitioned GPU not at all, by place; a total of an instance only where the state gives it one."""
    gpu = fake.add_gpu("H100")
    sram = "n.nvmlDeviceGetMemoryErrorCounter({}, 1, 0, 7)"
    child = started()
    assert child.value(sram.format("h0")) == 0
    (one,) = fake.set_mig(gpu, ["1g.10gb"])
    fake.set(one.uuid, {"ecc.1.0.7": 3})
    child.do("m0 = n.nvmlDeviceGetMigDeviceHandleByIndex(h0, 0)")
    assert child.value(sram.format("m0")) == 3
    assert child.code(sram.format("h0")) == NOT_SUPPORTED
    assert child.code("n.nvmlDeviceGetTotalEccErrors(m0, 1, 0)") == NOT_SUPPORTED
    assert child.value("n.nvmlDeviceGetMemoryErrorCounter(h0, 1, 0, 2)") == 0
    fake.set(one.uuid, {"ecc.1.0": 4})
    assert child.value("n.nvmlDeviceGetTotalEccErrors(m0, 1, 0)") == 4


def test_an_instance_has_gpm_windows_of_its_own(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """GPM by GPU-instance id and by MIG handle both measure the instance, and no window spans a new cut."""
    gpu = fake.add_gpu("H100")
    mig = fake.set_mig(gpu, ["3g.40gb", "1g.10gb"])
    fake.gpm(mig[0].uuid, {2: 40.0})
    fake.gpm(mig[1].uuid, {2: 80.0})
    child = started()
    child.do("m1 = n.nvmlDeviceGetMigDeviceHandleByIndex(h0, 1)")
    child.do(f"a, b = sample(h0, {mig[0].gi}), sample(m1)")
    fake.advance(2.0)
    child.do(f"c, d = sample(h0, {mig[0].gi}), sample(m1)")
    assert child.value("gpm(a, c, [2])") == [pytest.approx(40.0)]
    assert child.value("gpm(b, d, [2])") == [pytest.approx(80.0)]
    assert child.code("gpm(a, d, [2])") == INVALID_ARGUMENT
    assert child.code("sample(h0, 14)") == NOT_FOUND
    fake.set_mig(gpu, ["3g.40gb"])
    fake.advance(2.0)
    child.do(f"e = sample(h0, {mig[0].gi})")
    assert child.code("gpm(c, e, [2])") == INVALID_ARGUMENT


def test_a_lost_gpu_fails_alone_and_comes_back(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """All calls of a lost GPU say so while the other answers; once back it has new handles and counts from 0."""
    lost, other = fake.add_gpu("H100"), fake.add_gpu("H100")
    fake.count(lost, {"energy_mj": 1000})
    child = started()
    fake.advance(5.0)
    fake.lose(lost)
    assert child.code("n.nvmlDeviceGetName(h0)") == child.code("n.nvmlDeviceGetHandleByIndex(0)") == LOST
    assert child.value("n.nvmlDeviceGetUUID(h1)") == other
    assert child.value("n.nvmlDeviceGetCount()") == 2
    fake.restore(lost)
    fake.advance(1.0)
    assert child.code("n.nvmlDeviceGetName(h0)") == INVALID_ARGUMENT
    assert child.value("uuids()") == [lost, other]
    assert child.value("n.nvmlDeviceGetTotalEnergyConsumption(n.nvmlDeviceGetHandleByIndex(0))") == 1000


def test_a_removed_gpu_leaves_no_place(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Its old handle is of a lost GPU, the list is shorter, and the other keeps its handle at another index."""
    gone, other = fake.add_gpu("L4"), fake.add_gpu("L4")
    child = started()
    fake.remove_gpu(gone)
    assert child.code("n.nvmlDeviceGetName(h0)") == LOST
    assert child.value("uuids()") == [other]
    assert child.value("[n.nvmlDeviceGetUUID(h1), n.nvmlDeviceGetIndex(h1)]") == [other, 0]
    assert child.code("n.nvmlDeviceGetHandleByIndex(1)") == INVALID_ARGUMENT


def test_a_driver_that_is_loaded_anew_wants_a_new_start(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Handles of before are void, calls say 'not started', and after a new start counters count from 0."""
    gpu = fake.add_gpu("H100")
    fake.count(gpu, {"energy_mj": 1000})
    fake.set(gpu, {"ecc.1.0": 3, "ecc.1.1": 4})
    child = started()
    fake.advance(5.0)
    fake.reload_driver("590.48.01")
    assert child.code("n.nvmlDeviceGetName(h0)") == 1
    child.do("n.nvmlShutdown()")
    child.do("old = h0")
    child.start()
    assert child.code("n.nvmlDeviceGetName(old)") == INVALID_ARGUMENT
    assert child.value("n.nvmlDeviceGetTotalEnergyConsumption(h0)") == 0
    assert child.value("n.nvmlDeviceGetTotalEccErrors(h0, 1, 0)") == 0
    assert child.value("n.nvmlDeviceGetTotalEccErrors(h0, 1, 1)") == 4
    assert child.value("n.nvmlSystemGetDriverVersion()") == "590.48.01"
