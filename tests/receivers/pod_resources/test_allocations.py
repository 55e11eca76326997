from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.errors import ScrapeError
from gpulens.receivers.pod_resources.allocations import MAX_ROWS, Allocations, Owner, Reader
from gpulens.receivers.pod_resources.device_ids import Selection
from gpulens.receivers.pod_resources.podresources_pb2 import CDIDevice, ClaimResource, PodResources
from tests.receivers.pod_resources.kubelet import allocatable, devices, pod, pod_list

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
MIG = "MIG-cccccccc-0000-0000-0000-000000000000"
GPU = "nvidia.com/gpu"


def read(pods: bytes, all_devices: bytes | None = None, sharing_mode: str = "") -> Allocations:
    """Reads encoded replies."""
    return Reader(Selection(), sharing_mode).read_encoded(pods, all_devices)


def test_owners_and_free_devices() -> None:
    """A held device has its owner, one that nobody holds is free, and both are exclusive."""
    found = read(pod_list(pod("ml", "train", devices(GPU, A))), allocatable(devices(GPU, A, B)))
    assert found == Allocations(
        held=((Owner("ml", "train", "main"), (A,)),),
        free=(B,),
        replicas=((A, 1), (B, 1)),
        sharing=((A, "exclusive"), (B, "exclusive")),
    )


def test_two_replicas_in_one_container_are_one_owner() -> None:
    """Replicas are not shares of anything: a container that holds two of one GPU holds that GPU once."""
    replicas = [f"{A}::{n}" for n in range(4)]
    found = read(pod_list(pod("ml", "one", devices(GPU, *replicas[:2]))), allocatable(devices(GPU, *replicas)))
    assert found.held == ((Owner("ml", "one", "main"), (A,)),)
    assert found.replicas == ((A, 4),)
    assert found.free == ()


def test_two_pods_on_one_device_are_two_owners() -> None:
    """Every owner of a shared device is kept, in the same order whatever the kubelet's."""
    one, two = pod("ml", "one", devices(GPU, f"{A}::0")), pod("ml", "two", devices(GPU, f"{A}::1"))
    found = read(pod_list(two, one))
    assert [owner.pod for owner, _ in found.held] == ["one", "two"]
    assert found == read(pod_list(one, two))


def test_a_finished_pod_that_is_still_listed_stays() -> None:
    """Two owners of an exclusive device are both passed on; phases decide later."""
    found = read(pod_list(pod("ml", "done", devices(GPU, A)), pod("ml", "new", devices(GPU, A))))
    assert [owner.pod for owner, _ in found.held] == ["done", "new"]
    assert found.sharing == ((A, "exclusive"),)


def test_replicas_are_never_guessed() -> None:
    """Without the allocatable list a shared device has no count, and an exclusive one has 1 by its form."""
    found = read(pod_list(pod("ml", "one", devices(GPU, f"{A}::0", B))))
    assert found.replicas == ((B, 1),)


@pytest.mark.parametrize(
    ("ids", "configured", "mode"),
    [
        ((A,), "", "exclusive"),
        ((MIG,), "", "mig"),
        (("nvidia0/gi3",), "mps", "mig"),
        ((f"{A}::0", f"{A}::1"), "", "unknown"),
        ((f"{A}::0", f"{A}::1"), "time_slicing", "time_slicing"),
        (("nvidia0/vgpu0", "nvidia0/vgpu1"), "mps", "mps"),
        ((f"{MIG}::0", f"{MIG}::1"), "mps", "time_slicing"),
        (("nvidia0/gi3/vgpu0", "nvidia0/gi3/vgpu1"), "", "time_slicing"),
    ],
)
def test_sharing_is_told_by_the_ids(ids: tuple[str, ...], configured: str, mode: str) -> None:
    """MIG and exclusive devices are known by their ids; only replicas of whole GPUs need the configured
    word."""
    found = read(pod_list(), allocatable(devices(GPU, *ids)), configured)
    assert [how for _, how in found.sharing] == [mode]


def test_intel_shares_are_counted() -> None:
    """card0-0 and card0-1 are two shares of card0; one share alone is an exclusive card."""
    two = read(pod_list(), allocatable(devices("gpu.intel.com/xe", "card0-0", "card0-1", "card1-0")))
    assert two.replicas == (("card0", 2), ("card1", 1))
    assert two.sharing == (("card0", "unknown"), ("card1", "exclusive"))
    assert read(pod_list(pod("a", "b", devices("gpu.intel.com/xe", "card0-0")))).replicas == ()


def test_gke_ids_meet_without_their_replica() -> None:
    """Two virtual GPUs of one card are one device with two owners."""
    found = read(pod_list(pod("a", "x", devices(GPU, "nvidia0/vgpu0")), pod("a", "y", devices(GPU, "nvidia0/vgpu1"))))
    assert [ids for _, ids in found.held] == [("nvidia0",), ("nvidia0",)]


def test_dra_claims_are_owners_too() -> None:
    """A claimed GPU is held under driver/pool/device; other drivers' claims and unnamed devices are not."""
    claims = [
        ClaimResource(driver_name="gpu.nvidia.com", pool_name="node-a", device_name="gpu-0"),
        ClaimResource(driver_name="dra.net", pool_name="node-a", device_name="eth1"),
        ClaimResource(cdi_devices=[CDIDevice(name="k8s.gpu.nvidia.com/claim=1")]),
    ]
    found = read(pod_list(pod("ml", "claims", claims=claims)))
    assert found.held == ((Owner("ml", "claims", "main"), ("gpu.nvidia.com/node-a/gpu-0",)),)
    assert found.sharing == (("gpu.nvidia.com/node-a/gpu-0", "unknown"),)
    assert found.rejected == (("dra_without_device", 1),)


def test_devices_that_are_no_gpus_do_not_matter() -> None:
    """Network cards and other plugins' devices leave no trace."""
    found = read(pod_list(pod("a", "b", devices("intel.com/sriov", "0000:41:00.0"), devices("x.io/kvm", "kvm0"))))
    assert found == Allocations((), (), (), ())


def test_pods_without_devices_do_not_matter() -> None:
    """The kubelet lists every pod; one without devices is no owner."""
    assert read(pod_list(pod("a", "b"), PodResources(name="empty", namespace="a"))) == Allocations((), (), (), ())


def test_nameless_owners_and_endless_ids_are_struck_out() -> None:
    """What can't be an owner or an id is counted by reason and harms nothing else."""
    found = read(
        pod_list(
            pod("", "b", devices(GPU, A)),
            pod("a", "x" * 300, devices(GPU, A)),
            pod("a", "b", devices(GPU, "nvidia" * 200, B)),
        )
    )
    assert found.held == ((Owner("a", "b", "main"), (B,)),)
    assert dict(found.rejected) == {"owner_without_name": 2, "device_id_length": 1}


def test_a_flood_of_ids_is_bounded() -> None:
    """More allocations than any node has are cut off and counted."""
    flood = devices("nvidia.com/fake", *(f"id-{n}" for n in range(MAX_ROWS + 5)))
    found = read(pod_list(pod("a", "b", flood)), allocatable(flood))
    assert [len(ids) for _, ids in found.held] == [MAX_ROWS]
    assert dict(found.rejected) == {"too_many_allocations": 5, "too_many_devices": 5}


def test_unknown_fields_are_passed_over() -> None:
    """A newer kubelet's fields change nothing."""
    newer = PodResources.FromString(pod("ml", "train", devices(GPU, A)).SerializeToString() + b"\xfa\x3f\x03abc")
    assert read(pod_list(newer)) == read(pod_list(pod("ml", "train", devices(GPU, A))))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reply_or_an_error(data: bytes) -> None:
    """Hostile bytes are either allocations or a ScrapeError that says malformed."""
    reason = ""
    try:
        read(data, data)
    except ScrapeError as error:
        reason = error.reason
    assert reason in ("", "malformed")


def test_a_device_listed_twice_is_not_shared() -> None:
    """One ContainerDevices a NUMA node may repeat an id: the GPU stays exclusive, so two owners are a conflict."""
    found = read(pod_list(), allocatable(devices(GPU, A), devices(GPU, A)))
    assert found.replicas == ((A, 1),)
    assert found.sharing == ((A, "exclusive"),)


def test_a_share_of_a_card_alone_does_not_tell_how_it_is_shared() -> None:
    """Without the allocatable list card0-0 may be the whole card or one of its shares."""
    found = read(pod_list(pod("a", "b", devices("gpu.intel.com/xe", "card0-0"))))
    assert found.sharing == (("card0", "unknown"),)
