"""Writes the state file of the fake library: GPUs that come, go, are lost, re-partitioned, slow or wrong.

Invariant: a file that is read is complete: each change writes a new file and renames it, so every call of the library
sees one consistent world. Figures that rise (energy, counters, GPM integrals) go on from what was said before.

The keys are those of `profiles.py`; a figure that is taken out is 'not supported' from then on.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid as uuids
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from gpulens.simulator.models import MIB, number_instances
from gpulens.simulator.nvml.build import LIBRARY, build
from gpulens.simulator.nvml.profiles import DRIVERS, PROFILES, NvmlProfile

Figure: TypeAlias = "int | float | str | Ramp"

XID = 0x8
MIG_CHANGED = 0x100
_MOST_EVENTS = 64
_SRAM_PLACES = (0, 1, 3, 4, 5, 6, 7)
"""NVML's memory locations that are not DRAM: those of which a MIG instance's handle tells errors."""
# What the driver counts since it was loaded; aggregate ECC counts and retired pages live in the card and stay.
_COUNTERS = ("energy_mj", "violation.", "ecc.0.0", "ecc.1.0", "pcie.replay", "field.197", "field.198", "field.138.",
             "field.139.", "field.140.", "field.141.")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ramp:
    """A figure that is `base` at second `at_s` of the library's clock and rises by `rate` a second."""

    base: float
    rate: float
    at_s: float

    def now(self, at_s: float) -> float:
        """The figure at this second."""
        return self.base + self.rate * (at_s - self.at_s)

    def __str__(self) -> str:
        return f"{self.base!r}{self.rate:+.12g}@{self.at_s!r}"


@dataclass(frozen=True, slots=True)
class FakeInstance:
    """A MIG instance: its place in the driver's list, its ids and its profile."""

    uuid: str
    slot: int
    gi: int
    ci: int
    profile: str


@dataclass(frozen=True, slots=True)
class FakeProcess:
    """A process with a context. Memory in bytes, None where NVML can't tell; `instance` is a MIG instance's UUID.

    With `sm` the process ran `age_us` ago: percent of time, and of memory, encoder and decoder likewise. An age of -1
    gives a sample without a time stamp, as some drivers do.
    """

    pid: int
    memory: int | None = None
    kind: str = "compute"
    instance: str = ""
    sm: int | None = None
    memory_utilization: int = 0
    encoder: int = 0
    decoder: int = 0
    age_us: int = 200_000


@dataclass(slots=True)
class _Device:
    uuid: str
    profile: NvmlProfile
    figures: dict[str, Figure]
    generation: int = 0
    instances: dict[str, FakeInstance] = field(default_factory=dict)
    of_instances: dict[str, dict[str, Figure]] = field(default_factory=dict)
    processes: list[FakeProcess] = field(default_factory=list)


class FakeNvml:
    """One machine as NVML sees it. Everything is written at once, or at the end of a `batch()`.

    `folder` gets the state file, and the library with `install`. `clock_s` pins the library's clock to that second (and
    `advance` moves it); without it time is real. As a context manager it gives what a child process needs in its
    environment. Every `gpu` is a UUID, of a GPU or of a MIG instance.
    """

    def __init__(self, folder: Path, *, clock_s: float | None = None, driver: str = "580.105.08") -> None:
        self.folder = folder
        self.path = folder / "state"
        self.log = folder / "calls"
        self._pinned = clock_s
        self._devices: list[_Device] = []
        self._system: dict[str, Figure] = {}
        self._rules: dict[str, str] = {}
        self._events: list[str] = []
        self._event_count = 0
        self._numbers = 0
        self._batches = 0
        self._epoch = 1
        self._name_driver(driver)
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    # ---- the library ----

    def install(self, hidden: Iterable[str] = (), *, cache: Path | None = None) -> Path:
        """Puts the library beside the state. Raises BuildError."""
        return build(self.folder, hidden, cache)

    def remove(self) -> None:
        """Takes library, state and the log of calls away."""
        for path in (self.folder / LIBRARY, self.path, self.log):
            path.unlink(missing_ok=True)

    def imitate(self, branch: str, *, cache: Path | None = None) -> Path:
        """A driver of this branch (R470 ... R590): its version, and a library without the calls that it lacks."""
        version, lacks = DRIVERS[branch]
        self.driver(version)
        return self.install(lacks, cache=cache)

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs to load this library; nothing of it is in this process."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{self.folder}{os.pathsep}{before}" if before else str(self.folder),
            "FAKE_NVML_STATE": str(self.path),
            "FAKE_NVML_LOG": str(self.log),
        }

    def __enter__(self) -> dict[str, str]:
        if not (self.folder / LIBRARY).exists():
            self.install()
        return {**os.environ, **self.environment}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def calls(self) -> list[tuple[int, int, str, str]]:
        """The call log so far: (nanoseconds, thread, call, UUID or "")."""
        if not self.log.exists():
            return []
        rows = (line.split() for line in self.log.read_text().splitlines())
        return [(int(at), int(thread), name, "" if gpu == "-" else gpu) for at, thread, name, gpu in rows]

    # ---- time ----

    @property
    def pinned(self) -> bool:
        """Whether the clock stands still between calls of `advance`."""
        return self._pinned is not None

    def now_s(self) -> float:
        """The second of the library's clock."""
        return time.monotonic() if self._pinned is None else self._pinned

    def advance(self, seconds: float) -> None:
        """Moves the pinned clock."""
        self._pinned = self.now_s() + seconds
        self.write()

    # ---- the driver ----

    def driver(self, version: str) -> None:
        """The versions that the driver and its library say. Those before R570 do not answer field 230."""
        self._name_driver(version)
        self.write()

    def _name_driver(self, version: str) -> None:
        self._system |= {"driver": version, "nvml": f"13.{version}" if int(version[:3]) >= 580 else f"12.{version}"}
        self._system["cuda"] = 13000 if int(version[:3]) >= 580 else 12080
        self._system["branch"] = f"r{version[:3]}_00"

    def init(self, code: int) -> None:
        """What starting the library gives from now on: 0, 9 (no driver), 18 (versions do not fit), 999 ..."""
        self._system["init"] = code
        self.write()

    def reload_driver(self, version: str | None = None) -> None:
        """The driver is loaded anew: handles are void until the library is started again, counters begin at 0."""
        with self.batch():
            self._epoch += 1
            for device in self._devices:
                self._begin_anew(device)
            if version is not None:
                self.driver(version)

    def _begin_anew(self, device: _Device) -> None:
        """Counters are at 0 and rise as before; handles of before are void."""
        device.generation += 1
        for figures in (device.figures, *device.of_instances.values()):
            for key, value in figures.items():
                if isinstance(value, Ramp):
                    figures[key] = Ramp(0.0, value.rate, self.now_s())
                elif key.startswith(_COUNTERS):
                    figures[key] = 0

    # ---- GPUs ----

    def add_gpu(
        self,
        profile: str,
        *,
        uuid: str | None = None,
        minor: int | None = None,
        pci: str | None = None,
        serial: str | None = None,
    ) -> str:
        """Adds a GPU of this profile at the end of the list and returns its UUID."""
        card = PROFILES[profile]
        index = len(self._devices)
        number = self._next()
        name = uuid or f"GPU-{uuids.uuid5(uuids.NAMESPACE_OID, f'{profile}/{number}')}"
        figures: dict[str, Figure] = dict(card.figures)
        figures |= {
            "uuid": name,
            "name": card.name,
            "minor": index if minor is None else minor,
            "board_id": 0x400 + 0x100 * number,
            "pci.address": pci or f"00000000:{0x04 + 0x11 * number & 0xFF:02X}:00.0",
        }
        if "serial" in figures:
            figures["serial"] = serial or f"13200000{number:05d}"
        figures |= {f"gpm.{metric}": Ramp(0.0, 0.0, self.now_s()) for metric in card.gpm}
        self._devices.append(_Device(name, card, figures))
        self.write()
        return name

    def remove_gpu(self, gpu: str) -> None:
        """Takes the GPU out of the list: its handle is of a lost one, the places of the others move up."""
        self._devices.remove(self._device(gpu))
        self.write()

    def lose(self, gpu: str) -> None:
        """The GPU falls off the bus: it stays in the list and every call of it fails."""
        self.set(gpu, {"lost": 1})

    def restore(self, gpu: str) -> None:
        """The lost GPU is back, after a reset: handles of before are void, counters begin at 0."""
        with self.batch():
            self._begin_anew(self._device(gpu))
            self.set(gpu, {"lost": 0})

    def set(self, gpu: str, figures: Mapping[str, Figure]) -> None:
        """Sets figures by key; "!4" makes the calls that ask for it fail with code 4."""
        self._figures(gpu).update(figures)
        self.write()

    def unset(self, gpu: str, *keys: str) -> None:
        """Takes figures out: not supported from now on."""
        for key in keys:
            self._figures(gpu).pop(key, None)
        self.write()

    def get(self, gpu: str, key: str) -> Figure | None:
        """A figure as it stands; None where there is none."""
        return self._figures(gpu).get(key)

    def count(self, gpu: str, rates: Mapping[str, float]) -> None:
        """Lets counters rise by so much a second from now on, from what they say now."""
        at, figures = self.now_s(), self._figures(gpu)
        figures |= {key: Ramp(_value(figures.get(key), at), rate, at) for key, rate in rates.items()}
        self.write()

    def gpm(self, gpu: str, percent: Mapping[int, float]) -> None:
        """What GPM measures from now on, by metric id; a window over the change gives the mean."""
        self.count(gpu, {f"gpm.{metric}": value for metric, value in percent.items()})

    # ---- MIG ----

    def set_mig(self, gpu: str, profiles: Sequence[str] | None, *, gis: Sequence[int] = (), names: Sequence[str] = ()
                ) -> list[FakeInstance]:  # fmt: skip
        """Cuts the GPU anew: all instances of before are gone. None turns MIG off.

        GPU-instance ids are the driver's own numbering unless given, UUIDs (`names`) are new.
        """
        device = self._device(gpu)
        device.instances, device.of_instances, device.processes = {}, {}, []
        device.figures |= {"mig.mode": int(profiles is not None), "mig.pending": int(profiles is not None)}
        cuts = [device.profile.mig[name] for name in profiles or ()]
        numbers = list(gis) or number_instances(cuts)
        for slot, (cut, gi) in enumerate(zip(cuts, numbers, strict=True)):
            serial = self._next()
            name = names[slot] if names else f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{gpu}/{gi}/{serial}')}"
            board = device.profile.memory_mib - device.profile.reserved_mib
            memory = board * cut.memory // 8 * MIB
            device.instances[name] = FakeInstance(name, slot, gi, 0, cut.name)
            device.of_instances[name] = {
                "uuid": name,
                "name": f"{device.profile.name} MIG {cut.name}",
                "generation": serial,
                "gi": gi,
                "ci": 0,
                "memory.total": memory,
                "memory.reserved": 0,
                "memory.used": 0,
                "attribute.multiprocessors": device.profile.multiprocessors * cut.compute,
                "attribute.gpu_slices": cut.compute,
                "attribute.compute_slices": cut.compute,
                "attribute.memory_mib": memory // MIB,
                **{f"process.{kind}.count": 0 for kind in ("compute", "graphics", "mps")},
                **{f"ecc.1.0.{place}": 0 for place in _SRAM_PLACES},
                **{f"gpm.{metric}": Ramp(0.0, 0.0, self.now_s()) for metric in device.profile.gpm if metric < 20},
            }
        self.event(gpu, MIG_CHANGED, 0)
        return list(device.instances.values())

    def destroy_instance(self, instance: str) -> None:
        """Takes one instance away: its slot stays empty, the others keep theirs."""
        device = self._device(instance)
        device.instances.pop(instance)
        device.of_instances.pop(instance)
        device.processes = [p for p in device.processes if p.instance != instance]
        self.event(device.uuid, MIG_CHANGED, 0)

    def instances(self, gpu: str) -> list[FakeInstance]:
        """The MIG instances of a GPU as they are now."""
        return list(self._device(gpu).instances.values())

    # ---- processes ----

    def processes(self, gpu: str, processes: Iterable[FakeProcess]) -> None:
        """Who has a context on the GPU (or, by `instance`, on its MIG instances): the whole list."""
        self._device(gpu).processes = list(processes)
        self.write()

    # ---- things that happen ----

    def xid(self, gpu: str, code: int, *, gi: int | None = None, ci: int | None = None) -> None:
        """An XID is reported to whoever waits for events now."""
        self.event(gpu, XID, code, gi=gi, ci=ci)

    def event(self, gpu: str, kind: int, data: int, *, gi: int | None = None, ci: int | None = None) -> None:
        """An event of this kind, one bit of NVML's event types."""
        self._event_count += 1
        places = " ".join("-" if n is None else str(n) for n in (gi, ci))
        self._events = [*self._events, f"event.{self._event_count} = {gpu} {kind} {data} {places}"][-_MOST_EVENTS:]
        self.write()

    def fault(self, call: str, code: int, gpu: str = "*", times: int = 0) -> str:
        """Makes a call (`nvmlDeviceGetName`, or `nvmlGpm*`) fail, for a GPU, so often (0: always). Gives the rule."""
        return self._rule("fault", f"{call} {code} {gpu} {times}")

    def delay(self, call: str, ms: int, gpu: str = "*", times: int = 0) -> str:
        """Makes a call take so long: a hang where that is long enough. Ends as soon as the rule is cleared."""
        return self._rule("delay", f"{call} {ms} {gpu} {times}")

    def _rule(self, kind: str, text: str) -> str:
        rule = f"{kind}.{self._next()}"
        self._rules[rule] = text
        self.write()
        return rule

    def clear(self, rule: str | None = None) -> None:
        """Takes a rule out, or all of them."""
        if rule is None:
            self._rules.clear()
        else:
            self._rules.pop(rule, None)
        self.write()

    # ---- the file ----

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Several changes that appear at once."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self.write()

    def write(self) -> None:
        """Writes the state, unless a batch is open."""
        if self._batches:
            return
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        fresh.write_text("\n".join(self._lines()) + "\n", "utf-8")
        fresh.replace(self.path)

    def _lines(self) -> Iterator[str]:
        yield f"count = {len(self._devices)}"
        yield f"epoch = {self._epoch}"
        if self._pinned is not None:
            yield f"clock = {self._pinned!r}"
        yield from (f"{key} = {value}" for key, value in self._system.items())
        yield from (f"{rule} = {text}" for rule, text in self._rules.items())
        yield f"event.last = {self._event_count}"
        yield from self._events
        recovery = int(str(self._system["driver"])[:3]) >= 570
        for index, device in enumerate(self._devices):
            yield f"gpu.{index}.generation = {device.generation}"
            figures = device.figures | _process_figures(device.processes, device)
            if not recovery:
                figures.pop("field.230", None)
            yield from (f"gpu.{index}.{key} = {value}" for key, value in figures.items())
            for instance in device.instances.values():
                own = [p for p in device.processes if p.instance == instance.uuid]
                figures = device.of_instances[instance.uuid] | _process_figures(own, device)
                yield from (f"gpu.{index}.mig.{instance.slot}.{key} = {value}" for key, value in figures.items())

    def _device(self, gpu: str) -> _Device:
        for device in self._devices:
            if gpu == device.uuid or gpu in device.instances:
                return device
        raise KeyError(gpu)

    def _figures(self, gpu: str) -> dict[str, Figure]:
        device = self._device(gpu)
        return device.figures if gpu == device.uuid else device.of_instances[gpu]

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


def _value(figure: Figure | None, at_s: float) -> float:
    if isinstance(figure, Ramp):
        return figure.now(at_s)
    return float(figure) if isinstance(figure, int | float) else 0.0


def _process_figures(processes: Sequence[FakeProcess], device: _Device) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for kind in ("compute", "graphics", "mps"):
        found = [p for p in processes if p.kind == kind]
        if found:
            figures[f"process.{kind}.count"] = len(found)
        for position, process in enumerate(found):
            place = device.instances.get(process.instance)
            memory = "-" if process.memory is None else process.memory
            where = "- -" if place is None else f"{place.gi} {place.ci}"
            figures[f"process.{kind}.{position}"] = f"{process.pid} {memory} {where}"
    ran = [p for p in processes if p.sm is not None]
    if ran and "process.sample.count" in device.figures:
        figures["process.sample.count"] = len(ran)
        for position, process in enumerate(ran):
            rest = f"{process.memory_utilization} {process.encoder} {process.decoder}"
            figures[f"process.sample.{position}"] = f"{process.pid} {process.age_us} {process.sm} {rest}"
    return figures
