"""Who owns a pod in the end, as far as the pod itself tells.

Invariant: nothing is guessed from the shape of a name. A pod names only its direct controller; the one above that is
known where a label that the upper controller sets on its pods says so, and else the direct one stands. (A CronJob
leaves no mark on its Jobs' pods, so such a pod's owner is the Job.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BY_HASH: Final = (("pod-template-hash", "Deployment"), ("rollouts-pod-template-hash", "Rollout"))
"""A ReplicaSet's name is its owner's name, a dash and this label's value. Sources: kubernetes
pkg/controller/deployment/sync.go; argo-rollouts' documentation of its labels."""

_BY_NAME: Final = (
    ("Job", "jobset.sigs.k8s.io/jobset-name", "JobSet"),
    ("StatefulSet", "leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
)
"""(direct controller, label with the upper one's name, upper one). Sources: the projects' API references."""


def top_owner(kind: str, name: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """(kind, name) of the top owner of a pod whose controller is `kind` `name`; both empty for a pod without one."""
    if kind == "ReplicaSet":
        for label, owner in _BY_HASH:
            suffix = f"-{labels.get(label, '')}"
            if suffix != "-" and name.endswith(suffix) and len(name) > len(suffix):
                return owner, name.removesuffix(suffix)
    for direct, label, owner in _BY_NAME:
        if kind == direct and labels.get(label):
            return owner, labels[label]
    return kind, name
