"""Prints the Debian package of the shared libpython that programs linked with it would miss; nothing when none does.

rotel, a peer of the tests, is such a program; Debian keeps the library apart from the interpreter.
"""

import ctypes
import sysconfig
from pathlib import Path

version = sysconfig.get_python_version()
name = f"libpython{version}.so.1.0"
if not (Path(sysconfig.get_config_var("LIBDIR") or "/") / name).exists():
    try:
        ctypes.CDLL(name)
    except OSError:
        print(f"libpython{version}")
