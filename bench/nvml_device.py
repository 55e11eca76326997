"""What NVML and the nvml receiver do on a real NVIDIA GPU, as a report in Markdown. Under two minutes.

Run: python bench/nvml_device.py [--output report.md]
Needs a GPU with its driver, nvidia-ml-py and gpulens; libcuda.so.1 for the load (no toolkit). The report names models
and versions, no serial numbers, and of UUIDs the first four digits. See docs/nvml-on-a-gpu.md.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device import identity, nvml_child, phases, probes
from bench.device.gateway import Gpu, TimedGateway, found, opened, sees_all_pids
from bench.device.load import Load
from bench.device.markdown import Report, table
from gpulens.nvml.gateway import BindingError, Line
from gpulens.nvml.protocol import Tier
from gpulens.nvml.reason import Failure

LIBRARY = "libnvidia-ml.so.1"
LIMIT_S = 240.0
LATENCY_LIMIT_S = 12.0
BUSY_LIMIT_S = 4.0
CHILD_TICKS = 8
PAUSE_S = 1.05  # longer than the receiver's shortest GPM window, so that each reading measures a new one


class Run:
    """The sections that need NVML in this process, and what they leave for each other."""

    def __init__(self, gateway: TimedGateway, line: Line, args: argparse.Namespace) -> None:
        self.gateway = gateway
        self.line = line
        self.args = args
        self.pids_visible = sees_all_pids()
        self.gpus, self.lacking = found(line, self.pids_visible)
        self.watched = gateway.watch_library()
        self.idle = probes.Latencies()
        self.busy = probes.Latencies()
        self.processes = ""

    @property
    def gpu(self) -> Gpu:
        """The one that is measured."""
        chosen = next((gpu for gpu in self.gpus if gpu.index == self.args.gpu), None)
        if chosen is None:
            raise LookupError(f"there is no usable GPU with index {self.args.gpu}")
        return chosen

    def sections(self, report: Report) -> None:
        """All of them, in the order in which they are read; the latencies wait for those under load."""
        report.section("The machine", lambda: identity.machine(self.line, self.pids_visible))
        report.section("The GPUs", lambda: identity.gpus(self.line, self.gpus, self.lacking))
        report.section("Every row of the receiver's table", lambda: probes.rows(self.line, self.gpus, self.args.pause))
        report.section("What a known load looks like", self.loads)
        report.section("Latency of each call", self.latencies)
        report.section("Processes", lambda: self.processes or "Not looked at.")
        report.section("Events", lambda: probes.events(self.line, self.gpus))
        for gpu in self.gpus:
            gpu.board.windows.clear(self.line)

    def loads(self) -> str:
        """GPM while the GPU is idle, then under each load; under the first also latencies and processes."""
        gpu = self.gpu
        instances = gpu.board.layout.instances
        observer = phases.Observer(self.line, gpu, instances[0] if instances else None)
        self.idle = probes.latency(self.gateway, self.line, gpu, self.args.rounds, LATENCY_LIMIT_S)

        def under_load(load: Load) -> None:
            self.processes = phases.processes_seen(self.line, observer, load)
            self.busy = probes.latency(self.gateway, self.line, gpu, self.args.rounds // 2, BUSY_LIMIT_S)

        try:
            if self.args.no_load:
                idle = phases.Phase("nothing")
                observer.watch(idle, self.args.seconds)
                done, lacking = [idle], ["not asked for"]
            else:
                done, lacking = phases.run(observer, self.args.seconds, under_load)
            self.processes = self.processes or phases.processes_seen(self.line, observer, None)
            return phases.tables(done, lacking, with_gpm=not isinstance(observer.sight().gpm(2), Failure))
        finally:
            observer.close()

    def latencies(self) -> str:
        """The table of calls."""
        return probes.latency_table(self.idle, self.busy, self.watched)


def child_section(pause_s: float) -> str:
    """The child process that owns NVML: how fast it answers for all GPUs, and what it weighs."""
    with nvml_child.running(os.environ) as child:
        idle_ms = nvml_child.idle_cpu_ms(child, pause_s)
        costs = [
            nvml_child.measure(child, Tier.FAST, CHILD_TICKS, pause_s),
            *(nvml_child.measure(child, tier, 2, 0.1) for tier in (Tier.PROCESSES, Tier.ERRORS, Tier.INVENTORY)),
        ]
        stopped = child.stop()
    head = ("tier", "ticks", "GPUs", "series", "with a value", "median ms", "worst ms", "CPU ms a tick", "private MiB")
    lines = [
        (c.tier, len(c.latencies), c.gpus, c.series, c.values, f"{c.median_ms:.1f}", f"{c.worst_ms:.1f}",
         f"{c.cpu_ms:.1f}", f"{c.private_bytes / 2**20:.1f}")
        for c in costs
    ]  # fmt: skip
    return (
        f"{table(head, lines)}\n\nWhile nobody asked it took {idle_ms:.1f} ms of CPU a second; the ticks include it. "
        f"Asked to stop, it ended after {1e3 * stopped:.0f} ms."
    )


def receiver_section(pause_s: float, gpu: str) -> str:
    """The receiver end to end: the canonical series of its last tick for one GPU."""
    from bench.device import receiver  # needs what the agent needs; the other sections do not

    return receiver.shown(receiver.collect(ticks=4, interval_s=pause_s), gpu)


def main() -> int:
    """Reads the command line, runs everything, writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, help="where the report goes (default: standard output)")
    parser.add_argument("--library-path", type=Path, help="a folder that holds libnvidia-ml.so.1")
    parser.add_argument("--gpu", type=int, default=0, help="NVML's index of the GPU that is loaded and timed")
    parser.add_argument("--no-load", action="store_true", help="leave the GPU alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each load is watched")
    parser.add_argument("--rounds", type=int, default=100, help="how often each call is timed")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds between two readings of the child")
    args = parser.parse_args()
    if args.library_path is not None:
        if not (args.library_path / LIBRARY).exists():
            print(f"--library-path {args.library_path}: there is no {LIBRARY} in it", file=sys.stderr)
            return 1
        _with_library(args.library_path)
    begin = time.monotonic()
    report = Report("NVML on a GPU", args.output)
    # A driver that hangs can't be interrupted: say where it stands, and end.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with opened() as (gateway, line):
            run = Run(gateway, line, args)
            run.sections(report)
            gpu = next((one.target.uuid for one in run.gpus if one.index == args.gpu), "")
    except (BindingError, ConnectionError) as error:
        print(f"skipped: {error}")
        return 0
    report.section("The child process", lambda: child_section(args.pause))
    report.section("The receiver", lambda: receiver_section(args.pause, gpu))
    report.close(f"All in all {time.monotonic() - begin:.0f} s.")
    return 0


def _with_library(folder: Path) -> None:
    """Starts over with the folder in LD_LIBRARY_PATH, which the loader reads once."""
    before = os.environ.get("LD_LIBRARY_PATH", "")
    wanted = str(folder.resolve())
    if before.split(os.pathsep)[0] != wanted:
        path = f"{wanted}{os.pathsep}{before}" if before else wanted
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_LIBRARY_PATH": path})


if __name__ == "__main__":
    sys.exit(main())
