"""What every test may ask for: reference pages beside the checkout, golden files, free ports and real peers.

Invariant: a fixture whose thing is missing skips, with a reason that starts with `needs`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parents[1]

# A busy machine makes single examples slow: that is no finding. In CI the same examples come every time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --update-goldens."""
    parser.addoption("--update-goldens", action="store_true", help="write golden files instead of comparing")


@dataclass(frozen=True, slots=True)
class Golden:
    """Compares a result with the file of that name in the folder `golden` beside the test file."""

    folder: Path
    update: bool

    def __call__(self, name: str, actual: str | bytes) -> None:
        """Asserts that `actual` is what the file holds, byte by byte; or writes it (--update-goldens)."""
        path = self.folder / name
        data = actual.encode() if isinstance(actual, str) else actual
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return
        assert path.is_file(), f"{path} is missing: run `make goldens`, then read what it wrote"
        expected = path.read_bytes()
        if isinstance(actual, str):
            assert actual == expected.decode(), f"differs from {path}"
        else:
            assert data == expected, f"differs from {path}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The golden files of the asking test."""
    return Golden(request.path.parent / "golden", bool(request.config.getoption("--update-goldens")))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the checkout: pages of real exporters. Skips where it is absent."""
    path = REPO.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs shared: the folder is not beside this checkout")
    return path


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that names a TCP port of 127.0.0.1 nobody listens on, another one each call."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return pick


def _program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: apt-get install {package}")
    return path


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of Prometheus' own checker."""
    return _program("promtool", "prometheus")


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    """Path of a real Prometheus server."""
    return _program("prometheus", "prometheus")


@pytest.fixture(scope="session")
def rotel_binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of rotel's agent, a third-party OTLP server that comes inside its Python package. The agent is linked with
    libpython, which stands beside an interpreter that was built for itself, where the loader does not look."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        pytest.skip("needs rotel: pip install rotel")
    path = Path(spec.origin).with_name("rotel-agent")
    if not os.access(path, os.X_OK):
        pytest.skip(f"needs rotel: {path} can't be run")
    library = sysconfig.get_config_var("LIBDIR") or ""
    wrapper = tmp_path_factory.mktemp("rotel") / "rotel-agent"
    wrapper.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{library}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\nexec "{path}" "$@"\n'
    )
    wrapper.chmod(0o755)
    tried = subprocess.run([wrapper, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()
        pytest.skip(f"needs rotel: it does not start: {reason[-1] if reason else tried.returncode}")
    return str(wrapper)
