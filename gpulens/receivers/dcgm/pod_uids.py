"""Keeps a pod's UID steady: exporters learn it late, and not every row of a page has it.

Invariant: while a page names a container, its owner's identity does not change: a UID is there from the first
sight on or not at all, and only another UID is another pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpulens.receivers.dcgm.rows import Owner

PodKey = tuple[str, str, str]
"""Namespace, pod, container."""
Sightings = Mapping[PodKey, tuple[str, ...]]
"""The UIDs with which one page names each container, in the page's order; "" where a row lacks it."""


def sightings(owners: Iterable[Owner | None], most: int) -> Sightings:
    """Which UIDs a page's owners have, of the first `most` containers."""
    seen: dict[PodKey, dict[str, None]] = {}
    for owner in owners:
        if owner is not None and (_key(owner) in seen or len(seen) < most):
            seen.setdefault(_key(owner), {})[owner.uid] = None
    return {pod: tuple(uids) for pod, uids in seen.items()}


def with_uid(owner: Owner | None, uids: Mapping[PodKey, str]) -> Owner | None:
    """The owner under the UID that was settled on for its container."""
    if owner is None:
        return None
    settled = uids.get(_key(owner), owner.uid)
    uid = (owner.uid or settled) if settled else ""
    return owner if uid == owner.uid else replace(owner, uid=uid)


def _key(owner: Owner) -> PodKey:
    return owner.namespace, owner.pod, owner.container


class PodUids:
    """What the last page settled on. A container that a page does not name is forgotten."""

    def __init__(self) -> None:
        self._kept: Mapping[PodKey, str] = {}

    def settle(self, seen: Sightings) -> dict[PodKey, str]:
        """The UID of each container for rows that lack it; "" where no row may have one."""
        return {pod: _choose(self._kept.get(pod), uids) for pod, uids in seen.items()}

    def keep(self, uids: Mapping[PodKey, str]) -> None:
        """This is what the page was read with."""
        self._kept = uids


def _choose(kept: str | None, uids: tuple[str, ...]) -> str:
    named = [uid for uid in uids if uid]
    if kept == "" or not named:
        return kept or ""
    return kept if kept in named else named[0]
