"""What attribution says of itself on the grid: for each device, how its owner was found or why it has none.

Invariant: every device that somebody described or allocated has a `gpu.attribution` series: on each owner's resource
with the method, or on the node's with the reason. A rogue holder has one of its own beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_not

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import (
    AttributeValue,
    Batch,
    Identity,
    Layout,
    Series,
    build_layout,
)
from gpulens.processors.attribution.mapping import OWN
from gpulens.processors.attribution.nodes import Node, Nodes
from gpulens.processors.attribution.ownership import STRANGER, Owners, Reason
from gpulens.processors.attribution.plan import PROCESS, home_of, with_owner


class Reporter:
    """Builds the `gpu.attribution` batch; the layout object stays while nothing changes."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._layout: Layout | None = None
        self._seen: list[object] = []

    def batch(self, nodes: Nodes, time_ns: int) -> Batch | None:
        """The state now, stamped with a grid instant; None while no node is known."""
        seen = [each for node in nodes.all() for each in node.standing()]
        if not seen and self._layout is None:
            return None
        if self._layout is None or len(seen) != len(self._seen) or any(map(is_not, seen, self._seen)):
            layout, _ = build_layout(each for node in nodes.all() for each in _rows(node, nodes))
            # The same rows in another state (a reading's window, an interval) are the same layout.
            self._layout = self._layout if layout == self._layout else layout
            self._seen = seen
        assert self._layout is not None
        return Batch.of(self._layout, [1] * self._layout.size, time_ns, self._stream)


def _rows(node: Node, nodes: Nodes) -> Iterator[Identity]:
    allocated = {key for history in node.sources(node.elected) for key in history.keys_now(node.devices)}
    keys = node.devices.keys | allocated | node.words().keys()
    held = {key: nodes.owners_now(node, key) if node.elected else None for key in keys}
    split = _split(node, held)
    home = home_of(node.resource)
    for key in sorted(keys):
        owners, source = held[key], node.word_now(key).source
        if key in split and not owners:
            continue  # its instances or parts have rows of their own
        reason = _reason(node, nodes, key)
        if owners and reason in (Reason.OWNED, Reason.SHARED):
            for owner in sorted(owners - {STRANGER}, key=repr):
                yield with_owner(home, owner), OWN, _series(node, key, source, reason)
        else:
            yield home, OWN, _series(node, key, "none", reason)
    for key, owner in node.rogues:
        yield with_owner(home, owner), OWN, _series(node, key, PROCESS, Reason.ROGUE)


def _split(node: Node, held: Mapping[str, Owners | None]) -> set[str]:
    """Devices that can't be held themselves: GPUs in MIG mode, and cards of which parts are held."""
    cards = node.devices.cards
    return {
        node.devices.parent(key)
        for key, owners in held.items()
        if key not in cards or (owners and node.word_now(key).key == key)
    }


def _reason(node: Node, nodes: Nodes, key: str) -> Reason:
    if not node.elected:
        return Reason.NO_SOURCE
    reason = nodes.reason_now(node, key)
    if reason in (Reason.OWNED, Reason.SHARED) and not node.devices.is_resolved(key):
        return Reason.MIG_UNMAPPED if key.startswith("MIG-") else Reason.UNMAPPED
    return reason


def _series(node: Node, key: str, method: str, reason: Reason) -> Series:
    attrs: dict[str, AttributeValue] = {"hw.id": node.devices.hw_id(key), "gpu.attribution.method": method}
    if node.devices.parent(key):
        attrs["hw.parent"] = node.devices.parent(key)
    if reason is not Reason.OWNED:
        attrs["gpu.attribution.reason"] = str(reason)
    return Series(metric("gpu.attribution"), attrs)
