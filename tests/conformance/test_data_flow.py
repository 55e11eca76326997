"""Every registered component: what it makes of data, and what it leaves alone."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpulens.config.ids import Kind
from gpulens.pipeline.catalogue import CATALOGUE, DEVICE_KEYS, MetricScope
from gpulens.pipeline.component import Admission
from gpulens.pipeline.data import Batch, Layout, bitmap_slots
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World
from tests.conformance.cases import CASES, Place
from tests.conformance.rig import NODE, Key, Rig, key_id, of_kind
from tests.conformance.samples import samples

OWNER_KEYS = {
    "k8s.namespace.name", "k8s.pod.name", "k8s.pod.uid", "k8s.container.name",
    "namespace", "pod", "container", "exported_namespace", "exported_pod", "exported_container",
}  # fmt: skip
QUICK = {"collection_interval": "50ms", "initial_delay": "0s"}
SETTLE_S = 30.0

RECEIVERS = pytest.mark.parametrize("key", of_kind(Kind.RECEIVERS), ids=key_id)
PROCESSORS = pytest.mark.parametrize("key", of_kind(Kind.PROCESSORS), ids=key_id)
CONSUMERS = pytest.mark.parametrize("key", of_kind(Kind.PROCESSORS, Kind.EXPORTERS), ids=key_id)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for what cases need."""
    return Place(tmp_path)


def check_catalogued(batch: Batch) -> None:
    """Every series is a catalogued metric, defined as there, with attributes that it may have, in order."""
    for resource, _, series in batch.layout.identities():
        entry = CATALOGUE.get(series.metric.name)
        assert entry is not None, f"{series.metric.name} is not in the catalogue"
        assert series.metric == entry.metric
        families = tuple(name.removesuffix("*") for name in entry.attributes if name.endswith(".*"))
        own = {key for key in series.map if not (families and key.startswith(families))}
        unknown = own - {*entry.attributes, *DEVICE_KEYS}
        assert not unknown, f"{series.metric.name} has attributes that the catalogue does not know: {unknown}"
        assert not OWNER_KEYS & set(series.map), f"{series} carries its owner on the point"
        assert list(series.map) == sorted(series.map)
        assert resource.text("k8s.node.name"), f"{series} is on {resource}, which names no node"


def check_binary(batch: Batch) -> None:
    """0/1 metrics are 0 or 1."""
    for (_, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True):
        if CATALOGUE[series.metric.name].binary:
            assert value in (0, 1, None), f"{series} is {value}"


def check_ownerless(batch: Batch) -> None:
    """Readings of a device stand on the node's resource: whose they are is the attribution's business."""
    for resource, _, series in batch.layout.identities():
        if CATALOGUE[series.metric.name].scope in (MetricScope.WORK, MetricScope.DEVICE):
            assert not OWNER_KEYS & set(resource.map), f"{series} is on an owner's resource: {resource}"


def up(batch: Batch) -> list[object]:
    """What a batch says of its source."""
    return [
        value
        for (_, _, series), value in zip(batch.layout.identities(), batch.readings(), strict=True)
        if series.metric.name == "gpu.source.up"
    ]


def main_stream(rig: Rig) -> list[Batch]:
    """The batches of the receiver's main stream; slower tiers have streams of their own, without signs of life."""
    return [batch for batch in rig.sink.metrics() if batch.stream == str(rig.settings.id)]


@asynccontextmanager
async def simulated_node(world: str) -> AsyncIterator[Simulator]:
    """A served world, an hour after its start, with a socket path short enough for a unix socket."""
    loaded = World.load(world)
    with TemporaryDirectory(prefix="gl") as folder:
        async with serve(loaded, lambda: loaded.start_s + 3600, kubelet=Path(folder) / "k.sock") as node:
            yield node


def quick(key: Key) -> dict[str, object]:
    """Faster ticks, for receivers that have ticks."""
    return {} if CASES[key].silent else dict(QUICK)


@RECEIVERS
async def test_a_receiver_without_its_source_says_so_at_every_tick(key: Key, place: Place) -> None:
    """`gpu.source.up` is 0 tick after tick, on the node's resource, in batches of the receiver's stream that hold
    catalogued metrics only; nothing raises and the process goes on."""
    rig = Rig(key, place, quick(key))
    await rig.component.start(rig)
    if CASES[key].silent:
        await asyncio.sleep(0)
        assert rig.sink.seen == []
    else:
        await rig.sink.wait(3)
        batches = main_stream(rig)
        assert batches
        for batch in batches:
            check_catalogued(batch)
            check_binary(batch)
            assert up(batch) == [0]
        assert rig.statuses[-1][1], "the status says why"
    await rig.component.shutdown()


@RECEIVERS
@pytest.mark.parametrize("world", ["demo", "gke"])
async def test_a_receiver_emits_catalogued_metrics_only(key: Key, place: Place, world: str) -> None:
    """Against a simulated node: names, units, kinds and attributes are the catalogue's; readings carry no owner,
    neither on the point nor by their resource; the scope names the receiver."""
    live = CASES[key].live
    assert live is not None
    async with simulated_node(world) as node:
        rig = Rig(key, place, {**quick(key), **live(place, node)})
        await rig.component.start(rig)
        batches = await rig.sink.wait(1 if CASES[key].silent else 6)
        await rig.component.shutdown()
        refused = key == (Kind.RECEIVERS, "gke") and node.world.gke_refuses()
    for batch in batches:
        check_catalogued(batch)
        check_binary(batch)
        check_ownerless(batch)
        if not CASES[key].silent:
            main = batch.stream == str(rig.settings.id)
            assert main or batch.stream.startswith(f"{rig.settings.id}/")
            assert up(batch) == ([0 if refused else 1] if main else [])
            assert {block.scope.name for block in batch.layout.blocks} == {f"gpulens/{key[1]}"}
            nodes = {block.resource.text("k8s.node.name") for block in batch.layout.blocks}
            assert nodes == {NODE}
    batches = batches if CASES[key].silent else main_stream(rig)
    assert refused or len(batches[-1].layout) > len(up(batches[-1]))
    assert len({id(batch.layout) for batch in batches[-3:]}) == 1, "the layout of a node that does not change is steady"


def frozen(batch: Batch) -> tuple[object, ...]:
    """All that a consumer could change in a batch."""

    def times(value: int | array[int]) -> object:
        return value if isinstance(value, int) else list(value)

    return (
        batch.layout,
        [(block.resource.attributes, block.scope.attributes, block.series) for block in batch.layout.blocks],
        [(series.metric, series.attributes) for _, _, series in batch.layout.identities()],
        batch.values,
        times(batch.time_ns),
        times(batch.start_ns),
        batch.absent,
        (batch.stream, batch.complete, batch.events, batch.opaque),
    )


@CONSUMERS
@pytest.mark.parametrize("name", samples())
async def test_a_consumer_takes_any_batch_and_leaves_it_as_it_was(key: Key, place: Place, name: str) -> None:
    """Twice the same batch, then a plain one: no exception, the batch unchanged, every ack settled by the end."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    batch = samples()[name]
    before = frozen(batch)
    acks = [rig.consume(each) for each in (batch, batch, samples()["plain"])]
    async with asyncio.timeout(SETTLE_S):
        await rig.component.shutdown()
    assert frozen(batch) == before
    assert all(ack.settled for ack in acks)


@CONSUMERS
async def test_a_consumer_takes_a_whole_history(key: Key, place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Every sample after the other, twice over, without an exception and without an error in the log that is not
    about the destination."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    with caplog.at_level(logging.ERROR, logger="gpulens"):
        acks = [rig.consume(batch) for _ in range(2) for batch in samples().values()]
        await asyncio.sleep(0)
    async with asyncio.timeout(SETTLE_S):
        await rig.component.shutdown()
    assert all(ack.settled for ack in acks)
    assert "Traceback" not in caplog.text


@CONSUMERS
async def test_asking_for_admission_changes_nothing(key: Key, place: Place) -> None:
    """Whoever can refuse is asked before anything happens, for any batch, and admits while there is room."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    if isinstance(rig.component, Admission):
        for batch in samples().values():
            before = frozen(batch)
            assert rig.component.refusal(batch) is None
            assert frozen(batch) == before
    assert rig.sink.seen == []
    await rig.component.shutdown()


@PROCESSORS
async def test_a_processor_passes_on_every_foreign_reading(key: Key, place: Place) -> None:
    """What is not gpulens' own comes out as it went in: values, times, attributes, histograms and events."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    sent = [samples()[name] for name in ("odd names", "not a number", "opaque and events")]
    for batch in sent:
        rig.consume(batch)
    await rig.component.shutdown()

    def everything(batches: list[Batch]) -> list[object]:
        found: list[object] = []
        for batch in batches:
            identities = zip(batch.layout.identities(), batch.readings(), batch.times(), batch.starts(), strict=True)
            found += [(identity, repr(value), time, start) for identity, value, time, start in identities]
            found += [*batch.events, *batch.opaque]
        return found

    out = everything(rig.sink.metrics())
    assert [each for each in everything(sent) if each not in out] == []


@PROCESSORS
async def test_a_processor_emits_catalogued_metrics_only(key: Key, place: Place) -> None:
    """What it adds or moves is defined in the catalogue, and it keeps the streams' names."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    for name in ("plain", "again", "columns", "series left"):
        rig.consume(samples()[name])
    await rig.component.shutdown()
    for batch in rig.sink.metrics():
        check_catalogued(batch)
        check_binary(batch)


@PROCESSORS
async def test_a_processor_keeps_the_layout_in_the_steady_state(key: Key, place: Place) -> None:
    """The same series again and again come out on the same layout objects, so that what follows need not look at
    identities."""
    rig = Rig(key, place)
    await rig.component.start(rig)
    plain = samples()["plain"]
    layouts: dict[str, set[int]] = {}
    kept: list[Layout] = []
    for tick in range(40):
        rig.sink.seen.clear()
        rig.consume(Batch(plain.layout, plain.values, plain.latest_ns() + tick * 10**10, plain.stream, True))
        if tick >= 20:
            for batch in rig.sink.metrics():
                kept.append(batch.layout)  # a freed object's id could come back
                layouts.setdefault(batch.stream, set()).add(id(batch.layout))
    await rig.component.shutdown()
    assert layouts
    assert all(len(ids) <= 2 for ids in layouts.values()), {stream: len(ids) for stream, ids in layouts.items()}


@pytest.fixture
def gaps() -> Callable[[Batch], list[int]]:
    """The absent slots of a batch."""
    return lambda batch: bitmap_slots(batch.absent)


def test_the_samples_cover_the_data_model(gaps: Callable[[Batch], list[int]]) -> None:
    """Absence, columns of times and starts, both completenesses, events, opaque parts, both number types."""
    every = list(samples().values())
    assert any(gaps(batch) for batch in every)
    assert any(isinstance(batch.time_ns, array) and isinstance(batch.start_ns, array) for batch in every)
    assert {batch.complete for batch in every} == {True, False}
    assert any(batch.events and batch.opaque for batch in every)
    assert {flag for batch in every for flag in batch.layout.is_int} == {True, False}
