"""Join keys of a node's devices: what names mean the same GPU or MIG instance.

Invariant: a name is resolved only when exactly one device answers to it; otherwise it stays what it is. The join goes
by UUID, then PCI address, then /dev minor (GKE's ids), and never by an index: `gpu=` of a page is an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpulens.pipeline.data import AttributeValue

_GKE = re.compile(r"nvidia(?P<minor>\d+)(?:/gi(?P<gi>\d+))?\Z")
_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE)
_OLD_MIG = re.compile(r"MIG-(?P<gpu>GPU-[^/]+)/(?P<gi>\d+)/\d+\Z")
_INSTANCE = re.compile(r"(?P<parent>GPU-[^/]+)/gi\d+\Z")
_GI = re.compile(r".*/gi\d+\Z", re.DOTALL)
_WHOLE = re.compile(r"(?:card|nvidia)\d+\Z")
"""Ids of whole cards by their form: Intel's and GKE's device plugins."""

ALL_DEVICES = "all"

MOST_REMEMBERED = 4096
"""Resolved names that are kept; a node has some hundred devices and replicas."""


@dataclass(frozen=True, slots=True)
class DeviceFact:
    """What one `gpu.device.info` series says: a device and the names it answers to (empty = not said)."""

    hw_id: str
    parent: str = ""
    gi: str = ""
    minor: str = ""
    pci: str = ""
    dra: str = ""
    plugin: str = ""

    @classmethod
    def of(cls, attrs: Mapping[str, AttributeValue]) -> DeviceFact:
        """From the attributes of a `gpu.device.info` series."""

        def text(key: str) -> str:
            value = attrs.get(key)
            return "" if value is None else str(value)

        dra = "/".join(filter(None, (text("gpu.dra.driver"), text("gpu.dra.pool"), text("gpu.dra.device"))))
        return cls(
            text("hw.id"),
            text("hw.parent"),
            text("gpu.mig.gi"),
            text("gpu.minor"),
            text("gpu.pci.address"),
            dra,
            text("gpu.device.plugin.id"),
        )

    def anywhere(self) -> DeviceFact:
        """What of it holds without knowing the node: UUIDs only."""
        return replace(self, minor="", pci="", dra="", plugin="")

    @property
    def key(self) -> str:
        """The one key of this device: a GPU's UUID, or `<parent>/gi<N>` for a MIG instance."""
        return f"{self.parent}/gi{self.gi}" if self.parent and self.gi else self.hw_id

    @property
    def is_part(self) -> bool:
        """A part of a card that can be held whole (a tile, a compute partition), and no MIG instance."""
        return bool(self.parent) and not self.gi and not (is_nvidia(self.hw_id) or is_nvidia(self.parent))


def _plugin_name(plugin: str) -> str:
    """A device plugin's id for a device, spelled as `resolve` looks names up."""
    gke = _GKE.match(plugin)
    if gke is not None and gke["gi"] is None:
        return f"minor:{gke['minor']}"  # one name for one claim: where it contradicts a minor, neither joins
    return normal_pci(plugin) or plugin


def normal_pci(address: str) -> str:
    """A PCI address in one spelling: lower case, four digits of domain. Empty when it is none."""
    match = _PCI.match(address)
    if match is None:
        return ""
    return f"{int(match['domain'] or '0', 16):04x}:{match['rest'].lower()}"


def is_global(key: str) -> bool:
    """The key is unique in the world (built on a UUID), so it joins without a node."""
    return key.startswith(("GPU-", "MIG-"))


def is_nvidia(key: str) -> bool:
    """A GPU of NVIDIA's by UUID, or a MIG instance in any spelling."""
    return is_global(key) or _GI.match(key) is not None


class DeviceMap:
    """The devices of one node as its streams describe them; `version` changes when an answer may."""

    def __init__(self) -> None:
        self.version = 0
        self._facts: dict[str, tuple[DeviceFact, ...]] = {}
        self._names: dict[str, str] = {}
        self._uuids: dict[str, str] = {}
        self._keys: set[str] = set()
        self._parents: dict[str, str] = {}
        self._cards: dict[str, str] = {}
        self._gpus: tuple[str, ...] = ()
        self._resolved: dict[str, tuple[str, ...]] = {}

    def learn(self, stream: str, facts: Iterable[DeviceFact], complete: bool) -> None:
        """Takes in what a stream says; a complete word replaces its earlier ones."""
        new = tuple(facts)
        if not complete:
            known = {fact.hw_id: fact for fact in self._facts.get(stream, ())}
            new = tuple({**known, **{fact.hw_id: fact for fact in new}}.values())
        if self._facts.get(stream, ()) == new:
            return
        self._facts[stream] = new
        self._build()

    @property
    def state(self) -> object:
        """An object that stays the same while no answer changes."""
        return self._names

    @property
    def facts(self) -> Mapping[str, tuple[DeviceFact, ...]]:
        """What each stream says."""
        return self._facts

    @property
    def keys(self) -> set[str]:
        """Every device that a stream described."""
        return set(self._keys)

    @property
    def hw_ids(self) -> set[str]:
        """The devices by the names that streams gave them."""
        return {fact.hw_id for facts in self._facts.values() for fact in facts}

    def resolve(self, name: str) -> tuple[str, ...]:
        """The keys of the devices that a name stands for; the name itself when nobody knows it."""
        keys = self._resolved.get(name)
        if keys is None:
            if len(self._resolved) >= MOST_REMEMBERED:
                self._resolved.clear()
            keys = self._resolved[name] = self._resolve(name)
        return keys

    def _resolve(self, name: str) -> tuple[str, ...]:
        if name == ALL_DEVICES:
            return self._gpus
        gke = _GKE.match(name)
        if gke is not None:
            gpu = self._names.get(f"minor:{gke['minor']}")
            if gpu is None:
                return (self._names.get(name, name),)
            return (f"{gpu}/gi{gke['gi']}" if gke["gi"] is not None else gpu,)
        old_mig = _OLD_MIG.match(name)
        name = f"{old_mig['gpu']}/gi{old_mig['gi']}" if old_mig is not None else normal_pci(name) or name
        return (self._names.get(name, name),)

    def is_resolved(self, key: str) -> bool:
        """The key names a device for sure: a GPU by UUID, an instance of one, or something a stream described."""
        return key.startswith("GPU-") or key in self._keys or key in self._uuids

    def hw_id(self, key: str) -> str:
        """What stands in `hw.id` for a key: the MIG instance's UUID where it is known, else the key."""
        return self._uuids.get(key, key)

    def parent(self, key: str) -> str:
        """The GPU that a MIG instance or another part is part of; empty for a whole GPU."""
        match = _INSTANCE.match(key)
        return match["parent"] if match else self._parents.get(key, "")

    @property
    def cards(self) -> Mapping[str, str]:
        """Parts that are held with their card where nobody holds them by themselves -> the card. No MIG instances:
        a GPU in MIG mode can't be held whole."""
        return self._cards

    def is_vague(self, key: str) -> bool:
        """The key may stand for a part of any card: nobody described it, and its form is not a whole card's."""
        return not (self.is_resolved(key) or _WHOLE.match(key) or normal_pci(key))

    def _build(self) -> None:
        facts = [fact for said in self._facts.values() for fact in said]
        uuids: dict[str, set[str]] = {}
        for fact in facts:
            if fact.key != fact.hw_id:
                uuids.setdefault(fact.key, set()).add(fact.hw_id)
        answers: dict[str, set[str]] = {}
        gpus: dict[str, None] = {}
        parents: dict[str, set[str]] = {}
        self._keys, self._parents = set(), {}
        for fact in facts:
            key = fact.key
            if len(uuids.get(key, ())) > 1 and key != fact.hw_id:
                # One GPU instance under several UUIDs: several compute instances, or one word of several is stale
                # (ids are reused after a re-partition). Each UUID stands for itself then.
                key = fact.hw_id
                self._parents[key] = fact.parent
            self._keys.add(key)
            for name in filter(None, (fact.hw_id, fact.dra, _plugin_name(fact.plugin))):
                answers.setdefault(name, set()).add(key)
            if fact.is_part:
                parents.setdefault(key, set()).add(fact.parent)
            if not fact.parent:
                gpus[key] = None
                if fact.minor:
                    answers.setdefault(f"minor:{fact.minor}", set()).add(key)
                if normal_pci(fact.pci):
                    answers.setdefault(normal_pci(fact.pci), set()).add(key)
        self._names = {name: next(iter(keys)) for name, keys in answers.items() if len(keys) == 1}
        self._uuids = {key: next(iter(names)) for key, names in uuids.items() if len(names) == 1}
        cards = {key: next(iter(said)) for key, said in parents.items() if len(said) == 1}
        self._parents.update(cards)
        self._cards = {key: self._names.get(card, card) for key, card in cards.items()}
        self._gpus = tuple(gpus)
        self._resolved.clear()
        self.version += 1
