"""`gpulens demo`: the real pipeline on a simulated node, on any machine.

Invariant: everything between the node's sockets and the /metrics page is the product; only the node is simulated, and
its time runs faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import tempfile
from pathlib import Path
from typing import TextIO

from gpulens.config import load, resolve
from gpulens.config.durations import parse_duration
from gpulens.config.ids import Kind
from gpulens.pipeline import journal
from gpulens.pipeline.clock import ScaledClock
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.service import Service
from gpulens.simulator.comparison import Ledger, table
from gpulens.simulator.inventory import write_inventory
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.world_state import follow_world
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World

READING = (
    "dcgm-exporter by default gives every GPU to itself; GKE's collector knows the pod, but its duty cycle only says\n"
    "that a kernel was resident (- where it says nothing, as under MIG). gpulens has the pod, and with SM active the\n"
    "share of the chip that works. NVML says which MIG UUID is which instance, and what each process of a shared GPU\n"
    "holds (the lines with \u2514)."
)
READING_WITHOUT_NVML = (
    "dcgm-exporter by default gives every GPU to itself; GKE's collector knows the pod, but its duty cycle only says\n"
    "that a kernel was resident (- where it says nothing, as under MIG). gpulens has the pod, and with SM active the\n"
    "share of the chip that works. MIG owners are known here because the simulated node tells its device inventory."
)
RECEIVERS = "[nvml, k8s_pods, pod_resources, dcgm, gke]"
RECEIVERS_WITHOUT_NVML = "[otlp_json_file/inventory, k8s_pods, pod_resources, dcgm, gke]"
TABLE_EVERY_S = 20.0
"""Real seconds between two tables of a demo that runs until it is stopped."""


async def demo(duration: str, listen: str, world: str, scale: float, record: str, out: TextIO) -> None:
    """Runs the demo for `duration` (a Go duration, "0s" = until SIGINT or SIGTERM) and prints the table to `out`.

    `record` names a folder (it must exist) for raw.jsonl (what the receivers said) and out.jsonl (what came out).
    Raises StartError and ConfigError.
    """
    try:
        seconds = parse_duration(duration)
    except ValueError as error:
        raise StartError(f"--duration {duration}: {error}") from error
    if scale <= 0:
        raise StartError(f"--scale {scale}: simulated seconds per second must be above 0")
    node = World.load(world or "demo")
    clock = ScaledClock(int(node.start_s * 1e9), scale)
    journal.configure("warn", "console")
    with tempfile.TemporaryDirectory(prefix="gpulens-") as folder:
        socket = Path(folder) / "kubelet.sock"
        write_inventory(node, socket.with_name("inventory.jsonl"))

        def now() -> float:
            return clock.now_ns() / 1e9

        async with contextlib.AsyncExitStack() as stack:
            library: Path | None = Path(folder) / "nvml"
            try:
                _require_binding()
                await stack.enter_async_context(follow_world(node, now, Path(folder) / "nvml", scale=scale))
            except BuildError as error:
                print(f"NVML is not simulated: {error}", file=out)
                library = None
            simulator = await stack.enter_async_context(
                serve(node, now, kubelet=socket, pods=socket.with_name("pods.sock"))
            )
            ledger = Ledger()
            service = _service(simulator, ledger, folder, listen, record, clock, node, library)
            await service.start()
            try:
                print(
                    f"A simulated node, {scale:g} times as fast as real; http://{listen}/metrics is served now. "
                    f"A table comes {'after' if seconds else 'every'} {seconds or TABLE_EVERY_S:g} s.",
                    file=out,
                    flush=True,
                )
                while await _runs_on(service, seconds or TABLE_EVERY_S):
                    print(_table(ledger, node, clock.now_ns() / 1e9), file=out)
                    print(READING if library is not None else READING_WITHOUT_NVML, file=out, flush=True)
                    if seconds:
                        break
            finally:
                await service.shutdown()


def _require_binding() -> None:
    """Raises BuildError where nothing could read the simulated library."""
    if importlib.util.find_spec("pynvml") is None:
        raise BuildError("nvidia-ml-py is not installed (in gpulens's checkout: pip install '.[nvidia]')")


def _service(
    simulator: Simulator,
    ledger: Ledger,
    folder: str,
    listen: str,
    record: str,
    clock: ScaledClock,
    world: World,
    library: Path | None,
) -> Service:
    environ = {
        "GPULENS_DEMO_DCGM": simulator.dcgm_url,
        "GPULENS_DEMO_GKE": simulator.gke_url,
        "GPULENS_DEMO_KUBELET": simulator.kubelet_endpoint,
        "GPULENS_DEMO_PODS": simulator.pods_endpoint,
        "GPULENS_DEMO_NVML": str(library or folder),
        "GPULENS_DEMO_INVENTORY": str(Path(folder) / "inventory.jsonl"),
        "GPULENS_DEMO_LISTEN": listen,
        "GPULENS_DEMO_RECORD": record,
    }
    receivers = RECEIVERS if library is not None else RECEIVERS_WITHOUT_NVML
    configs = [
        "preset:demo",
        "yaml:exporters::demo_table:",
        f"yaml:service::pipelines::metrics::receivers: {receivers}",
    ]
    exporters = ["prometheus", "demo_table"]
    if record:
        configs += [
            "yaml:exporters::file/raw::path: ${env:GPULENS_DEMO_RECORD}/raw.jsonl",
            "yaml:exporters::file/out::path: ${env:GPULENS_DEMO_RECORD}/out.jsonl",
            f"yaml:service::pipelines::metrics/raw::receivers: {receivers}",
            "yaml:service::pipelines::metrics/raw::exporters: [file/raw]",
        ]
        exporters.append("file/out")
    configs.append(f"yaml:service::pipelines::metrics::exporters: [{', '.join(exporters)}]")
    registry = Registry([(Kind.EXPORTERS, ledger.factory())])
    config = resolve(load(configs, [], environ), registry)
    return Service(config, world.spec.node, registry, clock)


async def _runs_on(service: Service, seconds: float) -> bool:
    """Waits; False when the service was asked to end meanwhile."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop, signal.Signals(number).name)
    try:
        async with asyncio.timeout(seconds):
            await service.wait()
    except TimeoutError:
        return True
    return False


def _table(ledger: Ledger, world: World, now_s: float) -> str:
    unaware = world.spec.dcgm.model_copy(update={"kubernetes": False, "view": "no_honor_labels"})
    default = World(world.spec.model_copy(update={"dcgm": unaware}))
    names = {
        name: (device.uuid, str(instance.gi))
        for device in world.devices()
        for instance in device.mig
        for name in (instance.uuid, f"{device.uuid}/gi{instance.gi}")
    }
    return table(ledger, default.dcgm_page(now_s), world.gke_page(now_s), names)
