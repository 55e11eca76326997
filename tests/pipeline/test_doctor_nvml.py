"""What doctor learns from the child that owns NVML: a scripted one that misbehaves, the real one on the fake NVML."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from gpulens.nvml.launch import COMMAND
from gpulens.pipeline.doctor_nvml import SM_ACTIVE, Answer, ask, gpus, nvml
from gpulens.pipeline.doctor_report import Verdict
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.state import FakeNvml
from tests.pipeline.doctor_child import A100, H100

SCRIPT = Path(__file__).with_name("doctor_child.py")
METRICS = {"sm": SM_ACTIVE, "power": "hw.power"}


def asked(mode: str, deadline_s: float = 20.0) -> Answer:
    """What a scripted child of this kind told."""
    command = [sys.executable, str(SCRIPT), mode, "sm"]
    return ask(command, os.environ, deadline_s=deadline_s, window_s=0.0, goodbye_s=0.5)


def test_a_child_that_works() -> None:
    """Model, MIG instances and GPM of each GPU are told; without GPM the fix is DCGM."""
    answer = asked("works")
    assert answer.problem == ""
    assert nvml(answer).ok
    assert "driver 590.48.01" in nvml(answer).finding
    assert answer.every_process is False
    a100, h100 = gpus(answer, METRICS)
    assert (a100.what, a100.verdict) == ("nvidia0", Verdict.WARN)
    assert a100.facts["mig_instances"] == {"1g.5gb": 2, "3g.20gb": 1}
    assert "2 x 1g.5gb, 1 x 3g.20gb" in a100.finding
    assert "dcgm-exporter" in a100.fix
    assert (h100.what, h100.verdict) == ("nvidia1", Verdict.OK)
    assert h100.facts == {"uuid": H100, "model": "NVIDIA H100", "gpm": True, "mig_instances": {}}


def test_a_driver_that_is_not_there() -> None:
    """NVML's own code chooses the fix."""
    answer = asked("down")
    found = nvml(answer)
    assert found.verdict is Verdict.MISSING
    assert "the driver is not loaded (code 9)" in found.finding
    assert "load the NVIDIA driver" in found.fix
    assert gpus(answer, METRICS) == []


def test_no_gpu_at_all() -> None:
    """A driver that starts and shows nothing is missing a GPU."""
    found = nvml(asked("empty"))
    assert found.verdict is Verdict.MISSING
    assert "shows no GPU" in found.finding


def test_a_gpu_that_is_lost() -> None:
    """One GPU that does not answer is told of; the others are whole."""
    answer = asked("lost")
    assert answer.problem == ""
    a100, h100 = gpus(answer, METRICS)
    assert a100.facts["uuid"] == A100
    assert h100.verdict is Verdict.WARN
    assert "does not answer: lost" in h100.finding


def test_a_call_that_hangs_is_named() -> None:
    """The call and the GPU that hang are told, and the deadline holds."""
    begun = time.monotonic()
    answer = asked("hangs", deadline_s=1.5)
    assert time.monotonic() - begun < 10
    found = nvml(answer)
    assert found.verdict is Verdict.WARN
    assert f"nvmlDeviceGetPowerUsage of {H100}" in found.finding
    assert [each.verdict for each in gpus(answer, METRICS)] == [Verdict.WARN, Verdict.UNKNOWN]


def test_a_child_that_hangs_is_killed() -> None:
    """A child that hears nothing and does not end is killed, and the finding says that it did not answer."""
    begun = time.monotonic()
    found = nvml(asked("deaf", deadline_s=0.5))
    assert time.monotonic() - begun < 10
    assert found.verdict is Verdict.UNKNOWN
    assert "did not answer in time" in found.finding


def test_a_child_that_dies_leaves_its_last_words() -> None:
    """What a dying child wrote is in the finding."""
    found = nvml(asked("dies"))
    assert found.verdict is Verdict.UNKNOWN
    assert "ended: boom: the library broke" in found.finding


def test_a_child_that_speaks_something_else() -> None:
    """Bytes that are no frames end the conversation."""
    assert "no frame" in nvml(asked("garbage")).finding


def test_a_child_that_can_not_start(tmp_path: Path) -> None:
    """A command that is not there gives a finding, not an exception."""
    found = nvml(ask([str(tmp_path / "nothing")], os.environ))
    assert found.verdict is Verdict.UNKNOWN
    assert "could not be started" in found.finding


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_is_left_open() -> None:
    """However the child ends, its pipes are closed and it is no zombie."""
    before = _open_files()
    for mode in ("works", "dies", "garbage"):
        asked(mode)
    assert _open_files() <= before


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """A fake libnvidia-ml.so.1 without GPUs, for the agent's own child."""
    for module, reason in (("gpulens.nvml.__main__", "its child"), ("pynvml", "pip install '.[nvidia]'")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: {reason}")
    made = FakeNvml(tmp_path / "nvml")
    try:
        made.install()
    except BuildError as error:
        pytest.skip(f"needs a compiler: {error}")
    return made


def test_the_real_child_on_the_fake_library(fake: FakeNvml) -> None:
    """The agent's own child, with the unmodified binding, tells models, GPM and MIG instances of the fake NVML."""
    from gpulens.nvml.table import ROWS

    h100, a100 = fake.add_gpu("H100", minor=0), fake.add_gpu("A100", minor=1)
    fake.set_mig(a100, ["3g.20gb", "1g.5gb"])
    with fake as environ:
        answer = ask(COMMAND, {**os.environ, **environ})
    assert answer.problem == ""
    assert nvml(answer).ok, nvml(answer)
    found = {each.facts["uuid"]: each for each in gpus(answer, {row.key: row.metric for row in ROWS})}
    assert found[h100].facts["gpm"] is True
    assert found[a100].facts["gpm"] is False
    assert found[a100].facts["mig_instances"] == {"1g.5gb": 1, "3g.20gb": 1}
    assert "A100" in str(found[a100].facts["model"])


def test_a_gpu_that_hangs_under_the_real_child(fake: FakeNvml) -> None:
    """A call of one GPU that does not come back is named within the deadline, and the other GPU is told of."""
    hangs, works = fake.add_gpu("H100", minor=0), fake.add_gpu("T4", minor=1)
    fake.delay("nvmlDeviceGetPowerUsage", 60_000, hangs)
    begun = time.monotonic()
    with fake as environ:
        answer = ask(COMMAND, {**os.environ, **environ}, window_s=0.0, call_timeout_s=0.5)
    assert time.monotonic() - begun < 15
    assert ("nvmlDeviceGetPowerUsage", hangs) in [(call, gpu) for gpu, call in answer.hung]
    assert nvml(answer).verdict is Verdict.WARN
    found = {each.facts["uuid"]: each for each in gpus(answer, METRICS)}
    assert "Tesla T4" in found[works].finding
    assert found[hangs].verdict is not Verdict.OK


def test_a_library_that_hangs_under_the_real_child(fake: FakeNvml) -> None:
    """NVML that does not even start to answer ends in a finding, not in a hang."""
    fake.delay("nvmlInitWithFlags", 60_000)
    begun = time.monotonic()
    with fake as environ:
        found = nvml(ask(COMMAND, {**os.environ, **environ}, goodbye_s=0.5, call_timeout_s=0.5))
    assert time.monotonic() - begun < 15
    assert found.verdict is Verdict.MISSING
    assert "does not answer" in found.finding
    assert "Xid" in found.fix


def test_the_real_child_without_a_driver(fake: FakeNvml) -> None:
    """A driver that is not loaded is told with NVML's code and its fix."""
    fake.init(18)
    with fake as environ:
        found = nvml(ask(COMMAND, {**os.environ, **environ}))
    assert found.verdict is Verdict.MISSING
    assert found.facts["code"] == 18
    assert "restart this pod" in found.fix
