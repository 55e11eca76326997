"""What `gpulens doctor` reads from files: the cards, the driver and its library, the Python binding, device nodes.

Invariant: nothing here opens a device or loads a library (that may hang in the driver); files are read below `root`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from gpulens.nvml.places import CONTAINER_FOLDER, HOST_FOLDER, LIBRARY_FOLDERS
from gpulens.nvml.protocol import Json
from gpulens.pipeline.doctor_report import Finding, Verdict

LIBRARY: Final = "libnvidia-ml.so.1"

_MOUNT_FIX: Final = (
    f"on GKE mount the host's folder {HOST_FOLDER} at {CONTAINER_FOLDER} (hostPath) and set"
    f" LD_LIBRARY_PATH={LIBRARY_FOLDERS[0]}; elsewhere install the NVIDIA driver and, in a container, use the"
    " NVIDIA runtime (runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=utility)"
)

_LOADER_FOLDERS: Final = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
_IN_CACHE: Final = re.compile(rb"(/[^\0]+/" + re.escape(LIBRARY.encode()) + rb")\0")
_MODULE_VERSION: Final = re.compile(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d{3,4}(?:\.\d+)+)")
_VERSION: Final = re.compile(r"\d{3,4}(?:\.\d+)+")
_NODE: Final = re.compile(r"nvidia\d+")

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
_ACCELERATOR: Final = "0x1200"

_NEEDED_CALL: Final = "def nvmlGpmQueryDeviceSupport("
"""Old forks of the binding carry the same module name and lack it."""


@dataclass(frozen=True, slots=True)
class Library:
    """Where the driver's library is: `folder` "" when it was not found; `by_loader` says that the loader finds it
    without help; `version` as its file is named, "" where the name does not tell."""

    folder: str
    by_loader: bool
    version: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Binding:
    """The installed `pynvml` module: the newest driver it was made for (0 = unknown)."""

    driver: int
    finding: Finding


def below(root: Path, path: str) -> Path:
    """An absolute path of the machine, seen below `root`."""
    return root / path.lstrip("/")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return ""


# --- the cards ---------------------------------------------------------------------------------------------------


def hardware(root: Path) -> Finding:
    """Which accelerators the PCI bus shows. A GPU is there or not whatever drivers, mounts and permissions say."""
    devices = _listed(below(root, "/sys/bus/pci/devices"))
    found = [(_text(each / "vendor"), _text(each / "class")) for each in devices]
    gpus = sum(vendor == _NVIDIA and kind.startswith(_DISPLAY) for vendor, kind in found)
    others = sum(vendor != _NVIDIA and kind.startswith(_ACCELERATOR) for vendor, kind in found)
    facts: dict[str, Json] = {"nvidia": gpus, "others": others}
    also = f"; {others} accelerator(s) of other vendors: their exporters are read by the prometheus receiver"
    if gpus:
        text = f"{gpus} NVIDIA GPU(s) on the PCI bus" + (also if others else "")
        return Finding("hardware", "GPUs", Verdict.OK, text, facts=facts)
    if not devices:
        return Finding(
            "hardware",
            "GPUs",
            Verdict.UNKNOWN,
            "the PCI bus can't be seen (/sys/bus/pci/devices is empty)",
            "mount the host's /sys; virtual machines and WSL may have GPUs that no PCI bus shows",
            facts,
        )
    return Finding(
        "hardware",
        "GPUs",
        Verdict.MISSING,
        "no NVIDIA GPU on the PCI bus" + (also if others else ""),
        "run on a GPU node; without one, `gpulens demo` shows everything on a simulated node",
        facts,
    )


def device_nodes(root: Path) -> Finding:
    """/dev/nvidiactl and /dev/nvidiaN: NVML needs them readable. They are looked at and not opened."""
    dev = below(root, "/dev")
    gpus = [each for each in _listed(dev) if _NODE.fullmatch(each.name)]
    control = dev / "nvidiactl"
    names: list[Json] = [each.name for each in gpus]
    facts: dict[str, Json] = {"control": control.exists(), "gpus": names}
    fix = (
        "a container gets them by privileged: true, by a mount of /dev, or by the NVIDIA runtime"
        " (NVIDIA_VISIBLE_DEVICES=all); on a host, load the driver (nvidia-modprobe -u -c=0)"
    )
    if not control.exists() and not gpus:
        text = "there is neither /dev/nvidiactl nor /dev/nvidia0"
        return Finding("device-nodes", "device nodes", Verdict.MISSING, text, fix, facts)
    lacking = [] if control.exists() else ["/dev/nvidiactl"]
    if not gpus:
        lacking.append("/dev/nvidia0")
    if lacking:
        text = f"{' and '.join(lacking)} is not there"
        return Finding("device-nodes", "device nodes", Verdict.MISSING, text, fix, facts)
    closed = [f"/dev/{each.name}" for each in (control, *gpus) if not os.access(each, os.R_OK | os.W_OK)]
    if closed:
        text = f"no permission for {', '.join(closed)}"
        fix = "run as root, or give this user read and write permission for them (the driver's default is 0666)"
        return Finding("device-nodes", "device nodes", Verdict.WARN, text, fix, facts)
    text = f"/dev/nvidiactl and {len(gpus)} GPU(s): {', '.join(each.name for each in gpus)}"
    return Finding("device-nodes", "device nodes", Verdict.OK, text, facts=facts)


# --- the driver's library ----------------------------------------------------------------------------------------


def driver_library(root: Path, environ: Mapping[str, str], more: Sequence[str] = ()) -> Library:
    """Where libnvidia-ml.so.1 is, in the loader's order, then in the places that only gpulens looks into: `more` (the
    config's `library_path`) and GKE's folders."""
    flaws: list[str] = []
    own = tuple(more)
    path = tuple(each for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each.startswith("/"))
    for how, folders in (
        ("library_path", own),
        ("LD_LIBRARY_PATH", path),
        ("the loader's cache", _cached(root)),
        ("the loader's folders", _LOADER_FOLDERS),
        ("where GKE puts it", LIBRARY_FOLDERS),
    ):
        for folder in folders:
            file = below(root, folder) / LIBRARY
            flaw = _flaw(file)
            if flaw is None:
                continue
            if flaw:
                flaws.append(f"{folder}/{LIBRARY} {flaw}")
                continue
            by_loader = how not in ("library_path", "where GKE puts it")
            return _found(file, folder, how, by_loader=by_loader)
    verdict = Verdict.WARN if flaws else Verdict.MISSING
    text = "; ".join(flaws) if flaws else f"{LIBRARY} is nowhere the loader looks, nor where GKE puts it"
    finding = Finding("driver-library", "driver library", verdict, text, _MOUNT_FIX, {"folder": ""})
    return Library("", False, "", finding)


def _found(file: Path, folder: str, how: str, *, by_loader: bool) -> Library:
    version = _VERSION.search(file.resolve().name)
    text = f"{folder}/{LIBRARY} ({how})"
    if not by_loader:
        text += "; gpulens puts that folder before LD_LIBRARY_PATH for NVML"
    facts: dict[str, Json] = {"folder": folder, "how": how, "version": version[0] if version else ""}
    finding = Finding("driver-library", "driver library", Verdict.OK, text, facts=facts)
    return Library(folder, by_loader, version[0] if version else "", finding)


def _cached(root: Path) -> tuple[str, ...]:
    """Folders that /etc/ld.so.cache names for the library: its strings end with a zero byte each."""
    try:
        cache = below(root, "/etc/ld.so.cache").read_bytes()
    except OSError:
        return ()
    found = (str(Path(each.decode("utf-8", "replace")).parent) for each in _IN_CACHE.findall(cache))
    return tuple(dict.fromkeys(found))


def _flaw(file: Path) -> str | None:
    """None: no such file. "": it looks right. Otherwise what is wrong with it."""
    try:
        size = file.stat().st_size
    except PermissionError:
        return "may not be read"
    except OSError:
        return "is a link to a file that is not there" if file.is_symlink() else None
    if size == 0:  # image builds under the NVIDIA runtime leave empty files where it mounts the real ones
        return "is an empty file: an image was built under the NVIDIA runtime and runs without it"
    return "" if os.access(file, os.R_OK) else "may not be read"


# --- the Python binding ------------------------------------------------------------------------------------------


def binding(python_path: Sequence[str]) -> Binding:
    """Which distribution owns the module `pynvml`. The module is read and not imported."""
    owners, names = _owners(python_path)
    source = _module(python_path)
    shown = ", ".join(f"{name} {version}" for name, version in owners) or "no distribution that says so"
    listed: list[Json] = [f"{name} {version}" for name, version in owners]
    facts: dict[str, Json] = {"distributions": listed}
    if source is None:
        return Binding(
            0,
            Finding(
                "binding",
                "Python binding",
                Verdict.MISSING,
                "nvidia-ml-py (module pynvml) is not installed",
                "pip install '.[nvidia]' in gpulens's checkout",
                facts,
            ),
        )
    others = [name for name, _ in owners if name != "nvidia-ml-py"]
    version = next((version for name, version in owners if name == "nvidia-ml-py"), "")
    driver = _driver_of(version)
    if _NEEDED_CALL not in source or others:
        what = "lacks calls that gpulens needs" if _NEEDED_CALL not in source else "may be another one's"
        uninstall = f"pip uninstall {' '.join(others)} && " if others else ""
        fix = f"{uninstall}pip install --force-reinstall 'nvidia-ml-py>=12.535.133'"
        text = f"the module pynvml belongs to {shown} and {what}"
        return Binding(driver, Finding("binding", "Python binding", Verdict.WARN, text, fix, facts))
    if "pynvml" in names:
        text = f"{shown}; the distribution pynvml is there too, whose hook runs in every Python of this environment"
        fix = "pip uninstall pynvml (the module pynvml stays: nvidia-ml-py brings it)"
        return Binding(driver, Finding("binding", "Python binding", Verdict.WARN, text, fix, facts))
    return Binding(driver, Finding("binding", "Python binding", Verdict.OK, shown, facts=facts))


def _owners(python_path: Sequence[str]) -> tuple[list[tuple[str, str]], set[str]]:
    """(name, version) of what installed pynvml.py, and the names of everything installed."""
    owners: list[tuple[str, str]] = []
    names: set[str] = set()
    for each in metadata.distributions(path=list(python_path)):
        try:
            name = (each.name or "").lower().replace("_", "-")
        except (KeyError, FileNotFoundError):  # what a broken uninstall leaves behind
            continue
        if not name or name in names:
            continue
        names.add(name)
        record = each.read_text("RECORD") or each.read_text("installed-files.txt") or ""
        if any(line.startswith(("pynvml.py,", "pynvml/__init__.py,", "../pynvml.py")) for line in record.splitlines()):
            owners.append((name, each.version))
    return owners, names


def _module(python_path: Sequence[str]) -> str | None:
    for folder in python_path:
        for name in ("pynvml/__init__.py", "pynvml.py"):
            file = Path(folder or ".") / name
            if file.is_file():
                return _text(file)
    return None


def _driver_of(version: str) -> int:
    """The driver that a version of nvidia-ml-py was made for: 13.590.48 is R590."""
    parts = version.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


# --- versions and visibility -------------------------------------------------------------------------------------


def versions(root: Path, library: str, made_for: int, told: str = "") -> Finding:
    """The loaded driver against its library and the binding. `told` is what NVML itself says, "" where it does not."""
    match = _MODULE_VERSION.search(_text(below(root, "/proc/driver/nvidia/version")))
    loaded = match[1] if match else ""
    driver = told or loaded
    facts: dict[str, Json] = {"driver": driver, "loaded": loaded, "library": library, "binding": made_for}
    if not driver:
        return Finding(
            "driver",
            "driver",
            Verdict.MISSING,
            "no NVIDIA driver is loaded (there is no /proc/driver/nvidia/version)",
            "install the driver on the node (GKE: gpu-driver-version=latest on the node pool, or its installer's"
            " DaemonSet) and load it",
            facts,
        )
    if loaded and library and loaded != library:
        return Finding(
            "driver",
            "driver",
            Verdict.WARN,
            f"the loaded driver is {loaded}, its library {library}: NVML refuses to start like this",
            "after an upgrade: restart this pod so that the new library is mounted, or reboot the node so that the new"
            " driver is loaded",
            facts,
        )
    major = int(driver.split(".", 1)[0])
    if made_for and major > made_for:
        return Finding(
            "driver",
            "driver",
            Verdict.WARN,
            f"{driver} is newer than the binding (made for R{made_for}): figures new in it are not read",
            "pip install --upgrade nvidia-ml-py",
            facts,
        )
    made = f", the binding knows drivers up to R{made_for}" if made_for else ""
    return Finding("driver", "driver", Verdict.OK, f"{driver}{made}", facts=facts)


def visibility(every_process: bool | None) -> Finding:
    """Whether the processes of the whole node can be seen; None = it could not be found out."""
    facts: dict[str, Json] = {"every_process": every_process}
    if every_process is None:
        text = "whether the node's processes can be seen is not known"
        fix = "mount /proc"
        return Finding("processes", "processes", Verdict.UNKNOWN, text, fix, facts)
    if every_process:
        return Finding("processes", "processes", Verdict.OK, "all of the node's processes can be seen", facts=facts)
    return Finding(
        "processes",
        "processes",
        Verdict.WARN,
        "only processes of this container can be seen: NVML leaves the others out without an error",
        "set hostPID: true on the pod, if processes are to tell who uses a shared GPU",
        facts,
    )


def in_first_namespace(root: Path) -> bool | None:
    """Whether we are in the machine's first PID namespace, whose number is fixed in the kernel
    (PROC_PID_INIT_INO, include/linux/proc_ns.h)."""
    try:
        return str(below(root, "/proc/self/ns/pid").readlink()) == "pid:[4026531836]"
    except OSError:
        return None
