"""What the observer knows of the node's pods, as one immutable value.

Invariant: whoever was handed a PodsSeen never sees it change; a pod that comes again as it was keeps its object, and
while nothing changes, so does the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Protocol

from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.pods import Pod, PodsSeen

NOT_SERVED: Final = "not_served"
"""Reason of a WatchError: this kubelet does not have the API, or not for us."""

MAX_ANNOTATION: Final = 1024
"""Longer annotations are left out: kubectl's last-applied-configuration alone can be hundreds of kilobytes a pod."""


class WatchError(ScrapeError):
    """The watch of the pods ended or could not begin; it is tried again, not before `delay_s`."""

    def __init__(self, message: str, reason: str = "failed", delay_s: float = 0.0) -> None:
        super().__init__(message, reason)
        self.delay_s = delay_s


class PodSource(Protocol):
    """Somebody who tells of this node's pods."""

    async def follow(self) -> None:
        """Lists and watches until the watch ends in good order. Raises WatchError."""

    async def close(self) -> None:
        """Lets go of connections; safe when called twice."""


def short_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """The annotations that are kept."""
    return {key: value for key, value in annotations.items() if len(value) <= MAX_ANNOTATION}


def bare_id(container_id: str) -> str:
    """A container's id without its runtime: `containerd://f00` is `f00`."""
    return container_id.rpartition("://")[2]


class KnownPods:
    """The node's pods by UID. `worked` is called whenever a list or a watch shows that they are up to date."""

    def __init__(self, worked: Callable[[], None]) -> None:
        self.seen = PodsSeen()
        self._worked = worked

    def replace(self, pods: Iterable[Pod]) -> None:
        """The whole list as it is now: what is not in it is gone."""
        known = self.seen.pods
        self._publish({pod.uid: known[pod.uid] if known.get(pod.uid) == pod else pod for pod in pods})
        self._worked()

    def retain(self, uids: Collection[str]) -> None:
        """Only these pods are still there."""
        if not self.seen.pods.keys() <= set(uids):
            self._publish({uid: pod for uid, pod in self.seen.pods.items() if uid in uids})

    def put(self, pod: Pod) -> None:
        """One pod as it is now."""
        if self.seen.pods.get(pod.uid) != pod:
            self._publish({**self.seen.pods, pod.uid: pod})

    def remove(self, uid: str) -> None:
        """One pod is gone."""
        if uid in self.seen.pods:
            self._publish({other: pod for other, pod in self.seen.pods.items() if other != uid})

    def working(self) -> None:
        """The watch goes on from where it was: what is known is up to date."""
        if self.seen.synced and self.seen.problem:
            self.seen = replace(self.seen, problem="")
        self._worked()

    def failing(self, problem: str) -> None:
        """What is known may be old from now on."""
        if self.seen.problem != problem:
            self.seen = replace(self.seen, problem=problem)

    def _publish(self, pods: dict[str, Pod]) -> None:
        seen = self.seen
        if pods == seen.pods:
            if not seen.synced or seen.problem:
                self.seen = replace(seen, synced=True, problem="")
            return
        self.seen = PodsSeen(MappingProxyType(pods), synced=True, problem="", version=seen.version + 1)
