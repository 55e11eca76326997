"""GPM windows and field values, on a binding made of plain functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from gpulens.nvml import fields
from gpulens.nvml.fields import FAMILIES, NVLINK5
from gpulens.nvml.gateway import Gateway, Line, Target
from gpulens.nvml.gpm import METRICS, Windows
from gpulens.nvml.hangs import Hangs
from gpulens.nvml.reason import Failure, Reason

_GPU = Target("GPU-1", "GPU-1", object())


class _NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class _Request:
    def __init__(self) -> None:
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(98)]
        self.version = self.numMetrics = 0
        self.sample1: SimpleNamespace | None = None
        self.sample2: SimpleNamespace | None = None


class _Gpm:
    """A GPU whose metric N is N percent, over windows whose lengths are noted."""

    def __init__(self, *, supported: bool = True) -> None:
        self.now = 1000.0
        self.windows: list[float] = []
        self.held = 0
        self.value: float | None = None
        self.code = 0
        self.supported = supported
        module = ModuleType("pynvml")
        module.__dict__.update(
            NVMLError=_NvmlError,
            c_nvmlGpmMetricsGet_t=_Request,
            nvmlGpmQueryDeviceSupport=lambda _handle: SimpleNamespace(isSupportedDevice=int(self.supported)),
            nvmlGpmSampleAlloc=self._alloc,
            nvmlGpmSampleFree=self._free,
            nvmlGpmSampleGet=self._get,
            nvmlGpmMetricsGet=self._metrics,
        )
        gateway = Gateway(Hangs(self._clock), clock=self._clock, load=lambda: module)
        gateway.load()
        gateway.up = True
        self.line = Line(gateway)
        self.kept = Windows()

    def _clock(self) -> float:
        return self.now

    def _alloc(self) -> object:
        self.held += 1
        return SimpleNamespace(at=0.0)

    def _free(self, _sample: object) -> None:
        self.held -= 1

    def _get(self, _handle: object, sample: SimpleNamespace) -> None:
        sample.at = self.now

    def _metrics(self, request: _Request) -> _Request:
        assert request.version == 1
        assert request.sample1 is not None
        assert request.sample2 is not None
        self.windows.append(request.sample2.at - request.sample1.at)
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = self.code if metric.metricId == 11 else 0
            metric.value = float(metric.metricId) if self.value is None else self.value
        return request

    def read(self, after_s: float) -> dict[int, float | Failure] | Failure:
        """A reading so much later."""
        self.now += after_s
        return self.kept.read(self.line, _GPU, _GPU, None)


def test_a_window_reaches_from_one_reading_to_the_next() -> None:
    """The first reading has none; then each covers the time since the one before, without a gap."""
    gpm = _Gpm()
    first = gpm.read(0)
    assert isinstance(first, Failure)
    assert first.reason is Reason.EMPTY
    assert gpm.read(10) == {metric: float(metric) for metric in METRICS}
    gpm.read(12)
    assert gpm.windows == [10, 12]
    assert gpm.held == 2, "two samples an entity are enough for ever"


def test_a_window_below_a_second_serves_the_one_before() -> None:
    """Too short a window is not measured, and the time in it goes into the next one."""
    gpm = _Gpm()
    gpm.read(0)
    assert isinstance(gpm.read(0.5), Failure)
    before = gpm.read(2)
    assert gpm.read(0.3) == before
    gpm.read(1)
    assert gpm.windows == pytest.approx([2.5, 1.3])


def test_a_window_of_more_than_ten_minutes_begins_anew() -> None:
    """After a long silence there is no value, and the next window is short again."""
    gpm = _Gpm()
    gpm.read(0)
    gpm.read(10)
    assert isinstance(gpm.read(601), Failure)
    assert isinstance(gpm.read(0.5), Failure), "nor is the one of before the silence served"
    gpm.read(9.5)
    assert gpm.windows == [10, 10]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_share_is_no_value(value: float) -> None:
    """NaN is how GPM says that it measured nothing."""
    gpm = _Gpm()
    gpm.read(0)
    gpm.value = value
    found = gpm.read(10)
    assert isinstance(found, dict)
    assert {type(one) for one in found.values()} == {Failure}


def test_one_metric_that_fails_leaves_the_others() -> None:
    """Each metric has a code of its own."""
    gpm = _Gpm()
    gpm.read(0)
    gpm.code = 3
    found = gpm.read(10)
    assert isinstance(found, dict)
    assert found[11] == Failure(Reason.UNSUPPORTED, 3, "nvmlGpmMetricsGet")
    assert found[2] == 2.0


def test_a_card_without_gpm_is_not_sampled() -> None:
    """Where the driver says that the device has none, no sample is even allocated."""
    gpm = _Gpm(supported=False)
    for _ in range(3):
        found = gpm.read(10)
        assert isinstance(found, Failure)
        assert found.reason is Reason.UNSUPPORTED
    assert gpm.held == 0
    assert gpm.line.stats["nvmlGpmQueryDeviceSupport"][0] == 1


def test_every_sample_is_freed() -> None:
    """After `clear` nothing of the library's memory is held."""
    gpm = _Gpm()
    gpm.read(0)
    gpm.read(10)
    gpm.kept.clear(gpm.line)
    assert gpm.held == 0
    assert isinstance(gpm.read(10), Failure)


class _Fields:
    """A GPU with fields: (code, time stamp, value) by id; a batch with a field of `refused` fails as a whole."""

    def __init__(self, known: dict[int, tuple[int, int, int]], refused: frozenset[int] = frozenset()) -> None:
        self.known = known
        self.refused = refused
        self.batches: list[list[int]] = []
        module = ModuleType("pynvml")
        module.__dict__.update(NVMLError=_NvmlError, nvmlDeviceGetFieldValues=self._values)
        gateway = Gateway(Hangs(lambda: 0.0), clock=lambda: 0.0, load=lambda: module)
        gateway.load()
        gateway.up = True
        self.line = Line(gateway)

    def _values(self, _handle: object, asked: list[tuple[int, int]]) -> Iterator[object]:
        self.batches.append([number for number, _ in asked])
        if self.refused & {number for number, _ in asked}:
            raise _NvmlError(3)
        return (self._value(number) for number, _ in asked)

    def _value(self, number: int) -> object:
        code, stamp, value = self.known[number]
        return SimpleNamespace(nvmlReturn=code, timestamp=stamp, valueType=1, value=SimpleNamespace(uiVal=value))

    def read(self, *numbers: int) -> dict[int, int | float | Failure]:
        """The fields by id."""
        found = fields.read(self.line, _GPU, [(number, 0) for number in numbers])
        return {number: value for (number, _), value in found.items()}


def test_a_field_counts_with_its_own_code_and_time() -> None:
    """A field that failed, and one that was never filled, are no zeros."""
    world = _Fields({74: (0, 1, 5), 75: (3, 1, 0), 76: (0, 0, 0)})
    found = world.read(74, 75, 76)
    assert found[74] == 5
    assert found[75] == Failure(Reason.UNSUPPORTED, 3, fields.CALL)
    assert found[76] == Failure(Reason.EMPTY, 0, fields.CALL)
    world.read(74, 75, 76)
    assert world.batches == [[74, 75, 76], [74, 76]], "what is not supported is not asked again"


def test_a_batch_that_fails_is_asked_one_by_one() -> None:
    """One field that a driver refuses does not take the others with it."""
    world = _Fields({74: (0, 1, 5), 75: (0, 1, 6), 76: (0, 1, 7)}, frozenset({75}))
    found = world.read(74, 75, 76)
    assert (found[74], found[76]) == (5, 7)
    assert found[75] == Failure(Reason.UNSUPPORTED, 3, fields.CALL)
    assert world.batches == [[74, 75, 76], [74], [75], [76]]


def test_no_field_is_used_whose_number_means_two_things() -> None:
    """Ids from 251 on were given anew between driver branches."""
    assert all(number < 251 for family in FAMILIES.values() for number, _ in family)
    assert all(number < 251 for number in NVLINK5)
