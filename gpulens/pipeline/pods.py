"""What is known of this node's pods, and who tells it.

Invariant: pods are known by their UID. What the source has not said is None or empty, never a guess. The extension
that watches pods and the components that ask it know only this module, not each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

STATIC_POD_HASH = "kubernetes.io/config.hash"
"""Annotation of a static pod's mirror: the cgroups of its processes carry this hash in place of the UID."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod. `id` is the runtime's, without its `containerd://`; empty while it has none."""

    name: str
    id: str = ""
    started_s: float | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. Times are seconds since 1970. `ready` is None while the pod has no such condition."""

    uid: str
    namespace: str
    name: str
    ip: str = ""
    phase: str = ""
    ready: bool | None = None
    start_s: float | None = None
    deleting: bool = False
    host_network: bool = False
    owner_kind: str = ""
    owner_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    containers: tuple[Container, ...] = ()

    @property
    def ended(self) -> bool:
        """The pod will never run again."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """This node's pods by UID at one moment.

    - `synced`: the whole list has been read once; before that a missing pod says nothing.
    - `problem`: why what is here may be old; empty while the watch works.
    - `version` changes whenever `pods` does.
    """

    pods: Mapping[str, Pod] = field(default_factory=lambda: MappingProxyType({}))
    synced: bool = False
    problem: str = "the pods have not been listed yet"
    version: int = 0


@runtime_checkable
class PodObserver(Protocol):
    """An extension that knows this node's pods."""

    def pods(self) -> PodsSeen:
        """What is known now; the same object while nothing changes."""
