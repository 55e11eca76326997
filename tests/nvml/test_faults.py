"""GPUs that are lost, removed or hang, and drivers that go and come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from gpulens.nvml.protocol import Tier
from gpulens.simulator.nvml.state import FakeNvml
from tests.nvml.child import Child

_HANG_MS = 60_000
_QUICK = {"call_timeout_s": 0.25, "retry_s": [0.4, 5.0]}


def test_a_lost_gpu_keeps_its_name_and_nothing_else(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Of a GPU off the bus the inventory stays, everything else is silent, and the other GPU goes on."""
    lost, good = fake.add_gpu("H100"), fake.add_gpu("H100")
    child = start()
    before = child.read("inventory")[lost]
    epoch = child.read("fast")[lost].epoch
    fake.lose(lost)
    answers = child.read("fast")
    assert answers[lost].reason == "lost"
    assert answers[good].of("power") == 69.0
    assert child.read("errors")[lost].silent is not None
    again = child.read("inventory")[lost]
    assert [(one.key, one.more) for one in again.values] == [(one.key, one.more) for one in before.values]
    fake.restore(lost)
    child.read("inventory")  # has the list looked through at once
    child.until("back", gpu=lost)
    back = child.read("fast")[lost]
    assert back.of("power") == 69.0
    assert back.epoch != epoch, "its counters began anew"


def test_a_lost_gpu_is_looked_for_until_it_is_back(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Without being asked for the inventory the child finds the GPU again within a few seconds."""
    gpu = fake.add_gpu("T4")
    child = start()
    fake.lose(gpu)
    assert child.read_one("fast").silent is not None
    fake.restore(gpu)
    child.until("back", gpu=gpu, limit_s=8)
    assert child.read_one("fast").of("power") == 9.5


def test_a_gpu_lost_from_the_start_is_told_by_its_index(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A GPU whose handle was never had has no name; the others are read, and it joins when it can be reached."""
    good, bad = fake.add_gpu("T4"), fake.add_gpu("T4")
    fake.set(bad, {"access": 4})
    child = start(wait=False)
    driver = child.until("driver", up=True)
    driver = driver if driver["unreachable"] else child.until("driver", up=True)
    assert driver["unreachable"] == [[1, "permission", 4]]
    assert set(child.read("fast")) == {good}
    fake.unset(bad, "access")
    child.read("inventory")
    child.until("driver", unreachable=[], limit_s=8)
    assert set(child.read("fast")) == {good, bad}


def test_a_gpu_that_is_not_listed_any_more_goes(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A removed GPU is no lost one: it is not asked any more, and the list is told to have changed."""
    gone, good = fake.add_gpu("T4"), fake.add_gpu("L4")
    child = start()
    epoch = child.read("fast")[good].epoch
    fake.remove_gpu(gone)
    child.read("fast")
    child.until("changed", gpu=None)
    answers = child.read("fast")
    assert set(answers) == {good}
    assert answers[good].epoch == epoch, "it only moved to another index"
    assert dict(child.read("inventory")[good].all("info")[0].more)["gpu.index"] == "0"


def test_a_gpu_that_comes_is_found_with_the_next_inventory(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A hot-plugged GPU is listed, told, and read."""
    fake.add_gpu("T4")
    child = start()
    child.read("inventory")
    new = fake.add_gpu("L4")
    child.read("inventory")
    child.until("changed", gpu=None)
    assert child.read("fast")[new].of("power") == 13.0


def test_a_reloaded_driver_is_a_new_epoch(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """When the driver was loaded anew the child starts the library again and says so."""
    gpu = fake.add_gpu("H100")
    child = start()
    before = child.read_one("fast")
    fake.reload_driver("590.48.01")
    assert child.read_one("fast").reason == "driver"
    assert child.until("driver", up=False)["reason"] == "driver"
    driver = child.until("driver", up=True)
    assert (driver["epoch"], driver["driver"]) == (2, "590.48.01")
    fake.advance(1)
    after = child.read("fast")[gpu]
    assert after.of("power") == 69.0
    assert after.epoch != before.epoch
    info = child.read_one("inventory").all("info")[0]
    assert dict(info.more)["gpu.driver.version"] == "590.48.01"


@pytest.mark.parametrize(("code", "reason"), [(9, "driver"), (18, "driver"), (4, "permission"), (999, "error")])
def test_a_driver_that_does_not_start_is_told_and_tried_again(
    code: int, reason: str, fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """While NVML does not start, reads are answered with nobody; once it does the GPUs are there."""
    gpu = fake.add_gpu("T4")
    fake.init(code)
    child = start(wait=False)
    down = child.until("driver", up=False)
    assert (down["reason"], down["code"]) == (reason, code)
    assert down["text"]
    assert child.read("fast") == {}
    assert child.asked["up"] is False
    fake.init(0)
    child.up()
    assert set(child.read("fast")) == {gpu}


def test_a_library_that_does_not_fit_is_left_to_another_process(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """After an upgrade of the driver the loaded library never fits again: the child tries a little, then ends."""
    fake.add_gpu("T4")
    child = start()
    with fake.batch():
        fake.reload_driver()
        fake.init(18)
    assert child.read_one("fast").reason == "driver"
    child.until("driver", code=18)
    child.until("gone", limit_s=10)
    assert child.wait() == 0


def test_a_missing_library_is_told(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Where the loader finds no libnvidia-ml.so.1 the code is 12."""
    (fake.folder / "libnvidia-ml.so.1").unlink()
    env = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    with Child(env) as child:
        assert child.until("driver", up=False)["code"] == 12


def test_a_hanging_call_silences_its_gpu_only(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A call that takes 60 s costs one GPU its readings; the other answers at once, and the first one when it can."""
    bad, good = fake.add_gpu("H100"), fake.add_gpu("H100")
    child = start(**_QUICK)
    rule = fake.delay("nvmlDeviceGetPowerUsage", _HANG_MS, bad)
    answers = child.read("fast")
    assert answers[good].of("power") == 69.0
    assert answers[bad].silent == ("nvmlDeviceGetPowerUsage", "hung", 0)
    assert [(one["gpu"], one["call"]) for one in child.other if one["say"] == "hung"] == [
        (bad, "nvmlDeviceGetPowerUsage")
    ]
    began = time.monotonic()
    for tier in Tier:
        answers = child.read(tier)
        assert answers[bad].reason == "hung"
        assert answers[good].silent is None
    assert time.monotonic() - began < 0.25, "a GPU that is known to hang makes nobody wait"
    fake.clear(rule)
    child.until("back", gpu=bad)
    assert child.read("fast")[bad].of("power") == 69.0


def test_at_most_two_threads_are_left_behind(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A call that hangs each time is tried once more, then not before one of its threads comes back."""
    gpu = fake.add_gpu("T4")
    child = start(call_timeout_s=0.1, retry_s=[0.2, 0.2])
    rule = fake.delay("nvmlDeviceGetPowerUsage", _HANG_MS, gpu)
    child.read_one("fast")
    child.until("hung", gpu=gpu)
    child.until("hung", gpu=gpu)  # the second try
    assert child.frame(0.6) is None, "a third one does not come"
    threads = {thread for _, thread, name, _ in fake.calls() if name == "nvmlDeviceGetPowerUsage"}
    assert len(threads) <= 3
    fake.clear(rule)
    child.until("back", gpu=gpu)


def test_all_gpus_hung_still_leaves_a_child_that_answers(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """With every GPU in a hanging call the child says so at once, and ends politely when told to."""
    fake.add_gpu("T4")
    fake.add_gpu("L4")
    child = start(**_QUICK)
    fake.delay("nvmlDeviceGetPowerUsage", _HANG_MS)
    child.read("fast")
    assert {answer.reason for answer in child.read("fast").values()} == {"hung"}
    began = time.monotonic()
    child.send(do="stop")
    child.until("gone")
    assert child.wait() == 0
    assert time.monotonic() - began < 6


def test_a_hang_while_finding_the_gpus_stops_nobody_else(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """When asking one index for its name hangs, the GPUs that are known are still read."""
    bad, good = fake.add_gpu("T4"), fake.add_gpu("L4")
    child = start(**_QUICK)
    child.read("inventory")
    time.sleep(0.05)  # the list is looked through once more
    rule = fake.delay("nvmlDeviceGetUUID", _HANG_MS, bad)
    child.read("inventory")
    child.until("hung", gpu=bad)
    answers = child.read("fast")
    assert answers[good].of("power") == 13.0
    assert answers[bad].silent is not None
    fake.clear(rule)
    child.until("back", gpu=bad)


def test_a_library_that_hangs_at_its_start_is_told(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A start that does not come back leaves the driver down for that reason, until it does."""
    gpu = fake.add_gpu("T4")
    rule = fake.delay("nvmlInitWithFlags", _HANG_MS)
    child = start(wait=False, **_QUICK)
    assert child.until("hung")["gpu"] == ""
    assert child.until("driver", up=False)["reason"] == "hung"
    fake.clear(rule)
    child.up()
    assert set(child.read("fast")) == {gpu}


def test_what_hung_in_the_child_before_is_not_called_yet(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A child that is told of a hang leaves that GPU alone until the back-off is over, then finds it well."""
    bad, good = fake.add_gpu("T4"), fake.add_gpu("L4")
    child = start(hung=[[bad, "nvmlDeviceGetPowerUsage"]], call_timeout_s=0.5, retry_s=[1.0, 5.0])
    answers = child.read("fast")
    assert answers[bad].silent == ("nvmlDeviceGetPowerUsage", "hung", 0)
    assert answers[good].of("power") == 13.0
    asked = [gpu for _, _, name, gpu in fake.calls() if name == "nvmlDeviceGetPowerUsage"]
    assert bad not in asked
    child.until("back", gpu=bad)
    assert child.read("fast")[bad].of("power") == 9.5


def test_a_garbage_name_costs_the_name_only(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A name that is no UTF-8 leaves the model out; everything else of the GPU is there."""
    gpu = fake.add_gpu("T4")
    fake.set(gpu, {"name": r"NVIDIA \xff\xfe"})
    child = start()
    answer = child.read_one("fast")
    assert answer.entities == [{"hw.id": gpu, "hw.name": "nvidia0"}]
    assert answer.of("power") == 9.5


def test_xids_are_told_as_they_come(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """An XID comes as an event with the GPU and, where it is an instance's, the instance."""
    first, second = fake.add_gpu("H100"), fake.add_gpu("T4")
    child = start()
    _wait_for_events(fake, 2)
    fake.xid(second, 48)
    event = child.until("event")
    assert (event["gpu"], event["kind"], event["code"], event["gi"], event["ci"]) == (second, "xid", 48, None, None)
    fake.xid(first, 94, gi=2, ci=0)
    event = child.until("event")
    assert (event["gpu"], event["code"], event["gi"], event["ci"]) == (first, 94, 2, 0)


def test_events_go_on_after_a_gpu_was_lost(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """The wait that a lost GPU spoils is given up and made again, not spun on, and later events are told."""
    lost, good = fake.add_gpu("T4"), fake.add_gpu("L4")
    child = start()
    _wait_for_events(fake, 2)
    fake.lose(lost)
    child.read("fast")
    time.sleep(1.5)
    waits = [name for _, _, name, _ in fake.calls() if name == "nvmlEventSetWait_v2"]
    assert len(waits) < 20
    fake.xid(good, 79)
    assert child.until("event")["gpu"] == good


def test_events_of_a_gpu_that_is_back_are_told(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A GPU that was lost is registered again when it answers, also when it is the only one."""
    gpu = fake.add_gpu("T4")
    child = start()
    fake.lose(gpu)
    assert child.read_one("fast").reason == "lost"
    fake.restore(gpu)
    before = _registrations(fake)
    child.read("inventory")
    child.until("back", gpu=gpu)
    _wait_for_events(fake, before + 1)
    fake.xid(gpu, 48)
    assert child.until("event", limit_s=5)["code"] == 48


def test_a_gpu_whose_events_are_refused_does_not_cost_those_of_others(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """A registration that fails spoils the set: a new one is made without that GPU."""
    bad, good = fake.add_gpu("T4"), fake.add_gpu("L4")
    fake.fault("nvmlDeviceRegisterEvents", 999, bad)
    child = start()
    _wait_for_events(fake, 2)
    fake.xid(good, 48)
    assert child.until("event", limit_s=5)["gpu"] == good


def _registrations(fake: FakeNvml) -> int:
    return [name for _, _, name, _ in fake.calls()].count("nvmlDeviceRegisterEvents")


def _wait_for_events(fake: FakeNvml, gpus: int) -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        names = [name for _, _, name, _ in fake.calls()]
        if _registrations(fake) >= gpus and "nvmlEventSetWait_v2" in names[-20:]:
            return
        time.sleep(0.02)
    raise AssertionError("nobody waits for events")


@pytest.mark.parametrize("how", ["stop", "end of input", "SIGTERM"])
def test_the_child_ends_politely(how: str, fake: FakeNvml, start: Callable[..., Child]) -> None:
    """However it is told to end, it frees its samples, shuts NVML down, says so, and is gone."""
    fake.add_gpu("H100")
    child = start()
    child.read("fast")
    if how == "stop":
        child.send(do="stop")
    elif how == "SIGTERM":
        os.kill(child.pid, signal.SIGTERM)
    else:
        child.close_input()
    child.until("gone")
    assert child.wait() == 0
    names = [name for _, _, name, _ in fake.calls()]
    assert names[-1] == "nvmlShutdown"


def test_what_is_no_frame_ends_the_child(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A peer that is no receiver is not served."""
    child = start()
    child.send(do="read", tick="seven", tier="fast")
    assert child.wait() == 2
    assert "tick" in child.log()
