"""Which pod and container a process belongs to: names by UID and container id, as facts of pods flow by.

Invariant: a process gets names only when exactly one known pod answers to what it tells of itself, and nothing that
it tells speaks against it. Ids are compared whole. A UID names one pod for ever, so a source that is away takes no
name back; only its next complete word does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpulens.pipeline.data import Resource, attributes
from gpulens.pipeline.pods import STATIC_POD_HASH
from gpulens.processors.attribution.ownership import Owner

HASH_ATTRIBUTE = f"k8s.pod.annotation.{STATIC_POD_HASH}"
HINT_KEYS = frozenset({"k8s.pod.uid", "container.id"})
"""What a process tells of its owner in place of names; it goes once the names are known."""

MOST_PODS = 2048
"""Pods (and four times as many containers) that one stream may describe; a kubelet runs 110 by default, 500 at most
on the large node types of managed clusters."""

_HASH = re.compile(r"[0-9a-f]{32}\Z")
"""A config hash is an MD5 sum. Anything else in that annotation names no cgroup of a static pod."""

ENDED_PHASES = frozenset({"Succeeded", "Failed"})
"""Phases of a pod whose containers have all ended for good (Kubernetes API, PodStatus)."""

PodKey = tuple[str, str]
"""(namespace, name) of a pod."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Hint:
    """What a process tells of its owner: the pod's UID (of a static pod: its config hash) and the container's id.
    Empty is not told."""

    uid: str = ""
    container: str = ""

    @classmethod
    def of(cls, resource: Resource) -> Hint | None:
        """The hint on a resource; None when that names a pod already, or tells nothing."""
        if resource.text("k8s.pod.name"):
            return None
        hint = cls(resource.text("k8s.pod.uid"), whole_id(resource.text("container.id")))
        return hint if hint.uid or hint.container else None


@dataclass(frozen=True, slots=True)
class PodFact:
    """A pod as `k8s.pod.info` describes it; `hash` is the config hash of a static pod."""

    uid: str
    namespace: str
    name: str
    hash: str = ""

    @classmethod
    def of(cls, resource: Resource, config_hash: str) -> PodFact | None:
        """From the resource of a `k8s.pod.info` series; None when it does not say which pod."""
        uid, namespace = resource.text("k8s.pod.uid"), resource.text("k8s.namespace.name")
        name = resource.text("k8s.pod.name")
        if not (uid and namespace and name):
            return None
        return cls(uid, namespace, name, config_hash if _HASH.match(config_hash) else "")


@dataclass(frozen=True, slots=True)
class ContainerFact:
    """A container: the runtime's id, the UID of its pod, its name in the pod."""

    id: str
    uid: str
    name: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a stream says of pods. `phases`: UID -> phase."""

    pods: Mapping[str, PodFact] = field(default_factory=dict)
    containers: Mapping[str, ContainerFact] = field(default_factory=dict)
    phases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pods: Iterable[PodFact], containers: Iterable[ContainerFact], phases: Iterable[tuple[str, str]]
    ) -> Said:
        """From single facts of one moment; those that contradict each other name nobody."""
        return cls(
            _unambiguous(_answers((pod.uid, pod) for pod in pods)),
            _contested_belong_to_nobody(_answers((box.id, box) for box in containers)),
            _unambiguous(_answers(phases)),
        )

    def and_now(self, later: Said) -> Said:
        """Both, the later word last."""
        return Said(
            _joined(self.pods, later.pods),
            _joined(self.containers, later.containers),
            _joined(self.phases, later.phases),
        )

    def bounded(self) -> Said:
        """The newest of it, as much as is kept."""
        if max(len(self.pods), len(self.containers), len(self.phases)) <= MOST_PODS:
            return self
        return Said(
            _newest(self.pods, MOST_PODS), _newest(self.containers, 4 * MOST_PODS), _newest(self.phases, MOST_PODS)
        )


NOTHING = Said()


@dataclass(frozen=True, slots=True)
class Named:
    """The names of a process' pod; `container` is empty while nobody says which one it is, `others` are those that it
    is not."""

    pod: PodFact
    container: str = ""
    others: frozenset[str] = frozenset()

    @property
    def key(self) -> PodKey:
        """(namespace, name)."""
        return self.pod.namespace, self.pod.name

    def owner(self, owners: Iterable[Owner]) -> Owner:
        """The pod as an owner: as one of `owners` writes it, so that one pod is one resource, else by its names.

        Another container of the pod is another owner.
        """
        mine: list[tuple[bool, Owner]] = []
        for each in sorted(owners, key=repr):
            told = dict(each)
            if pod_key(each) == self.key and told.get("k8s.pod.uid", self.pod.uid) == self.pod.uid:
                container = told.get("k8s.container.name", "")
                if (not self.container and container not in self.others) or container in ("", self.container):
                    mine.append((container == self.container, each))
        exact = [owner for same, owner in mine if same]
        if len(exact) == 1:
            return exact[0]
        if len(mine) == 1:
            return mine[0][1]
        named = {"k8s.namespace.name": self.pod.namespace, "k8s.pod.name": self.pod.name}
        if self.container:
            named["k8s.container.name"] = self.container
        return attributes(named)


def pod_key(owner: Owner) -> PodKey:
    """(namespace, name) of an owner's pod."""
    told = dict(owner)
    return str(told.get("k8s.namespace.name", "")), str(told.get("k8s.pod.name", ""))


def whole_id(container: str) -> str:
    """A container's id without the runtime before it (`containerd://`)."""
    return container.rpartition("://")[2]


class PodMap:
    """The pods of one node as streams describe them."""

    def __init__(self) -> None:
        self._said: dict[str, Said] = {}
        self._pods: dict[str, PodFact] = {}
        self._containers: dict[str, ContainerFact] = {}
        self._of_pod: dict[str, frozenset[str]] = {}
        self._phases: dict[str, str] = {}
        self.since_ns: dict[str, int] = {}
        """UID -> when somebody first told of the phase that the pod has now."""
        self._by_name: dict[PodKey, list[PodFact]] = {}

    @property
    def state(self) -> object:
        """An object that stays the same while no answer changes."""
        return self._pods

    @property
    def said(self) -> Mapping[str, Said]:
        """What each stream says."""
        return self._said

    def learn(self, stream: str, said: Said, complete: bool, now_ns: int) -> None:
        """Takes in what a stream says at a time; a complete word replaces its earlier ones."""
        before = self._said.get(stream, NOTHING)
        if said is before:
            return
        now = (said if complete else before.and_now(said)).bounded()
        self._said[stream] = now
        if now == NOTHING:
            del self._said[stream]
        if now != before:
            self._build(now_ns)

    def find(self, hint: Hint) -> Named | None:
        """Whose process it is; None when nobody knows, or when pod and container do not belong together."""
        box = self._containers.get(hint.container) if hint.container else None
        uid = hint.uid or (box.uid if box is not None else "")
        pod = self._pods.get(uid)
        if pod is None or (box is not None and box.uid != pod.uid):
            return None
        if box is not None:
            return Named(pod, box.name)
        return Named(pod, others=self._of_pod.get(pod.uid, frozenset()) if hint.container else frozenset())

    def phase(self, pod: PodFact) -> str:
        """The pod's phase; empty when nobody tells it."""
        return self._phases.get(pod.uid, "")

    def phase_since_ns(self, pod: PodFact) -> int:
        """When somebody first told of the phase that the pod has now; meaningless where nobody tells it."""
        return self.since_ns.get(pod.uid, 0)

    def has_ended(self, owner: Owner) -> bool:
        """Every pod that is known under an owner's names has ended, and there is one."""
        told = dict(owner)
        uid = str(told.get("k8s.pod.uid", ""))
        ends = [
            self._phases.get(pod.uid, "") in ENDED_PHASES
            for pod in self._by_name.get(pod_key(owner), ())
            if uid in ("", pod.uid)
        ]
        return bool(ends) and all(ends)

    def _build(self, now_ns: int) -> None:
        pods: dict[str, set[PodFact]] = {}
        containers: dict[str, set[ContainerFact]] = {}
        phases: dict[str, set[str]] = {}
        for said in self._said.values():
            for pod in said.pods.values():
                for name in filter(None, (pod.uid, pod.hash)):
                    pods.setdefault(name, set()).add(replace(pod, hash=""))  # not every stream tells the hash
            for box in said.containers.values():
                containers.setdefault(box.id, set()).add(box)
            for uid, phase in said.phases.items():
                phases.setdefault(uid, set()).add(phase)
        known = _unambiguous(pods)
        self._pods = {name: pod for name, pod in known.items() if known.get(pod.uid) == pod}
        self._containers = _contested_belong_to_nobody(containers)
        names: dict[str, set[str]] = {}
        for box in self._containers.values():
            names.setdefault(box.uid, set()).add(box.name)
        self._of_pod = {uid: frozenset(boxes) for uid, boxes in names.items()}
        before, self._phases = self._phases, _unambiguous(phases)
        self.since_ns = {
            uid: self.since_ns[uid] if before.get(uid) == phase else now_ns for uid, phase in self._phases.items()
        }
        self._by_name = {}
        for pod in set(self._pods.values()):
            self._by_name.setdefault((pod.namespace, pod.name), []).append(pod)


def _joined(before: Mapping[str, V], later: Mapping[str, V]) -> dict[str, V]:
    """Both, the later ones at the end."""
    return {**{key: value for key, value in before.items() if key not in later}, **later}


def _newest(facts: Mapping[str, V], count: int) -> Mapping[str, V]:
    return facts if len(facts) <= count else dict(list(facts.items())[-count:])


def _answers(facts: Iterable[tuple[str, V]]) -> dict[str, set[V]]:
    answers: dict[str, set[V]] = {}
    for name, fact in facts:
        answers.setdefault(name, set()).add(fact)
    return answers


def _unambiguous(answers: Mapping[str, set[V]]) -> dict[str, V]:
    return {name: next(iter(facts)) for name, facts in answers.items() if len(facts) == 1}


def _contested_belong_to_nobody(answers: Mapping[str, set[ContainerFact]]) -> dict[str, ContainerFact]:
    """A container that is told of in two ways fits no pod: what it belongs to speaks against the pod's UID."""
    return {
        name: next(iter(facts)) if len(facts) == 1 else ContainerFact(name, "", "") for name, facts in answers.items()
    }
