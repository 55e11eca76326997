"""GPU performance monitoring: how busy the units were between two samples (Hopper and newer).

Invariant: a value is the mean over the window from the previous reading to this one, of one device in one MIG layout;
no window, no value.

A window shorter than a second serves the values of the one before it, one longer than ten minutes begins anew (the
counters may have wrapped). Samples are the library's memory: they are freed before it is shut down.
"""

from __future__ import annotations

import math
from typing import Any, Final

from gpulens.nvml.gateway import Line, Target, reason_of
from gpulens.nvml.reason import Failure, Reason

SHORTEST_S: Final = 1.0
LONGEST_S: Final = 600.0

METRICS: Final = (1, 2, 3, 5, 10, 11, 12, 13)
"""Engine, SM, occupancy, any tensor, DRAM, FP64, FP32, FP16; percent."""

_MOST_PERCENT: Final = 110.0
"""A ratio of two counters may read a little above 100 and then is 100; what is further off is no reading."""

_GET: Final = "nvmlGpmMetricsGet"
_SUPPORT: Final = "nvmlGpmQueryDeviceSupport"
_VERSION: Final = 1

Values = dict[int, "float | Failure"]


class Windows:
    """The windows of one GPU and its instances. For one thread."""

    def __init__(self, shortest_s: float = SHORTEST_S) -> None:
        self._shortest_s = shortest_s
        self._windows: dict[str, _Window] = {}
        self._request: Any = None
        self._supported = False

    def read(self, line: Line, parent: Target, on: Target, instance: int | None) -> Values | Failure:
        """Metric id -> percent of `on`, which is the GPU itself (instance None) or a GPU instance of it."""
        if not self._supported:
            failure = self._ask_support(line, parent)
            if failure is not None:
                return failure
            self._supported = True
        window = self._windows.setdefault(on.uuid, _Window())
        return window.read(line, parent, on, instance, self)

    def _ask_support(self, line: Line, parent: Target) -> Failure | None:
        """The driver answers by GPU; whether an instance can be measured shows when its sample is taken."""
        found = line.ask(lambda answer: bool(answer.isSupportedDevice), _SUPPORT, parent.handle, on=parent)
        if isinstance(found, Failure):
            return found
        if found:
            return None
        failure = Failure(Reason.UNSUPPORTED, 0, _SUPPORT)
        line.gateway.capabilities.put(parent, f"{_SUPPORT}()", failure)
        return failure

    def shortest(self) -> float:
        """The shortest window in seconds."""
        return self._shortest_s

    def request(self, line: Line) -> Any:  # noqa: ANN401 - a ctypes structure of the binding
        """The request structure (19 kB in newer bindings), one for this thread."""
        if self._request is None:
            self._request = line.gateway.make("c_nvmlGpmMetricsGet_t")
        return self._request

    def clear(self, line: Line) -> None:
        """Frees every sample: the layout changed, or the library is to be shut down."""
        for window in self._windows.values():
            window.free(line)
        self._windows.clear()

    def drop(self) -> None:
        """Forgets every sample without freeing it: the library that made them is gone."""
        self._windows.clear()
        self._supported = False


class _Window:
    def __init__(self) -> None:
        self._start: object = None
        self._spare: object = None
        self._since = 0.0
        self._torn = False
        """A reading failed since the first sample: a window from there would reach back behind that reading."""
        self._values: Values = {}

    def read(self, line: Line, parent: Target, on: Target, instance: int | None, owner: Windows) -> Values | Failure:
        now = line.gateway.clock()
        length = now - self._since
        if self._start is not None and length < owner.shortest():
            return self._values or Failure(Reason.EMPTY, 0, _GET)
        sample = self._take(line, parent, on, instance)
        if isinstance(sample, Failure):
            self._torn, self._values = True, {}
            return sample
        start, self._start, self._since = self._start, sample, now
        if start is None:
            return Failure(Reason.EMPTY, 0, _GET)
        self._spare = start
        torn, self._torn = self._torn, False
        if torn or length > LONGEST_S:
            self._values = {}
            return Failure(Reason.EMPTY, 0, _GET)
        found = _metrics(line, on, start, sample, owner)
        self._values = {} if isinstance(found, Failure) else found
        return found

    def free(self, line: Line) -> None:
        for sample in (self._start, self._spare):
            if sample is not None:
                line.ask(lambda _: None, "nvmlGpmSampleFree", sample, gpu="")
        self._start = self._spare = None

    def _take(self, line: Line, parent: Target, on: Target, instance: int | None) -> object | Failure:
        sample = self._spare
        self._spare = None
        if sample is None:
            sample = line.ask(_same, "nvmlGpmSampleAlloc", gpu=on.gpu)
            if isinstance(sample, Failure):
                return sample
        if instance is None:
            taken = line.ask(_same, "nvmlGpmSampleGet", on.handle, sample, on=on, what="nvmlGpmSampleGet")
        else:
            taken = line.ask(
                _same, "nvmlGpmMigSampleGet", parent.handle, instance, sample, on=on, what="nvmlGpmMigSampleGet"
            )
        if isinstance(taken, Failure):
            self._spare = sample
            return taken
        return sample


def _metrics(line: Line, on: Target, start: object, end: object, owner: Windows) -> Values | Failure:
    request = owner.request(line)
    request.version = _VERSION
    request.numMetrics = len(METRICS)
    request.sample1, request.sample2 = start, end
    for place, metric in enumerate(METRICS):
        request.metrics[place].metricId = metric

    def take(found: Any) -> Values:  # noqa: ANN401 - a ctypes structure of the binding
        return {metric: _value(found.metrics[place]) for place, metric in enumerate(METRICS)}

    return line.ask(take, _GET, request, gpu=on.gpu)


def _value(metric: Any) -> float | Failure:  # noqa: ANN401 - a ctypes structure of the binding
    code = int(metric.nvmlReturn)
    if code:
        return Failure(reason_of(code), code, _GET)
    value = float(metric.value)
    good = math.isfinite(value) and 0 <= value <= _MOST_PERCENT
    return min(value, 100.0) if good else Failure(Reason.EMPTY, 0, _GET)


def _same(result: object) -> object:
    return result
