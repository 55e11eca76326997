"""The one way into NVML: what codes mean, what is remembered, and what is never done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.nvml.gateway import (
    REMEMBER_S,
    AbandonedError,
    BindingError,
    Gateway,
    Line,
    Target,
    import_binding,
    reason_of,
)
from gpulens.nvml.hangs import Hangs
from gpulens.nvml.posts import Post
from gpulens.nvml.reason import Failure, Reason


class _NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class _MismatchError(Exception):
    pass


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _World:
    """A binding whose calls are plain functions."""

    def __init__(self, **calls: Callable[..., object]) -> None:
        self.clock = _Clock()
        self.module = ModuleType("pynvml")
        self.module.__dict__.update(NVMLError=_NvmlError, NVMLLibraryMismatchError=_MismatchError, **calls)
        self.hangs = Hangs(self.clock, first_s=30, longest_s=100)
        self.gateway = Gateway(self.hangs, clock=self.clock, load=lambda: self.module)
        self.gateway.load()
        self.gateway.up = True
        self.line = Line(self.gateway)


_GPU = Target("GPU-1", "GPU-1", object())


def _failing(code: int) -> Callable[..., object]:
    def call(*_args: object) -> object:
        raise _NvmlError(code)

    return call


def _ask(world: _World, call: str = "nvmlCall") -> object:
    return world.line.ask(int, call, _GPU.handle, on=_GPU)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(3, "unsupported"), (13, "unsupported"), (25, "unsupported"), (26, "unsupported"), (22, "unsupported"),
     (4, "permission"), (6, "empty"), (21, "empty"), (27, "empty"), (10, "empty"), (15, "lost"), (28, "lost"),
     (1, "driver"), (9, "driver"), (12, "driver"), (18, "driver"), (2, "stale"), (16, "error"), (23, "error"),
     (29, "error"), (999, "error")],
)  # fmt: skip
def test_codes_have_reasons(code: int, reason: str) -> None:
    """Each return code is a lifecycle, a capability, a permission, a moment's absence, or an error with its code."""
    world = _World(nvmlCall=_failing(code), nvmlDeviceGetUUID=_failing(code))
    assert _ask(world) == Failure(Reason(reason), code, "nvmlCall")


@given(st.integers(min_value=-5, max_value=2000))
def test_a_failure_is_never_a_number(code: int) -> None:
    """Whatever code a call fails with, what comes back is a Failure that names the call."""
    world = _World(nvmlCall=_failing(code), nvmlDeviceGetUUID=lambda _handle: "GPU-1")
    found = _ask(world)
    assert isinstance(found, Failure)
    assert found.call == "nvmlCall"
    assert isinstance(reason_of(code), Reason)


def test_unsupported_is_believed_for_ten_minutes() -> None:
    """What a device can't do is asked once, and again after ten minutes, another driver or another MIG layout."""
    asked: list[object] = []

    def call(handle: object) -> int:
        asked.append(handle)
        raise _NvmlError(3)

    world = _World(nvmlCall=call)
    for _ in range(3):
        assert isinstance(_ask(world), Failure)
    assert len(asked) == 1
    world.clock.now += REMEMBER_S
    _ask(world)
    assert len(asked) == 2
    world.gateway.capabilities.driver = "590.48"
    _ask(world)
    assert len(asked) == 3
    other = Target("GPU-1", "GPU-1", _GPU.handle, "7/0/MIG-a")
    world.line.ask(int, "nvmlCall", other.handle, on=other)
    assert len(asked) == 4


def test_capabilities_are_of_a_question_with_its_arguments() -> None:
    """A clock that a card does not have says nothing of its other clocks."""

    def clock(_handle: object, which: int) -> int:
        if which == 3:
            raise _NvmlError(3)
        return 1980

    world = _World(nvmlDeviceGetClockInfo=clock)
    assert isinstance(world.line.ask(int, "nvmlDeviceGetClockInfo", _GPU.handle, 3, on=_GPU), Failure)
    assert world.line.ask(int, "nvmlDeviceGetClockInfo", _GPU.handle, 1, on=_GPU) == 1980


def test_what_passes_is_not_remembered() -> None:
    """An error of the moment, or nothing to report, is asked again at once."""
    codes = [999, 6, 23]
    world = _World(nvmlCall=lambda _h: _failing(codes.pop())() if codes else 7)
    assert [isinstance(_ask(world), Failure) for _ in range(4)] == [True, True, True, False]


def test_an_invalid_argument_is_stale_only_if_the_handle_is() -> None:
    """A handle that still names its device is good: then the device does not know the question."""
    good = _World(nvmlCall=_failing(2), nvmlDeviceGetUUID=lambda _handle: "GPU-1")
    assert _ask(good) == Failure(Reason.UNSUPPORTED, 2, "nvmlCall")
    for other in (_failing(2), lambda _handle: "GPU-other"):
        stale = _World(nvmlCall=_failing(2), nvmlDeviceGetUUID=other)
        assert _ask(stale) == Failure(Reason.STALE, 2, "nvmlCall")
    lost = _World(nvmlCall=_failing(2), nvmlDeviceGetUUID=_failing(15))
    found = _ask(lost)
    assert isinstance(found, Failure)
    assert found.reason is Reason.LOST


def test_a_list_that_grew_is_fetched_again() -> None:
    """'Insufficient size' is tried again a few times, then it is an error."""
    tries: list[int] = []

    def call(_handle: object) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise _NvmlError(7)
        return 5

    world = _World(nvmlCall=call, nvmlNever=_failing(7))
    assert _ask(world) == 5
    assert _ask(world, "nvmlNever") == Failure(Reason.ERROR, 7, "nvmlNever")


def test_what_the_binding_or_the_library_lacks_is_unsupported() -> None:
    """A call that is missing in the binding, or whose structures the library is too old for, is no crash."""

    def mismatch(_handle: object) -> int:
        raise _MismatchError

    world = _World(nvmlCall=mismatch)
    assert _ask(world) == Failure(Reason.UNSUPPORTED, 13, "nvmlCall")
    assert _ask(world, "nvmlNotThere") == Failure(Reason.UNSUPPORTED, 13, "nvmlNotThere")


def test_text_that_is_no_utf8_is_an_error() -> None:
    """The binding decodes names and may fail at it."""
    world = _World(nvmlCall=lambda _handle: b"\xff".decode())
    assert _ask(world) == Failure(Reason.ERROR, 0, "nvmlCall")


def test_other_exceptions_are_not_swallowed() -> None:
    """A mistake of ours is no failure of a call."""

    def call(_handle: object) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _ask(_World(nvmlCall=call))


def test_a_null_handle_can_not_be_made() -> None:
    """NULL crashes the driver's library, so a target without a handle does not exist."""
    with pytest.raises(ValueError, match="GPU-2"):
        Target("GPU-2", "GPU-2", None)


def test_nothing_is_called_while_the_library_is_down() -> None:
    """Between the end of the library's life and its next one every call fails unasked."""
    world = _World(nvmlCall=lambda _handle: 1, nvmlInit=lambda: None)
    world.gateway.up = False
    assert _ask(world) == Failure(Reason.DRIVER, 1, "nvmlCall")
    assert world.line.ask(lambda _: "started", "nvmlInit", down=True) == "started"


def test_a_hung_call_is_not_made_before_its_back_off_is_over() -> None:
    """The back-off doubles with each hang up to its longest, other calls are made, and an answer ends it."""
    world = _World(nvmlCall=lambda _handle: 1, nvmlOther=lambda _handle: 2)
    pauses = []
    for _ in range(4):
        pauses.append(world.hangs.mark("GPU-1", "nvmlCall") - world.clock.now)
        assert _ask(world) == Failure(Reason.HUNG, 0, "nvmlCall")
        assert _ask(world, "nvmlOther") == 2
    assert pauses == [30, 60, 100, 100]
    assert world.hangs.of("GPU-1") == "nvmlCall"
    world.clock.now += 100
    assert _ask(world) == 1
    assert world.hangs.of("GPU-1") is None


def test_a_call_that_always_comes_back_too_late_is_made_ever_more_seldom() -> None:
    """The first time it is tried again at once (a card that had to be woken), after that with a pause of its own."""
    now = 0.0
    hangs = Hangs(lambda: now, first_s=30, longest_s=600)
    waits = []
    for _ in range(7):
        hangs.mark("GPU-1", "nvmlX")
        now += 2
        hangs.ready("GPU-1")
        waits.append(hangs.retry_at("GPU-1") - now)
        now = hangs.retry_at("GPU-1")
    assert waits == [0, 30, 90, 210, 450, 570, 570]


def test_a_thread_that_was_given_up_ends_when_its_call_comes_back() -> None:
    """Its answer reaches nobody, the GPU may be tried at once, and whoever counts such threads is told."""
    inside, leave = threading.Event(), threading.Event()
    returned: list[Line] = []

    def call(_handle: object) -> int:
        inside.set()
        assert leave.wait(5)
        return 1

    world = _World(nvmlCall=call)
    line = Line(world.gateway, returned=returned.append)
    ends: list[object] = []

    def work() -> None:
        try:
            ends.append(line.ask(int, "nvmlCall", _GPU.handle, on=_GPU))
        except AbandonedError as error:
            ends.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(5)
    assert line.give_up(world.clock.now + 4, 5) is None
    assert line.give_up(world.clock.now + 6, 5) == ("GPU-1", "nvmlCall")
    assert line.give_up(world.clock.now + 7, 5) is None
    world.hangs.mark("GPU-1", "nvmlCall")
    leave.set()
    thread.join(5)
    assert [type(end) for end in ends] == [AbandonedError]
    assert returned == [line]
    assert world.hangs.retry_at("GPU-1") == world.clock.now
    with pytest.raises(AbandonedError):
        line.ask(int, "nvmlCall", _GPU.handle, on=_GPU)


def test_calls_are_counted_with_their_times() -> None:
    """Each call's number, total and longest time are kept, failures included."""
    world = _World(nvmlCall=_failing(999))

    def slow(_handle: object) -> int:
        world.clock.now += 0.5
        return 1

    world.module.__dict__["nvmlSlow"] = slow
    for _ in range(2):
        _ask(world)
        _ask(world, "nvmlSlow")
    assert world.line.stats == {"nvmlCall": [2, 0.0, 0.0], "nvmlSlow": [2, 1.0, 0.5]}
    assert world.line.fresh == [Failure(Reason.ERROR, 999, "nvmlCall")] * 2


def test_a_missing_binding_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the text says what to install."""

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BindingError, match=r"\.\[nvidia\]"):
        import_binding()


def test_an_old_fork_is_named_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A years-old module of the same name is told from the binding by the calls that it lacks."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    with pytest.raises(BindingError, match="has no nvmlGpmQueryDeviceSupport"):
        import_binding()


def test_a_thread_that_dies_of_a_mistake_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had to answer is answered, and the next look puts another thread in its place."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    world, begun, died = _World(), list[bool](), list[str]()

    def work(_line: Line, again: bool) -> None:
        begun.append(again)
        raise ZeroDivisionError

    post = Post("gpu", world.gateway, work, hung=_nobody, free=lambda: True, died=lambda: died.append("told"))
    post.start()
    post.join(5)
    post.look(5.0)
    assert died == ["told"]
    post.look(5.0)
    post.join(5)
    assert begun == [False, True]


def _nobody(gpu: str, call: str) -> None:
    raise AssertionError(f"{gpu} {call}")
