"""The unmodified binding on every profile: what a card has, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulens.simulator.models import MODELS
from gpulens.simulator.nvml.build import LIBRARY
from gpulens.simulator.nvml.profiles import DRIVERS, PROFILES
from gpulens.simulator.nvml.state import FakeNvml
from tests.simulator.nvml.child import Child

NOT_SUPPORTED, FUNCTION_NOT_FOUND = 3, 13
PROBES = {
    "residency": "n.nvmlDeviceGetUtilizationRates(h0)",
    "memory": "n.nvmlDeviceGetMemoryInfo(h0, version=n.nvmlMemory_v2)",
    "serial": "n.nvmlDeviceGetSerial(h0)",
    "power": "n.nvmlDeviceGetPowerUsage(h0)",
    "power limit": "n.nvmlDeviceGetEnforcedPowerLimit(h0)",
    "energy": "n.nvmlDeviceGetTotalEnergyConsumption(h0)",
    "temperature": "n.nvmlDeviceGetTemperatureV(h0, 0)",
    "threshold": "n.nvmlDeviceGetTemperatureThreshold(h0, 1)",
    "margin": "n.nvmlDeviceGetMarginTemperature(h0)",
    "ecc": "n.nvmlDeviceGetTotalEccErrors(h0, 1, 0)",
    "rows": "n.nvmlDeviceGetRemappedRows(h0)",
    "pages": "n.nvmlDeviceGetRetiredPages(h0, 0)",
    "mig": "n.nvmlDeviceGetMigMode(h0)",
    "link": "n.nvmlDeviceGetNvLinkState(h0, 0)",
    "reasons": "n.nvmlDeviceGetCurrentClocksEventReasons(h0)",
    "sm clock": "n.nvmlDeviceGetClockInfo(h0, 1)",
    "jpeg": "n.nvmlDeviceGetJpgUtilization(h0)",
}
FIELDS = {
    "memory temperature": 82,
    "average power": 185,
    "T.Limit": 194,
    "old link errors": 163,
    "new link errors": 206,
}
COMMON = {"residency", "power", "energy", "temperature", "reasons", "sm clock"}
HAS = {
    "T4": {"memory", "serial", "power limit", "threshold", "ecc", "pages"},
    "V100": {"memory", "serial", "power limit", "threshold", "ecc", "pages", "link", "memory temperature",
             "old link errors"},
    "A100": {"memory", "serial", "power limit", "threshold", "ecc", "rows", "mig", "link", "jpeg",
             "memory temperature", "old link errors"},
    "L4": {"memory", "serial", "power limit", "margin", "ecc", "rows", "jpeg", "average power", "T.Limit"},
    "H100": {"memory", "serial", "power limit", "margin", "ecc", "rows", "mig", "link", "jpeg", "memory temperature",
             "average power", "T.Limit", "old link errors", "gpm"},
    "RTX4080": {"memory", "power limit", "threshold", "jpeg", "average power"},
    "GB10": {"average power"},
}  # fmt: skip
HAS |= {"A100-80": HAS["A100"], "H200": HAS["H100"], "B200": (HAS["H100"] - {"old link errors"}) | {"new link errors"}}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_card_has_what_its_kind_has_and_refuses_the_rest(
    profile: str, fake: FakeNvml, started: Callable[[], Child]
) -> None:
    """Every probe answers or is 'not supported' as the availability matrix has it."""
    fake.add_gpu(profile)
    child = started()
    codes = {name: child.code(text) for name, text in PROBES.items()}
    codes |= {name: child.value(f"fields(h0, [{number}])")[0][0] for name, number in FIELDS.items()}
    codes["gpm"] = 0 if child.value("n.nvmlGpmQueryDeviceSupport(h0).isSupportedDevice") else NOT_SUPPORTED
    assert {name for name, code in codes.items() if code == 0} == COMMON | HAS[profile]
    assert {code for code in codes.values() if code} <= {NOT_SUPPORTED}


@pytest.mark.parametrize("profile", PROFILES)
def test_gpm_samples_are_refused_where_gpm_is(profile: str, fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Below Hopper a sample can't be taken; from Hopper on it can."""
    fake.add_gpu(profile)
    expected = 0 if profile in {"H100", "H200", "B200"} else NOT_SUPPORTED
    assert started().code("sample(h0)") == expected


def test_a_card_says_who_it_is(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Name, UUID, serial, address, minor, architecture and versions come back as they were set."""
    gpu = fake.add_gpu("H100", minor=5, pci="00000000:1B:00.0", serial="1650123")
    child = started()
    assert child.value("uuids()") == [gpu]
    assert child.value("[n.nvmlDeviceGetName(h0), n.nvmlDeviceGetSerial(h0), n.nvmlDeviceGetMinorNumber(h0)]") == [
        "NVIDIA H100 80GB HBM3",
        "1650123",
        5,
    ]
    assert child.value("[n.nvmlDeviceGetPciInfo(h0).busId, n.nvmlDeviceGetPciInfo(h0).busIdLegacy]") == [
        "00000000:1B:00.0",
        "0000:1b:00.0",
    ]
    assert child.value("n.nvmlDeviceGetCudaComputeCapability(h0)") == [9, 0]
    assert child.value("n.nvmlDeviceGetArchitecture(h0)") == 9
    assert child.value("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByPciBusId('0000:1b:00.0'))") == gpu
    assert child.value("n.nvmlSystemGetDriverVersion()") == "580.105.08"
    assert child.value("n.nvmlSystemGetCudaDriverVersion_v2()") == 13000


def test_the_first_memory_call_counts_the_drivers_share_as_used(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """Version 2 tells the driver's share apart; version 1 adds it to what programs use."""
    fake.set(fake.add_gpu("H100"), {"memory.used": 2**30})
    child = started()
    reserved = MODELS["H100"].reserved_mib * 2**20
    total, kept, free, used = child.value("memory(h0)")
    assert (kept, used) == (reserved, 2**30)
    assert total == kept + free + used
    assert child.value("n.nvmlDeviceGetMemoryInfo(h0).used") == 2**30 + reserved


def test_a_wrong_version_word_is_refused(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """A structure whose first word is not its size and version gets 'version mismatch'."""
    fake.add_gpu("H100")
    assert started().code("n.nvmlDeviceGetMemoryInfo(h0, version=0x03000028)") == 25


def test_fields_answer_each_for_itself(fake: FakeNvml, started: Callable[[], Child]) -> None:
    """One call gives values, per-field refusals and scopes side by side, each with its own code."""
    gpu = fake.add_gpu("H100")
    fake.set(gpu, {"field.163.2": 7, "field.230": 2, "field.138.all": 4096, "temperature.memory": "!4"})
    child = started()
    assert child.value("fields(h0, [(163, 2), 230, (138, 0xFFFFFFFF), 82, 219, (163, 40)])") == [
        [0, 7],
        [0, 2],
        [0, 4096],
        [4, 0],
        [NOT_SUPPORTED, 0],
        [NOT_SUPPORTED, 0],
    ]
    assert child.value("n.nvmlDeviceGetFieldValues(h0, [194])[0].value.siVal") == -2


@pytest.mark.parametrize("branch", DRIVERS)
def test_an_older_driver_lacks_calls_for_real(branch: str, fake: FakeNvml, cache: Path) -> None:
    """What a branch does not have can't be looked up in its library, and its version is told."""
    fake.add_gpu("H100")
    fake.imitate(branch, cache=cache)
    with fake as environment, Child(environment) as child:
        child.start()
        version, lacks = DRIVERS[branch]
        assert child.value("n.nvmlSystemGetDriverVersion()") == version
        wanted = FUNCTION_NOT_FOUND if "nvmlDeviceGetMemoryInfo_v2" in lacks else 0
        assert child.code("memory(h0)") == wanted
        wanted = FUNCTION_NOT_FOUND if "nvmlDeviceGetTemperatureV" in lacks else 0
        assert child.code("n.nvmlDeviceGetTemperatureV(h0, 0)") == wanted
        wanted = 0 if int(version[:3]) >= 570 else NOT_SUPPORTED
        assert child.value("fields(h0, [230])")[0][0] == wanted


def test_the_library_reads_the_state_beside_itself(fake: FakeNvml) -> None:
    """Without FAKE_NVML_STATE the file `state` in the library's folder counts."""
    gpu = fake.add_gpu("L4")
    with fake as environment, Child({k: v for k, v in environment.items() if k != "FAKE_NVML_STATE"}) as child:
        child.start()
        assert child.value("uuids()") == [gpu]
        assert child.value(f"'{LIBRARY}' in open('/proc/self/maps').read()")
