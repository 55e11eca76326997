"""The process that owns NVML: started, replaced, stopped, left behind."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gpulens.nvml.protocol import Message
from gpulens.pipeline.status import Status
from gpulens.receivers.nvml.supervisor import pause_s
from tests.receivers.nvml.kit import A, B, Card, Puppet, Rig, S, Stage


async def settled() -> set[str]:
    """Names of the tasks that are left once those that end had their turns."""
    for _ in range(20):
        await asyncio.sleep(0)
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def test_readings_come_at_every_tick_and_the_stop_leaves_nothing() -> None:
    """The process is configured first, asked in four tiers, told to stop at the end; its pipes are closed."""
    stage = Stage()
    rig = Rig(stage.start, host_pid=True, call_timeout="3s")
    async with rig:
        await rig.advance(31)
        assert rig.up == [1, 1, 1, 1]
        assert stage.puppet.told[0] == {
            "do": "configure", "call_timeout_s": 3.0, "hung": [],
            "host_pid": "true", "proc": "/proc", "processes": True,
        }  # fmt: skip
        assert {m["tier"] for m in stage.puppet.told[1:]} == {"fast", "processes", "errors", "inventory"}
    assert [m["do"] for m in stage.puppet.told][-1] == "stop"
    assert (stage.puppet.closed, stage.puppet.alive, stage.puppet.killed) == (True, False, False)
    assert await settled() == set()
    assert {status for status, _ in rig.statuses} == {Status.OK}


async def test_a_killed_process_costs_at_most_one_tick() -> None:
    """Another one starts at once; between two ticks nobody notices."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(15)
        stage.puppet.die(-9)
        await rig.advance(20)
        assert rig.up == [1, 1, 1, 1]
        assert len(stage.puppets) == 2
        assert rig.telemetry.value("gpulens_nvml_restarts") == 1


async def test_a_process_that_dies_within_a_tick_fails_that_tick_at_once() -> None:
    """The open question is answered by the death, not by the deadline, and says how it died."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].mute = True
        await rig.advance(6.1)
        stage.puppet.die(-9)
        stage.cards[A].mute = False
        await rig.advance(0.5)
        assert rig.up == [1, 0]
        assert "ended by signal 9" in rig.statuses[-1][1]
        await rig.advance(10)
        assert rig.up == [1, 0, 1]
        assert rig.statuses[-1] == (Status.OK, "")


def test_pauses_grow_with_deaths_in_a_row() -> None:
    """The first restart is at once, then 1 s, 2 s, 4 s, up to a minute."""
    assert [pause_s(n) for n in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_s(10**6) == 60


async def test_a_process_that_keeps_dying_is_started_ever_more_slowly() -> None:
    """Ticks go on with up=0 meanwhile; a steady life makes the next restart an instant one again."""
    stage = Stage()
    act = stage.act
    stage.act = lambda puppet, message: puppet.die(3)  # type: ignore[method-assign]  # noqa: ARG005
    async with Rig(stage.start) as rig:
        await rig.advance(20)
        assert len(stage.puppets) == 6  # at 0, 0, 1, 3, 7 and 15 s
        assert set(rig.up) == {0}
        assert "exit code 3" in rig.statuses[-1][1]
        stage.act = act  # type: ignore[method-assign]
        await rig.advance(100)
        assert rig.up[-1] == 1
        born = len(stage.puppets)
        stage.puppet.die(1)
        await rig.advance(0.1)
        assert len(stage.puppets) == born + 1


async def test_a_process_that_can_not_be_started_is_tried_again() -> None:
    """No executable, no memory: a failed tick with the reason."""
    stage = Stage()
    stage.fails = [OSError("no such file"), OSError("no such file")]
    async with Rig(stage.start) as rig:
        await rig.advance(0.5)
        assert not stage.puppets
        await rig.advance(12)
        assert rig.up[-1] == 1


async def test_a_process_that_says_nothing_is_replaced_after_two_ticks() -> None:
    """It is asked to stop first, killed 10 s later, and only then another starts."""
    stage = Stage()
    async with Rig(stage.start, processes=False) as rig:
        await rig.advance(5)
        stage.mute = stage.deaf = True
        await rig.advance(12)
        assert rig.up == [1, 0]
        assert "did not answer" in rig.statuses[-1][1]
        await rig.advance(9.5)
        assert stage.puppet.told[-1] == {"do": "stop"}
        stage.mute = False
        await rig.advance(9)
        assert len(stage.puppets) == 1
        assert not stage.puppet.killed
        await rig.advance(1.5)
        assert stage.puppets[0].killed
        assert len(stage.puppets) == 2
        await rig.advance(10)
        assert rig.up == [1, 0, 0, 0, 1]
        stage.deaf = False


async def test_a_process_that_survives_sigkill_is_left_alone() -> None:
    """No second one is started while it is there, ticks go on, and when it dies after all another takes its place."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.mute = stage.deaf = stage.immortal = True
        await rig.advance(200)
        assert len(stage.puppets) == 1
        assert rig.gauge("gpulens_nvml_abandoned") == 1
        assert rig.up == [1, *[0] * 20]
        assert "survived SIGKILL" in rig.statuses[-1][1]
        stage.mute = False
        stage.puppet.die(-9)
        await rig.advance(11)
        assert len(stage.puppets) == 2
        assert rig.gauge("gpulens_nvml_abandoned") == 0
        assert rig.up[-1] == 1
        stage.deaf = stage.immortal = False


async def test_the_log_says_whether_another_process_starts_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first death costs no pause; the next ones tell how long it is."""
    stage = Stage()
    with caplog.at_level(logging.WARNING, logger="gpulens"):
        async with Rig(stage.start) as rig:
            for _ in range(2):
                await rig.advance(3)
                stage.puppet.die(1)
            await rig.advance(3)
    told = [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]
    assert told == ["NVML process ended. Another starts at once.", "NVML process ended. Another starts after a pause."]


async def test_the_stop_does_not_wait_for_a_process_that_can_not_die() -> None:
    """10 s for the request, 2 s for the kill, then it is left behind with its pipes closed."""
    stage = Stage()
    stage.deaf = stage.immortal = True
    rig = Rig(stage.start)
    await rig.receiver.start(rig)
    await rig.advance(5)
    ending = asyncio.create_task(rig.receiver.shutdown())
    for _ in range(10):
        await rig.advance(0.01)
    await rig.advance(11.8)
    assert not ending.done()
    await rig.advance(0.2)
    assert ending.done()
    assert (stage.puppet.closed, stage.puppet.alive, stage.puppet.killed) == (True, True, True)
    await ending
    assert await settled() == set()


async def test_the_stop_with_an_abandoned_process_is_quick() -> None:
    """Nobody asks it a second time."""
    stage = Stage()
    rig = Rig(stage.start)
    await rig.receiver.start(rig)
    await rig.advance(5)
    stage.mute = stage.deaf = stage.immortal = True
    await rig.advance(60)
    assert rig.gauge("gpulens_nvml_abandoned") == 1
    async with asyncio.timeout(5):
        await rig.receiver.shutdown()
    assert await settled() == set()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"say": "shape", "shape": 1},
        {"say": "nobody knows"},
        {"say": "readings", "tick": 1, "tier": "fast", "gpu": A, "shape": 99, "values": []},
        {"say": "shape", "shape": 1, "gpu": A, "tier": "fast", "entities": [], "series": [[0, "sm", {}, None]]},
        {"say": "driver", "up": True, "pids": True, "epoch": "one"},
    ],
)
async def test_a_process_that_talks_nonsense_is_replaced(nonsense: dict[str, object]) -> None:
    """It is stopped in order, and the next one's readings come."""
    stage = Stage()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.puppet.say(**nonsense)  # type: ignore[arg-type]
        await rig.advance(0.1)
        assert stage.puppets[0].told[-1] == {"do": "stop"}
        await rig.advance(10)
        assert len(stage.puppets) == 2
        assert rig.up == [1, 1]


async def test_the_next_process_is_told_which_calls_hung() -> None:
    """All GPUs hang: the process is replaced, and its successor does not make those calls at once."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        for gpu in (A, B):
            stage.cards[gpu].silent = ("hung", 0)
            stage.puppet.say("hung", gpu=gpu, call="nvmlDeviceGetPowerUsage")
        await rig.advance(7)
        assert len(stage.puppets) == 2
        assert stage.puppet.told[0]["hung"] == [[A, "nvmlDeviceGetPowerUsage"], [B, "nvmlDeviceGetPowerUsage"]]
        assert rig.failures()["hung"] >= 2
        await rig.advance(50)
        assert len(stage.puppets) == 2, "what hung before is not held against it"
        stage.cards = {A: Card(), B: Card()}
        stage.puppet.say("back", gpu=A)
        stage.puppet.die(-9)
        await rig.advance(1)
        assert stage.puppet.told[0]["hung"] == [[B, "nvmlDeviceGetPowerUsage"]]


async def test_a_process_whose_gpus_hang_again_is_left_in_peace_for_longer() -> None:
    """The first is replaced at once, the next after a minute, then two."""
    stage = Stage()
    stage.cards[A].silent = ("hung", 0)
    born: list[int] = []
    act = stage.act

    def hanging(puppet: Puppet, message: Message) -> None:
        act(puppet, message)
        if message["do"] == "configure":
            born.append(rig.clock.now_ns() // S - 1_700_000_000)
            puppet.say("hung", gpu=A, call="nvmlX")

    stage.act = hanging  # type: ignore[method-assign]
    async with Rig(stage.start, processes=False, error_interval="1h", inventory_interval="1h") as rig:
        await rig.advance(400)
    assert born == [0, 0, 61, 181, 421][: len(born)]
    assert len(born) == 4


async def test_one_hanging_gpu_keeps_its_process() -> None:
    """The others are told at every tick, without waiting for it; its series are absent and the status says why."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].silent = ("hung", 0)
        stage.puppet.say("hung", gpu=A, call="nvmlDeviceGetPowerUsage")
        begin = rig.clock.now_ns()
        await rig.advance(6)
        last = rig.last()
        assert last["gpu.sm.active", A] is None
        assert last["gpu.sm.active", B] == 0.5
        assert rig.of()[-1].latest_ns() - begin < 6.1 * S
        assert rig.statuses[-1] == (Status.RECOVERABLE, f"{A}: hung (nvmlX)")
        await rig.advance(60)
        assert len(stage.puppets) == 1
        told = [text for status, text in rig.statuses if status is Status.RECOVERABLE]
        assert len(told) == 1, "said once"
        stage.cards[A].silent = None
        stage.puppet.say("back", gpu=A)
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", A] is None, "its window reaches back into the hang"
        await rig.advance(10)
        assert rig.last()["gpu.sm.active", A] == 0.5
        await rig.advance(40)
        assert rig.statuses[-1] == (Status.OK, "")


async def test_a_gpu_that_does_not_answer_in_time_costs_the_tick_its_deadline() -> None:
    """The batch goes out at the deadline with the others' readings, stamped with the time at which it was made."""
    stage = Stage()
    stage.cards[B] = Card()
    async with Rig(stage.start) as rig:
        await rig.advance(5)
        stage.cards[A].mute = True
        await rig.advance(10.9)
        assert len(rig.of()) == 1
        await rig.advance(0.2)
        last = rig.of()[-1]
        assert rig.last()["hw.gpu.memory.usage", A] is None
        assert rig.last()["hw.gpu.memory.usage", B] == 10
        assert last.complete
        assert last.latest_ns() == 1_700_000_016 * S
        assert rig.telemetry.value("gpulens_nvml_unanswered", tier="fast") == 1


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (
            {"reason": "driver", "code": 12, "text": "not found by the loader"},
            ["/home/kubernetes/bin/nvidia", "library_path"],
        ),
        ({"reason": "driver", "code": 18, "text": "x"}, ["different versions", "restart this pod"]),
        ({"reason": "permission", "code": 4, "text": "x"}, ["/dev/nvidiactl"]),
        ({"reason": "driver", "code": 9, "text": "x"}, ["not loaded"]),
        ({"reason": "error", "code": 999, "text": "x"}, ["daemon-reload"]),
        ({"reason": "driver", "code": 0, "text": "install 'gpulens[nvidia]'"}, ["gpulens[nvidia]"]),
    ],
)
async def test_without_a_driver_the_status_says_what_to_do(driver: dict[str, object], words: list[str]) -> None:
    """The process stays, ticks go on with up=0, and readings come as soon as the driver is there."""
    stage = Stage()
    good = stage.driver
    stage.driver = {"up": False, **driver}  # type: ignore[dict-item]
    async with Rig(stage.start) as rig:
        await rig.advance(25)
        assert rig.up == [0, 0, 0]
        assert rig.statuses[-1][0] is Status.RECOVERABLE
        for word in words:
            assert word in rig.statuses[-1][1]
        assert sum(status is Status.RECOVERABLE for status, _ in rig.statuses) == 1, "four tiers, one reason, said once"
        assert rig.gauge("gpulens_nvml_up") == 0
        stage.driver = good
        stage.puppet.say("driver", **good)
        await rig.advance(10)
        assert rig.up[-1] == 1
        assert rig.gauge("gpulens_nvml_up") == 1
        assert len(stage.puppets) == 1


@pytest.mark.parametrize("told", [True, False])
async def test_a_driver_that_hangs_at_its_start_has_the_process_replaced(told: bool) -> None:
    """After a minute: nothing answers, so nothing is lost; a slow start is left alone."""
    stage = Stage()
    stage.mute = True
    async with Rig(stage.start) as rig:
        await rig.advance(0.5)
        stage.puppet.say("hung", gpu="", call="nvmlInitWithFlags")
        if told:
            stage.puppet.say("driver", up=False, reason="hung", code=0, text="the driver's library does not answer")
        await rig.advance(50)
        assert len(stage.puppets) == 1
        await rig.advance(20)
        assert len(stage.puppets) == 2
        assert stage.puppet.told[0]["hung"] == [["", "nvmlInitWithFlags"]]
        assert set(rig.up) == {0}


async def test_a_library_of_another_version_is_looked_for_anew_by_a_new_process() -> None:
    """It stays loaded in the process that found it."""
    stage = Stage()
    stage.driver = {"up": False, "reason": "driver", "code": 18, "text": "mismatch"}
    async with Rig(stage.start) as rig:
        await rig.advance(75)
        assert len(stage.puppets) == 2
