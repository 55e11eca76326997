"""Worlds in which pods come and go all the time, to try attribution on.

Invariant: reproducible from the seed. About half of all handovers are back to back: the next pod has the
device from the very instant at which the last one lost it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from typing import Literal

from gpulens.simulator.layout import build_devices, build_units
from gpulens.simulator.loads import PROFILES
from gpulens.simulator.schema import (
    DcgmSpec,
    FaultSpec,
    GpuSpec,
    KubeletSpec,
    MigSpec,
    PhaseSpec,
    PodSpec,
    WorldSpec,
)
from gpulens.simulator.world import World

ChurnMode = Literal["whole", "mig", "time_slicing", "gke", "gke_shared", "gke_mig"]

_MIG_LAYOUT = ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb")
_MODELS: Mapping[ChurnMode, str] = {
    "whole": "H100",
    "mig": "A100",
    "time_slicing": "L4",
    "gke": "L4",
    "gke_shared": "T4",
    "gke_mig": "A100",
}
_NAMESPACES = ("research", "serving", "batch", "vision")
_WORK = (
    "training",
    "spin",
    "decode",
    "data_loading",
    "parked",
    "inference_bursty",
    "embedding_tiny",
    "empty",
)


def churn_world(
    pods: int = 500,
    gpus: int = 8,
    mode: ChurnMode = "whole",
    seed: int = 1,
    duration_s: float | None = None,
    pod_life_s: float = 600.0,
    kubelet_restarts: int = 4,
    restart_s: float = 20.0,
    lists_finished: bool = False,
    recreated: float = 0.0,
) -> World:
    """A node with `gpus` GPUs on which `pods` pods live for about `pod_life_s` seconds each.

    Lives are spread evenly between a third and five thirds of the mean. With `duration_s` pods that would
    start after it are left out. Kubelet restarts (the socket gone for `restart_s`) are spread over the
    duration, or over the time that all pods take. In `whole` mode one pod in ten takes two GPUs. Minors run
    against the index, so that a join by index fails. `recreated` is the share of pods that come back under
    the very name that they replace on a device, as a StatefulSet's do: Pod Resources alone can't tell the two
    apart.
    """
    rng = random.Random(f"{seed}/{mode}/{pods}")
    draft = WorldSpec(
        seed=seed,
        gpus=[_gpu(mode, index, gpus) for index in range(gpus)],
        kubelet=KubeletSpec(plugin="gke" if mode.startswith("gke") else "nvidia"),
        dcgm=DcgmSpec(virtual_gpus=mode in ("time_slicing", "gke_shared")),
    )
    references = [unit.reference for unit in build_units(draft, build_devices(draft))]
    schedule = _Schedule(rng, references, pod_life_s, pairs=mode == "whole", recreated=recreated)
    placed = [schedule.next_pod(number) for number in range(pods)]
    if duration_s is not None:
        placed = [pod for pod in placed if pod.start < duration_s]
    length = duration_s if duration_s is not None else max((pod.end or 0.0 for pod in placed), default=0.0)
    step = length / (kubelet_restarts + 1)
    faults = [
        FaultSpec(kind="kubelet_gone", from_=step * (i + 1), to=step * (i + 1) + restart_s)
        for i in range(kubelet_restarts)
        if length > 0
    ]
    if lists_finished:
        faults.append(FaultSpec(kind="kubelet_lists_finished"))
    return World(draft.model_copy(update={"pods": placed, "faults": faults, "horizon": max(length, 1.0)}))


def _gpu(mode: ChurnMode, index: int, count: int) -> GpuSpec:
    mig = [MigSpec(profile=profile) for profile in _MIG_LAYOUT] if mode in ("mig", "gke_mig") else []
    shared = mode in ("time_slicing", "gke_shared")
    return GpuSpec(
        model=_MODELS[mode],
        minor=count - 1 - index,
        numa=index * 2 // count,
        mig=mig,
        sharing="time_slicing" if shared else "whole",
        replicas=4 if shared else 1,
    )


class _Schedule:
    """Gives each new pod the device that comes free first."""

    def __init__(
        self, rng: random.Random, references: list[str], life_s: float, *, pairs: bool, recreated: float
    ) -> None:
        self._rng = rng
        self._life_s = life_s
        self._recreated = recreated
        self._pairs = pairs and len(references) > 1
        # Not everything is taken at the start: the first pods trickle in.
        self._free = [(rng.uniform(0.0, life_s / 2), reference) for reference in references]
        heapq.heapify(self._free)
        self._last_name: dict[str, tuple[str, str]] = {}

    def next_pod(self, number: int) -> PodSpec:
        rng = self._rng
        count = 2 if self._pairs and rng.random() < 0.1 else 1
        taken = [heapq.heappop(self._free) for _ in range(count)]
        start = max(free_at for free_at, _ in taken)
        if rng.random() < 0.5:
            start += rng.uniform(1.0, self._life_s * 0.3)
        start = round(start, 3)
        end = round(start + self._life_s * rng.uniform(1 / 3, 5 / 3), 3)
        for _, reference in taken:
            heapq.heappush(self._free, (end, reference))
        references = [reference for _, reference in taken]
        namespace, name = self._name(number, references)
        return PodSpec(
            name=name,
            namespace=namespace,
            container=rng.choice(("main", "trainer", "server")),
            start=start,
            end=end,
            devices=references,
            phases=self._phases(end - start),
        )

    def _name(self, number: int, references: list[str]) -> tuple[str, str]:
        fresh = (self._rng.choice(_NAMESPACES), f"pod-{number:04d}")
        again = self._rng.random() < self._recreated
        chosen = self._last_name.get(references[0], fresh) if again else fresh
        # A name lives on one device only: what else remembers it must not bring it back a second time.
        self._last_name = {r: name for r, name in self._last_name.items() if name != chosen}
        self._last_name[references[0]] = chosen
        return chosen

    def _phases(self, life_s: float) -> list[PhaseSpec]:
        first, then = self._rng.choice(_WORK), self._rng.choice(tuple(PROFILES))
        return [PhaseSpec(profile=first, for_=round(life_s * 0.6, 3)), PhaseSpec(profile=then)]
