from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.receivers.pod_resources.device_ids import (
    DeviceId,
    IdKind,
    Selection,
    dra_device,
    parse_device_id,
    pci_address,
)

UUID = "0a1b2c3d-1111-2222-3333-444455556666"
GPU = f"GPU-{UUID}"
MIG = f"MIG-{UUID}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GPU, DeviceId(GPU, IdKind.GPU)),
        (MIG, DeviceId(MIG, IdKind.MIG)),
        (f"MIG-{GPU}/7/0", DeviceId(f"{GPU}/gi7", IdKind.MIG_PATH, gi=7)),
        (f"{GPU}::0", DeviceId(GPU, IdKind.GPU, shared=True)),
        (f"{GPU}::13", DeviceId(GPU, IdKind.GPU, shared=True)),
        (f"{MIG}::1", DeviceId(MIG, IdKind.MIG, shared=True)),
        (f"MIG-{GPU}/7/0::2", DeviceId(f"{GPU}/gi7", IdKind.MIG_PATH, shared=True, gi=7)),
        ("nvidia0", DeviceId("nvidia0", IdKind.GKE)),
        ("nvidia12", DeviceId("nvidia12", IdKind.GKE)),
        ("nvidia0/gi3", DeviceId("nvidia0/gi3", IdKind.GKE, gi=3)),
        ("nvidia0/vgpu1", DeviceId("nvidia0", IdKind.GKE, shared=True)),
        ("nvidia0/gi3/vgpu0", DeviceId("nvidia0/gi3", IdKind.GKE, shared=True, gi=3)),
        ("0000:c1:00.0", DeviceId("0000:c1:00.0", IdKind.PCI)),
        ("00000000:C1:00.0", DeviceId("0000:c1:00.0", IdKind.PCI)),
        ("C1:00.0", DeviceId("0000:c1:00.0", IdKind.PCI)),
        ("10000:01:00.0", DeviceId("10000:01:00.0", IdKind.PCI)),
        ("amdgpu_xcp_5", DeviceId("amdgpu_xcp_5", IdKind.XCP)),
        ("card0-0", DeviceId("card0", IdKind.CARD)),
        ("card1-3", DeviceId("card1", IdKind.CARD)),
        ("Ascend910-0", DeviceId("Ascend910-0", IdKind.ASCEND)),
        ("Ascend910-2c-100-1", DeviceId("Ascend910-2c-100-1", IdKind.ASCEND)),
        ("Ascend310P-2c.1cpu-100-1", DeviceId("Ascend310P-2c.1cpu-100-1", IdKind.ASCEND)),
        ("Ascend310P-0-99", DeviceId("Ascend310P-0", IdKind.ASCEND, shared=True)),
        ("all", DeviceId("all", IdKind.ALL)),
        ("tegra", DeviceId("tegra", IdKind.TEGRA)),
        ("tegra::1", DeviceId("tegra", IdKind.TEGRA, shared=True)),
    ],
)
def test_every_known_form_is_read(text: str, expected: DeviceId) -> None:
    """Each form that a device plugin writes becomes the spelling to join by, with what the form itself
    tells."""
    assert parse_device_id(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"{GPU}-0",  # one replica of HAMi: the pick may differ from what is mounted
        UUID,  # a mediated device
        "42",  # an IOMMU group
        "nvidia",
        "nvidia0/gi",
        "nvidia0/vgpu1/gi3",
        "nvidia٣",  # a digit, but not an ASCII one
        "GPU-123",
        f"MIG-{GPU}/7",
        "HL-0",
        "",
        "::1",
        f"{GPU}\n",
    ],
)
def test_other_forms_keep_their_text_and_are_unresolved(text: str) -> None:
    """What has no known form is left as it is and marked, not guessed."""
    device = parse_device_id(text)
    assert (device.hw_id, device.kind, device.resolved) == (text, IdKind.UNKNOWN, False)


@given(st.text(max_size=60))
def test_any_text_is_an_id(text: str) -> None:
    """Parsing never fails, and what it gives parses to itself again unless it is a path of its own making."""
    device = parse_device_id(text)
    again = parse_device_id(device.hw_id)
    if not device.shared and device.kind is not IdKind.CARD:
        assert again == device


def test_only_the_last_replica_mark_is_stripped() -> None:
    """An id that itself holds '::' loses nothing but its last mark."""
    assert parse_device_id("odd::name::4") == DeviceId("odd::name", IdKind.UNKNOWN, shared=True)


def test_dra_devices_are_named_by_driver_pool_and_device() -> None:
    """A claimed device is named so that ResourceSlices can resolve it; a share id marks it shared."""
    assert dra_device("gpu.nvidia.com", "node-a", "gpu-0") == DeviceId("gpu.nvidia.com/node-a/gpu-0", IdKind.DRA)
    assert dra_device("gpu.nvidia.com", "node-a", "gpu-0", "s1").shared
    assert not dra_device("gpu.nvidia.com", "node-a", "gpu-0").resolved


def test_instances_know_that_they_are_instances() -> None:
    """MIG is told by the id, never by the resource's name."""
    instances = [MIG, f"MIG-{GPU}/7/0", "nvidia0/gi3"]
    assert [parse_device_id(text).is_mig for text in [*instances, GPU, "nvidia0"]] == [True] * 3 + [False] * 2


def test_pci_addresses_of_all_tools_meet() -> None:
    """NVML's eight digits, the kernel's four and none at all name one device."""
    assert {pci_address(domain, "3B:00.0") for domain in ("00000000", "0000", None)} == {"0000:3b:00.0"}


@pytest.mark.parametrize(
    ("resource", "text", "taken"),
    [
        ("nvidia.com/gpu", GPU, True),
        ("nvidia.com/gpu.shared", f"{GPU}::3", True),
        ("example.com/my-gpus", f"{GPU}::3", True),
        ("nvidia.com/gpu", "nvidia0/vgpu1", True),
        ("amd.com/gpu", "0000:c1:00.0", True),
        ("amd.com/cpx_nps4", "amdgpu_xcp_5", True),
        ("gpu.intel.com/i915", "card0-0", True),
        ("gpu.intel.com/i915_monitoring", "all", False),
        ("nvidia.com/gpu", "all", True),
        ("nvidia.com/GA102GL_A10", "0000:41:00.0", True),
        ("habana.ai/gaudi", "HL-0", True),
        ("huawei.com/Ascend910", "Ascend910-0", True),
        ("huawei.com/Ascend310P-2c.1cpu", "Ascend310P-2c.1cpu-100-1", True),
        ("huawei.com/npu", "npu-0", True),
        ("nvidia.com/hostdev", "0000:41:00.0", False),
        ("amd.com/nic", "0000:41:00.0", False),
        ("nvidia.com/gpumem", "gpu-mem-1", False),
        ("intel.com/sriov", "0000:41:00.0", False),
        ("smarter-devices/fuse", "fuse-0", False),
        ("devices.example.com/all", "all", False),
    ],
)
def test_shape_decides_what_is_a_gpu(resource: str, text: str, taken: bool) -> None:
    """Ids with a GPU's shape count under any resource name; others only under a GPU vendor's name."""
    assert Selection().takes(resource, parse_device_id(text)) is taken


@pytest.mark.parametrize("text", ["Ascend910-0", "Ascend910-2c-100-1", "Ascend310P-0-99", "HL-0", "accel0", "0"])
def test_ids_of_which_the_device_may_be_another_are_unresolved(text: str) -> None:
    """Ascend's pick may differ from what is mounted, and the form of Gaudi's ids is not known: both are taken by their
    resource and stay open until a device's own description names them."""
    assert not parse_device_id(text).resolved


def test_named_resources_are_the_only_ones() -> None:
    """With names given, nothing else is taken; `*` stands for any rest."""
    selection = Selection(("nvidia.com/mig-*", "gpu.nvidia.com"))
    assert selection.takes("nvidia.com/mig-1g.5gb", parse_device_id(MIG))
    assert not selection.takes("nvidia.com/gpu", parse_device_id(GPU))
    assert selection.takes_driver("gpu.nvidia.com")
    assert not selection.takes_driver("gpu.amd.com")
    assert Selection().takes_driver("gpu.amd.com")
    assert not Selection().takes_driver("dra.net")
