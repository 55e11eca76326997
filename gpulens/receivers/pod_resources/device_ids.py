"""What the ids in Pod Resources say about the device behind them.

Invariant: pure, and never a guess. An id is brought into the one spelling that other sources can be joined
with; what is not understood keeps its text and is marked unresolved. Whether `nvidia0` is this or that UUID
is decided later, by whoever knows the node's devices.

The forms and who writes them: NVIDIA's device plugin (`GPU-`, `MIG-`, `::N` replicas), GKE's
(`nvidia0/gi3/vgpu0`), AMD's (PCI address, `amdgpu_xcp_N`), Intel's (`card0-0`), Ascend's (`Ascend910-0`),
and DRA drivers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class IdKind(StrEnum):
    """Which form an id has."""

    GPU = "gpu"  # GPU-<uuid>
    MIG = "mig"  # MIG-<uuid>; its parent is not in the text
    MIG_PATH = "mig_path"  # MIG-GPU-<uuid>/<gi>/<ci>, drivers before R470
    GKE = "gke"  # nvidiaN: the minor number of /dev/nvidiaN, neither an index nor a UUID
    PCI = "pci"  # a PCI address
    XCP = "xcp"  # an AMD partition
    CARD = "card"  # a DRM card of Intel's plugin
    ASCEND = "ascend"
    ALL = "all"  # every GPU of the node (WSL), or Intel's monitoring resource
    TEGRA = "tegra"
    DRA = "dra"  # <driver>/<pool>/<device>
    UNKNOWN = "unknown"


_UNRESOLVED = frozenset({IdKind.ALL, IdKind.ASCEND, IdKind.DRA, IdKind.UNKNOWN})


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A parsed id.

    `hw_id` is the text to join by. `shared` says that the form itself is one of several replicas of the
    device; a form without that mark may still be shared (Intel's shares are counted, not marked). `gi` is
    the GPU instance where the text names one.
    """

    hw_id: str
    kind: IdKind
    shared: bool = False
    gi: int | None = None

    @property
    def is_mig(self) -> bool:
        """The device is an instance of a GPU, not a whole one."""
        return self.gi is not None or self.kind is IdKind.MIG

    @property
    def resolved(self) -> bool:
        """The text names one device. False for what stands for several, for what may differ from the device
        that is really mounted (Ascend: the pod's annotations hold the truth), and for what was not
        understood."""
        return self.kind not in _UNRESOLVED


_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = re.compile(rf"GPU-{_UUID}", re.ASCII)
_MIG = re.compile(rf"MIG-{_UUID}", re.ASCII)
_MIG_PATH = re.compile(rf"MIG-(?P<gpu>GPU-{_UUID})/(?P<gi>\d{{1,4}})/\d{{1,4}}", re.ASCII)
_GKE = re.compile(r"(?P<gpu>nvidia\d{1,4})(?:/gi(?P<gi>\d{1,4}))?(?P<vgpu>/vgpu\d{1,6})?", re.ASCII)
_HEX2 = r"[0-9a-fA-F]{2}"
_PCI = re.compile(rf"(?:(?P<domain>[0-9a-fA-F]{{4,8}}):)?(?P<rest>{_HEX2}:{_HEX2}\.[0-7])", re.ASCII)
_XCP = re.compile(r"amdgpu_xcp_\d{1,4}", re.ASCII)
_CARD = re.compile(r"(?P<card>card\d{1,4})-\d{1,6}", re.ASCII)
_ASCEND_WHOLE = re.compile(r"Ascend\w{1,16}-\d{1,6}", re.ASCII)
_ASCEND_VIRTUAL = re.compile(r"Ascend\w{1,16}-\d+c(?:\.\w+)*-\d{1,6}-\d{1,6}", re.ASCII)
_ASCEND_SHARE = re.compile(r"(?P<npu>Ascend\w{1,16}-\d{1,6})-\d{1,6}", re.ASCII)
_REPLICA = re.compile(r"(?P<id>.+)::\d{1,6}", re.ASCII | re.DOTALL)


def parse_device_id(text: str) -> DeviceId:
    """Reads an id as the kubelet lists it. Never fails: what has no known form comes back as it is,
    unresolved."""
    replica = _REPLICA.fullmatch(text)  # greedy: cut at the last "::"
    if replica is None:
        return _parse_plain(text)
    plain = _parse_plain(replica["id"])
    return DeviceId(plain.hw_id, plain.kind, True, plain.gi)


def _parse_plain(text: str) -> DeviceId:
    if _GPU.fullmatch(text):
        return DeviceId(text, IdKind.GPU)
    if _MIG.fullmatch(text):
        return DeviceId(text, IdKind.MIG)
    if found := _MIG_PATH.fullmatch(text):
        gi = int(found["gi"])
        return DeviceId(f"{found['gpu']}/gi{gi}", IdKind.MIG_PATH, gi=gi)
    if found := _GKE.fullmatch(text):
        return _gke(found)
    if found := _PCI.fullmatch(text):
        return DeviceId(pci_address(found["domain"], found["rest"]), IdKind.PCI)
    if _XCP.fullmatch(text):
        return DeviceId(text, IdKind.XCP)
    if found := _CARD.fullmatch(text):
        return DeviceId(found["card"], IdKind.CARD)
    if text.startswith("Ascend"):
        return _ascend(text)
    return DeviceId(text, {"all": IdKind.ALL, "tegra": IdKind.TEGRA}.get(text, IdKind.UNKNOWN))


def _gke(found: re.Match[str]) -> DeviceId:
    gi = None if found["gi"] is None else int(found["gi"])
    hw_id = found["gpu"] if gi is None else f"{found['gpu']}/gi{gi}"
    return DeviceId(hw_id, IdKind.GKE, found["vgpu"] is not None, gi)


def _ascend(text: str) -> DeviceId:
    if found := _ASCEND_SHARE.fullmatch(text):
        return DeviceId(found["npu"], IdKind.ASCEND, True)
    if _ASCEND_WHOLE.fullmatch(text) or _ASCEND_VIRTUAL.fullmatch(text):
        return DeviceId(text, IdKind.ASCEND)
    return DeviceId(text, IdKind.UNKNOWN)


def pci_address(domain: str | None, rest: str) -> str:
    """A PCI address as the kernel writes it: lower case, four digits of domain (NVML and DCGM write
    eight)."""
    return f"{int(domain or '0', 16):04x}:{rest.lower()}"


def dra_device(driver: str, pool: str, device: str, share: str = "") -> DeviceId:
    """A device that a DRA claim names; its UUID stands in the node's ResourceSlices."""
    return DeviceId(f"{driver}/{pool}/{device}", IdKind.DRA, bool(share))


_GPU_SHAPES = frozenset({IdKind.GPU, IdKind.MIG, IdKind.MIG_PATH, IdKind.GKE, IdKind.XCP, IdKind.ASCEND})
_GPU_PREFIXES = ("nvidia.com/", "amd.com/", "gpu.intel.com/", "habana.ai/", "huawei.com/Ascend", "huawei.com/npu")
_GPU_DRIVERS = frozenset({"gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com", "gaudi.intel.com"})
# Network cards stand under the same vendors' prefixes with PCI addresses as ids; HAMi's memory and core
# units are amounts, not devices.
_NO_GPU = re.compile(r"hostdev|rdma|sriov|mlnx|(?:^|[-_])v?nics?$|gpumem|gpucores", re.ASCII)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of a node's devices are GPUs.

    Without `names` the id's shape decides, and for ids without a telling shape the vendor's resource
    prefix. With names (exact, or with `*`) only these resources, and DRA drivers, are taken.
    """

    names: tuple[str, ...] = ()

    def takes(self, resource_name: str, device: DeviceId) -> bool:
        """Whether a device plugin's device is a GPU that somebody can own."""
        if device.kind is IdKind.ALL and resource_name.startswith("gpu.intel.com/"):
            return False  # Intel's monitoring resource sees every card and owns none
        if self.names:
            return self._named(resource_name)
        if device.kind in _GPU_SHAPES:
            return True
        kind_of_resource = resource_name.partition("/")[2]
        return resource_name.startswith(_GPU_PREFIXES) and not _NO_GPU.search(kind_of_resource)

    def takes_driver(self, driver: str) -> bool:
        """Whether a DRA driver hands out GPUs."""
        return self._named(driver) if self.names else driver in _GPU_DRIVERS

    def _named(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)
