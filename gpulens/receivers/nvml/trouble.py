"""What to do when the driver or its library is not there.

Invariant: a text only; it names the cause and the remedy, for the status and the log.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from gpulens.nvml.places import CONTAINER_FOLDER, HOST_FOLDER, LIBRARY_FOLDERS

_NO_LIBRARY: Final = (
    "libnvidia-ml.so.1 could not be loaded: mount the folder of the driver's libraries into the container and name it "
    f"in 'library_path' (GKE: hostPath {HOST_FOLDER} at {CONTAINER_FOLDER}, library_path "
    f"{LIBRARY_FOLDERS[0]}); elsewhere the container toolkit mounts it with NVIDIA_DRIVER_CAPABILITIES=utility"
)

_BY_CODE: Final = MappingProxyType(
    {
        4: "no permission to use the driver: the container needs /dev/nvidiactl and /dev/nvidia* readable (a privileged"
        " DaemonSet, or the device plugin's mounts)",
        9: "the NVIDIA kernel driver is not loaded on this node: is it a GPU node, and is its driver installed?",
        12: _NO_LIBRARY,
        18: "the driver's library and its kernel module are of different versions, as after an upgrade: restart this"
        " pod so that it mounts the new library, or reboot the node",
        999: "the driver answers 'unknown error', mostly because the container lost its device nodes (systemd"
        " daemon-reload): restart this pod",
    }
)


def explain(reason: str, code: int, text: str) -> str:
    """The cause and the remedy. `reason`, `code` and `text` are the NVML process's words."""
    known = _BY_CODE.get(code)
    if known is None and reason == "permission":
        known = _BY_CODE[4]
    if known is None:
        return f"NVML can't be used: {text or reason or 'it does not say why'}"
    return f"{known} (NVML error {code}{f': {text}' if text else ''})"
