"""Processes with a context, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.nvml.child import Child

_ID = "a1" * 32
_OTHER_ID = "b2" * 32
_POD = "0b5c2a4e-6a0f-4a39-9a6c-2f3f1a0c7d11"


def _proc(folder: Path, pid: int, container: str, pod: str = _POD) -> None:
    here = folder / str(pid)
    here.mkdir(parents=True)
    stat = " ".join(str(number) for number in range(4, 53))
    (here / "stat").write_text(f"{pid} (python) S {stat}\n")
    (here / "cgroup").write_text(f"0::/kubepods/burstable/pod{pod}/{container}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with two processes of one container and one of another."""
    folder = tmp_path / "proc"
    for pid, container in ((101, _ID), (102, _ID), (201, _OTHER_ID)):
        _proc(folder, pid, container)
    return folder


def test_processes_have_memory_utilisation_and_owners(proc: Path, fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Each process tells its memory and how busy it kept the GPU; each container holds the device once. Memory that
    the driver does not tell is absent."""
    gpu = fake.add_gpu("A100")
    child = start(proc=str(proc))
    fake.processes(gpu, [FakeProcess(101, 448 << 20, sm=30), FakeProcess(102, 1 << 30), FakeProcess(201, None, sm=5)])
    answer = child.read_one("processes")
    owner = (("container.id", _ID), ("k8s.pod.uid", _POD))
    other = (("container.id", _OTHER_ID), ("k8s.pod.uid", _POD))
    assert answer.of("process.count.compute") == 3
    assert [(one.more, one.owner, one.value) for one in answer.all("process.memory")] == [
        ((("process.pid", 101),), owner, 448 << 20),
        ((("process.pid", 102),), owner, 1 << 30),
    ]
    assert [(one.more, one.value) for one in answer.all("process.utilization")] == [
        ((("process.pid", 101),), 0.3),
        ((("process.pid", 201),), 0.05),
    ]
    assert [(one.owner, one.value) for one in answer.all("allocated")] == [(owner, 1), (other, 1)]


def test_a_process_that_stopped_running_has_no_utilisation_and_no_zero(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """Its slot stays, empty, while the process is listed: the driver has samples of those that ran only."""
    gpu = fake.add_gpu("T4")
    child = start()
    fake.processes(gpu, [FakeProcess(1001, 5, sm=30)])
    before = child.read_one("processes")
    fake.processes(gpu, [FakeProcess(1001, 5)])
    fake.advance(15)
    after = child.read_one("processes")
    assert before.of("process.utilization") == 0.3
    assert after.of("process.utilization") is None
    assert after.shape == before.shape


def test_a_process_that_ended_is_told_no_more(proc: Path, fake: FakeNvml, start: Callable[..., Child]) -> None:
    """With its context a process leaves the list, and an empty list counts zero."""
    gpu = fake.add_gpu("T4")
    child = start(proc=str(proc))
    fake.processes(gpu, [FakeProcess(101, 1 << 20, sm=30)])
    assert child.read_one("processes").all("process.memory")
    fake.processes(gpu, [])
    answer = child.read_one("processes")
    assert answer.of("process.count.compute") == 0
    assert not answer.all("process.memory")
    assert not answer.all("process.utilization")
    assert not answer.all("allocated")


def test_graphics_and_mps_processes_are_counted_once_there_were_some(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """The two other lists have a count from their first process on; a process in two lists holds its memory once."""
    gpu = fake.add_gpu("T4")
    child = start()
    assert child.read_one("processes").rows() == ["process.count.compute"]
    fake.processes(gpu, [FakeProcess(7, 5, kind="graphics"), FakeProcess(7, 9), FakeProcess(8, 3, kind="mps")])
    answer = child.read_one("processes")
    assert [answer.of(f"process.count.{kind}") for kind in ("compute", "graphics", "mps")] == [1, 1, 1]
    assert [(one.more, one.value) for one in answer.all("process.memory")] == [
        ((("process.pid", 7),), 9),
        ((("process.pid", 8),), 3),
    ]
    fake.processes(gpu, [])
    assert child.read_one("processes").of("process.count.mps") == 0


def test_junk_of_the_utilisation_samples_is_dropped(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """More than 100 %, and processes that are not listed, are nobody's utilisation."""
    gpu = fake.add_gpu("T4")
    fake.processes(gpu, [FakeProcess(1001, 5, sm=250), FakeProcess(1002, 5, sm=40)])
    child = start()
    fake.fault("nvmlDeviceGetProcessUtilization", 0)
    answer = child.read_one("processes")
    assert [(one.more, one.value) for one in answer.all("process.utilization")] == [((("process.pid", 1002),), 0.4)]


def test_a_list_that_grows_while_it_is_read_is_read_whole(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Processes that start between the size call and the fetch are in the list."""
    gpu = fake.add_gpu("T4")
    fake.processes(gpu, [FakeProcess(1000 + n, 1) for n in range(6)])
    fake.set(gpu, {"process.compute.grow": 4})
    child = start()
    assert child.read_one("processes").of("process.count.compute") == 6


def test_without_sight_of_all_pids_nothing_is_counted_and_nobody_named(
    proc: Path, fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """In a pid namespace of its own the child says so: an empty list is no zero, and a pid names nobody."""
    gpu = fake.add_gpu("T4")
    child = start(proc=str(proc), host_pid="false", wait=False)
    assert child.until("driver", up=True)["pids"] is False
    child.until("changed")
    assert child.read_one("processes").rows() == []
    fake.processes(gpu, [FakeProcess(101, 5)])
    answer = child.read_one("processes")
    assert [(one.key, one.owner) for one in answer.values] == [("process.memory", ()), ("allocated", ())]


def test_processes_are_left_alone_where_they_are_not_wanted(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """With `processes` off that tier asks nobody."""
    fake.add_gpu("T4")
    child = start(processes=False)
    assert child.read("processes") == {}
    assert "nvmlDeviceGetComputeRunningProcesses_v3" not in [name for _, _, name, _ in fake.calls()]


def test_an_early_r535_gives_no_process_list(fake: FakeNvml, cache: Path, start: Callable[..., Child]) -> None:
    """A driver whose entries are longer than they say would give wrong pids: it gives none."""
    gpu = fake.add_gpu("A100")
    fake.imitate("R535-early", cache=cache)
    fake.processes(gpu, [FakeProcess(101, 5), FakeProcess(102, 6)])
    child = start()
    assert child.read_one("processes").rows() == []
    fake_calls = [name for _, _, name, _ in fake.calls()]
    assert "nvmlDeviceGetComputeRunningProcesses_v3" not in fake_calls
