"""The seven families of GKE's nvidia-metrics-collector, and what each becomes.

Invariant: device readings come from the node's families; the containers' families only say who holds what.

Source: the collector's code (container-engine-accelerators, pkg/gpu/nvidia/metrics): duty_cycle is a percentage over
the last 10 s of every 30 s, memory is NVML's v1 figure in bytes, with what the driver reserves for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gpulens.pipeline.data import Value

NODE_SUFFIX: Final = "_gpu_node"
REQUEST: Final = "request"
RESOURCE: Final = "nvidia.com/gpu"

_MAX_BYTES: Final = 1e14


@dataclass(frozen=True, slots=True)
class Family:
    """One device reading. `read` gives the canonical number, None when the page's number is not plausible."""

    metric: str
    read: Callable[[float], Value | None]


def _percent(value: float) -> Value | None:
    return value / 100 if 0 <= value <= 100 else None  # builds before February 2025 could exceed 100


def _bytes(value: float) -> Value | None:
    return round(value) if 0 <= value <= _MAX_BYTES else None


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "duty_cycle": Family("gpu.duty_cycle", _percent),
        "memory_total": Family("hw.gpu.memory.limit", _bytes),
        "memory_used": Family("hw.gpu.memory.usage", _bytes),
    }
)
"""By the containers' name; the node's name has `_gpu_node` behind it."""
