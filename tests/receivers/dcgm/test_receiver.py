"""The dcgm receiver as a component: real HTTP, one batch a tick, failures as data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web
from pydantic import ValidationError

from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.pipeline.status import Status
from gpulens.receivers.dcgm import FACTORY
from gpulens.receivers.dcgm.config import DcgmConfig
from tests.receivers.page_server import Bench, Sink, serving

GPU = '{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100",container="c",namespace="ml",pod="p"}'
PAGE = f"DCGM_FI_DEV_POWER_USAGE{GPU} 71.500000\nDCGM_FI_DEV_GPU_UTIL{GPU} 97\n"


def make(url: str, bench: Bench, sink: Sink, **more: object) -> ScrapeReceiver:
    """A receiver as the graph would make it."""
    assert FACTORY.metrics is not None
    receiver = FACTORY.metrics(bench.settings, DcgmConfig.model_validate({"endpoint": url, **more}), sink)
    assert isinstance(receiver, ScrapeReceiver)
    return receiver


def test_defaults() -> None:
    """15 s interval, 1 s initial delay, 10 s deadline, the refresh learned."""
    config = DcgmConfig(endpoint="http://h:9400/metrics")
    times = (config.collection_interval, config.initial_delay, config.timeout, config.refresh)
    assert times == (15.0, 1.0, 10.0, 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"endpoint": "h:9400"},
        {"endpoint": "http://h", "discovery": {}},
        {"endpoint": "http://h", "refresh": 5},
        {"endpoint": "http://h", "max_page_size": 0},
    ],
)
def test_bad_configurations_are_refused(bad: dict[str, object]) -> None:
    """A missing or odd endpoint, an unknown key, a duration without a unit."""
    with pytest.raises(ValidationError):
        DcgmConfig.model_validate(bad)


async def test_a_tick_emits_readings_allocations_and_signs_of_life() -> None:
    """One complete batch of stream `dcgm`, on the node's and the owner's resources."""
    clock = VirtualClock()
    bench, sink = Bench("dcgm", clock), Sink()
    async with serving(PAGE) as url:
        receiver = make(url, bench, sink)
        await receiver.tick()
        await receiver.shutdown()
    (batch,) = sink.batches
    assert (batch.stream, batch.complete, batch.time_ns) == ("dcgm", True, clock.now_ns())
    found = sink.last()
    assert found["gpu.source.up"] == [1]
    assert found["gpu.source.interval"] == [15.0]
    assert found["hw.power"] == [71.5]
    assert found["hw.gpu.utilization"] == [0.97]
    assert found["gpu.allocated"] == [1]
    assert {block.scope.name for block in batch.layout.blocks} == {"gpulens/dcgm"}
    assert bench.status == (Status.OK, "")


async def test_the_batchs_layout_is_the_same_object_at_the_next_tick() -> None:
    """With the signs of life joined on, and new numbers."""
    bench, sink = Bench("dcgm", VirtualClock()), Sink()
    numbers = iter(range(70, 80))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"DCGM_FI_DEV_POWER_USAGE{GPU} {next(numbers)}\n")

    async with serving(answer) as url:
        receiver = make(url, bench, sink)
        for _ in range(3):
            await receiver.tick()
        await receiver.shutdown()
    first, *others = (batch.layout for batch in sink.batches)
    assert all(layout is first for layout in others)
    assert sink.last()["hw.power"] == [72.0]


async def test_a_dead_exporter_is_data_and_one_status(free_port: Callable[[], int]) -> None:
    """Each tick says up 0; the state changes once; after two intervals nothing else is left of the stream."""
    clock = VirtualClock()
    bench, sink = Bench("dcgm", clock), Sink()
    receiver = make(f"http://127.0.0.1:{free_port()}/metrics", bench, sink)
    for _ in range(4):
        await receiver.tick()
        await clock.advance(15)
    await receiver.shutdown()
    assert [batch.numbers()[0] for batch in sink.batches] == [0, 0, 0, 0]
    assert bench.changes == 1
    status, reason = bench.status
    assert status is Status.RECOVERABLE
    assert "connection refused; is dcgm-exporter running" in reason


async def test_a_hung_exporter_misses_its_deadline() -> None:
    """The deadline is the clock's; the receiver goes on."""
    clock = VirtualClock()
    bench, sink = Bench("dcgm", clock), Sink()

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with serving(hangs) as url:
        receiver = make(url, bench, sink, timeout="10s")
        tick = asyncio.ensure_future(receiver.tick())
        await asyncio.sleep(0)
        await clock.advance(10)
        await tick
        await receiver.shutdown()
    assert sink.last()["gpu.source.up"] == [0]
    assert "no answer within 10s" in bench.status[1]


async def test_struck_out_values_are_counted_in_the_stream() -> None:
    """`gpu.telemetry.rejected` rises by reason; the other series are there."""
    bench, sink = Bench("dcgm", VirtualClock()), Sink()
    page = f"{PAGE}DCGM_FI_DEV_MEMORY_TEMP{GPU} 2147483632\nDCGM_FI_DEV_GPU_TEMP{GPU} oops\n"
    async with serving(page) as url:
        receiver = make(url, bench, sink)
        for _ in range(2):
            await receiver.tick()
        await receiver.shutdown()
    found = sink.last()
    assert found["gpu.telemetry.rejected"] == [2, 2]
    assert found["hw.power"] == [71.5]


async def test_a_page_over_the_limit_gives_a_partial_batch() -> None:
    """What fits is used, the batch does not claim to be everything, and the status says why."""
    bench, sink = Bench("dcgm", VirtualClock()), Sink()
    async with serving(PAGE + "# " + "x" * 100_000) as url:
        receiver = make(url, bench, sink, max_page_size=1000)
        await receiver.tick()
        await receiver.shutdown()
    assert not sink.batches[0].complete
    assert sink.last()["hw.power"] == [71.5]
    assert "longer than max_page_size" in bench.status[1]


async def test_an_exporter_that_comes_back_is_ok_again() -> None:
    """HTTP 500, then the page: the state follows."""
    bench, sink = Bench("dcgm", VirtualClock()), Sink()
    broken = True

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500, text="no") if broken else web.Response(text=PAGE)

    async with serving(answer) as url:
        receiver = make(url, bench, sink)
        await receiver.tick()
        assert bench.status[0] is Status.RECOVERABLE
        broken = False
        await receiver.tick()
        await receiver.shutdown()
    assert bench.status == (Status.OK, "")
    assert sink.last()["gpu.source.up"] == [1]
