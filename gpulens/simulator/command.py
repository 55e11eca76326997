"""`gpulens simulate WORLD.yaml`: a node as a program.

Invariant: it tells where everything listens before it does anything else, and ends on SIGTERM or SIGINT alone
(or when the asked-for time is over) with the socket file removed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpulens.pipeline.errors import StartError
from gpulens.simulator.inventory import write_inventory
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.world_state import WorldState, follow_world
from gpulens.simulator.reading import shipped_worlds
from gpulens.simulator.schema import parse_duration
from gpulens.simulator.server import Simulator, serve
from gpulens.simulator.world import World

DEFAULT_DCGM = "127.0.0.1:9400"
DEFAULT_GKE = "127.0.0.1:2112"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `simulate` takes: its names in the namespace are those of its parameters."""
    known = ", ".join(shipped_worlds())
    socket = Path(tempfile.gettempdir()) / "gpulens" / "kubelet.sock"
    parser.add_argument("world_path", metavar="WORLD", help=f"a world file, or one that comes along: {known}")
    parser.add_argument("--dcgm", default=DEFAULT_DCGM, help="where dcgm-exporter listens (default %(default)s)")
    parser.add_argument("--gke", default=DEFAULT_GKE, help="where GKE's collector listens (default %(default)s)")
    parser.add_argument("--kubelet", default=str(socket), help="the Pod Resources socket (default %(default)s)")
    parser.add_argument(
        "--pods", default=str(socket.with_name("pods.sock")), help="the kubelet's Pods API (default %(default)s)"
    )
    parser.add_argument(
        "--inventory",
        default=str(socket.with_name("inventory.jsonl")),
        help="where the map of MIG instances is written as a recording (default %(default)s)",
    )
    parser.add_argument(
        "--nvml",
        default=str(socket.with_name("nvml")),
        metavar="DIR",
        help="put a fake libnvidia-ml.so.1 here, with its state and a /proc of the pods' processes; needs a C compiler "
        "(default %(default)s)",
    )
    parser.add_argument("--scale", type=_scale, default=1.0, help="simulated seconds per second (default 1)")
    parser.add_argument("--duration", type=_duration, default=None, help="stop after this time, as in 20s")


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor above 0")
    return value


def _duration(text: str) -> float:
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(value, float) or value <= 0:
        raise argparse.ArgumentTypeError("a duration is longer than 0s")
    return value


def scaled_now(start_s: float, scale: float, monotonic: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """A clock in simulated seconds since 1970 that begins at `start_s` now and runs `scale` times as fast."""
    origin = monotonic()
    return lambda: start_s + (monotonic() - origin) * scale


async def simulate(
    world_path: str,
    *,
    dcgm: str = DEFAULT_DCGM,
    gke: str = DEFAULT_GKE,
    kubelet: str,
    pods: str = "",
    inventory: str = "",
    nvml: str = "",
    scale: float = 1.0,
    duration: float | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves the world until SIGTERM or SIGINT, or for `duration` real seconds.

    Raises ConfigError for a bad world and StartError where something can't be listened on.
    """
    world = World.load(world_path)
    if inventory:
        _write_inventory(world, Path(inventory))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    now = scaled_now(world.start_s, scale)
    try:
        async with contextlib.AsyncExitStack() as stack:
            simulator = await stack.enter_async_context(
                serve(world, now, dcgm=dcgm, gke=gke, kubelet=kubelet, pods=pods or None)
            )
            library = await _nvml(stack, world, now, Path(nvml), scale) if nvml else ""
            say(endpoints(simulator, scale) + library)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), duration)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _nvml(
    stack: contextlib.AsyncExitStack, world: World, now: Callable[[], float], folder: Path, scale: float
) -> str:
    """Serves the fake NVML while the stack lasts; the line that says where it is, or why it is not there."""
    try:
        state: WorldState = await stack.enter_async_context(follow_world(world, now, folder, scale=scale))
    except BuildError as error:
        return f"\n  NVML           not simulated: {error}"
    except OSError as error:
        raise StartError(f"simulate: {folder} can't be written: {error.strerror}; name another with --nvml") from error
    return f"\n  NVML           {folder} (LD_LIBRARY_PATH, or the receiver's library_path); processes in {state.proc}"


def _write_inventory(world: World, path: Path) -> None:
    try:
        write_inventory(world, path)
    except OSError as error:
        raise StartError(
            f"the inventory {path} can't be written: {error.strerror}; name another with --inventory"
        ) from error


def endpoints(simulator: Simulator, scale: float) -> str:
    """What is served where, for people."""
    world = simulator.world
    gpus = len(world.devices())
    refused = " (refused on this node)" if world.gke_refuses() else ""
    return "\n".join(
        (
            f"node {world.spec.node}: {gpus} GPUs, {len(world.spec.pods)} pods, time x{scale:g}",
            f"  dcgm-exporter  {simulator.dcgm_url}",
            f"  GKE collector  {simulator.gke_url}{refused}",
            f"  Pod Resources  {simulator.kubelet_endpoint}",
            *([f"  Pods API       {simulator.pods_endpoint}"] if simulator.pods_endpoint else []),
        )
    )
