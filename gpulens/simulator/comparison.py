"""The demo's table: each device as a default dcgm-exporter and GKE's collector tell it, and as gpulens does.

Invariant: the left columns are read from pages that the simulated node really serves, the right ones from what came
out of the pipeline; nothing is taken from the world's script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpulens.config.types import ComponentConfig
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Exporter, ExporterFactory, Host, Settings, Stability
from gpulens.pipeline.data import Batch, Resource, Series, Value
from gpulens.pipeline.exposition import PageParser

MIB = 1048576


Row = tuple[str, str, str, str, str, str, str]


@dataclass(slots=True)
class Ledger:
    """Keeps the newest batch of each stream; the demo's exporter."""

    batches: dict[str, Batch] = field(default_factory=dict)

    async def start(self, host: Host) -> None:
        """Nothing to start."""

    async def shutdown(self) -> None:
        """Nothing to stop."""

    def consume(self, data: Batch, ack: Ack) -> None:
        """Keeps the batch in place of the stream's last one."""
        if data.complete:
            self.batches[data.stream] = data

    def readings(self) -> Iterable[tuple[Resource, str, Series, Value]]:
        """(resource, scope, series, value) of everything that is known now."""
        for batch in self.batches.values():
            for (resource, scope, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
                if value is not None:
                    yield resource, scope.name, series, value

    def factory(self) -> ExporterFactory[ComponentConfig]:
        """The exporter under the name `demo_table`, always this one."""

        def create(_settings: Settings, _config: ComponentConfig) -> Exporter[Batch]:
            return self

        return ExporterFactory("demo_table", ComponentConfig, Stability.DEVELOPMENT, metrics=create)


@dataclass(slots=True)
class Device:
    """What is told of one GPU or MIG instance."""

    hw_id: str
    parent: str = ""
    model: str = ""
    profile: str = ""
    name: str = ""
    owners: set[tuple[str, str]] = field(default_factory=set)
    reason: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    parts: dict[tuple[str, str], dict[str, Value]] = field(default_factory=dict)
    """What each owner's processes have of it, by metric."""


_SHOWN = {
    "hw.gpu.utilization": "general",
    "gpu.sm.active": "",
    "hw.gpu.memory.usage": "",
}


def devices(ledger: Ledger) -> list[Device]:
    """Every device that came out of the pipeline, GPUs by name and their instances after them."""
    found: dict[str, Device] = {}
    for resource, scope, series, value in ledger.readings():
        hw_id = series.text("hw.id")
        if not hw_id:
            continue
        device = found.setdefault(hw_id, Device(hw_id))
        device.parent = series.text("hw.parent") or device.parent
        device.model = series.text("hw.model") or device.model
        device.profile = series.text("gpu.mig.profile") or device.profile
        device.name = series.text("hw.name") or device.name
        name = series.metric.name
        if name == "gpu.allocated" and value == 1:
            device.owners.add((resource.text("k8s.namespace.name"), resource.text("k8s.pod.name")))
        elif name == "gpu.attribution":
            device.reason = series.text("gpu.attribution.reason")
        elif name in ("gpu.process.memory.usage", "gpu.process.utilization"):
            owner = (resource.text("k8s.namespace.name"), resource.text("k8s.pod.name"))
            part = device.parts.setdefault(owner, {})
            part[name] = part.get(name, 0) + value
        elif name in _SHOWN and scope == "gpulens/dcgm" and series.text("hw.gpu.task") in ("", _SHOWN[name]):
            device.values[name] = value
    in_mig = {device.parent for device in found.values() if device.parent}
    shown = [device for device in found.values() if device.values and device.hw_id not in in_mig]
    return sorted(shown, key=lambda device: (device.name, device.profile, device.hw_id))


def _samples(page: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    parsed = PageParser().parse(page.encode())
    for key, value in zip(parsed.layout.samples, parsed.values, strict=True):
        yield key.name, dict(key.labels), value


def exporter_view(page: str) -> dict[tuple[str, str], str]:
    """(GPU UUID, GPU instance id or "") -> the pod on its series, as Prometheus holds a default dcgm-exporter's."""
    return {
        (labels.get("UUID", ""), labels.get("GPU_I_ID", "")): labels.get("pod", "(no pod)")
        for name, labels, _ in _samples(page)
        if name.startswith("DCGM_FI_")
    }


def gke_view(page: str) -> dict[str, str]:
    """GPU UUID -> what GKE's collector says: pod and duty cycle."""
    found: dict[str, str] = {}
    for name, labels, value in _samples(page):
        uuid = labels.get("accelerator_id", "")
        if name == "duty_cycle":
            found[uuid] = f"{labels['pod']} {value:3.0f} %"
        elif name == "duty_cycle_gpu_node":
            found.setdefault(uuid, f"(no pod) {value:3.0f} %")
    return found


def _short(model: str) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `A100`."""
    return model.removeprefix("NVIDIA ").removeprefix("Tesla ").replace("-", " ").partition(" ")[0]


def _ratio(value: Value | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _owner(device: Device) -> str:
    if not device.owners:
        return f"({device.reason or 'unknown'})"
    # The namespace once where all owners share it: a table fits a terminal.
    namespaces = {namespace for namespace, _ in device.owners}
    pods = [pod if len(namespaces) == 1 else f"{namespace}/{pod}" for namespace, pod in sorted(device.owners)]
    return (f"{next(iter(namespaces))}/" if len(namespaces) == 1 else "") + ", ".join(pods)


def table(ledger: Ledger, exporter_page: str, gke_page: str, names: Mapping[str, tuple[str, str]]) -> str:
    """The comparison as text. `names` maps a device's id to (GPU UUID, GPU instance id or "")."""
    by_exporter, by_gke = exporter_view(exporter_page), gke_view(gke_page)
    rows = [("GPU", "dcgm-exporter", "GKE's collector", "gpulens: the owner", "resident", "SM active", "memory")]
    for device in devices(ledger):
        uuid, instance = names.get(device.hw_id, (device.hw_id, ""))
        memory = device.values.get("hw.gpu.memory.usage")
        rows.append(
            (
                f"{device.name.removeprefix('nvidia')} {_short(device.model)} {device.profile}".strip(),
                by_exporter.get((uuid, instance), "-"),
                by_gke.get(uuid, "-") if not instance else "-",
                _owner(device),
                _ratio(device.values.get("hw.gpu.utilization")),
                _ratio(device.values.get("gpu.sm.active")),
                _size(memory),
            )
        )
        if len(device.owners) > 1:
            rows += (_part(device, owner) for owner in sorted(device.owners & device.parts.keys()))
    return _aligned(rows)


def _part(device: Device, owner: tuple[str, str]) -> Row:
    """The line of one of several owners: what its processes have of the device."""
    part = device.parts[owner]
    residency, memory = part.get("gpu.process.utilization"), part.get("gpu.process.memory.usage")
    return ("", "", "", f"\u2514 {owner[1]}", _ratio(residency), "-", _size(memory))


def _size(memory: Value | None) -> str:
    return "-" if memory is None else f"{memory / MIB:.0f} MiB"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = 4
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
