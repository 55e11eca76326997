"""Which device an id names: every form that sources use, joined or left unknown."""

from __future__ import annotations

import pytest

from gpulens.pipeline.data import Resource
from tests.processors.attribution.kit import (
    GPU,
    OTHER,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    pod,
    processor,
)

INSTANCE = f"{GPU}/gi7"
MIG_FACT = {"hw.id": "MIG-1", "hw.parent": GPU, "gpu.mig.gi": "7", "gpu.mig.ci": "0"}
NOWHERE = Resource({"service.name": "somebody"})


def owner_between(device: str, allocated: str, *facts: dict[str, str]) -> str:
    """The pod of a reading of `device` while a pod holds what the source calls `allocated`."""
    sink = Sink()
    held = {allocated: [pod("a")]}
    join = processor(sink)
    feed(join, described(at(0), *facts), holders(at(1), held), activity(at(5), device=device), holders(at(11), held))
    return sink.owner_of_last()


@pytest.mark.parametrize(
    ("device", "allocated", "facts"),
    [
        (GPU, GPU, []),
        (GPU, "all", [{"hw.id": GPU}]),
        (GPU, "nvidia4", [{"hw.id": GPU, "gpu.minor": "4"}]),
        (INSTANCE, "nvidia4/gi7", [{"hw.id": GPU, "gpu.minor": "4"}]),
        (INSTANCE, "MIG-1", [MIG_FACT]),
        ("MIG-1", INSTANCE, [MIG_FACT]),
        ("MIG-1", "nvidia4/gi7", [{"hw.id": GPU, "gpu.minor": "4"}, MIG_FACT]),
        (INSTANCE, f"MIG-{GPU}/7/0", []),
        (INSTANCE, INSTANCE, []),
        (GPU, "0000:53:00.0", [{"hw.id": GPU, "gpu.pci.address": "00000000:53:00.0"}]),
        (GPU, "00000000:C1:00.0", [{"hw.id": GPU, "gpu.pci.address": "0000:c1:00.0"}]),
        ("0000:c1:00.0", "00000000:C1:00.0", []),
        ("amd-1", "0000:C1:00.0", [{"hw.id": "amd-1", "gpu.device.plugin.id": "0000:c1:00.0"}]),
        ("amd-1", "amdgpu_xcp_3", [{"hw.id": "amd-1", "hw.parent": "amd-0", "gpu.device.plugin.id": "amdgpu_xcp_3"}]),
        (GPU, "nvidia0", [{"hw.id": GPU, "gpu.device.plugin.id": "nvidia0"}]),
        ("c1:00.0", "0000:c1:00.0", []),
        (
            GPU,
            "gpu.nvidia.com/node-1/gpu-0",
            [{"hw.id": GPU, "gpu.dra.driver": "gpu.nvidia.com", "gpu.dra.pool": "node-1", "gpu.dra.device": "gpu-0"}],
        ),
        (
            INSTANCE,
            "gpu.nvidia.com/node-1/gpu-0-mig-1g5gb-19-0",
            [
                {
                    **MIG_FACT,
                    "gpu.dra.driver": "gpu.nvidia.com",
                    "gpu.dra.pool": "node-1",
                    "gpu.dra.device": "gpu-0-mig-1g5gb-19-0",
                }
            ],
        ),
    ],
)
def test_every_form_of_an_id_finds_its_device(device: str, allocated: str, facts: list[dict[str, str]]) -> None:
    """A reading and an allocation that name one device in different ways meet."""
    assert owner_between(device, allocated, *facts) == "a"


@pytest.mark.parametrize(
    ("device", "allocated", "facts"),
    [
        (GPU, OTHER, []),
        (GPU, "nvidia0", []),
        (GPU, "nvidia0", [{"hw.id": GPU, "gpu.minor": "1"}]),
        (GPU, "nvidia0/gi7", [{"hw.id": GPU, "gpu.minor": "0"}]),
        (INSTANCE, "nvidia0", [{"hw.id": GPU, "gpu.minor": "0"}]),
        (INSTANCE, "MIG-1", []),
        (INSTANCE, "MIG-2", [MIG_FACT]),
        (GPU, "MIG-1", [MIG_FACT]),
        (GPU, "0000:53:00.0", [{"hw.id": GPU, "gpu.pci.address": "0000:54:00.0"}]),
        (GPU, "gpu.nvidia.com/node-1/gpu-0", [{"hw.id": GPU, "gpu.minor": "0"}]),
        (GPU, "tegra", [{"hw.id": GPU}]),
        (GPU, "one", [{"hw.id": each, "gpu.device.plugin.id": "one"} for each in (GPU, OTHER)]),
        (GPU, "nvidia0", [{"hw.id": GPU, "gpu.minor": "0"}, {"hw.id": OTHER, "gpu.device.plugin.id": "nvidia0"}]),
        (GPU, "0", [{"hw.id": GPU, "gpu.minor": "0"}]),
    ],
)
def test_an_id_that_is_not_understood_joins_nothing(device: str, allocated: str, facts: list[dict[str, str]]) -> None:
    """Unknown stays unknown; a wrong owner is worse than none."""
    assert owner_between(device, allocated, *facts) == ""


def test_all_stands_for_every_gpu_of_the_node() -> None:
    """The id `all` gives its holder each GPU that somebody described, under its own id."""
    sink = Sink()
    held = {"all": [pod("a")]}
    feed(processor(sink), described(at(0), {"hw.id": GPU}, {"hw.id": OTHER}), holders(at(1), held))
    assert {point[:2] for point in sink.points("gpu.allocated")} == {("a", GPU), ("a", OTHER)}


def test_join_keys_belong_to_a_node() -> None:
    """Two nodes in one pipeline, each with a /dev/nvidia0 and the same PCI address: nothing crosses over."""
    second = Resource({"k8s.node.name": "node-2"})
    sink = Sink()
    join = processor(sink)
    facts = {"gpu.minor": "0", "gpu.pci.address": "0000:01:00.0", "gpu.device.plugin.id": "first"}
    feed(
        join,
        described(at(0), {"hw.id": GPU, **facts}, stream="info/1"),
        described(at(0), {"hw.id": OTHER, **facts}, stream="info/2", node=second),
    )
    for moment in (1, 11):
        feed(
            join,
            holders(at(moment), {"nvidia0": [pod("a")], "first": [pod("a")]}, stream="pods/1"),
            holders(
                at(moment),
                {"0000:01:00.0": [pod("b", node="node-2")], "first": [pod("b", node="node-2")]},
                stream="pods/2",
                node=second,
            ),
            activity(at(moment + 1), stream="nvml/1"),
            activity(at(moment + 1), 0.1, OTHER, stream="nvml/2", node=second),
        )
    assert {point[:2] for point in sink.points("gpu.sm.active")} == {("a", GPU), ("b", OTHER)}
    assert sink.reasons() == {("a", GPU): ("pod_resources", ""), ("b", OTHER): ("pod_resources", "")}


@pytest.mark.parametrize(
    "resource",
    [
        Resource({"host.id": "h1"}),
        Resource({"service.instance.id": "i1", "service.name": "agent"}),
        Resource({"k8s.node.name": "n", "host.id": "h", "service.instance.id": "i"}),
    ],
)
def test_the_node_is_named_by_the_first_key_there_is(resource: Resource) -> None:
    """k8s.node.name, else host.id, else the sender's service.instance.id scope what is told."""
    sink = Sink()
    join = processor(sink)
    owner = Resource({**resource.map, "k8s.pod.name": "a", "k8s.namespace.name": "ml"})
    held = {"nvidia0": [owner]}
    feed(join, described(at(0), {"hw.id": GPU, "gpu.minor": "0"}, node=resource), holders(at(1), held, node=resource))
    feed(join, activity(at(2), node=resource), holders(at(11), held, node=resource))
    assert sink.owner_of_last() == "a"


def test_without_a_node_only_uuids_join() -> None:
    """A reading that names no node meets the one node that holds its UUID; minors of nowhere join nothing."""
    sink = Sink()
    join = processor(sink)
    held = {GPU: [pod("a")]}
    feed(join, holders(at(0), held), activity(at(5), node=NOWHERE), holders(at(10), held))
    assert sink.owner_of_last() == "a"
    nobody = Resource({**NOWHERE.map, "k8s.pod.name": "b", "k8s.namespace.name": "ml"})
    sink, claims = Sink(), {"nvidia0": [nobody]}
    join = processor(sink)
    feed(join, described(at(0), {"hw.id": GPU, "gpu.minor": "0"}, node=NOWHERE), holders(at(1), claims, node=NOWHERE))
    feed(join, activity(at(2), node=NOWHERE), holders(at(11), claims, node=NOWHERE))
    assert sink.owner_of_last() == ""


def test_a_uuid_finds_its_node_also_where_allocations_go_by_minor() -> None:
    """On GKE the node's own device map says which UUIDs are its."""
    sink = Sink()
    join = processor(sink)
    held = {"nvidia3": [pod("a")]}
    feed(join, described(at(0), {"hw.id": GPU, "gpu.minor": "3"}), holders(at(1), held))
    feed(join, activity(at(2), node=NOWHERE), holders(at(11), held))
    assert sink.owner_of_last() == "a"
