"""The one way into NVML: every call goes through a `Line` and comes back as a value or a Failure.

Invariant: nothing else calls the binding, and no failure turns into a number. What a device can't tell is remembered
for a while and not asked again; a call that hangs can be seen from outside and is not repeated until its back-off is
over.

The handling of codes follows NVML's header (nvmlReturn_t); the binding is nvidia-ml-py, imported as `pynvml` when the
library is first loaded and not before.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar

from gpulens.nvml.hangs import Hangs
from gpulens.nvml.reason import Failure, Reason

T = TypeVar("T")

REMEMBER_S: Final = 600.0
"""How long 'unsupported' and 'no permission' are believed before they are asked for again."""

LIBRARY: Final = "libnvidia-ml.so.1"

_SIZE_TRIES: Final = 3
_UNINITIALIZED: Final = 1
_INVALID_ARGUMENT: Final = 2
_INSUFFICIENT_SIZE: Final = 7
_FUNCTION_NOT_FOUND: Final = 13

_REASONS: Final[dict[int, Reason]] = {
    0: Reason.EMPTY,  # the binding's sizing call of GetProcessUtilization raises SUCCESS where there are no samples
    1: Reason.DRIVER,
    2: Reason.STALE,
    3: Reason.UNSUPPORTED,
    4: Reason.PERMISSION,
    6: Reason.EMPTY,
    9: Reason.DRIVER,
    10: Reason.EMPTY,
    12: Reason.DRIVER,
    13: Reason.UNSUPPORTED,
    15: Reason.LOST,
    18: Reason.DRIVER,
    21: Reason.EMPTY,
    22: Reason.UNSUPPORTED,
    25: Reason.UNSUPPORTED,
    26: Reason.UNSUPPORTED,
    27: Reason.EMPTY,
    28: Reason.LOST,
}

_NEEDED: Final = ("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetFieldValues")
"""Calls that every nvidia-ml-py since 12.535 has; years-old forks under the same import name have not."""


def reason_of(code: int) -> Reason:
    """What an NVML return code means for a reading."""
    return _REASONS.get(code, Reason.ERROR)


class BindingError(Exception):
    """There is no binding that can be used; the text says what to install."""


class AbandonedError(Exception):
    """The call of this thread came back after it had been given up: the thread ends."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a call is about: a GPU, or a MIG instance of it.

    `handle` is the binding's and never None, for NULL crashes the driver's library. `mig` is the fingerprint of the
    GPU's layout: handles and capabilities of one layout mean nothing in another.
    """

    uuid: str
    gpu: str
    handle: object
    mig: str = ""

    def __post_init__(self) -> None:
        if self.handle is None:
            raise ValueError(f"no handle for {self.uuid}")


def import_binding() -> ModuleType:
    """The module `pynvml` of nvidia-ml-py. Raises BindingError."""
    try:
        with warnings.catch_warnings():
            # The retired distribution named pynvml warns at import; that both are installed is no reason to fail.
            warnings.simplefilter("ignore", FutureWarning)
            binding = importlib.import_module("pynvml")
    except ImportError as error:
        raise BindingError("nvidia-ml-py is not installed: pip install '.[nvidia]' in the checkout") from error
    lacking = [name for name in _NEEDED if not hasattr(binding, name)]
    if lacking:
        raise BindingError(
            f"the module pynvml belongs to {_owner()} and has no {lacking[0]}: "
            "uninstall that, then pip install --force-reinstall nvidia-ml-py"
        )
    return binding


def _owner() -> str:
    from importlib.metadata import packages_distributions  # slow, and needed only to complain

    return " and ".join(sorted(packages_distributions().get("pynvml", []))) or "an unknown package"


class Capabilities:
    """What was found not to work, by (device, call, driver, MIG layout), for `REMEMBER_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str, str, str], tuple[float, Failure]] = {}
        self.driver = ""

    def get(self, on: Target, what: str) -> Failure | None:
        """Why `what` is not worth asking; None when it is."""
        key = (on.uuid, what, self.driver, on.mig)
        known = self._known.get(key)
        if known is None:
            return None
        until, failure = known
        if self._clock() < until:
            return failure
        self._known.pop(key, None)
        return None

    def put(self, on: Target, what: str, failure: Failure) -> None:
        """Remembers a failure that says something about the device and not about the moment."""
        if failure.reason in {Reason.UNSUPPORTED, Reason.PERMISSION}:
            self._known[on.uuid, what, self.driver, on.mig] = (self._clock() + REMEMBER_S, failure)

    def forget(self, gpu_uuids: set[str] | None = None) -> None:
        """Everything of these devices is asked again; of all of them with None."""
        for key in [k for k in list(self._known) if gpu_uuids is None or k[0] in gpu_uuids]:
            self._known.pop(key, None)


class Gateway:
    """The binding and the library behind it, shared by all lines.

    `up` is set by whoever owns the library's life: while it is False every call fails with `driver` unasked.
    """

    def __init__(
        self,
        hangs: Hangs,
        *,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], ModuleType] = import_binding,
    ) -> None:
        self.hangs = hangs
        self.clock = clock
        self.capabilities = Capabilities(clock)
        self.up = False
        self._load = load
        self._binding: ModuleType | None = None
        self._errors: tuple[type[Exception], ...] = ()

    def load(self) -> None:
        """Imports the binding. Raises BindingError."""
        if self._binding is None:
            binding = self._load()
            mismatch = getattr(binding, "NVMLLibraryMismatchError", None)
            self._errors = (binding.NVMLError, UnicodeDecodeError, *((mismatch,) if mismatch else ()))
            self._binding = binding

    def loader_says(self) -> str:
        """Why the library can't be loaded, in the loader's words; the binding keeps them to itself."""
        try:
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            return str(error)
        return ""

    def exports(self, symbol: str) -> bool:
        """Whether the driver's library has this symbol."""
        library = getattr(self._binding, "nvmlLib", None)
        return library is not None and hasattr(library, symbol)

    def make(self, name: str) -> Any:  # noqa: ANN401 - a ctypes structure of the binding
        """A new structure of the binding by its class's name, so that no two calls share one."""
        return getattr(self._binding, name)()

    def run(self, call: str, args: tuple[object, ...]) -> tuple[Any, Failure | None]:
        """One call of the binding, nothing around it: (result, None) or (None, why not)."""
        function = getattr(self._binding, call, None)
        if function is None:
            return None, Failure(Reason.UNSUPPORTED, _FUNCTION_NOT_FOUND, call)
        for left in reversed(range(_SIZE_TRIES)):
            try:
                return function(*args), None
            except self._errors as error:
                code = getattr(error, "value", None)
                if code == _INSUFFICIENT_SIZE and left:
                    continue  # the list grew between asking for its size and fetching it
                if isinstance(code, int):
                    return None, Failure(reason_of(code), code, call)
                if isinstance(error, UnicodeDecodeError):
                    return None, Failure(Reason.ERROR, 0, call)
                return None, Failure(Reason.UNSUPPORTED, _FUNCTION_NOT_FOUND, call)  # the library is too old for it
        return None, Failure(Reason.ERROR, _INSUFFICIENT_SIZE, call)


class Line:
    """One thread's way into NVML. The thread asks; the watch looks at `busy` and may give the line up.

    `fresh` holds the failures of calls that were really made since it was last emptied.
    """

    def __init__(self, gateway: Gateway, *, returned: Callable[[Line], None] = lambda _line: None) -> None:
        self.gateway = gateway
        self.abandoned = False
        self.fresh: list[Failure] = []
        self.stats: dict[str, list[float]] = {}
        self._returned = returned
        self._lock = threading.Lock()
        self._busy: tuple[str, str, float, float] | None = None

    @property
    def busy(self) -> tuple[str, str] | None:
        """(gpu, call) of the call under way."""
        now = self._busy
        return None if now is None else (now[0], now[1])

    def give_up(self, now: float, limit_s: float) -> tuple[str, str] | None:
        """Abandons the thread if its call takes longer than allowed; (gpu, call) then, once."""
        with self._lock:
            if self._busy is None or self.abandoned:
                return None
            gpu, call, since, extra = self._busy
            if now - since <= limit_s + extra:
                return None
            self.abandoned = True
            return gpu, call

    def ask(
        self,
        take: Callable[[Any], T],
        call: str,
        *args: object,
        on: Target | None = None,
        gpu: str = "",
        remember: bool = True,
        what: str = "",
        allowed_s: float = 0.0,
        down: bool = False,
    ) -> T | Failure:
        """Calls NVML and takes what is wanted from its result.

        `on` is the device the call is about: it is believed when it says that it can't, and 'invalid argument' is told
        apart into a stale handle and a question that this device does not know. `gpu` names the device where there is
        no handle yet, `what` the question where its arguments differ from call to call. `allowed_s` is for calls that
        wait by design, `down` for those that start and stop the library. With `remember=False` the code is what it
        says. Raises AbandonedError in a thread that was given up.
        """
        device = on.gpu if on is not None else gpu
        if self.gateway.hangs.is_hung(device, call):
            return Failure(Reason.HUNG, 0, call)
        what = what or f"{call}{args[1:]}"
        if remember and on is not None and (known := self.gateway.capabilities.get(on, what)) is not None:
            return known
        if not (self.gateway.up or down):
            return Failure(Reason.DRIVER, _UNINITIALIZED, call)
        result, failure = self._timed(device, call, args, allowed_s)
        if failure is None:
            return take(result)
        if failure.code == _INVALID_ARGUMENT and on is not None and remember:
            failure = self.doubt(on, failure)
        if remember and on is not None:
            self.gateway.capabilities.put(on, what, failure)
        if failure.reason is not Reason.EMPTY:
            self.fresh.append(failure)
        return failure

    def doubt(self, on: Target, failure: Failure) -> Failure:
        """An invalid argument is a stale handle only if the handle does not name its device any more."""
        uuid, error = self._timed(on.gpu, "nvmlDeviceGetUUID", (on.handle,), 0.0)
        if error is None and uuid == on.uuid:
            return Failure(Reason.UNSUPPORTED, failure.code, failure.call)
        if error is not None and error.reason in {Reason.LOST, Reason.DRIVER}:
            return error
        return failure

    def _timed(self, gpu: str, call: str, args: tuple[object, ...], allowed_s: float) -> tuple[Any, Failure | None]:
        clock = self.gateway.clock
        since = clock()
        with self._lock:
            self._still_wanted(call)
            self._busy = (gpu, call, since, allowed_s)
        try:
            result = self.gateway.run(call, args)
        finally:
            with self._lock:
                self._busy = None
        took = clock() - since
        stat = self.stats.setdefault(call, [0, 0.0, 0.0])
        stat[0] += 1
        stat[1] += took
        stat[2] = max(stat[2], took)
        if self.abandoned:
            self.gateway.hangs.ready(gpu)
            self._returned(self)
        self._still_wanted(call)
        self.gateway.hangs.answered(gpu, call)
        return result

    def _still_wanted(self, call: str) -> None:
        if self.abandoned:
            raise AbandonedError(call)
