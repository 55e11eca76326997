"""Shows a simulated node through the fake NVML: its GPUs, their activity and the processes of the pods on them.

Invariant: at each `write` the fake says what the world says at that moment; between two writes counters and GPM
integrals run on at the world's mean rate over the time until the next one, and they never go back. Every process of the
fake stands in a /proc tree of its own, in the cgroup of its pod's container.

Temperatures, clocks and idle states follow the same simple rules as the simulated dcgm-exporter page.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from gpulens.simulator.activity import Activity
from gpulens.simulator.layout import Device, DeviceKey, Owner, container_id
from gpulens.simulator.models import MODELS
from gpulens.simulator.nvml.build import build
from gpulens.simulator.nvml.profiles import GPM_RATIOS, PROFILES
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess, Figure, Ramp
from gpulens.simulator.truth import Truth

EVERY_S = 1.0
_SAMPLE_S = 0.167
_RING, _AHEAD = 100, 18
_MIB_S = 1024.0 * 1024.0
_TICKS_PER_S = 100
_PROC_FILES = {"cgroup", "stat", "comm"}
_MODEL_KEYS = {model.name: key for key, model in MODELS.items()}


class WorldState:
    """One world as NVML sees it. `scale` is simulated seconds per second, `every_s` real seconds between two writes.

    `folder` gets `state` and `proc`; `clock_s` pins the library's clock. Raises OSError where it can't be written.
    """

    def __init__(
        self,
        world: Truth,
        folder: Path,
        *,
        scale: float = 1.0,
        every_s: float = EVERY_S,
        clock_s: float | None = None,
    ) -> None:
        self.world = world
        self.proc = folder / "proc"
        self.fake = FakeNvml(folder, clock_s=clock_s, driver=world.spec.dcgm.driver)
        self._scale = scale
        self._every_s = every_s
        self._written_s: float | None = None
        self._pids = _pids(world)
        self._alive: set[int] = set()
        self._history: dict[str, deque[int]] = {}
        self._sampled: dict[str, int] = {}
        self._lost: set[str] = set()
        self.proc.mkdir(parents=True, exist_ok=True)
        self._clear_processes()
        with self.fake.batch():
            for device in world.devices():
                self._add(device)

    def _add(self, device: Device) -> None:
        profile = _MODEL_KEYS[device.model.name]
        self.fake.add_gpu(profile, uuid=device.uuid, minor=device.minor, pci=device.pci)
        if device.mig:
            self.fake.set_mig(
                device.uuid,
                [instance.profile.name for instance in device.mig],
                gis=[instance.gi for instance in device.mig],
                names=[instance.uuid for instance in device.mig],
            )
            for instance in device.mig:
                self.fake.set(instance.uuid, {"memory.total": instance.memory_bytes})

    def _clear_processes(self) -> None:
        """Takes away what an earlier run left, and nothing that it could not have made."""
        for folder in self.proc.iterdir():
            ours = folder.name.lstrip(".").isdigit() and folder.is_dir() and not folder.is_symlink()
            if ours and {entry.name for entry in folder.iterdir()} <= _PROC_FILES:
                shutil.rmtree(folder, ignore_errors=True)

    def write(self, t_s: float) -> None:
        """The state at this simulated moment. Moments only go forward; XIDs since the last one are reported."""
        before, self._written_s = self._written_s, t_s
        alive: dict[int, tuple[Owner, float]] = {}
        with self.fake.batch():
            for device in self.world.devices():
                self._follow_loss(device, t_s)
                self._show(device, t_s, alive)
                for at_s, code in device.xids:
                    if before is not None and before < at_s <= t_s:
                        self.fake.xid(device.uuid, code)
        self._show_processes(alive)

    def remove(self) -> None:
        """Takes away what was put into the folder, and the folders that are empty then."""
        for pid in self._alive:
            shutil.rmtree(self.proc / str(pid), ignore_errors=True)
        self._alive = set()
        with contextlib.suppress(OSError):  # an end in order matters more than a file
            self.fake.remove()
        for folder in (self.proc, self.fake.folder):
            with contextlib.suppress(OSError):  # something else is in it
                folder.rmdir()

    def _follow_loss(self, device: Device, t_s: float) -> None:
        lost = self.world.fault("gpu_lost", t_s, device.index) is not None
        if lost and device.uuid not in self._lost:
            self._lost.add(device.uuid)
            self.fake.lose(device.uuid)
        elif not lost and device.uuid in self._lost:
            self._lost.discard(device.uuid)
            self.fake.restore(device.uuid)

    def _show(self, device: Device, t_s: float, alive: dict[int, tuple[Owner, float]]) -> None:
        ahead_s = self._every_s * self._scale
        now = self.world.activity(device.uuid, t_s)
        past = self.world.mean_activity(device.uuid, max(self.world.loaded_s, t_s - 1.0), t_s)
        ahead = self.world.mean_activity(device.uuid, t_s, t_s + ahead_s)
        self.fake.set(device.uuid, _figures(device, now, past))
        if not device.mig:
            self.fake.set(device.uuid, {"samples.1": self._samples(device.uuid, t_s), "samples.ring": _RING})
        self._count(device, t_s, ahead)
        self._measure(device.uuid, device, ahead)
        for instance in device.mig:
            used = self.world.activity(instance.key, t_s).memory_bytes
            self.fake.set(instance.uuid, {"memory.used": used})
            self._measure(instance.uuid, device, self.world.mean_activity(instance.key, t_s, t_s + ahead_s))
        self.fake.processes(device.uuid, list(self._processes(device, t_s, alive)))

    def _count(self, device: Device, t_s: float, ahead: Activity) -> None:
        """Energy is led to where the world has it at the next write; bytes follow their mean rate."""
        now_s = self.fake.now_s()
        said = self.fake.get(device.uuid, "energy_mj")
        base = said.now(now_s) if isinstance(said, Ramp) else self.world.energy_j(device.uuid, t_s) * 1000
        due = self.world.energy_j(device.uuid, t_s + self._every_s * self._scale) * 1000
        rate = max(0.0, (due - base) / self._every_s)
        self.fake.set(device.uuid, {"energy_mj": Ramp(base, rate, now_s)})
        self.fake.count(
            device.uuid, {"field.197": ahead.pcie_tx * self._scale, "field.198": ahead.pcie_rx * self._scale}
        )

    def _measure(self, uuid: str, device: Device, ahead: Activity) -> None:
        measured = PROFILES[_MODEL_KEYS[device.model.name]].gpm
        percent: dict[int, float] = {number: 100 * getattr(ahead, name) for name, number in GPM_RATIOS.items()}
        if uuid == device.uuid:
            percent |= {20: ahead.pcie_tx / _MIB_S, 21: ahead.pcie_rx / _MIB_S}
        self.fake.gpm(uuid, {number: value for number, value in percent.items() if number in measured})

    def _samples(self, uuid: str, t_s: float) -> str:
        """The driver's ring of residency, with what will be until after the next write."""
        period_us = round(_SAMPLE_S * 1e6)
        newest = int(self.fake.now_s() * 1e6 if self.fake.pinned else time.time() * 1e6) // period_us
        last, size = newest + _AHEAD, _RING + 2 * _AHEAD
        history = self._history.setdefault(uuid, deque(maxlen=size))
        first = max(self._sampled.get(uuid, 0) + 1, last - size + 1)
        for tick in range(first, last + 1):
            at_s = t_s + (tick - newest) * _SAMPLE_S * self._scale
            start_s = max(self.world.loaded_s, at_s - _SAMPLE_S * self._scale)
            mean = self.world.mean_activity(uuid, start_s, max(start_s, at_s))
            history.append(round(100 * (mean.residency or 0.0)))
        self._sampled[uuid] = last
        # The library takes the sample of tick n from place n modulo the length of the list.
        ring = [0] * len(history)
        for back, value in enumerate(reversed(history)):
            ring[(last - back) % len(ring)] = value
        return ",".join(map(str, ring))

    def _processes(self, device: Device, t_s: float, alive: dict[int, tuple[Owner, float]]) -> Iterator[FakeProcess]:
        names: Mapping[DeviceKey, str] = {i.key: i.uuid for i in device.mig} or {device.uuid: ""}
        for key, instance in names.items():
            unit = self.world.unit_timeline(key)
            memory, residency = self.world.owner_memory(key, t_s), self.world.owner_residency(key, t_s)
            for span in unit.holders(t_s):
                if not span.load.context:
                    continue
                pid = self._pids[span.owner, key]
                alive[pid] = (span.owner, span.start_s)
                busy = round(100 * residency[span.owner]) if not device.mig else 0
                dram = round(100 * span.load.dram) if busy else 0
                yield FakeProcess(
                    pid,
                    memory[span.owner],
                    "mps" if device.sharing == "mps" else "compute",
                    instance,
                    sm=busy or None,
                    memory_utilization=dram,
                )

    def _show_processes(self, alive: Mapping[int, tuple[Owner, float]]) -> None:
        for pid in self._alive - alive.keys():
            shutil.rmtree(self.proc / str(pid), ignore_errors=True)
        for pid in alive.keys() - self._alive:
            owner, start_s = alive[pid]
            self._make_process(pid, owner, max(0.0, start_s - self.world.loaded_s))
        self._alive = set(alive)

    def _make_process(self, pid: int, owner: Owner, age_s: float) -> None:
        # Written beside and renamed, so that a reader finds the process whole or not at all.
        fresh = self.proc / f".{pid}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        pod = owner.uid.replace("-", "_")
        slices = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod}.slice"
        (fresh / "cgroup").write_text(f"0::{slices}/cri-containerd-{container_id(owner)}.scope\n")
        started = round(age_s * _TICKS_PER_S)
        (fresh / "stat").write_text(f"{pid} (python) S 1 {pid} {pid}{' 0' * 15} {started}{' 0' * 30}\n")
        (fresh / "comm").write_text("python\n")
        shutil.rmtree(self.proc / str(pid), ignore_errors=True)
        fresh.rename(self.proc / str(pid))


def _pids(world: Truth) -> dict[tuple[Owner, DeviceKey], int]:
    """A process for each container on each thing it ever holds: the same in every run of a world, none twice."""
    pids: dict[tuple[Owner, DeviceKey], int] = {}
    taken: set[int] = set()
    for hold in world.holds():
        place = (hold.owner, hold.unit.key)
        if place in pids:
            continue
        pid = 2000 + zlib.crc32(f"{hold.owner.uid}/{hold.owner.container}/{hold.unit.key}".encode()) % 4_000_000
        while pid in taken:
            pid += 1
        taken.add(pid)
        pids[place] = pid
    return pids


def _figures(device: Device, now: Activity, past: Activity) -> dict[str, Figure]:
    model, watts = device.model, now.power_w or 0.0
    heat = watts / model.limit_w
    busy = now.engine > 0 or watts > model.context_w * 1.2
    degrees, clock = round(27 + 46 * heat), model.sm_mhz if busy else model.idle_mhz
    figures: dict[str, Figure] = {
        "memory.used": now.memory_bytes,
        "power.usage_mw": round((past.power_w or 0.0) * 1000),
        "power.instant_mw": round(watts * 1000),
        "temperature.gpu": degrees,
        "clock.0": clock,
        "clock.1": clock,
        "clock.reasons": 0 if busy else 1,
    }
    profile = PROFILES[_MODEL_KEYS[model.name]]
    if "power.average_mw" in profile.figures:
        figures["power.average_mw"] = round((past.power_w or 0.0) * 1000)
    if "temperature.memory" in profile.figures:
        figures["temperature.memory"] = round(32 + 48 * heat)
    if "temperature.margin" in profile.figures:
        figures["temperature.margin"] = int(profile.figures["temperature.margin"]) - (degrees - 31)
    if past.residency is not None:
        figures["utilization.gpu"] = round(100 * past.residency)
        figures["utilization.memory"] = round(100 * past.dram)
    return figures


@contextlib.asynccontextmanager
async def follow_world(
    world: Truth, now: Callable[[], float], folder: Path, *, scale: float = 1.0, every_s: float = EVERY_S
) -> AsyncIterator[WorldState]:
    """The library, its state and its /proc in `folder`, kept up to date while the context lasts and gone after it.

    Raises BuildError where the library can't be built and OSError where the folder can't be written.
    """
    await asyncio.to_thread(build, folder)
    state = WorldState(world, folder, scale=scale, every_s=every_s)
    state.write(now())
    task = asyncio.create_task(_follow(state, now, every_s), name="gpulens-simulated-nvml")
    try:
        yield state
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        state.remove()


async def _follow(state: WorldState, now: Callable[[], float], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        # A full disk for a moment leaves the state as it was; the next write catches up.
        with contextlib.suppress(OSError):
            state.write(now())
