"""How the child that owns NVML is started, whoever starts it.

Invariant: constants and pure functions of their arguments and of which folders are there; nothing is started here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpulens.nvml.places import LIBRARY_FOLDERS

# -P: a module of the current folder must not be taken for one of ours.
COMMAND: Final = (sys.executable, "-P", "-m", "gpulens.nvml")


def environment(inherited: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """The child's environment: the library is found by LD_LIBRARY_PATH, which the loader reads at exec only, and the
    child imports the same gpulens as we, from a checkout too."""
    libraries = folders or [folder for folder in LIBRARY_FOLDERS if Path(folder).is_dir()]
    ours = str(Path(__file__).parents[2])
    return {
        **inherited,
        "LD_LIBRARY_PATH": _path(*libraries, inherited.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _path(ours, inherited.get("PYTHONPATH", "")),
    }


def _path(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)
