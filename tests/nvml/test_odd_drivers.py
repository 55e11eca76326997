"""Drivers that refuse oddly, say more than all, or stamp with another clock, and libraries that can't be loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.nvml.protocol import ProtocolError, message
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.nvml.child import Child

_INVALID_ARGUMENT = 2
_UNKNOWN = 999


def test_fields_refused_as_an_invalid_argument_leave_the_rest(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A driver that does not know a field says 'invalid argument' of a handle that is good: the GPU is not silent."""
    fake.add_gpu("H100")
    child = start()
    fake.fault("nvmlDeviceGetFieldValues", _INVALID_ARGUMENT)
    fast, errors = child.read_one("fast"), child.read_one("errors")
    assert fast.of("power") == 69.0
    assert "temperature.memory" not in fast.rows()
    assert errors.of("rows.corrected") == 0
    assert "nvlink.crc_flit" not in errors.rows()


def test_an_instance_that_may_not_be_seen_leaves_the_others(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """No permission for one slot is no reason to say nothing of the GPU and of the instances that were given."""
    gpu = fake.add_gpu("H100")
    given = fake.set_mig(gpu, ["1g.10gb"] * 3)
    child = start()
    fake.advance(5)
    fake.fault("nvmlDeviceGetMigDeviceHandleByIndex", 4, times=1)  # the first slot
    fast = child.read_one("fast")
    assert fast.of("power", gpu) == 69.0
    assert [one["hw.id"] for one in fast.entities] == [gpu, given[1].uuid, given[2].uuid]
    assert ("nvmlDeviceGetMigDeviceHandleByIndex", "permission", 4) in fast.failures


def test_a_share_of_a_gpu_instance_is_unmeasured_beside_hidden_ones(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """A compute instance of a part of its GPU instance may share it with one that can't be seen: GPM, which measures
    the whole of it, is not told as its own."""
    gpu = fake.add_gpu("H100")
    hidden, part = fake.set_mig(gpu, ["1g.10gb", "3g.40gb"])
    fake.set(part.uuid, {"name": "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"})
    rule = fake.fault("nvmlDeviceGetMigDeviceHandleByIndex", 4, times=1)
    child = start(wait=False)
    child.up()
    child.read_one("fast")
    fake.clear(rule)
    fake.fault("nvmlDeviceGetMigDeviceHandleByIndex", 4, times=1)
    fake.advance(5)
    fast = child.read_one("fast")
    assert hidden.uuid not in {one["hw.id"] for one in fast.entities}
    assert "memory.used" in fast.rows(part.uuid)
    assert "sm" not in fast.rows(part.uuid)


def test_more_than_all_is_no_share(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Over 100 % is junk and absent; a ratio a little above it is 1."""
    gpu = fake.add_gpu("H100")
    child = start()
    fake.gpm(gpu, {2: 65_535, 3: 100.5, 5: 40})
    fake.set(gpu, {"utilization.gpu": 250, "utilization.memory": 255, "utilization.encoder": 300,
                   "memory.used": 200 << 30})  # fmt: skip
    fake.advance(10)
    fast = child.read_one("fast")
    assert [fast.of(key) for key in ("sm", "occupancy", "pipe.tensor")] == [None, 1.0, 0.4]
    junk = ("utilization", "memory.copy", "utilization.encoder", "memory.share")
    assert [fast.of(key) for key in junk] == [None] * 4
    assert fast.of("memory.used") == 200 << 30


def test_a_window_does_not_reach_back_behind_a_reading_that_failed(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """After a sample that could not be taken the next figure would be of two ticks: absent once."""
    gpu = fake.add_gpu("H100")
    child = start()
    fake.gpm(gpu, {2: 100})
    fake.advance(10)
    assert child.read_one("fast").of("sm") == 1.0
    fake.advance(10)
    rules = [fake.fault(call, _UNKNOWN) for call in ("nvmlGpmSampleGet", "nvmlDeviceGetSamples")]
    assert child.read_one("fast").of("sm") is None
    for rule in rules:
        fake.clear(rule)
    fake.gpm(gpu, {2: 0})
    fake.advance(10)
    after = child.read_one("fast")
    assert after.of("sm") is None
    assert after.of("utilization.max") is None
    fake.advance(10)
    assert child.read_one("fast").of("sm") == 0.0


def test_what_ran_long_ago_is_not_told_as_of_now(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """The driver's buffer of process samples may have stood still since long before the first reading."""
    gpu = fake.add_gpu("A100")
    fake.processes(gpu, [FakeProcess(101, 1 << 20, sm=90, age_us=60_000_000)])
    child = start()
    child.read_one("fast")
    assert "process.utilization" not in child.read_one("processes").rows()


def test_a_clock_set_back_does_not_end_process_utilisation(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Samples are stamped by the clock of the day: after an hour back they are all older than the last one seen."""
    gpu = fake.add_gpu("A100")
    fake.advance(10_000)
    child = start()
    fake.processes(gpu, [FakeProcess(101, 1 << 20, sm=90)])
    assert child.read_one("processes").of("process.utilization") == 0.9
    fake.advance(-3600)
    for _ in range(7):  # the history of the GPU's own samples finds out in so many ticks
        fake.advance(10)
        child.read_one("fast")
    assert child.read_one("processes").of("process.utilization") == 0.9


def test_every_gpm_sample_is_given_back_when_a_gpu_was_lost(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A GPU that comes and goes costs no memory: the library lives on, and its samples with it."""
    gpu = fake.add_gpu("H100")
    child = start()
    for _ in range(3):
        fake.lose(gpu)
        child.read_one("fast")
        fake.restore(gpu)
        child.read_one("inventory")
        child.until("back", gpu=gpu)
        fake.advance(5)
        child.read_one("fast")
    called = [call for _, _, call, _ in fake.calls()]
    assert called.count("nvmlGpmSampleAlloc") - called.count("nvmlGpmSampleFree") <= 2


@pytest.mark.parametrize(("content", "says"), [(b"", "file too short"), (b"no library" * 99, "invalid ELF header")])
def test_a_library_that_cannot_be_loaded_is_told_in_the_loaders_words(
    content: bytes, says: str, tmp_path: Path
) -> None:
    """'Not found' is no help where a wrong file was found."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    (tmp_path / "libnvidia-ml.so.1").write_bytes(content)
    with Child({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) as child:
        down = child.until("driver", up=False)
    assert down["code"] == 12
    assert says in down["text"]


def test_a_bottomless_frame_is_no_message() -> None:
    """Nesting that no parser follows is garbage like any other."""
    with pytest.raises(ProtocolError):
        message(b"[" * 1_000_000)
