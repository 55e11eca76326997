"""The page of GKE's nvidia-metrics-collector: seven families, refreshed every 30 s.

Invariant: a pure function of time that keeps the real one's habits (read from its source): nothing for the
first period, gauges cleared only every third tick so that an ended pod stays up to 90 s, a tick skipped whole
(and the old page served unchanged) when the kubelet does not answer, ids with /vgpu dropped so that a sharing
container shows `request` 0 and nothing else, and no server at all on a MIG node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from gpulens.simulator.layout import Device, Hold
from gpulens.simulator.models import MIB
from gpulens.simulator.number_text import shortest
from gpulens.simulator.truth import Truth

Labels: TypeAlias = tuple[tuple[str, str], ...]
Family: TypeAlias = dict[Labels, float]

_HELP: Mapping[str, str] = {
    "duty_cycle": "Percent of time when the GPU was actively processing",
    "duty_cycle_gpu_node": "Percent of time when the GPU was actively processing",
    "memory_total": "Total memory available on the GPU in bytes",
    "memory_total_gpu_node": "Total memory available on the GPU in bytes",
    "memory_used": "Allocated GPU memory in bytes",
    "memory_used_gpu_node": "Allocated GPU memory in bytes",
    "request": "Number of accelerator devices requested by the container",
}
_TICKS_PER_RESET = 3
_DUTY_WINDOW_S = 10.0


def gke_refuses(truth: Truth) -> bool:
    """Whether the node has no such server: under MIG it is never started, and off GKE there is none."""
    if truth.spec.gke.serve == "always":
        return False
    return truth.spec.kubelet.plugin != "gke" or any(d.mig for d in truth.devices())


def render_gke(truth: Truth, t_s: float) -> str:
    """The text of /metrics at this instant; empty while there is nothing to show."""
    tick = _last_tick(truth, t_s)
    if tick is None or gke_refuses(truth):
        return ""
    families: dict[str, Family] = {name: {} for name in _HELP}
    for earlier in _ticks_since_reset(truth, tick):
        _observe(truth, _time_of(truth, earlier), families)
    lines: list[str] = []
    for name, samples in families.items():
        if samples:
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_label_text(labels)}}} {shortest(v)}" for labels, v in sorted(samples.items())]
    return "\n".join(lines) + "\n" if lines else ""


def _time_of(truth: Truth, tick: int) -> float:
    return truth.start_s + tick * truth.spec.gke.refresh


def _last_tick(truth: Truth, t_s: float) -> int | None:
    """The last tick that was carried through; None before the first."""
    frozen = truth.fault("gke_frozen", t_s)
    if frozen is not None:
        t_s = truth.start_s + frozen.from_
    tick = math.floor((t_s - truth.start_s) / truth.spec.gke.refresh)
    while tick >= 1 and not _carried_through(truth, tick):
        tick -= 1
    return tick if tick >= 1 else None


def _carried_through(truth: Truth, tick: int) -> bool:
    at = _time_of(truth, tick)
    return truth.kubelet_reachable(at) and not truth.fault("kubelet_rate_limited", at)


def _ticks_since_reset(truth: Truth, tick: int) -> list[int]:
    first = (tick - 1) // _TICKS_PER_RESET * _TICKS_PER_RESET + 1
    return [t for t in range(first, tick + 1) if _carried_through(truth, t)]


def _observe(truth: Truth, at_s: float, families: dict[str, Family]) -> None:
    """One tick: what is read then replaces what stands there."""
    figures = {device.uuid: _figures(truth, device, at_s) for device in truth.devices() if not device.mig}
    by_container: dict[tuple[str, str, str], list[Hold]] = {}
    for hold in truth.held_at(at_s):
        owner = hold.owner
        by_container.setdefault((owner.namespace, owner.pod, owner.container), []).append(hold)
    for (namespace, pod, container), holds in by_container.items():
        owner_labels: Labels = (("container", container), ("namespace", namespace), ("pod", pod))
        whole = [h for h in holds if h.unit.replica is None and h.unit.key in figures]
        request: Labels = tuple(sorted((*owner_labels, ("resource_name", "nvidia.com/gpu"))))
        families["request"][request] = len(whole)
        for device in (d for d in truth.devices() if d.uuid in {h.unit.key for h in whole}):
            _put(families, "", tuple(sorted((*owner_labels, *_device_labels(device)))), figures[device.uuid])
    for device in truth.devices():
        if device.uuid in figures:
            _put(families, "_gpu_node", _device_labels(device), figures[device.uuid])


def _put(families: dict[str, Family], suffix: str, labels: Labels, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        families[name + suffix][labels] = value


def _device_labels(device: Device) -> Labels:
    return (("accelerator_id", device.uuid), ("make", "nvidia"), ("model", device.model.name))


def _figures(truth: Truth, device: Device, at_s: float) -> dict[str, float]:
    """Duty: the last ten seconds' mean, cut to a whole percent. Memory: the driver's share counts as used."""
    duty = truth.mean_activity(device.uuid, at_s - _DUTY_WINDOW_S, at_s).residency or 0.0
    used = truth.activity(device.uuid, at_s).memory_bytes + device.model.reserved_mib * MIB
    return {
        "duty_cycle": float(math.floor(100 * duty + 1e-9)),
        "memory_total": float(device.memory_bytes),
        "memory_used": float(used),
    }


def _label_text(labels: Labels) -> str:
    return ",".join(f'{key}="{value}"' for key, value in labels)
