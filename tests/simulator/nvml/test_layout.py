"""The fake's binary interface is that of the binding."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from gpulens.simulator import nvml
from gpulens.simulator.nvml.build import compiler

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

STRUCTURES = {
    "Memory": pynvml.c_nvmlMemory_t,
    "MemoryV2": pynvml.c_nvmlMemory_v2_t,
    "Bar1Memory": pynvml.c_nvmlBAR1Memory_t,
    "PciInfo": pynvml.nvmlPciInfo_t,
    "Utilization": pynvml.c_nvmlUtilization_t,
    "Value": pynvml.c_nvmlValue_t,
    "Sample": pynvml.c_nvmlSample_t,
    "ViolationTime": pynvml.c_nvmlViolationTime_t,
    "FieldValue": pynvml.c_nvmlFieldValue_t,
    "RowRemapperHistogram": pynvml.c_nvmlRowRemapperHistogramValues,
    "RemappedRowsV2": getattr(pynvml, "c_nvmlRemappedRowsInfo_v2_t", None),
    "TemperatureV1": pynvml.c_nvmlTemperature_v1_t,
    "MarginTemperature": pynvml.c_nvmlMarginTemperature_v1_t,
    "EventData": pynvml.c_nvmlEventData_t,
    "ProcessInfo": pynvml.c_nvmlProcessInfo_v3_t,
    "ProcessSample": pynvml.c_nvmlProcessUtilizationSample_t,
    "DeviceAttributes": pynvml.c_nvmlDeviceAttributes,
    "DriverBranch": pynvml.c_nvmlSystemDriverBranchInfo_v1_t,
    "GpmMetricInfo": pynvml.c_metricInfo_t,
    "GpmMetric": pynvml.c_nvmlGpmMetric_t,
    "GpmSupport": pynvml.c_nvmlGpmSupport_t,
}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Size and alignment of our structures as the compiler lays them out."""
    program = compiler()
    if program is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("sizes")
    names = [*STRUCTURES, "GpmMetricsGet"]
    lines = "".join(f'printf("{n} %zu %zu\\n", sizeof({n}), _Alignof({n}));' for n in names)
    source = folder / "sizes.c"
    source.write_text(f'#include <stdio.h>\n#include "fake_nvml.h"\nint main(void) {{ {lines} return 0; }}\n')
    include = Path(nvml.__file__).parent
    subprocess.run([program, f"-I{include}", "-o", str(folder / "sizes"), str(source)], check=True, timeout=60)
    told = subprocess.run([folder / "sizes"], capture_output=True, text=True, check=True, timeout=10).stdout
    return {name: (int(size), int(align)) for name, size, align in (line.split() for line in told.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_as_long_as_the_bindings(name: str, sizes: dict[str, tuple[int, int]]) -> None:
    """Each structure of our header has the size and alignment of its counterpart in the binding."""
    theirs = STRUCTURES[name]
    if theirs is None:
        pytest.skip(f"needs a nvidia-ml-py that has {name}")
    assert sizes[name] == (ctypes.sizeof(theirs), ctypes.alignment(theirs))


def test_the_metrics_request_differs_only_by_the_length_of_its_list(sizes: dict[str, tuple[int, int]]) -> None:
    """The head of a GPM request is as long as the binding's, whose list has as many places as it knows metrics."""
    metric = ctypes.sizeof(pynvml.c_nvmlGpmMetric_t)
    head = ctypes.sizeof(pynvml.c_nvmlGpmMetricsGet_t) - metric * pynvml.NVML_GPM_METRIC_MAX
    assert sizes["GpmMetricsGet"][0] == head + metric
