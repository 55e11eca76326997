"""Starts real processes for the system tests, waits for what they do, and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
REPO = Path(__file__).resolve().parents[2]


def gpulens(*arguments: str) -> list[str]:
    """The command line of the checkout."""
    return [sys.executable, "-m", "gpulens", *arguments]


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process while the context lasts; its output goes to `log`. It is asked to end, then made to."""
    env = {**os.environ, "PYTHONPATH": str(REPO), **(environ or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=log.parent)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def fetch(url: str) -> str:
    """A page's text. Raises OSError when nobody answers well."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def eventually(read: Callable[[], T | None], log: Path, seconds: float = 60.0) -> T:
    """The first value that `read` gives that is not None (or empty); connection errors count as not yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError, json.JSONDecodeError):
            value = read()
            if value:
                return value
        time.sleep(0.05)  # another process has no event to wait for
    raise AssertionError(f"not within {seconds:g}s; the log says:\n{log.read_text(errors='replace')[-4000:]}")


def query(prometheus: str, expression: str) -> dict[str, float]:
    """pod -> value of an instant query against a Prometheus server."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    rows = json.loads(fetch(url))["data"]["result"]
    return {row["metric"].get("pod", ""): float(row["value"][1]) for row in rows}
