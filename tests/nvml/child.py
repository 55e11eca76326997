"""The child as a real process, driven by its frames."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from gpulens.nvml.launch import COMMAND
from gpulens.nvml.protocol import HEADER, Json, frame, size

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0

Owner = dict[str, str] | None
Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One slot of a reading, with what its shape says of it."""

    device: str
    key: str
    more: tuple[tuple[str, str | int], ...]
    owner: tuple[tuple[str, str], ...]
    value: float | None


@dataclass(slots=True)
class Answer:
    """What came of one GPU for one read."""

    gpu: str
    silent: tuple[str, str, int] | None = None
    values: list[Value] = field(default_factory=list)
    failures: list[tuple[str, str, int]] = field(default_factory=list)
    entities: list[dict[str, str]] = field(default_factory=list)
    shape: int = 0
    epoch: int = 0

    @property
    def reason(self) -> str:
        """Why it was silent; "" when it was not."""
        return self.silent[1] if self.silent else ""

    def rows(self, device: str | None = None) -> list[str]:
        """Row keys in order, of a device or of all."""
        return [one.key for one in self.values if device in {None, one.device}]

    def of(self, key: str, device: str | None = None) -> float | None:
        """The value of the one slot of this row."""
        (found,) = (one.value for one in self.values if one.key == key and device in {None, one.device})
        return found

    def all(self, key: str) -> list[Value]:
        """Every slot of this row."""
        return [one for one in self.values if one.key == key]


class Child:
    """A running child. `other` are the frames that are no answers to a read."""

    def __init__(self, env: Mapping[str, str], **configure: Json) -> None:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "PYTHONPATH": str(REPO)},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._bytes = b""
        self._shapes: dict[int, Frame] = {}
        self._ticks = 0
        self.other: list[Frame] = []
        self.asked: Frame = {}
        settings: dict[str, Json] = {"host_pid": "true", **configure}
        self.send(do="configure", **settings)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, **message: Json) -> None:
        """Sends one frame."""
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))
        self._process.stdin.flush()

    def close_input(self) -> None:
        """Ends the frames that the child gets."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait(LIMIT_S)

    def log(self) -> str:
        """What it wrote to its standard error, once it has ended."""
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def frame(self, limit_s: float = LIMIT_S) -> Frame | None:
        """The next frame; None at the end, or when none came in time."""
        until = time.monotonic() + limit_s
        while True:
            if len(self._bytes) >= HEADER.size:
                end = HEADER.size + size(self._bytes[: HEADER.size])
                if len(self._bytes) >= end:
                    body, self._bytes = self._bytes[HEADER.size : end], self._bytes[end:]
                    found: Frame = json.loads(body)
                    return found
            ready, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._out, 65536) if ready else b""
            if not data:
                return None
            self._bytes += data

    def until(self, say: str, limit_s: float = LIMIT_S, **wanted: object) -> Frame:
        """The next frame of this kind with these fields; others are kept in `other`, where it is looked for first."""

        def fits(one: Frame) -> bool:
            return one["say"] == say and all(one.get(key) == value for key, value in wanted.items())

        for one in self.other:
            if fits(one):
                self.other.remove(one)
                return one
        deadline = time.monotonic() + limit_s
        while (fresh := self.frame(max(0.0, deadline - time.monotonic()))) is not None:
            if fits(fresh):
                return fresh
            self.other.append(fresh)
        raise AssertionError(f"no {say} {wanted} came; before: {self.other[-5:]}")

    def up(self) -> Frame:
        """Waits until the driver is up and the GPUs are known."""
        driver = self.until("driver", up=True)
        self.until("changed", gpu=None)
        return driver

    def read(self, tier: str, limit_s: float = LIMIT_S) -> dict[str, Answer]:
        """One tick: every GPU's answer. A GPU that was asked and does not answer in time is missing."""
        self._ticks += 1
        self.send(do="read", tick=self._ticks, tier=tier)
        self.asked = self.until("asked", tick=self._ticks)
        waiting = set(self.asked["gpus"])
        answers: dict[str, Answer] = {}
        deadline = time.monotonic() + limit_s
        while waiting:
            one = self.frame(max(0.0, deadline - time.monotonic()))
            if one is None:
                break
            if one["say"] == "shape":
                self._shapes[one["shape"]] = one
            elif one.get("tick") == self._ticks and one["say"] in {"readings", "silent"}:
                answers[one["gpu"]] = self._answer(one)
                waiting.discard(one["gpu"])
            else:
                self.other.append(one)
        return answers

    def read_one(self, tier: str) -> Answer:
        """One tick of a machine with one GPU."""
        (answer,) = self.read(tier).values()
        return answer

    def _answer(self, one: Frame) -> Answer:
        if one["say"] == "silent":
            return Answer(one["gpu"], (one["call"], one["reason"], one["code"]))
        shape = self._shapes[one["shape"]]
        assert shape["gpu"] == one["gpu"]
        assert shape["tier"] == one["tier"]
        values = []
        for (entity, key, more, owner), value in zip(shape["series"], one["values"], strict=True):
            device = shape["entities"][entity]["hw.id"]
            values.append(Value(device, key, tuple(sorted(more.items())), tuple(sorted((owner or {}).items())), value))
        failures = [(call, reason, code) for call, reason, code in one["failures"]]
        return Answer(one["gpu"], None, values, failures, shape["entities"], one["shape"], one["epoch"])

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
