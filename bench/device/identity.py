"""Every call that tells what a machine and its GPUs are. No serial numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from bench.device.gateway import Gpu, told
from bench.device.markdown import table
from gpulens.nvml.gateway import Line
from gpulens.nvml.reason import Failure

_ARCHITECTURES: Final = {5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper", 10: "Blackwell", 13: "Rubin"}


def _bus(info: Any) -> str:  # noqa: ANN401 - a ctypes structure of the binding
    return info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)


def _branch(found: Any) -> str:  # noqa: ANN401 - a ctypes structure of the binding
    branch = getattr(found, "branch", found)
    return branch.decode() if isinstance(branch, bytes) else str(branch)


def _joined(pair: Sequence[object]) -> str:
    return " / ".join(str(one) for one in pair)


CALLS: Final[tuple[tuple[str, str, tuple[int, ...], Callable[[Any], str]], ...]] = (
    ("name", "nvmlDeviceGetName", (), str),
    ("UUID", "nvmlDeviceGetUUID", (), str),
    ("serial number", "nvmlDeviceGetSerial", (), lambda _: "told"),
    ("minor number", "nvmlDeviceGetMinorNumber", (), str),
    ("PCI address", "nvmlDeviceGetPciInfo", (), _bus),
    ("architecture", "nvmlDeviceGetArchitecture", (), lambda n: f"{n} ({_ARCHITECTURES.get(n, 'unknown')})"),
    ("compute capability", "nvmlDeviceGetCudaComputeCapability", (), lambda pair: ".".join(map(str, pair))),
    ("brand", "nvmlDeviceGetBrand", (), str),
    ("cores", "nvmlDeviceGetNumGpuCores", (), str),
    ("memory bus, bits", "nvmlDeviceGetMemoryBusWidth", (), str),
    ("highest SM clock, MHz", "nvmlDeviceGetMaxClockInfo", (1,), str),
    ("highest memory clock, MHz", "nvmlDeviceGetMaxClockInfo", (2,), str),
    ("board id", "nvmlDeviceGetBoardId", (), lambda _: "told"),
    ("board with several GPUs", "nvmlDeviceGetMultiGpuBoard", (), str),
    ("module id", "nvmlDeviceGetModuleId", (), str),
    ("board part number", "nvmlDeviceGetBoardPartNumber", (), str),
    ("VBIOS", "nvmlDeviceGetVbiosVersion", (), str),
    ("NUMA node", "nvmlDeviceGetNumaNodeId", (), str),
    ("PCIe generation now", "nvmlDeviceGetCurrPcieLinkGeneration", (), str),
    ("PCIe width now", "nvmlDeviceGetCurrPcieLinkWidth", (), str),
    ("PCIe generation at most", "nvmlDeviceGetMaxPcieLinkGeneration", (), str),
    ("PCIe width at most", "nvmlDeviceGetMaxPcieLinkWidth", (), str),
    ("persistence mode", "nvmlDeviceGetPersistenceMode", (), str),
    ("compute mode", "nvmlDeviceGetComputeMode", (), str),
    ("virtualisation mode", "nvmlDeviceGetVirtualizationMode", (), str),
    ("ECC now / after a reboot", "nvmlDeviceGetEccMode", (), _joined),
    ("MIG now / after a reset", "nvmlDeviceGetMigMode", (), _joined),
    ("MIG instances at most", "nvmlDeviceGetMaxMigDeviceCount", (), str),
    ("GPM", "nvmlGpmQueryDeviceSupport", (), lambda found: "yes" if found.isSupportedDevice else "no"),
    ("event types", "nvmlDeviceGetSupportedEventTypes", (), hex),
)


def machine(line: Line, pids_visible: bool) -> str:
    """What runs here, as a table."""
    facts = [
        ("driver", line.ask(str, "nvmlSystemGetDriverVersion")),
        ("driver branch", line.ask(_branch, "nvmlSystemGetDriverBranch")),
        ("NVML", line.ask(str, "nvmlSystemGetNVMLVersion")),
        ("CUDA of the driver", line.ask(str, "nvmlSystemGetCudaDriverVersion")),
        ("nvidia-ml-py", _binding_version()),
        ("Python", platform.python_version()),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processors", os.cpu_count()),
        ("user id", os.geteuid()),
        ("processes of other PID namespaces", "visible" if pids_visible else "hidden: this is not the first one"),
    ]
    return table(("what", "value"), [(what, told(v) if isinstance(v, Failure) else v) for what, v in facts])


def _binding_version() -> str:
    try:
        return version("nvidia-ml-py")
    except PackageNotFoundError:
        return "not installed by that name"


def gpus(line: Line, found: Sequence[Gpu], lacking: Sequence[str]) -> str:
    """Every identity call on every GPU, and the MIG instances."""

    def cell(gpu: Gpu, call: str, args: tuple[int, ...], take: Callable[[Any], str]) -> str:
        value = line.ask(take, call, gpu.target.handle, *args, on=gpu.target)
        return told(Failure(value.reason, value.code)) if isinstance(value, Failure) else value

    rows = [(what, f"`{call}`", *(cell(gpu, call, args, take) for gpu in found)) for what, call, args, take in CALLS]
    parts = [table(("what", "call", *(f"GPU {gpu.index}" for gpu in found)), rows)]
    instances = [
        (f"GPU {gpu.index}", one.gi, one.ci, one.profile, one.target.uuid)
        for gpu in found
        for one in gpu.board.layout.instances
    ]
    if instances:
        parts.append(table(("MIG instance of", "GI", "CI", "profile", "UUID"), instances))
    parts += [f"Can't be used: {text}" for text in lacking]
    return "\n\n".join(parts)
