"""Where GKE puts the NVIDIA driver's files.

Invariant: constants only. On the node the driver is installed below HOST_FOLDER, and the device plugin mounts that
folder into containers as CONTAINER_FOLDER (https://cloud.google.com/kubernetes-engine/docs/how-to/gpus, "CUDA
libraries"). The loader looks into neither by itself.
"""

from __future__ import annotations

from typing import Final

HOST_FOLDER: Final = "/home/kubernetes/bin/nvidia"
CONTAINER_FOLDER: Final = "/usr/local/nvidia"
LIBRARY_FOLDERS: Final = (f"{CONTAINER_FOLDER}/lib64", f"{HOST_FOLDER}/lib64")
"""Folders in which libnvidia-ml.so.1 may be, in the order in which to look."""
