"""Which rows each card gives, and that none of them is invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.nvml.protocol import Tier
from gpulens.nvml.table import BY_KEY
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from tests.nvml.child import Child

_ALWAYS = (
    "utilization utilization.max utilization.p95 utilization.encoder utilization.decoder memory.copy "
    "memory.used memory.total memory.share memory.reserved power power.limit.enforced energy temperature.gpu "
    "clock.sm clock.memory clock.violation.power clock.violation.thermal "
    "process.count.compute pcie.transmit pcie.receive pcie.replays info device.info"
)
_MEMORY_TEMPERATURE = "temperature.memory"
_ABSOLUTE = "temperature.limit.throttled temperature.limit.critical"
_MARGIN = "temperature.margin"
_ECC = "errors.ecc.corrected errors.ecc.uncorrected"
_PAGES = "pages.corrected pages.uncorrected pages.pending"
_ROWS = "rows.corrected rows.uncorrected"
_GPM = "engine sm occupancy pipe.tensor pipe.fp32 pipe.fp16 memory.bandwidth"
_LINK_ERRORS = "nvlink.crc_flit nvlink.crc_data nvlink.replay nvlink.recovery"
_LINK_BYTES = "nvlink.transmit nvlink.receive"
_UNIFIED_LACKS = (
    "memory.used memory.total memory.share memory.reserved power.limit.enforced clock.memory "
    "pcie.transmit pcie.receive pcie.replays"
)

EXPECTED = {
    "T4": (_ABSOLUTE, _ECC, _PAGES),
    "V100": (_MEMORY_TEMPERATURE, _ABSOLUTE, _ECC, _PAGES, _LINK_ERRORS),
    "A100": (_MEMORY_TEMPERATURE, _ABSOLUTE, _ECC, _ROWS, _LINK_ERRORS, _LINK_BYTES),
    "L4": (_MARGIN, _ECC, _ROWS),
    "H100": (_MEMORY_TEMPERATURE, _MARGIN, _ECC, _ROWS, _GPM, _LINK_ERRORS, _LINK_BYTES),
    "H200": (_MEMORY_TEMPERATURE, _MARGIN, _ECC, _ROWS, _GPM, _LINK_ERRORS, _LINK_BYTES),
    "B200": (_MEMORY_TEMPERATURE, _MARGIN, _ECC, _ROWS, _GPM, "nvlink.recovery nvlink.symbol", _LINK_BYTES),
    "RTX4080": (_ABSOLUTE,),
    "GB10": (),
}


def _keys(child: Child) -> list[str]:
    return [key for tier in Tier for key in child.read_one(tier).rows()]


@pytest.mark.parametrize("profile", EXPECTED)
def test_each_card_gives_exactly_its_rows(profile: str, fake: FakeNvml, start: Callable[..., Child]) -> None:
    """An idle card gives the rows that NVML has for it, each once and with a value, and no other."""
    fake.add_gpu(profile)
    child = start()
    fake.advance(2)
    expected = {*_ALWAYS.split(), *" ".join(EXPECTED[profile]).split()}
    if profile == "GB10":
        expected -= set(_UNIFIED_LACKS.split())
    answers = [child.read_one(tier) for tier in Tier]
    keys = [key for answer in answers for key in answer.rows()]
    assert sorted(keys) == sorted(expected)
    assert [one.key for answer in answers for one in answer.values if one.value is None] == []
    assert len(keys) + 12 <= 60, "with the twelve XID counters the budget of a whole GPU"


def test_units_are_base_units(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Percent, mW, mJ, MHz, ns and KiB become ratios, W, J, Hz, s and bytes."""
    gpu = fake.add_gpu("H100")
    fake.set(gpu, {"utilization.gpu": 97, "utilization.memory": 40, "memory.used": 2**30, "power.usage_mw": 512500,
                   "energy_mj": 7_500, "clock.1": 1980, "violation.0": 2_500_000_000, "samples.1": "0,100",
                   "field.138.all": 3, "field.197": 11, "utilization.encoder": 12})  # fmt: skip
    child = start()
    fake.gpm(gpu, {1: 90, 2: 15.25, 3: 8, 5: 0.5, 10: 30})
    fake.advance(10)
    fast, errors = child.read_one("fast"), child.read_one("errors")
    assert fast.of("utilization") == pytest.approx(0.5, abs=0.02)
    assert (fast.of("utilization.max"), fast.of("utilization.p95")) == (1.0, 1.0)
    assert (fast.of("memory.copy"), fast.of("utilization.encoder")) == (0.4, 0.12)
    assert (fast.of("memory.used"), fast.of("power"), fast.of("energy")) == (2**30, 512.5, 7.5)
    assert fast.of("memory.share") == pytest.approx(2**30 / (85520809984 - 577765376))
    assert (fast.of("clock.sm"), fast.of("clock.violation.power")) == (1_980_000_000, 2.5)
    assert [fast.of(key) for key in ("engine", "sm", "occupancy", "pipe.tensor", "memory.bandwidth")] == (
        pytest.approx([0.9, 0.1525, 0.08, 0.005, 0.3])
    )
    assert (errors.of("nvlink.transmit"), errors.of("pcie.transmit")) == (3 * 1024, 11)


def test_a_fall_of_the_energy_is_another_life_of_the_gpu(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """The handle is as good as before: the epoch of both tiers changes once, and no window spans the reset."""
    gpu = fake.add_gpu("H100")
    fake.set(gpu, {"energy_mj": 500_000})
    fake.gpm(gpu, {2: 50})
    child = start()
    fake.advance(2)
    before = child.read_one("fast")
    assert before.of("sm") == 0.5
    assert child.read_one("errors").epoch == before.epoch
    fake.set(gpu, {"energy_mj": 2_000})
    fake.advance(2)
    after = child.read_one("fast")
    assert after.epoch != before.epoch
    assert (after.of("energy"), after.of("sm")) == (2.0, None)
    fake.advance(2)
    assert child.read_one("fast").of("sm") == 0.5
    assert child.read_one("errors").epoch == child.read_one("fast").epoch == after.epoch
    child.close_input()
    assert child.wait() == 0
    told = child.log().splitlines()
    assert told[-1] == f"{gpu} was reset: its counters begin anew"
    assert any(line.startswith("driver 5") and line.endswith("is up, 1 GPU") for line in told)


def test_a_window_of_samples_is_told_once(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Without a newer sample the maximum and percentile are absent and the residency is the driver's own."""
    gpu = fake.add_gpu("A100")
    fake.set(gpu, {"utilization.gpu": 30, "samples.1": "80"})
    child = start()
    fake.advance(5)
    first, again = child.read_one("fast"), child.read_one("fast")
    assert (first.of("utilization"), first.of("utilization.max")) == (0.8, 0.8)
    assert (again.of("utilization"), again.of("utilization.max"), again.of("utilization.p95")) == (0.3, None, None)
    assert again.shape == first.shape


def test_rows_that_were_never_other_than_zero_are_not_there(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """A throttle reason, a recovery action or an aggregate count appears with its first non-zero and then stays."""
    gpu = fake.add_gpu("H100")
    child = start()
    sparse = {key for key, row in BY_KEY.items() if row.sparse}
    assert not sparse & set(_keys(child))
    fake.set(gpu, {"clock.reasons": 0x1 | 0x20, "field.230": 2, "ecc.0.1": 5, "violation.2": 4_000_000_000,
                   "utilization.jpeg": 3})  # fmt: skip
    fake.gpm(gpu, {11: 12})
    fake.advance(3)
    fast, errors = child.read_one("fast"), child.read_one("errors")
    assert fast.of("clock.reason.sw_thermal") == 1
    assert fast.of("clock.violation.sync_boost") == 4.0
    assert fast.of("utilization.jpeg") == 0.03
    assert fast.of("pipe.fp64") == pytest.approx(0.12)
    assert errors.of("recovery.node_reboot") == 1
    assert errors.of("errors.ecc_aggregate.corrected") == 5
    fake.set(gpu, {"clock.reasons": 0x1, "field.230": 0})
    assert child.read_one("fast").of("clock.reason.sw_thermal") == 0
    assert child.read_one("errors").of("recovery.node_reboot") == 0


def test_a_flag_goes_again_after_its_time_at_zero_and_a_counter_stays(
    fake: FakeNvml, start: Callable[..., Child]
) -> None:
    """Or months of small troubles would add up to a page of zeros."""
    gpu = fake.add_gpu("H100")
    child = start(quiet_s=1e-6)
    fake.set(gpu, {"clock.reasons": 0x20, "field.230": 2, "ecc.0.1": 5, "violation.2": 4_000_000_000,
                   "remap.pending": 1, "utilization.jpeg": 3})  # fmt: skip
    fake.advance(3)
    passing = {"clock.reason.sw_thermal", "recovery.node_reboot", "rows.pending", "utilization.jpeg"}
    assert passing <= set(_keys(child))
    fake.set(gpu, {"clock.reasons": 0, "field.230": 0, "ecc.0.1": 0, "violation.2": 0, "remap.pending": 0,
                   "utilization.jpeg": 0})  # fmt: skip
    left = set(_keys(child))
    assert not passing & left
    assert {"errors.ecc_aggregate.corrected", "clock.violation.sync_boost"} <= left


@pytest.mark.parametrize("branch", ["R470", "R535", "R550", "R570", "R590"])
def test_older_drivers_lack_calls_and_nothing_else(
    branch: str, fake: FakeNvml, cache: Path, start: Callable[..., Child]
) -> None:
    """A call that the library does not have takes its rows away; the others are as ever."""
    gpu = fake.add_gpu("H100")
    fake.set(gpu, {"memory.used": 2**20})
    fake.imitate(branch, cache=cache)
    child = start()
    fake.advance(2)
    fast = child.read_one("fast")
    old = branch == "R470"
    assert ("sm" in fast.rows()) is not old
    assert ("temperature.margin" in fast.rows()) is (branch not in {"R470", "R535", "R550"})
    assert ("memory.reserved" in fast.rows()) is not old
    assert fast.of("memory.used") == (2**20 + 577765376 if old else 2**20)
    assert (fast.of("temperature.gpu"), fast.of("power")) == (31, 69.0)
    assert "temperature.limit.throttled" not in fast.rows()


def test_what_a_device_can_not_tell_is_not_asked_each_tick(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """An unsupported call is made once, told once as a failure, and not repeated at the next ticks."""
    fake.add_gpu("T4")
    child = start()
    first = child.read_one("fast")
    assert ("nvmlDeviceGetMarginTemperature", "unsupported", 3) in first.failures
    for _ in range(3):
        assert all(reason != "unsupported" for _, reason, _ in child.read_one("fast").failures)
    calls = [name for _, _, name, _ in fake.calls()]
    assert calls.count("nvmlDeviceGetMarginTemperature") == 1
    assert calls.count("nvmlDeviceGetJpgUtilization") == 1
    assert calls.count("nvmlDeviceGetPowerUsage") >= 4
    assert "nvmlDeviceGetPcieThroughput" not in calls
    assert all(name != "nvmlGpmSampleGet" for name in calls), "never where GPM is not supported"


def test_no_reading_where_its_call_failed(fake: FakeNvml, start: Callable[..., Child]) -> None:
    """Whatever call fails: each row has the value that it has without the failure, or none."""
    gpu = fake.add_gpu("H100")
    fake.set(gpu, {"utilization.gpu": 97, "samples.1": "97", "utilization.memory": 40, "utilization.encoder": 5,
                   "utilization.decoder": 6, "memory.used": 2**30, "energy_mj": 5000, "violation.0": 10**9,
                   "violation.1": 10**9, "ecc.0.0": 3, "ecc.1.0": 4, "remap.corrected": 1, "remap.uncorrected": 2,
                   "remap.pending": 1, "remap.failure": 1, "pcie.replay": 9, "field.197": 8, "field.198": 7,
                   "field.38": 1, "field.45": 2, "field.52": 3, "field.59": 4, "field.138.all": 5,
                   "field.139.all": 6})  # fmt: skip
    fake.gpm(gpu, dict.fromkeys(range(1, 14), 50.0))
    fake.processes(gpu, [FakeProcess(4242, 448 << 20, sm=30)])
    child = start()
    healthy = _values(fake, child)
    assert all(value for value in healthy.values()), "a zero would hide a zero that stands for a failure"
    calls = sorted({name for _, _, name, uuid in fake.calls() if uuid} | {"nvmlGpmMetricsGet", "nvmlGpmSampleAlloc"})
    gone: set[tuple[object, ...]] = set()
    for call in calls:
        rule = fake.fault(call, 999)
        for key, value in _values(fake, child).items():
            assert value is None or value == pytest.approx(healthy.get(key)), (call, key)
            if value is None:
                gone.add(key)
        fake.clear(rule)
    assert _values(fake, child).keys() == healthy.keys()
    assert {key for _, key, _ in gone if isinstance(key, str)} >= {"power", "sm", "memory.used", "pcie.replays"}


def _values(fake: FakeNvml, child: Child) -> dict[tuple[object, ...], float | None]:
    fake.advance(1)
    answers = (answer for tier in Tier for answer in child.read(tier).values())
    return {(one.device, one.key, one.more): one.value for answer in answers for one in answer.values}
