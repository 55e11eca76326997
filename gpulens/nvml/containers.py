"""Which container and pod a process belongs to, read from its cgroup.

Invariant: pure text in, never a guess out. An id is 64 hex digits as container runtimes write it, a pod UID is what
the API server shows; what the path does not tell stays empty, because a wrong owner is worse than none.

The forms (kubelet `pkg/kubelet/cm`, containerd, CRI-O, docker, podman):

- cgroupfs: `/kubepods[/burstable|/besteffort]/pod<uid>/<id>`
- systemd: `...-pod<uid with _ for ->.slice/{cri-containerd-|crio-|docker-}<id>.scope`, under CRI-O with a child
  `/container`; `crio-conmon-<id>` is the monitor of a container, not the container
- runtime and kubelet of different drivers: `...-pod<uid>.slice:cri-containerd:<id>`
- a static pod's uid is 32 hex digits (the config hash); its mirror pod has another one in the API
- without Kubernetes: `/docker/<id>`, `docker-<id>.scope`, `libpod-<id>.scope`

Nothing is anchored at the root: from inside a cgroup namespace of its own (the default under cgroup v2) a reader sees
others as `/../../...`, a process of its own pod as `/../cri-containerd-<id>.scope` without the pod, and itself as `/`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

DEFAULT_LIMIT: Final = 4096
"""How many processes are remembered; accounting buffers of NVML hold 4000."""

_POD: Final = re.compile(
    r"(?:^|[/:-])pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[/.:\s]|$)"
)
_CONTAINER: Final = re.compile(r"(?:^|(?<=[/:-]))(?<!conmon-)(?P<id>[0-9a-f]{64})(?=[/.:\s]|$)")

_START_TIME: Final = 19
"""Field 22 of /proc/<pid>/stat, counted from the first field after the command's closing parenthesis."""


@dataclass(frozen=True, slots=True)
class Container:
    """Where a process runs. `id` is the runtime's 64 hex digits, `pod_uid` the pod's UID (of a static pod: its config
    hash); each is "" where the cgroup does not tell. Both "" = in no container that can be named."""

    id: str = ""
    pod_uid: str = ""


NOWHERE: Final = Container()


def parse_cgroup(text: str) -> Container:
    """The container that /proc/<pid>/cgroup names; NOWHERE where it names none. Never raises.

    Under cgroup v1 there is one line for each hierarchy and not all of them lead into the container: the line that
    tells most is taken whole, since ids of two lines need not belong together.
    """
    best = NOWHERE
    for line in text.splitlines():
        found = _of_path(line.split(":", 2)[-1])
        if _told(found) > _told(best):
            best = found
    return best


def _told(container: Container) -> tuple[int, bool]:
    """How much is known; of two halves the container tells more, for it belongs to one pod only."""
    return bool(container.id) + bool(container.pod_uid), bool(container.id)


def _of_path(path: str) -> Container:
    """The outermost pod and the first container in it: this node's kubelet knows nothing of containers that are
    started inside its own (docker in a pod), and above the pod there may be the container that is the node (kind)."""
    pod = _POD.search(path)
    container = _CONTAINER.search(path, pod.end() if pod else 0)
    return Container(
        id=container["id"] if container else "",
        pod_uid=pod["uid"].replace("_", "-") if pod else "",
    )


class Containers:
    """Finds the container of a process, at the cost of one small read for a process already known.

    `proc` is the /proc whose numbers the pids are (a mount of the host's, or our own). A pid is known together with its
    start time, because pids are given again. Safe to use from several threads.
    """

    def __init__(self, proc: Path, limit: int = DEFAULT_LIMIT) -> None:
        self._proc = proc
        self._limit = max(1, limit)
        self._known: OrderedDict[int, tuple[str, Container]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, pid: int) -> Container | None:
        """The container of a process; NOWHERE when it runs in none; None when the process is gone, is not visible in
        this /proc, or may not be read."""
        start = self._start(pid)
        if start is None:
            self._forget(pid)
            return None
        with self._lock:
            known = self._known.get(pid)
            if known is not None and known[0] == start:
                self._known.move_to_end(pid)
                return known[1]
        text = self._read(pid, "cgroup")
        if text is None or self._start(pid) != start:  # gone, or another process by now
            self._forget(pid)
            return None
        found = parse_cgroup(text)
        if (
            found.id
        ):  # a runtime moves a process into its container after starting it: what is not there yet is read anew
            self._remember(pid, start, found)
        else:
            self._forget(pid)
        return found

    def _remember(self, pid: int, start: str, found: Container) -> None:
        with self._lock:
            self._known[pid] = (start, found)
            self._known.move_to_end(pid)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def _forget(self, pid: int) -> None:
        with self._lock:
            self._known.pop(pid, None)

    def _start(self, pid: int) -> str | None:
        """When a process started, in ticks since boot, as text; None where it can't be read. The command may hold
        spaces and parentheses, so fields count from its last parenthesis."""
        text = self._read(pid, "stat")
        if text is None:
            return None
        _, closing, rest = text.rpartition(")")
        fields = rest.split()
        return fields[_START_TIME] if closing and len(fields) > _START_TIME else None

    def _read(self, pid: int, name: str) -> str | None:
        if pid <= 0:
            return None
        try:
            return (self._proc / str(pid) / name).read_bytes().decode("utf-8", "replace")
        except OSError:
            return None
