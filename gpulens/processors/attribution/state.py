"""What attribution has learned, as bytes and back: it survives a reload, and with storage a restart.

Invariant: a state that can't be read whole changes nothing. What waits for its second snapshot is not part of it; the
snapshots' own times decide what they vouch for, so a gap makes readings unowned and never wrongly owned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from gpulens.pipeline.data import Attributes, AttributeValue, Resource, attributes
from gpulens.processors.attribution.devices import DeviceFact
from gpulens.processors.attribution.holders import Seen, Sight
from gpulens.processors.attribution.nodes import Node, Nodes
from gpulens.processors.attribution.ownership import Snapshot
from gpulens.processors.attribution.pods import ContainerFact, Hint, PodFact, Said

VERSION = 2

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def dump(nodes: Nodes) -> bytes:
    """Every node as JSON."""
    return json.dumps([_node(node) for node in nodes.all()], separators=(",", ":")).encode()


def load(nodes: Nodes, state: bytes) -> bool:
    """Takes saved nodes up into `nodes`, which must be empty; False, and nothing changed, when they can't be read."""
    try:
        read = [_read_node(nodes, each) for each in json.loads(state)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    nodes.adopt(read)
    return True


def _node(node: Node) -> Json:
    return {
        "name": node.name,
        "resource": _pairs(node.resource.attributes),
        "first_ns": node.first_ns,
        "last_ns": node.last_ns,
        "interval_ns": dict(node.interval_ns),
        "window_ns": [[source, stream, ns] for (source, stream), ns in node.window_ns.items()],
        "facts": {
            stream: [[fact.hw_id, fact.parent, fact.gi, fact.minor, fact.pci, fact.dra, fact.plugin] for fact in facts]
            for stream, facts in node.devices.facts.items()
        },
        "pods": {
            stream: {
                "pods": [[pod.uid, pod.namespace, pod.name, pod.hash] for pod in said.pods.values()],
                "containers": [[box.id, box.uid, box.name] for box in said.containers.values()],
                "phases": [[uid, phase] for uid, phase in said.phases.items()],
            }
            for stream, said in node.pods.said.items()
        },
        "phases_since_ns": dict(node.pods.since_ns),
        "processes": {
            stream: [
                [device, hint.uid, hint.container, sight.first_ns, sight.last_ns]
                for (device, hint), sight in seen.items()
            ]
            for stream, seen in node.processes.streams.items()
        },
        "histories": [
            {
                "source": source,
                "stream": stream,
                "heard_ns": history.heard_ns,
                "snapshots": [_snapshot(each) for each in history.snapshots],
            }
            for (source, stream), history in node.histories.items()
        ],
    }


def _snapshot(snapshot: Snapshot) -> Json:
    return {
        "begin_ns": snapshot.begin_ns,
        "end_ns": snapshot.end_ns,
        "owners": {name: [_pairs(owner) for owner in sorted(held)] for name, held in snapshot.owners.items()},
        "exclusive": [*sorted(snapshot.exclusive)],
        "said": None if snapshot.said is None else [*sorted(snapshot.said)],
    }


def _pairs(attrs: Attributes) -> Json:
    # Resources of nodes and owners carry texts and numbers; what JSON has no word for is left out.
    return [[key, value] for key, value in attrs if isinstance(value, str | int | float | bool)]


def _read_node(nodes: Nodes, saved: Mapping[str, object]) -> Node:
    node = nodes.fresh(_text(saved["name"]), Resource(_attributes(saved["resource"])), _int(saved["first_ns"]))
    node.last_ns = _int(saved["last_ns"])
    node.interval_ns = {_text(source): _int(ns) for source, ns in _dict(saved["interval_ns"]).items()}
    for source, stream, ns in map(_list, _list(saved["window_ns"])):
        node.window_ns[_text(source), _text(stream)] = _int(ns)
    for stream, facts in _dict(saved["facts"]).items():
        said = [DeviceFact(*(_text(each) for each in _list(fact))) for fact in _list(facts)]
        node.devices.learn(stream, said, complete=True)
    for stream, said_of_pods in _dict(saved["pods"]).items():
        node.pods.learn(stream, _read_said(_dict(said_of_pods)), complete=True, now_ns=node.last_ns)
    node.pods.since_ns |= {_text(uid): _int(ns) for uid, ns in _dict(saved["phases_since_ns"]).items()}
    for stream, seen in _dict(saved["processes"]).items():
        node.processes.streams[_text(stream)] = dict(map(_read_sight, map(_list, _list(seen))))
    for each in map(_dict, _list(saved["histories"])):
        history = nodes.history(node, _text(each["source"]), _text(each["stream"]))
        history.restore(map(_read_snapshot, map(_dict, _list(each["snapshots"]))), _int(each["heard_ns"]))
    return node


def _read_said(saved: Mapping[str, object]) -> Said:
    pods, containers, phases = (
        [[_text(each) for each in _list(row)] for row in _list(saved[kind])]
        for kind in ("pods", "containers", "phases")
    )
    return Said.of(
        (PodFact(uid, namespace, name, config_hash) for uid, namespace, name, config_hash in pods),
        (ContainerFact(container, uid, name) for container, uid, name in containers),
        ((uid, phase) for uid, phase in phases),
    )


def _read_sight(saved: list[object]) -> tuple[Seen, Sight]:
    device, uid, container, first_ns, last_ns = saved
    return (_text(device), Hint(_text(uid), _text(container))), Sight(_int(first_ns), _int(last_ns))


def _read_snapshot(saved: Mapping[str, object]) -> Snapshot:
    owners = {
        name: frozenset(attributes(_attributes(owner)) for owner in _list(held))
        for name, held in _dict(saved["owners"]).items()
    }
    said = saved["said"]
    return Snapshot(
        _int(saved["begin_ns"]),
        _int(saved["end_ns"]),
        owners,
        frozenset(map(_text, _list(saved["exclusive"]))),
        None if said is None else frozenset(map(_text, _list(said))),
    )


def _attributes(saved: object) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    for key, value in map(_list, _list(saved)):
        if not isinstance(value, str | int | float | bool):
            raise TypeError(f"{key}: no attribute value")
        found[_text(key)] = value
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no integer")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value
