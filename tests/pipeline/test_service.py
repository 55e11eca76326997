"""The service: one graph from start to stop."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from gpulens.config.ids import ComponentID
from gpulens.pipeline import service as service_module
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.service import node_name
from gpulens.pipeline.status import Status
from tests.pipeline.parts import Bench

CONFIG = """
receivers: {{src: {receiver}}}
processors: {{step: }}
exporters: {{tap: {exporter}}}
extensions: {{ext: }}
service:
  extensions: [ext]
  pipelines: {{metrics: {{receivers: [src], processors: [step], exporters: [tap]}}}}
"""


@pytest.fixture
def bench() -> Bench:
    """An empty workbench."""
    return Bench()


def config(receiver: str = "{}", exporter: str = "{}") -> str:
    """A pipeline of one of each."""
    return CONFIG.format(receiver=receiver, exporter=exporter)


async def test_every_component_goes_from_starting_to_stopped(bench: Bench) -> None:
    """Starting, OK, stopping, stopped, each once, in the order of the graph and back."""
    service = bench.service(config())
    moves: list[tuple[str, Status]] = []
    service.board.watch(lambda key, event: moves.append((key, event.status)))
    await service.start()
    await service.shutdown()
    keys = [node.key for node in service.graph.nodes]
    started = [(key, status) for key in keys for status in (Status.STARTING, Status.OK)]
    stopped = [(key, status) for key in reversed(keys) for status in (Status.STOPPING, Status.STOPPED)]
    assert moves == started + stopped
    assert service.board.get("receivers/src").time_ns == bench.clock.now_ns()


async def test_run_ends_when_somebody_asks_for_it(bench: Bench) -> None:
    """`stop` ends it in order; asking again, also before the start, does no harm."""
    service = bench.service(config())
    running = asyncio.create_task(service.run())
    await bench.clock.advance(0)
    assert bench.did("start") == ["ext", "tap", "step", "src"]
    assert not running.done()
    service.stop("SIGTERM")
    service.stop("SIGTERM")
    await running
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]


async def test_a_stop_before_the_start_is_not_forgotten(bench: Bench) -> None:
    """A signal that comes while everything starts ends the service right after."""
    service = bench.service(config())
    service.stop("SIGTERM")
    await service.run()
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]


async def test_shutting_down_twice_stops_each_component_once(bench: Bench) -> None:
    """The second call finds nothing left to stop."""
    service = bench.service(config())
    await service.shutdown()
    assert bench.diary == []
    await service.start()
    await service.shutdown()
    await service.shutdown()
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]


async def test_a_component_that_can_not_start_rolls_the_start_back(bench: Bench) -> None:
    """What had started is stopped in reverse, what had not is left alone, and the error names the component."""
    service = bench.service(config(exporter="{start_error: port 9464 is in use}"))
    with pytest.raises(StartError) as raised:
        await service.run()
    assert str(raised.value) == 'cannot start pipelines: failed to start "tap" exporter: port 9464 is in use'
    assert (bench.did("start"), bench.did("shutdown")) == (["ext", "tap"], ["tap", "ext"])


async def test_a_defect_in_start_rolls_the_start_back_too(bench: Bench) -> None:
    """An error that is no StartError leaves no half graph running either."""
    service = bench.service(config(receiver="{start_defect: oops}"))
    with pytest.raises(StartError, match=r"failed to start \"src\" receiver: KeyError\('oops'\)"):
        await service.start()
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]


async def test_a_hanging_shutdown_is_bounded_and_stops_nobody_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the grace period the component is left behind with a permanent error; the others stop as they should."""
    monkeypatch.setattr(service_module, "SHUTDOWN_GRACE_S", 0.01)
    service = bench.service(config(receiver="{hang_on_shutdown: true}"))
    await service.start()
    begun = time.monotonic()
    await service.shutdown()
    assert time.monotonic() - begun < 5
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]
    assert service.board.get("receivers/src").status is Status.PERMANENT
    assert service.board.get("exporters/tap").status is Status.STOPPED


async def test_a_defect_in_shutdown_stops_nobody_else(bench: Bench) -> None:
    """The error is on the board, and what comes after is flushed and stopped."""
    service = bench.service(config(receiver="{shutdown_defect: oops}"))
    await service.start()
    await service.shutdown()
    assert bench.did("shutdown") == ["src", "step", "tap", "ext"]
    assert "oops" in service.board.get("receivers/src").reason


async def test_components_report_their_own_status(bench: Bench) -> None:
    """What a component reports stands under its own key; `report` says whether that was a change."""
    service = bench.service(config())
    await service.start()
    report = bench.source().settings.report
    assert report(Status.RECOVERABLE, "no answer")
    assert not report(Status.RECOVERABLE, "no answer")
    assert service.board.get("receivers/src").reason == "no answer"
    assert service.board.get("exporters/tap").status is Status.OK
    await service.shutdown()
    assert not report(Status.OK, "")
    assert service.board.get("receivers/src").status is Status.STOPPED


async def test_a_started_component_finds_extensions_and_can_stop_the_service(bench: Bench) -> None:
    """The host knows extensions by id, only while they run, and no other component as one."""
    service = bench.service(config())
    assert service.extension(ComponentID("ext")) is None
    await service.start()
    host = bench.source().host
    assert host is not None
    assert host.extension(ComponentID("ext")) is bench.part("ext")
    assert host.extension(ComponentID("src")) is None
    assert host.extension(ComponentID("ext", "other")) is None
    host.stop("the recording was read to its end")
    await service.wait()
    await service.shutdown()


NODE = "receivers: {src: }\nexporters: {tap: }\nservice: {%spipelines: {metrics: {receivers: [src], exporters: [tap]}}}"


@pytest.mark.parametrize(
    ("key", "environ", "expected"),
    [
        ("node: from-config, ", {"NODE_NAME": "from-env"}, "from-config"),
        ("", {"NODE_NAME": "from-env"}, "from-env"),
        ("", {"NODE_NAME": ""}, socket.gethostname()),
        ("", {}, socket.gethostname()),
        ("node: '', ", {"NODE_NAME": "from-env"}, "from-env"),
    ],
)
def test_the_node_is_named_by_config_then_environment_then_host(
    bench: Bench, key: str, environ: dict[str, str], expected: str
) -> None:
    """`service.node`, else NODE_NAME, else the hostname; empty ones do not count."""
    assert node_name(bench.config(NODE % key), environ) == expected
