"""The child process that owns NVML, driven by its frames as the receiver drives it, with its cost."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpulens.nvml.launch import COMMAND
from gpulens.nvml.protocol import HEADER, Do, Message, Say, Tier, frame, message, size

_START_S = 30.0  # without persistence mode starting NVML takes seconds a GPU
_STOP_S = 5.0


class ChildError(Exception):
    """The child did not do what it should."""


class Child:
    """`python -m gpulens.nvml` and its pipes. What it tells people goes to `said`: it matters only where it fails."""

    def __init__(self, environment: Mapping[str, str], said: IO[bytes]) -> None:
        self._said = said
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**environment, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        self._held = b""
        self._tick = 0
        self.driver: Message = {}

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def send(self, body: Message) -> None:
        """One frame to the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(frame(body))
        self._process.stdin.flush()

    def receive(self, deadline: float) -> Message:
        """The next frame. Raises ChildError at the deadline and at the end of the pipe."""
        head = self._bytes(HEADER.size, deadline)
        got = message(self._bytes(size(head), deadline))
        if got.get("say") == Say.DRIVER:
            self.driver = got
        return got

    def _bytes(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while len(self._held) < count:
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildError("no answer in time")
            more = os.read(source, 1 << 16)
            if not more:
                raise ChildError(f"the child ended with {self._process.wait(_STOP_S)}: {self._last_words()}")
            self._held += more
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"

    def read(self, tier: Tier, limit_s: float = 10.0) -> tuple[float, list[Message]]:
        """(seconds until the last GPU answered, the answers). Raises ChildError."""
        self._tick += 1
        begin = time.perf_counter()
        deadline = time.monotonic() + limit_s
        self.send({"do": Do.READ, "tick": self._tick, "tier": tier})
        waiting: set[object] | None = None
        answers: list[Message] = []
        while waiting is None or waiting:
            got = self.receive(deadline)
            if got.get("tick") != self._tick:
                if got.get("say") == Say.SHAPE:
                    answers.append(got)
                continue
            if got["say"] == Say.ASKED:
                gpus = got.get("gpus")
                waiting = set(gpus) if isinstance(gpus, list) else set()
                waiting -= {answer.get("gpu") for answer in answers}
            else:
                answers.append(got)
                if waiting is not None:
                    waiting.discard(got.get("gpu"))
        return time.perf_counter() - begin, answers

    def stop(self) -> float:
        """Asks the child to end; returns after how many seconds it did. Kills it where it did not."""
        begin = time.monotonic()
        try:
            self.send({"do": Do.STOP})
            self._process.communicate(timeout=_STOP_S)
        except (subprocess.TimeoutExpired, BrokenPipeError, ValueError):
            self._process.kill()
            self._process.communicate()
        return time.monotonic() - begin


@contextmanager
def running(environment: Mapping[str, str]) -> Iterator[Child]:
    """A child that has found its GPUs."""
    with tempfile.TemporaryFile() as said:
        yield from _serving(Child(environment, said))


def _serving(child: Child) -> Iterator[Child]:
    try:
        child.send(
            {
                "do": Do.CONFIGURE,
                "call_timeout_s": 5,
                "hung": [],
                "proc": "/proc",
                "host_pid": "auto",
                "processes": True,
            }
        )
        deadline = time.monotonic() + _START_S
        while not child.driver:
            child.receive(deadline)
        if not child.driver.get("up"):
            raise ChildError(f"the driver is not there: {child.driver.get('text') or child.driver.get('reason')}")
        yield child
    finally:
        child.stop()


@dataclass(slots=True)
class Cost:
    """What some ticks cost the child: seconds of latency and of CPU each, private memory at the end."""

    tier: Tier
    latencies: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    private_bytes: int = 0
    series: int = 0
    values: int = 0
    gpus: int = 0

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU of the median tick, with the pause before it."""
        return 1e3 * statistics.median(self.cpu_s)

    @property
    def median_ms(self) -> float:
        """Milliseconds until the last GPU answered, of the median tick."""
        return 1e3 * statistics.median(self.latencies)

    @property
    def worst_ms(self) -> float:
        """Milliseconds until the last GPU answered, of the slowest tick."""
        return 1e3 * max(self.latencies)


def measure(child: Child, tier: Tier, ticks: int, pause_s: float) -> Cost:
    """Reads a tier some times; the first reading, which makes the shapes, is not counted."""
    cost = Cost(tier)
    child.read(tier)
    time.sleep(pause_s)
    _, answers = child.read(tier)
    begin = cpu_seconds(child.pid)
    for _ in range(ticks):
        time.sleep(pause_s)
        took, answers = child.read(tier)
        cost.latencies.append(took)
        end = cpu_seconds(child.pid)
        cost.cpu_s.append(end - begin)
        begin = end
    cost.private_bytes = private_bytes(child.pid)
    for answer in answers:
        values = answer.get("values")
        if answer["say"] == Say.READINGS and isinstance(values, list):
            cost.gpus += 1
            cost.series += len(values)
            cost.values += sum(value is not None for value in values)
    return cost


def idle_cpu_ms(child: Child, seconds: float) -> float:
    """Milliseconds of CPU that the child takes in a second in which nobody asks."""
    begin = cpu_seconds(child.pid)
    time.sleep(seconds)
    return 1e3 * (cpu_seconds(child.pid) - begin) / seconds


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads, in nanosecond steps where the kernel tells them so."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return 1024 * sum(int(row[1]) for row in rows if row[0] in {"Private_Clean:", "Private_Dirty:"})
