"""A simulated GPU node: the truth about it, and the pages and sockets' replies that it shows of itself.

Invariant: every method is a pure function of the world file and of the time given, in seconds since 1970 of
simulated time; the same world and time give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from gpulens.simulator.dcgm_page import render_dcgm
from gpulens.simulator.gke_page import gke_refuses, render_gke
from gpulens.simulator.kubelet import allocatable_reply, list_reply, pod_reply
from gpulens.simulator.reading import read_spec
from gpulens.simulator.truth import Truth


class World(Truth):
    """One node. `start_s` is its first instant; pods with negative starts were there before."""

    @classmethod
    def load(cls, source: Path | str) -> Self:
        """A world from a file, from the name of a shipped one (`demo`, `gke`), or from YAML text.

        Raises ConfigError with every problem and its position.
        """
        return cls(read_spec(source))

    def dcgm_page(self, t_s: float) -> str:
        """dcgm-exporter's /metrics: values of the last refresh under the labels of now."""
        return render_dcgm(self, t_s)

    def gke_page(self, t_s: float) -> str:
        """The /metrics of GKE's collector; empty in its first period and where `gke_refuses` holds."""
        return render_gke(self, t_s)

    def gke_refuses(self) -> bool:
        """Whether nothing listens on GKE's port: on a MIG node, and off GKE."""
        return gke_refuses(self)

    def pod_resources(self, t_s: float) -> bytes:
        """A serialized ListPodResourcesResponse."""
        return list_reply(self, t_s)

    def allocatable(self, t_s: float) -> bytes:
        """A serialized AllocatableResourcesResponse."""
        return allocatable_reply(self, t_s)

    def pod_resources_of(self, t_s: float, namespace: str, name: str) -> bytes | None:
        """A serialized GetPodResourcesResponse; None when the kubelet does not list such a pod."""
        return pod_reply(self, t_s, namespace, name)
