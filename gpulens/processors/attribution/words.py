"""Whose word counts for one device, and under which name: the node's elected source as a rule.

Invariant: the elected source's word about a device goes before every other. A vendor's page counts only for a device
that this source has no name for, neither as held nor as free; and what is said of a whole card holds for a part of it
only where nobody names the part, and where nothing tells that the card is handed out in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpulens.processors.attribution.devices import DeviceMap
from gpulens.processors.attribution.ownership import History, Snapshot

VENDOR = "prometheus"
"""The source that tells of devices by the mapping of a vendor's exporter. The only page that stands in for a device:
what NVIDIA's exporters describe, Pod Resources can name once somebody maps it."""

Around = Callable[[History], Sequence[Snapshot]]
"""The snapshots of a history that are asked."""


@dataclass(frozen=True, slots=True)
class Word:
    """Who is asked about a device: a source, and the key of the device or of its card."""

    source: str
    key: str


def word(
    key: str, elected: str, vendor: str, histories: Callable[[str], list[History]], devices: DeviceMap, around: Around
) -> Word:
    """Who is asked about a device. `vendor` is `VENDOR` where its word may count on this node, else empty."""
    asked = _Asked(histories(elected), devices, around)
    if asked.names(key):
        return Word(elected, key)
    page = _Asked(histories(vendor) if vendor else [], devices, around)
    if page.names(key) and asked.knows_not(key):
        return Word(vendor, key)
    card = devices.cards.get(key, "")
    if card:
        if asked.names(card):
            return Word(elected, card if asked.holds_whole(card) else key)
        if page.names(card) and page.holds_whole(card) and asked.knows_not(key) and asked.knows_not(card):
            return Word(vendor, card)
    return Word(elected, key)


class _Asked:
    """What all streams of one source say together."""

    def __init__(self, histories: list[History], devices: DeviceMap, around: Around) -> None:
        self._said = [(history, around(history)) for history in histories]
        self._devices = devices

    def names(self, key: str) -> bool:
        """One of them says something of the device."""
        return any(history.names(key, snapshots, self._devices) for history, snapshots in self._said)

    def knows_not(self, key: str) -> bool:
        """All that ever said anything have no name for the device."""
        answers = {history.knows_not(key, snapshots, self._devices) for history, snapshots in self._said}
        return answers - {None} == {True}

    def holds_whole(self, card: str) -> bool:
        """None of them tells that the card is handed out in parts."""
        return all(history.holds_whole(card, snapshots, self._devices) for history, snapshots in self._said)
