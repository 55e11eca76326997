"""Compiles the fake library from the C files beside this module.

Invariant: one set of sources, flags and hidden symbols is compiled once into the cache; a folder gets a copy with the
name that the binding asks the loader for, and that copy reads the file `state` beside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
_FOLDER = Path(__file__).parent
_SOURCES = ("fake_nvml.c", "fake_errors.c", "fake_state.c", "fake_activity.c")
_HEADERS = ("fake_nvml.h", "fake_state.h", "fake_calls.h")
_FLAGS = ("-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}")
_LIMIT_S = 120.0


class BuildError(Exception):
    """The library can't be built here; the text says why."""


def compiler() -> str | None:
    """The C compiler to use: $CC, cc, gcc or clang; None where there is none."""
    return next((found for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if (found := which(name))), None)


def which(name: str) -> str | None:
    """The path of a program; None for an empty name and where there is none."""
    return shutil.which(name) if name else None


def build(folder: Path, hidden: Iterable[str] = (), cache: Path | None = None) -> Path:
    """Puts the library into `folder` and returns its path; `hidden` names are not in it, as in an older driver's.

    `cache` is where compiled libraries are kept (default: in the user's own folder of temporary files). Raises
    BuildError where there is no compiler, where it fails, and where a folder can't be written.
    """
    names = sorted(set(hidden))
    store = cache or Path(tempfile.gettempdir()) / f"gpulens-fake-nvml-{os.getuid()}"
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        if store.stat().st_uid != os.getuid():
            raise BuildError(f"{store} belongs to somebody else")
        built = store / f"{_fingerprint(names)}.so"
        if not built.exists():
            _compile(built, names)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / LIBRARY
        # By a new file, so that a process that has the old one mapped goes on with it.
        fresh = folder / f"{LIBRARY}.{os.getpid()}"
        shutil.copyfile(built, fresh)
        fresh.replace(target)
    except OSError as error:
        raise BuildError(f"the fake NVML library can't be put into {folder}: {error}") from error
    return target


def _fingerprint(hidden: Iterable[str]) -> str:
    digest = hashlib.sha256(" ".join((compiler() or "", *_FLAGS, *hidden)).encode())
    for name in (*_HEADERS, *_SOURCES):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()[:24]


def _compile(target: Path, hidden: Iterable[str]) -> None:
    program = compiler()
    if program is None:
        raise BuildError("no C compiler found (cc, gcc, clang or $CC): the fake NVML library can't be built")
    fresh = target.with_suffix(f".{os.getpid()}")
    # A hidden call is compiled under another name: looking it up by its own fails as it would with an older library.
    renamed = [f"-D{name}=hidden_{name}" for name in hidden]
    sources = [str(_FOLDER / name) for name in _SOURCES]
    command = [program, *_FLAGS, *renamed, "-o", str(fresh), *sources, "-lpthread", "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{program} did not end within {_LIMIT_S:g} s") from error
    if done.returncode:
        raise BuildError(f"{program} failed: {done.stderr.strip()[:2000]}")
    fresh.replace(target)
