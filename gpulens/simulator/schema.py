"""What a world file may say.

Invariant: a spec that validates describes a world that can exist: MIG layouts fit, minors and names are
unique, durations are positive where they must be. Times are seconds from the world's start; negative ones lie
before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gpulens.simulator.loads import PROFILES, Load, adjusted
from gpulens.simulator.models import MODELS

_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

FaultKind = Literal[
    "kubelet_gone",  # no socket at all
    "kubelet_restart",  # gone for two seconds unless `to` says otherwise
    "kubelet_rate_limited",  # RESOURCE_EXHAUSTED: rejected by rate limit
    "kubelet_large",  # a reply of 5 MiB
    "kubelet_lists_finished",  # as before 1.34: finished pods keep their devices in List
    "kubelet_v1alpha1_only",  # v1 answers UNIMPLEMENTED
    "kubelet_unknown_fields",  # fields of a later version
    "kubelet_hung",  # takes the call and never answers
    "dcgm_down",
    "dcgm_hung",
    "dcgm_slow",  # answers after `delay`
    "dcgm_error",  # HTTP 500
    "dcgm_frozen",  # values of the last refresh before the fault
    "dcgm_unmapped",  # Kubernetes mapping off
    "dcgm_mapped",  # Kubernetes mapping on, where the world has it off
    "dcgm_no_profiling",  # PROF fields dropped
    "dcgm_profiling_zero",  # PROF fields falsely 0
    "dcgm_blanks",  # sentinels printed as values
    "gke_down",
    "gke_hung",
    "gke_slow",
    "gke_error",
    "gke_frozen",
    "gpu_lost",  # the GPU falls off the bus: its rows vanish
]
MIG_NAME = r"^\d+g\.\d+gb$"


def parse_duration(value: object) -> object:
    """Seconds from text such as 90s, 1h30m or -5m; numbers pass (they come from code, never from a file).

    Raises ValueError for text without a unit.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    sign = -1.0 if text.startswith("-") else 1.0
    body = text.lstrip("+-")
    if body == "0":
        return 0.0
    pieces = _PIECE.findall(body)
    if not pieces or "".join(number + unit for number, unit in pieces) != body:
        raise ValueError(f"{value!r} is no duration: write a number with its unit, as in 90s, 5m or 1h30m")
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in pieces)


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("must be longer than 0s")
    return value


def _known(kind: str, names: Iterable[str]) -> AfterValidator:
    known = tuple(names)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"unknown {kind} {value!r}; known: {', '.join(known)}")
        return value

    return AfterValidator(check)


def _mig_from_text(value: object) -> object:
    return {"profile": value} if isinstance(value, str) else value


def _start_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


Seconds = Annotated[float, BeforeValidator(parse_duration)]
Span = Annotated[float, BeforeValidator(parse_duration), AfterValidator(_positive)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class MigSpec(_Strict):
    """One GPU instance; `gi` is numbered as the driver would where it is not given."""

    profile: Annotated[str, Field(pattern=MIG_NAME)]
    gi: int | None = Field(default=None, ge=0, le=14)


class XidSpec(_Strict):
    """An XID that the GPU reports at a moment."""

    at: Seconds
    code: int = Field(ge=1, le=200)


class GpuSpec(_Strict):
    """One GPU. `minor` is N of /dev/nvidiaN; the position in the list is DCGM's `gpu=`, another number."""

    model: Annotated[str, _known("model", MODELS)]
    minor: int | None = Field(default=None, ge=0, le=63)
    uuid: Annotated[str, Field(pattern=r"^GPU-[0-9a-f-]{36}$")] | None = None
    pci: Annotated[str, Field(pattern=r"^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d$")] | None = None
    numa: int = Field(default=0, ge=0, le=7)
    mig: list[Annotated[MigSpec, BeforeValidator(_mig_from_text)]] = []
    sharing: Literal["whole", "time_slicing", "mps"] = "whole"
    replicas: int = Field(default=1, ge=1, le=64)
    xids: list[XidSpec] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        model = MODELS[self.model]
        for instance in self.mig:
            if instance.profile not in model.mig:
                known = ", ".join(model.mig) or "none, it has no MIG"
                raise ValueError(f"{self.model} has no MIG profile {instance.profile}; known: {known}")
        profiles = [model.mig[i.profile] for i in self.mig]
        if sum(p.compute for p in profiles) > 7 or sum(p.memory for p in profiles) > 8:
            raise ValueError("the MIG instances take more than the GPU has (7 compute and 8 memory slices)")
        given = [i.gi for i in self.mig if i.gi is not None]
        if len(set(given)) != len(given):
            raise ValueError("two MIG instances have the same gi")
        if self.sharing == "whole" and self.replicas != 1:
            raise ValueError("replicas need sharing: time_slicing or mps")
        if self.sharing != "whole" and self.replicas < 2:
            raise ValueError(f"sharing: {self.sharing} needs replicas: 2 or more")
        if self.sharing == "mps" and self.mig:
            raise ValueError("MPS does not share MIG instances; use time_slicing or no mig")
        return self


class PhaseSpec(_Strict):
    """What a pod does for a while (the last phase: until it ends); figures replace those of the profile."""

    profile: Annotated[str, _known("profile", PROFILES)]
    for_: Span | None = Field(default=None, alias="for")
    residency: Ratio | None = None
    engine: Ratio | None = None
    sm: Ratio | None = None
    occupancy: Ratio | None = None
    tensor: Ratio | None = None
    dram: Ratio | None = None
    power: Ratio | None = None
    memory_mib: float | None = Field(default=None, ge=0)
    memory_share: Ratio | None = None
    growth_mib_per_h: float | None = None

    def load(self) -> Load:
        """The profile with this phase's changes."""
        changes = self.model_dump(exclude={"profile", "for_"}, exclude_none=True)
        return adjusted(PROFILES[self.profile], changes)


class PodSpec(_Strict):
    """A pod on this node. `devices` names units (`0`, `3/gi2`, `4::1`); `request` takes free ones.

    `of` narrows a request to a model (L4) or a MIG profile. A finished pod stays in the API for `linger`.
    """

    name: str = Field(min_length=1)
    namespace: str = "default"
    container: str = "main"
    sidecars: list[str] = []
    uid: str | None = None
    start: Seconds = 0.0
    end: Seconds | None = None
    linger: Seconds = 600.0
    devices: list[Annotated[str, Field(pattern=r"^\d+(/gi\d+)?(::\d+)?$")]] = []
    request: int = Field(default=0, ge=0)
    of: str | None = None
    phases: list[PhaseSpec] = [PhaseSpec(profile="parked")]
    repeat: bool = False

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if self.end is not None and self.end <= self.start:
            raise ValueError("a pod ends after its start")
        if self.devices and self.request:
            raise ValueError("give devices or request, not both")
        if not self.phases:
            raise ValueError("a pod needs at least one phase")
        open_ended = [p.for_ is None for p in self.phases]
        if any(open_ended[:-1]) or (self.repeat and open_ended[-1]):
            raise ValueError("only the last phase may lack `for`, and with repeat none may")
        return self


class DcgmSpec(_Strict):
    """The exporter. `view` shows its page as a Prometheus would hold it, with or without honorLabels."""

    naming: Literal["old", "4.9", "1.x"] = "old"
    kubernetes: bool = True
    ids: Literal["uid", "device-name", "auto"] = "auto"
    virtual_gpus: bool = False
    per_process: bool = False
    pod_uid: bool = False
    profiling: Literal["full", "default", "off"] = "full"
    view: Literal["direct", "honor_labels", "no_honor_labels"] = "direct"
    refresh: Span = 30.0
    driver: str = "580.105.08"
    pod: str = "dcgm-exporter-x7k2p"
    namespace: str = "gpu-monitoring"


class GkeSpec(_Strict):
    """GKE's collector. `auto` refuses under MIG and off GKE as the real one; `always` serves what it can."""

    serve: Literal["auto", "always"] = "auto"
    refresh: Span = 30.0


class KubeletSpec(_Strict):
    """The kubelet and the device plugin that names the devices."""

    plugin: Literal["nvidia", "gke"] = "nvidia"
    mig_strategy: Literal["mixed", "single"] = "mixed"
    mig_ids: Literal["uuid", "legacy"] = "uuid"
    rename_shared: bool = False


class FaultSpec(_Strict):
    """Something goes wrong in [from, to), or for good; `gpus` narrows it to GPUs by position."""

    kind: FaultKind
    from_: Seconds = Field(default=0.0, alias="from")
    to: Seconds | None = None
    delay: Span = 5.0
    gpus: list[int] = []

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.to is not None and self.to <= self.from_:
            raise ValueError("a fault ends after it begins")
        return self

    @property
    def until(self) -> float:
        """Where it ends, in seconds from the world's start; infinite where nothing ends it."""
        if self.to is not None:
            return self.to
        return self.from_ + 2.0 if self.kind == "kubelet_restart" else float("inf")


class WorldSpec(_Strict):
    """A whole world: one node. `uptime` is how long the driver has been loaded at the start."""

    node: str = "gpu-node-1"
    seed: int = 1
    start: Annotated[float, BeforeValidator(_start_from_text)] = 1_767_225_600.0
    uptime: Span = 86400.0
    horizon: Span = 86400.0
    dcgm: DcgmSpec = DcgmSpec()
    gke: GkeSpec = GkeSpec()
    kubelet: KubeletSpec = KubeletSpec()
    gpus: list[GpuSpec] = Field(min_length=1, max_length=32)
    pods: list[PodSpec] = []
    faults: list[FaultSpec] = []

    @model_validator(mode="after")
    def _unique(self) -> Self:
        minors = Counter(i if g.minor is None else g.minor for i, g in enumerate(self.gpus))
        if twice := [str(m) for m, n in minors.items() if n > 1]:
            raise ValueError(f"two GPUs have the minor {', '.join(twice)}")
        uuids = Counter(g.uuid for g in self.gpus if g.uuid)
        if twice := [u for u, n in uuids.items() if n > 1]:
            raise ValueError(f"two GPUs have the UUID {', '.join(twice)}")
        last: dict[tuple[str, str], float] = {}
        for pod in sorted(self.pods, key=lambda p: p.start):
            if pod.start < last.get((pod.namespace, pod.name), -float("inf")):
                raise ValueError(f"two pods are called {pod.namespace}/{pod.name} at one time")
            last[pod.namespace, pod.name] = float("inf") if pod.end is None else pod.end
            if pod.start < -self.uptime:
                raise ValueError(f"pod {pod.namespace}/{pod.name} starts before the driver was loaded (uptime)")
        for fault in self.faults:
            if any(i >= len(self.gpus) or i < 0 for i in fault.gpus):
                raise ValueError(f"fault {fault.kind} names a GPU that is not there")
        return self
