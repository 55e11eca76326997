"""What the labels of a dcgm-exporter row say: which device it is about, and who holds it.

Invariant: a pod counts as an owner only when nothing suggests that it is the exporter itself; in doubt
there is no owner. A device is what a row names by UUID, never by its index on some node. An empty label is an
absent one; label keys are compared without regard to case, and of equal ones the exporter's own, which stands
first, counts.

Sources: label names of all exporter generations and the label clash of Prometheus' honor_labels, both ways,
as dcgm-exporter's issues 27, 340, 363 and 411 and a GPU Operator page show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulens.pipeline.exposition_line import SampleKey

RowLabels = Mapping[str, str]

_EXPORTER: Final = "dcgm-exporter"
_OLD_VERSION_LABEL: Final = "dcgm_fi_driver_version"
_NEW_VERSION_LABEL: Final = "dcgm_fi_system_driver_version"


@dataclass(frozen=True, slots=True, order=True)
class Entity:
    """A physical GPU, or a MIG instance of it (`gi` is the GPU instance's id, empty for the GPU itself)."""

    gpu: str
    gi: str = ""

    @property
    def hw_id(self) -> str:
        """The GPU's UUID; `<parent>/gi<N>` for an instance, whose own UUID no row names."""
        return f"{self.gpu}/gi{self.gi}" if self.gi else self.gpu

    @property
    def parent(self) -> Entity:
        """The physical GPU."""
        return Entity(self.gpu)


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A container that a row names as the holder. `uid` is empty where the exporter does not know it."""

    namespace: str
    pod: str
    container: str = ""
    uid: str = ""


@dataclass(slots=True)
class Facts:
    """What the rows of one entity say about it; the first row that says something counts."""

    name: str = ""
    model: str = ""
    profile: str = ""
    pci: str = ""
    driver: str = ""
    serial: str = ""
    index: str = ""
    minor: str = ""

    def learn(self, labels: RowLabels) -> None:
        """Takes up what one row adds."""
        device = labels.get("device", "")
        self.name = self.name or device
        self.model = self.model or labels.get("modelname", "") or labels.get("model_name", "")
        self.profile = self.profile or labels.get("gpu_i_profile", "")
        self.pci = self.pci or normal_pci(labels.get("pci_bus_id", ""))
        self.driver = self.driver or labels.get(_NEW_VERSION_LABEL, "") or labels.get(_OLD_VERSION_LABEL, "")
        self.serial = self.serial or labels.get("dcgm_fi_dev_serial", "")
        self.index = self.index or labels.get("gpu", "")
        self.minor = self.minor or labels.get("dcgm_fi_dev_minor_number", "") or _minor(device)


_ATTRIBUTES = frozenset(
    ("container", "namespace", "pod", "pod_uid", "vgpu", "hpc_job", "container_name", "pod_namespace", "pod_name")
)


def row_labels(key: SampleKey) -> RowLabels:
    """The labels that say something, by lower-case key.

    A pod's own labels stand between the exporter's device keys, whose case has changed over releases, and its
    attributes, which are always lower case. So the first of equal device keys counts, and of the attributes only the
    one that is spelled so.
    """
    found: dict[str, str] = {}
    for name, value in key.labels:
        folded = name.lower()
        if folded not in _ATTRIBUTES:
            found.setdefault(folded, value)
        elif folded == name:
            found[name] = value
    return {name: value for name, value in found.items() if value}


def normal_pci(address: str) -> str:
    """A PCI address as the kernel writes it (`0000:53:00.0`), from NVML's longer form too; empty stays
    empty."""
    domain, _, rest = address.lower().partition(":")
    if not rest:
        return address.lower()
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def _minor(device: str) -> str:
    """The N of `/dev/nvidiaN`."""
    number = device.removeprefix("nvidia")
    return number if number.isdecimal() and number != device else ""


def is_new_exporter(rows: Iterable[RowLabels]) -> bool | None:
    """Whether the driver's version stands under the label of exporter 4.9 and later; None when no row has
    one."""
    old = False
    for labels in rows:
        if _NEW_VERSION_LABEL in labels:
            return True
        old = old or _OLD_VERSION_LABEL in labels
    return False if old else None


class Devices:
    """Finds the entity of each row of one page, and gathers what the rows say about it."""

    def __init__(self, rows: Iterable[RowLabels]) -> None:
        self.facts: dict[Entity, Facts] = {}
        for labels in rows:
            entity = self.entity(labels)
            if entity is not None:
                self._learn(entity, labels)

    def _learn(self, entity: Entity, labels: RowLabels) -> None:
        for each in (entity, entity.parent) if entity.gi else (entity,):
            facts = self.facts.setdefault(each, Facts())
            facts.learn(labels)
            if not each.gi:
                facts.profile = ""

    @staticmethod
    def entity(labels: RowLabels) -> Entity | None:
        """Which device a row is about; None when it names none, as the rows of an NVSwitch do."""
        uuid = _uuid(labels)
        return Entity(uuid, labels.get("gpu_i_id", "")) if uuid else None


def _uuid(labels: RowLabels) -> str:
    """The GPU's UUID: `gpu_uuid` on NVLink rows, `UUID` on all others. Where both stand, one is a pod's own
    label, and those come last."""
    if "uuid" in labels and "gpu_uuid" in labels:
        return next(value for name, value in labels.items() if name in ("uuid", "gpu_uuid"))
    return labels.get("uuid", "") or labels.get("gpu_uuid", "")


class Owners:
    """Finds the holder that each row of one page names.

    Read straight from the exporter, a row's pod is its holder. Behind a Prometheus (a federated page) it
    may be the exporter's own pod: on all rows when honor_labels is off (the holder then stands in
    `exported_pod`), and on the rows of free GPUs when it is on. In that last case a pod that can't be recognised as
    the exporter's may be it all the same, under a name of someone's choice, until another row shows the one that is.
    """

    def __init__(self, rows: Sequence[RowLabels]) -> None:
        self._renamed = any("exported_pod" in labels or "exported_namespace" in labels for labels in rows)
        self._recognised = any(_is_exporter(*_plain_names(labels), labels) for labels in rows)

    def owner(self, labels: RowLabels) -> Owner | None:
        """The holder, None when the row names none that can be believed."""
        if self._renamed:
            return _owner(
                labels.get("exported_namespace", ""),
                labels.get("exported_pod", ""),
                labels.get("exported_container", ""),
                labels.get("exported_pod_uid", "") or labels.get("pod_uid", ""),
            )
        pod, container = _plain_names(labels)
        namespace = labels.get("namespace", "") or labels.get("pod_namespace", "")
        if not pod or _is_exporter(pod, container, labels) or (_has_target(labels) and not self._recognised):
            return None
        return _owner(namespace, pod, container, labels.get("pod_uid", ""))


def _plain_names(labels: RowLabels) -> tuple[str, str]:
    """Pod and container, whether the workload's or the target's."""
    pod = labels.get("pod", "") or labels.get("pod_name", "")
    return pod, labels.get("container", "") or labels.get("container_name", "")


def _has_target(labels: RowLabels) -> bool:
    """Whether a Prometheus has put its target labels on the row."""
    return "instance" in labels and "job" in labels


def _owner(namespace: str, pod: str, container: str, uid: str) -> Owner | None:
    return Owner(namespace, pod, container, uid) if namespace and pod else None


def _is_exporter(pod: str, container: str, labels: RowLabels) -> bool:
    """Whether a row's pod is the one that serves the page."""
    if not pod:
        return False
    if _EXPORTER in pod or _EXPORTER in container or pod == labels.get("hostname", ""):
        return True
    if not _has_target(labels):
        return False
    # the target labels of a Prometheus: they name the exporter's service or job, and its pods are named after that
    targets = (labels.get("service", ""), labels.get("job", "").rpartition("/")[2])
    return any(target and (container == target or pod.startswith(f"{target}-")) for target in targets)
