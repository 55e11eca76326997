from __future__ import annotations

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import Batch, Block, Identity, Layout, Resource, Scope, Series
from gpulens.pipeline.otlp import NO_RECORDED_VALUE, decode_request, parse_request
from gpulens.pipeline.otlp_sending import OtlpEncoding, Owner, OwnerMapping
from tests.exporters.otlp.rig import Rig, node, pod, tick

OWNER = {
    "k8s.namespace.name": "research",
    "k8s.pod.name": "a",
    "k8s.pod.uid": "uid-a",
    "k8s.container.name": "main",
}


def _sent(encoding: OtlpEncoding, batch: Batch) -> list[Identity]:
    [back] = decode_request(parse_request(encoding.encode(batch)[0]), "s")
    return list(back.layout.identities())


def test_attributes_moves_the_owner_to_the_points() -> None:
    """The resource becomes the node's, and all that belongs to the pod stands on the points."""
    [block] = OwnerMapping(Owner.ATTRIBUTES).map(tick(pod("a", "GPU-1"))).layout.blocks
    assert block.resource.map == {"k8s.node.name": "node-1"}
    assert block.series[0].map == {**OWNER, "hw.id": "GPU-1", "k8s.pod.label.team": "vision"}


def test_both_copies_the_owner_to_the_points() -> None:
    """The resource stays whole; the four owner keys are on the points too."""
    batch = tick(pod("a", "GPU-1"))
    [block] = OwnerMapping(Owner.BOTH).map(batch).layout.blocks
    assert block.resource == batch.layout.blocks[0].resource
    assert block.series[0].map == {**OWNER, "hw.id": "GPU-1"}


def test_resource_changes_nothing() -> None:
    """The default passes the batch itself."""
    batch = tick(pod("a", "GPU-1"))
    assert OwnerMapping(Owner.RESOURCE).map(batch) is batch


@pytest.mark.parametrize("owner", list(Owner))
def test_values_stay_with_their_series(owner: Owner) -> None:
    """Mapping moves identity only: slots, values, times and absence are those of the batch."""
    batch = tick(pod("a", "GPU-1", "GPU-2"), node("GPU-1"), pod("b", "GPU-1"))
    mapped = OwnerMapping(owner).map(batch)
    assert (mapped.values, mapped.time_ns, mapped.absent) == (batch.values, batch.time_ns, batch.absent)
    ids = [[series.text("hw.id") for _, _, series in each.layout.identities()] for each in (batch, mapped)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("owner", list(Owner))
def test_two_pods_on_a_gpu_and_two_gpus_of_a_pod_are_distinct(owner: Owner) -> None:
    """No series of the three collapses into another, wherever the owner stands."""
    identities = _sent(OtlpEncoding(Rig().settings, owner), tick(pod("a", "GPU-1", "GPU-2"), pod("b", "GPU-1")))
    assert len(set(identities)) == 3
    if owner is not Owner.RESOURCE:
        assert {series.text("k8s.pod.name") for _, _, series in identities} == {"a", "b"}


def test_a_layout_is_mapped_once() -> None:
    """From its second sight on a layout comes out as one object, and a pod that changes maps its own block only."""
    mapping, first = OwnerMapping(Owner.ATTRIBUTES), tick(pod("a", "GPU-1"), pod("b", "GPU-2"))
    mapping.map(first)
    mapped = mapping.map(first).layout
    assert mapping.map(first).layout is mapped
    changed = mapping.map(tick(pod("a", "GPU-1"), pod("c", "GPU-2"))).layout
    assert changed.blocks[0] is mapped.blocks[0]


def test_points_that_name_a_pod_themselves_stay_as_they_are() -> None:
    """A foreign point with its own k8s.pod.name keeps it; two such points never become one."""
    series = [Series(metric("hw.power"), {"k8s.pod.name": name}) for name in ("x", "y")]
    block = Block(Resource(OWNER), Scope(), series)
    assert OwnerMapping(Owner.ATTRIBUTES).map(tick(block)).layout.blocks == (block,)


def test_a_departed_pod_departs_under_the_identity_it_had() -> None:
    """With the owner on the points, the NO_RECORDED_VALUE point carries it there too."""
    encoding = OtlpEncoding(Rig().settings, Owner.ATTRIBUTES)
    encoding.encode(tick(pod("a", "GPU-1"), node("GPU-1")))
    request = parse_request(encoding.encode(tick(node("GPU-1"), second=10))[0])
    gone: ResourceMetrics = request.resource_metrics[1]
    assert [pair.key for pair in gone.resource.attributes] == ["k8s.node.name"]
    [point] = gone.scope_metrics[0].metrics[0].gauge.data_points
    assert point.flags == NO_RECORDED_VALUE
    assert {pair.key: pair.value.string_value for pair in point.attributes}["k8s.pod.name"] == "a"


def test_points_are_counted_without_the_absent() -> None:
    """What is absent is not sent and not counted."""
    layout = Layout([pod("a", "GPU-1", "GPU-2")])
    _, items = OtlpEncoding(Rig().settings, Owner.RESOURCE).encode(Batch.of(layout, [1.0, None], 1, "s"))
    assert items == 1


def test_caches_show_in_the_agents_own_metrics() -> None:
    """Size, hits, misses and evictions of every cache can be read."""
    rig = Rig()
    encoding, batch = OtlpEncoding(rig.settings, Owner.BOTH), tick(pod("a", "GPU-1"))
    for _ in range(3):
        encoding.encode(batch)
    read = {(name, labels["cache"]): value for name, labels, value in rig.telemetry.read()}
    assert read["gpulens_cache_hits", "otlp_compiled"] == 1
    assert read["gpulens_cache_bytes", "otlp_compiled"] > 0
    assert {cache for _, cache in read} == {"otlp_compiled", "otlp_owner_layouts", "otlp_owner_blocks", "departures"}
