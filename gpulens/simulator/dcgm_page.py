"""The page of the simulated dcgm-exporter.

Invariant: values are those of the last refresh, labels are those of now. That is how the real one behaves,
and why for up to one refresh after a handover the old pod's load stands under the new pod's name.

Row format (from the exporter's render code): gpu, UUID, pci_bus_id, device, modelName, GPU_I_PROFILE and
GPU_I_ID, Hostname, label fields, then container, err_code, err_msg, namespace, pod, pod_uid, vgpu; values of
labels unescaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from gpulens.simulator.activity import Activity
from gpulens.simulator.dcgm_fields import FIELDS, UTILISATION_IDS, XID_TEXT, Field, Reading
from gpulens.simulator.layout import Device, DeviceKey, Hold, MigInstance, Owner
from gpulens.simulator.models import MIB
from gpulens.simulator.number_text import fixed, shortest
from gpulens.simulator.truth import Truth

Labels: TypeAlias = tuple[tuple[str, str], ...]
_JITTERED = ("engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16")


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of every family: a GPU or an instance, with the owner that it names, if any."""

    reading: Reading
    labels: Labels
    owner: Owner | None
    vgpu: str
    shared: bool


def refresh_time(truth: Truth, t_s: float) -> float:
    """The refresh whose values a page at this instant shows; they are due at multiples of the period."""
    fault = truth.fault("dcgm_frozen", t_s)
    if fault is not None:
        t_s = truth.start_s + fault.from_
    refresh = truth.spec.dcgm.refresh
    return truth.start_s + math.floor((t_s - truth.start_s) / refresh) * refresh


def render_dcgm(truth: Truth, t_s: float) -> str:
    """The text of /metrics at this instant."""
    rows = [row for device in truth.devices() for row in _rows(truth, device, t_s)]
    lines: list[str] = []
    for field in FIELDS:
        samples = list(_samples(truth, field, rows, t_s))
        if samples:
            name = _name(truth, field)
            lines.append(f"# HELP {name} {field.help}.")
            lines.append(f"# TYPE {name} {'counter' if field.counter else 'gauge'}")
            lines += [f"{name}{{{labels}}} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n" if lines else ""


def _rows(truth: Truth, device: Device, t_s: float) -> Iterator[_Row]:
    at = refresh_time(truth, t_s)
    if truth.fault("gpu_lost", t_s, device.index):
        return
    held = _holds_seen(truth, t_s)
    for key in device.held_as:
        instance = truth.instance(key)
        reading = _reading(truth, device, key, instance, at)
        labels = _labels(truth, device, instance)
        yield from _owned(truth, [h for h in held if h.unit.key == key], reading, labels, device)


def _owned(truth: Truth, holds: list[Hold], reading: Reading, labels: Labels, device: Device) -> Iterator[_Row]:
    plain = _Row(reading, labels, None, "", shared=False)
    if not truth.spec.dcgm.virtual_gpus or device.sharing == "whole":
        # A map from device to pod: the last pod read wins, the others vanish.
        yield replace(plain, owner=holds[-1].owner) if holds else plain
        return
    last_of_pod = {h.pod: h for h in holds}
    if truth.spec.dcgm.per_process or not holds:
        yield plain
    for hold in last_of_pod.values():
        yield replace(plain, owner=hold.owner, vgpu=str(hold.unit.replica), shared=True)


def _holds_seen(truth: Truth, t_s: float) -> tuple[Hold, ...]:
    """The allocations that the exporter's mapper can match; none when it can't ask the kubelet."""
    options = truth.spec.dcgm
    mapped = options.kubernetes or truth.fault("dcgm_mapped", t_s) is not None
    if not mapped or truth.fault("dcgm_unmapped", t_s) or not truth.kubelet_reachable(t_s):
        return ()
    plugin = truth.spec.kubelet.plugin
    by_name = options.ids == "device-name" or (options.ids == "auto" and plugin == "gke")
    if by_name != (plugin == "gke"):
        return ()
    return truth.held_at(t_s)


def _reading(truth: Truth, device: Device, key: DeviceKey, instance: MigInstance | None, at_s: float) -> Reading:
    since = at_s - truth.spec.dcgm.refresh
    usable = device.memory_bytes - device.model.reserved_mib * MIB
    return Reading(
        device=device,
        is_mig=instance is not None,
        unit=truth.activity(key, at_s),
        unit_mean=_jittered(truth, key, truth.mean_activity(key, since, at_s), at_s),
        board=truth.activity(device.uuid, at_s),
        board_mean=truth.mean_activity(device.uuid, since, at_s),
        memory_total=instance.memory_bytes if instance else usable,
        energy_j=truth.energy_j(device.uuid, at_s),
        xid=truth.last_xid(device, at_s),
    )


def _jittered(truth: Truth, key: DeviceKey, mean: Activity, at_s: float) -> Activity:
    """Steady loads waver by 1.5 % from one refresh to the next; zero stays zero."""
    tick = round(at_s - truth.start_s)
    changes = {}
    for field in _JITTERED:
        factor = 1.0 + 0.03 * (truth.noise(f"{key}/{field}", tick) - 0.5)
        changes[field] = min(1.0, getattr(mean, field) * factor)
    return replace(mean, **changes)


def _labels(truth: Truth, device: Device, instance: MigInstance | None) -> Labels:
    options = truth.spec.dcgm
    pairs = [("gpu", str(device.index)), ("UUID", device.uuid)]
    if options.naming != "1.x":
        pairs.append(("pci_bus_id", device.pci))
    pairs.append(("device", f"nvidia{device.minor}"))
    if options.naming != "1.x":
        pairs.append(("modelName", device.model.name))
    if instance is not None:
        pairs += [("GPU_I_PROFILE", instance.profile.name), ("GPU_I_ID", str(instance.gi))]
    if options.naming == "old":
        pairs += [("Hostname", truth.spec.node), ("DCGM_FI_DRIVER_VERSION", options.driver)]
    elif options.naming == "4.9":
        pairs += [("hostname", truth.spec.node), ("DCGM_FI_SYSTEM_DRIVER_VERSION", options.driver)]
    return tuple(pairs)


def _name(truth: Truth, field: Field) -> str | None:
    return {"old": field.old, "4.9": field.new, "1.x": field.legacy}[truth.spec.dcgm.naming]


def _samples(truth: Truth, field: Field, rows: Iterable[_Row], t_s: float) -> Iterator[tuple[str, str]]:
    if _name(truth, field) is None or not _enabled(truth, field, t_s):
        return
    for row in rows:
        value = _value(truth, field, row, t_s)
        if value is not None:
            yield _label_text(truth, field, row, value), _text(truth, field, value)


def _enabled(truth: Truth, field: Field, t_s: float) -> bool:
    profiling = truth.spec.dcgm.profiling
    if field.honest and profiling != "full":
        return False
    return not field.profiling or (profiling != "off" and truth.fault("dcgm_no_profiling", t_s) is None)


def _value(truth: Truth, field: Field, row: _Row, t_s: float) -> float | None:
    device = row.reading.device
    if field.profiling and field.profiling not in device.model.profiling:
        return None
    if field.blank is not None and truth.fault("dcgm_blanks", t_s, device.index):
        return field.blank
    if field.profiling and truth.fault("dcgm_profiling_zero", t_s, device.index):
        return 0
    value = field.value(row.reading)
    if row.shared and truth.spec.dcgm.per_process and field.id in UTILISATION_IDS:
        value = _own_part(truth, field, row, refresh_time(truth, t_s))
    if value is None and truth.spec.dcgm.naming == "1.x" and not row.reading.is_mig:
        value = field.blank
    if value is None and field.id == 230 and truth.spec.dcgm.naming != "4.9":
        value = 0
    return value


def _own_part(truth: Truth, field: Field, row: _Row, at_s: float) -> float | None:
    """What this pod's processes use of a shared device; no process yet at that refresh: nothing to show."""
    key: DeviceKey = row.reading.device.uuid
    gi = dict(row.labels).get("GPU_I_ID")
    if gi is not None:
        key = (row.reading.device.uuid, int(gi))
    if row.owner is None:
        return None
    if field.id == 203:
        part = truth.owner_residency(key, at_s).get(row.owner)
        return None if part is None or row.reading.is_mig else round(100 * part)
    memory = truth.owner_memory(key, at_s).get(row.owner)
    return None if memory is None else memory // MIB


def _text(truth: Truth, field: Field, value: float) -> str:
    if truth.spec.dcgm.naming == "4.9":
        is_blank = field.blank is not None and value == field.blank
        return shortest(float(value if is_blank else round(value * field.scale, 9)))
    return str(int(value)) if field.integer else fixed(float(value))


def _label_text(truth: Truth, field: Field, row: _Row, value: float) -> str:
    pairs = [*row.labels, *_attributes(truth, field, row, value)]
    pairs = _as_viewed(truth, pairs)
    separator = ", " if truth.spec.dcgm.naming == "1.x" else ","
    return separator.join(f'{key}="{text}"' for key, text in pairs)


def _attributes(truth: Truth, field: Field, row: _Row, value: float) -> list[tuple[str, str]]:
    options = truth.spec.dcgm
    attributes: dict[str, str] = {}
    if row.owner is not None:
        attributes |= {
            "container": row.owner.container,
            "namespace": row.owner.namespace,
            "pod": row.owner.pod,
        }
        if options.pod_uid:
            attributes["pod_uid"] = row.owner.uid
        if row.vgpu:
            attributes["vgpu"] = row.vgpu
    elif options.naming == "1.x":
        attributes |= {"container": "", "namespace": "", "pod": ""}
    if field.id == 230 and value and options.naming != "1.x":
        attributes |= {"err_code": str(int(value)), "err_msg": XID_TEXT.get(int(value), "")}
    return sorted(attributes.items())


def _as_viewed(truth: Truth, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The labels after a Prometheus has added those of its target (the exporter's own pod)."""
    options = truth.spec.dcgm
    if options.view == "direct":
        return pairs
    target = {"container": "exporter", "namespace": options.namespace, "pod": options.pod}
    own = {k: v for k, v in pairs if k in target and v}
    rest = [(k, v) for k, v in pairs if k not in target]
    kept = own if options.view == "honor_labels" else {f"exported_{k}": v for k, v in own.items()}
    seen = target | kept | {"instance": "10.0.0.7:9400", "job": "dcgm-exporter", "service": "dcgm-exporter"}
    return rest + sorted(seen.items())
