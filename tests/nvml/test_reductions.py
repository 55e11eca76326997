"""Samples, sums and lists brought down to one figure; frames taken out of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.nvml.agent import Inbox
from gpulens.nvml.context import Wish
from gpulens.nvml.devices import mig_profile, sysfs_address
from gpulens.nvml.fields import NVLINK5, LinkSums
from gpulens.nvml.gateway import Gateway, Line, Target
from gpulens.nvml.hangs import Hangs
from gpulens.nvml.processes import Busy, Process, good, merged, newest
from gpulens.nvml.protocol import Json, ProtocolError, frame
from gpulens.nvml.reason import Failure, Reason
from gpulens.nvml.samples import number_of, spread

_PERCENTS = st.lists(st.integers(min_value=0, max_value=100), min_size=1, max_size=200)


@given(_PERCENTS)
def test_a_spread_lies_within_its_samples(values: list[int]) -> None:
    """min <= mean <= max, and at least 95 % of the samples do not exceed the percentile, which is one of them."""
    found = spread(values)
    assert found is not None
    assert min(values) <= found.mean <= found.highest == max(values)
    assert found.p95 in values
    assert sum(value <= found.p95 for value in values) * 100 >= 95 * len(values)
    assert sum(value < found.p95 for value in values) * 100 < 95 * len(values)


def test_no_samples_are_no_figure() -> None:
    """Nothing is neither zero nor the value of before."""
    assert spread([]) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 1000)), max_size=20))
def test_a_process_in_two_lists_holds_its_memory_once(entries: list[tuple[int, int | None]]) -> None:
    """Every listed pid is there; its memory is the most that a list says, None only where none says any."""
    processes = [Process(pid, memory) for pid, memory in entries]
    found = merged([processes[::2], processes[1::2]])
    assert found.keys() == {pid for pid, _ in entries}
    for pid, memory in found.items():
        told = [one for who, one in entries if who == pid and one is not None]
        assert memory == (max(told) if told else None)


_BUSY = st.builds(Busy, st.integers(0, 6), st.integers(0, 50), st.integers(-5, 300))


@given(st.lists(_BUSY, max_size=30), st.sets(st.integers(0, 6)))
def test_utilisation_is_that_of_a_listed_process_and_at_most_one(samples: list[Busy], alive: set[int]) -> None:
    """Junk never comes through, and of a process's samples the newest counts."""
    found = newest(good(samples, alive))
    assert found.keys() <= alive
    for pid, share in found.items():
        assert 0 <= share <= 1
        mine = [one for one in samples if one.pid == pid and 0 <= one.percent <= 100 and one.stamp_us > 0]
        last = max(one.stamp_us for one in mine)
        assert share == max(one.percent for one in mine if one.stamp_us == last) / 100


class _Links:
    """A GPU of so many links whose fields fail where the table says so."""

    def __init__(self, codes: dict[int, int]) -> None:
        self.codes = codes
        gateway = Gateway(Hangs(lambda: 0.0), clock=lambda: 0.0, load=self._binding)
        gateway.load()
        gateway.up = True
        self.line = Line(gateway)

    def _binding(self) -> ModuleType:
        module = ModuleType("pynvml")
        error = type("NVMLError", (Exception,), {})
        module.__dict__.update(NVMLError=error, nvmlDeviceGetFieldValues=self._values)
        return module

    def _values(self, _handle: object, asked: list[tuple[int, int]]) -> Iterator[object]:
        for _, link in asked:
            code = self.codes.get(link, 0)
            value = SimpleNamespace(ullVal=link + 1)
            yield SimpleNamespace(nvmlReturn=code, timestamp=1, valueType=3, value=value)


def test_a_sum_over_links_does_not_shrink_when_a_link_fails() -> None:
    """The links of the first sum are those of every sum: with one of them unknown the sum is."""
    links, sums, on = _Links({2: 3}), LinkSums(), Target("GPU-1", "GPU-1", object())
    assert sums.read(links.line, on, 4) == dict.fromkeys(NVLINK5, 1 + 2 + 4)
    links.codes = {2: 3, 1: 999}
    assert all(isinstance(value, Failure) for value in sums.read(links.line, on, 4).values())
    links.codes = {2: 3}
    assert sums.read(links.line, on, 4) == dict.fromkeys(NVLINK5, 1 + 2 + 4)


def test_no_link_is_no_sum() -> None:
    """Where no link has the field the GPU has not."""
    links = _Links({0: 3, 1: 3})
    found = LinkSums().read(links.line, Target("GPU-1", "GPU-1", object()), 2)
    assert {value.reason for value in found.values() if isinstance(value, Failure)} == {Reason.UNSUPPORTED}


def test_a_number_is_taken_by_its_type() -> None:
    """The union's member follows the type word; an unknown type and NaN are no number."""
    value = SimpleNamespace(dVal=float("nan"), uiVal=1, ulVal=2, ullVal=3, sllVal=-4, siVal=-5, usVal=6)
    assert [number_of(kind, value) for kind in range(-1, 8)] == [None, None, 1, 2, 3, -4, -5, 6, None]


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers()), max_size=5), st.integers(1, 40))
def test_frames_come_out_however_the_stream_is_cut(messages: list[dict[str, int]], step: int) -> None:
    """Each message once and in order."""
    data = b"".join(frame(dict[str, Json](one)) for one in messages)
    inbox = Inbox()
    found = [one for at in range(0, len(data), step) for one in inbox.feed(data[at : at + step])]
    assert found == messages


def test_a_stream_that_is_none_of_ours_is_refused() -> None:
    """Text instead of a length is told as that."""
    with pytest.raises(ProtocolError):
        Inbox().feed(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("nvml", "sysfs"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("0000:3b:00.0", "0000:3b:00.0"), ("00010000:C1:00.0", "00010000:c1:00.0"),
     ("", ""), ("somewhere", "somewhere")],
)  # fmt: skip
def test_addresses_are_written_as_the_kernel_writes_them(nvml: str, sysfs: str) -> None:
    """Lower case, and a domain of four digits where its upper half is zero."""
    assert sysfs_address(nvml) == sysfs


def test_a_mig_profile_is_the_end_of_a_name() -> None:
    """The name of a MIG device ends with its profile; another name has none."""
    assert mig_profile("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me") == "1g.10gb+me"
    assert mig_profile("NVIDIA H100 80GB HBM3") == ""


def test_a_wish_has_defaults_for_what_does_not_fit() -> None:
    """Values of a wrong kind are as good as left out."""
    assert Wish.of({"call_timeout_s": "5", "hung": "x", "retry_s": [1], "gpm_window_s": -1}) == Wish()
    wish = Wish.of(
        {"call_timeout_s": 2, "hung": [["GPU-1", "nvmlCall"], "x"], "processes": False, "proc": "/host/proc"}
    )
    assert (wish.call_timeout_s, wish.hung, wish.processes) == (2.0, (("GPU-1", "nvmlCall"),), False)
    assert wish.proc == "/host/proc"
