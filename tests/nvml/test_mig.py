"""GPUs that are partitioned, partitioned anew, and whole again, while they are read."""

from __future__ import annotations

from collections.abc import Callable

from gpulens.simulator.nvml.state import FakeInstance, FakeNvml, FakeProcess
from tests.nvml.child import Answer, Child

_INSTANCE = {
    "memory.used", "memory.total", "memory.share", "memory.reserved", "engine", "sm", "occupancy", "pipe.tensor",
    "pipe.fp32", "pipe.fp16", "memory.bandwidth",
}  # fmt: skip
_NOT_OF_A_PARENT = ("utilization", "engine", "sm", "occupancy", "pipe", "nvlink", "process", "memory.copy", "allocated")


def test_an_instance_has_its_own_figures_and_its_parent_has_none_of_them(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """With MIG on, activity, processes and links are the instances' or nobody's; power and the like the GPU's."""
    gpu = fake.add_gpu("H100")
    large, small = fake.set_mig(gpu, ["3g.40gb", "1g.10gb"])
    fake.set(large.uuid, {"memory.used": 2**31})
    fake.processes(gpu, [FakeProcess(4242, 2**30, instance=small.uuid)])
    child = start()
    fake.gpm(large.uuid, {2: 55, 5: 20})
    fake.advance(5)
    fast, processes, errors = (child.read_one(tier) for tier in ("fast", "processes", "errors"))
    assert set(fast.rows(large.uuid)) == set(fast.rows(small.uuid)) == _INSTANCE
    assert fast.of("sm", large.uuid) == 0.55
    assert fast.of("sm", small.uuid) == 0.0
    assert fast.of("memory.used", large.uuid) == 2**31
    assert fast.of("power") == 69.0
    parent = [key for answer in (fast, processes, errors) for key in answer.rows(gpu)]
    assert not [key for key in parent if key.startswith(_NOT_OF_A_PARENT)]
    assert [(one.device, one.more, one.value) for one in processes.all("process.memory")] == [
        (small.uuid, (("process.pid", 4242),), 2**30)
    ]
    assert fast.entities[1] == {
        "hw.id": large.uuid,
        "hw.parent": gpu,
        "hw.name": "nvidia0",
        "hw.model": "NVIDIA H100 80GB HBM3",
        "gpu.mig.profile": "3g.40gb",
    }
    for instance in (large, small):
        rows = [key for answer in (fast, processes, errors) for key in answer.rows(instance.uuid)]
        assert len(rows) <= 30


def test_uncorrected_errors_of_an_instance_are_told_by_its_handle(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """The total where the handle has one, else SRAM's, else the sum over the places; none is asked of the parent's."""
    gpu = fake.add_gpu("H100")
    total, sram, places = fake.set_mig(gpu, ["1g.10gb", "1g.10gb", "1g.10gb"])
    fake.set(gpu, {"ecc.1.0": 9})
    fake.set(total.uuid, {"ecc.1.0": 5})
    fake.set(sram.uuid, {"ecc.1.0.7": 3, "ecc.1.0.1": 2})
    fake.set(places.uuid, {"ecc.1.0.1": 2, "ecc.1.0.3": 4})
    fake.unset(places.uuid, "ecc.1.0.7", "ecc.1.0.6")
    errors = start().read_one("errors")
    found = {one.device: one.value for one in errors.all("errors.ecc.uncorrected")}
    assert found == {gpu: 9, total.uuid: 5, sram.uuid: 3, places.uuid: 6}
    assert [one.device for one in errors.all("errors.ecc.corrected")] == [gpu]


def test_an_instance_whose_handle_tells_no_errors_has_no_such_row(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Absent, not 0; and a place that can't be read now makes the sum unknown, not smaller."""
    gpu = fake.add_gpu("A100")
    mute, broken = fake.set_mig(gpu, ["1g.5gb", "1g.5gb"])
    every = [f"ecc.1.0.{place}" for place in (0, 1, 3, 4, 5, 6, 7)]
    fake.unset(mute.uuid, *every)
    fake.unset(broken.uuid, "ecc.1.0.7")
    fake.set(broken.uuid, {"ecc.1.0.1": 2, "ecc.1.0.3": "!999"})
    errors = start().read_one("errors")
    assert "errors.ecc.uncorrected" not in errors.rows(mute.uuid)
    assert errors.of("errors.ecc.uncorrected", broken.uuid) is None


def test_device_info_has_what_instances_are_joined_by(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Every GPU and every instance says its ids, so that MIG-<uuid> allocations resolve."""
    gpu = fake.add_gpu("A100")
    instances = fake.set_mig(gpu, ["1g.5gb", "2g.10gb"])
    child = start()
    found = {one.device: dict(one.more) for one in child.read_one("inventory").all("device.info")}
    assert found.keys() == {gpu, *(one.uuid for one in instances)}
    for one in instances:
        assert found[one.uuid] == {"gpu.mig.gi": str(one.gi), "gpu.mig.ci": str(one.ci), "gpu.minor": "0"}
    assert found[gpu]["gpu.pci.address"] == "0000:15:00.0"


def test_ampere_instances_have_no_gpm(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """On an A100 an instance has memory and processes, and no activity that NVML could know."""
    gpu = fake.add_gpu("A100")
    (one,) = fake.set_mig(gpu, ["1g.5gb"])
    child = start()
    fake.advance(5)
    assert set(child.read_one("fast").rows(one.uuid)) == {
        "memory.used",
        "memory.total",
        "memory.share",
        "memory.reserved",
    }


def test_instances_come_change_and_go_between_two_ticks(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """The tick after a change knows the new layout; nothing is told of an instance that is gone."""
    gpu = fake.add_gpu("H100")
    child = start()
    fake.advance(2)
    assert child.read_one("fast").of("sm") == 0.0

    first = fake.set_mig(gpu, ["3g.40gb", "3g.40gb"])
    fake.advance(2)
    answer = child.read_one("fast")
    assert _devices(answer) == [gpu, *(one.uuid for one in first)]
    assert "utilization" not in answer.rows()
    child.until("changed", gpu=gpu)

    second = fake.set_mig(gpu, ["7g.80gb"])
    assert first[0].gi in {0, 1, 2}
    fake.advance(2)
    answer = child.read_one("fast")
    assert _devices(answer) == [gpu, second[0].uuid]
    child.until("changed", gpu=gpu)

    fake.destroy_instance(second[0].uuid)
    assert _devices(child.read_one("fast")) == [gpu]

    fake.set_mig(gpu, None)
    child.read_one("fast")
    fake.advance(2)
    answer = child.read_one("fast")
    assert _devices(answer) == [gpu]
    assert {"utilization", "sm"} <= set(answer.rows())


def test_a_window_does_not_reach_over_a_repartition(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """An instance with the id of one before it starts a window of its own: what the other did is not its doing."""
    gpu = fake.add_gpu("H100")
    (old,) = fake.set_mig(gpu, ["1g.10gb"], gis=[7])
    child = start()
    fake.gpm(old.uuid, {2: 100})
    fake.advance(10)
    assert child.read_one("fast").of("sm", old.uuid) == 1.0
    (new,) = fake.set_mig(gpu, ["1g.10gb"], gis=[7])
    answer = child.read_one("fast")
    assert answer.of("sm", new.uuid) is None
    fake.gpm(new.uuid, {2: 25})
    fake.advance(10)
    assert child.read_one("fast").of("sm", new.uuid) == 0.25


def test_an_instance_of_the_same_name_in_another_place_is_another_window(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """Samples of before a re-partition are refused by the library; the value is absent once, then right."""
    gpu = fake.add_gpu("H100")
    fake.set_mig(gpu, ["1g.10gb"], gis=[7], names=["MIG-one"])
    child = start()
    fake.advance(5)
    fake.set_mig(gpu, ["1g.10gb"], gis=[7], names=["MIG-one"])
    fake.advance(5)
    assert child.read_one("fast").of("sm", "MIG-one") is None
    fake.gpm("MIG-one", {2: 50})
    fake.advance(5)
    assert child.read_one("fast").of("sm", "MIG-one") == 0.5


def test_a_partitioned_gpu_that_is_lost_keeps_its_instances_names(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Who was there stays known while the GPU is off the bus."""
    gpu = fake.add_gpu("A100")
    (one,) = fake.set_mig(gpu, ["1g.5gb"])
    child = start()
    fake.lose(gpu)
    assert child.read_one("fast").reason == "lost"
    assert _devices(child.read_one("inventory")) == [gpu, one.uuid]


def _devices(answer: Answer) -> list[str]:
    return [entity["hw.id"] for entity in answer.entities]


def test_the_call_log_shows_no_call_of_a_parent_that_has_no_answer(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """With MIG on the parent is not asked for utilisation, codecs, processes or links."""
    gpu = fake.add_gpu("H100")
    instances: list[FakeInstance] = fake.set_mig(gpu, ["1g.10gb"])
    child = start()
    for tier in ("fast", "processes", "errors"):
        child.read_one(tier)
    asked = {name for _, _, name, uuid in fake.calls() if uuid == gpu}
    assert not [name for name in asked if "Utilization" in name or "Processes" in name or "Samples" in name]
    assert {name for _, _, name, uuid in fake.calls() if uuid == instances[0].uuid} >= {"nvmlDeviceGetMemoryInfo_v2"}
