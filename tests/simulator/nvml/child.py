"""The unmodified binding in a process of its own, asked line by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

_PROGRAM = r"""
import ctypes, json, sys, threading, time
import pynvml as n

def uuids():
    return [n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())]

def gpm(first, second, ids):
    request = n.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics, request.sample1, request.sample2 = 1, len(ids), first, second
    for place, metric in enumerate(ids):
        request.metrics[place].metricId = metric
    n.nvmlGpmMetricsGet(request)
    return [None if m.nvmlReturn else m.value for m in request.metrics[: len(ids)]]

def fields(handle, ids):
    return [[f.nvmlReturn, f.value.ullVal] for f in n.nvmlDeviceGetFieldValues(handle, ids)]

def memory(handle):
    found = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
    return [found.total, found.reserved, found.free, found.used]

def sample(handle, gi=None):
    one = n.nvmlGpmSampleAlloc()
    return n.nvmlGpmSampleGet(handle, one) if gi is None else n.nvmlGpmMigSampleGet(handle, gi, one)

space = dict(globals())
for line in sys.stdin:
    try:
        ask = json.loads(line)
        if ask[0] == "do":
            exec(ask[1], space)
            answer = ["value", None]
        else:
            answer = ["value", eval(ask[1], space)]
    except n.NVMLError as error:
        answer = ["code", error.value]
    except Exception as error:
        answer = ["raised", type(error).__name__ + ": " + str(error)]
    print(json.dumps(answer), flush=True)
"""


class Child:
    """Python with the fake's environment. `value` evaluates, `do` executes, `code` is the NVML code of a failure."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.close()
        stdout.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()

    def _ask(self, kind: str, text: str) -> tuple[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, text]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer[0], answer[1]

    def do(self, text: str) -> None:
        """Executes statements; their names stay."""
        answer = self._ask("do", text)
        assert answer == ("value", None), (text, answer)

    def value(self, text: str) -> Any:  # noqa: ANN401
        """The value of an expression, as JSON can tell it."""
        kind, value = self._ask("value", text)
        assert kind == "value", (text, kind, value)
        return value

    def code(self, text: str) -> int:
        """The code with which NVML refuses; 0 where it does not."""
        kind, value = self._ask("value", f"({text}, None)[1]")
        assert kind in {"value", "code"}, (text, kind, value)
        return int(value) if kind == "code" else 0

    def start(self) -> None:
        """Starts the library and names the handles h0, h1, ..."""
        self.do("n.nvmlInit()")
        self.do("for i in range(n.nvmlDeviceGetCount()): globals()[f'h{i}'] = n.nvmlDeviceGetHandleByIndex(i)")
