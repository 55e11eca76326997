"""Runs `cuda_load.py` in a process of its own, on one GPU or MIG instance, with a time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_START_S = 30.0
_STOP_S = 10.0


class LoadError(Exception):
    """There is no load; the text says why."""


@dataclass(slots=True)
class Load:
    """A load that runs. `facts` are the child's words when it was ready, `done` those at its end."""

    process: subprocess.Popen[str]
    facts: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)


@contextmanager
def loaded(kind: str, share: float, uuid: str, seconds: float) -> Iterator[Load]:
    """The GPU at work while the context lasts, `seconds` at most. Raises LoadError."""
    command = [sys.executable, str(Path(__file__).with_name("cuda_load.py")), "--kind", kind, "--share", f"{share:g}",
               "--seconds", f"{seconds:g}", "--until-eof"]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    load = Load(process)
    try:
        load.facts = _ready(process, time.monotonic() + _START_S)
        yield load
    finally:
        _end(load)


def _ready(process: subprocess.Popen[str], deadline: float) -> dict[str, float]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    line = process.stdout.readline() if ready else ""
    facts = json.loads(line) if line else {"event": "none", "reason": "the load said nothing"}
    if facts["event"] != "ready":
        raise LoadError(str(facts.get("reason")))
    return {key: float(value) for key, value in facts.items() if key != "event"}


def _end(load: Load) -> None:
    try:
        out, _ = load.process.communicate(timeout=_STOP_S)  # closes its standard input, which tells it to end
    except subprocess.TimeoutExpired:
        load.process.kill()
        load.process.communicate()
        return
    for line in out.splitlines():
        facts = json.loads(line) if line.startswith("{") else {}
        if facts.get("event") == "done":
            load.done = {key: float(value) for key, value in facts.items() if key != "event"}
