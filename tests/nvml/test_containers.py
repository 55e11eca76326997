"""From a process to its container and pod: every form of cgroup path, and a cache that knows pids are given again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.nvml.containers import NOWHERE, Container, Containers, parse_cgroup

ID = "5f2c" * 16
OTHER = "a9e1" * 16
UID = "0f9a3c1e-7b52-4d0e-9a61-3c2f5d7e8b90"
UID_ = UID.replace("-", "_")
STATIC = "8ba7d3fc5b1e4f60a2c9d1e0f4b3a596"

BOTH = Container(ID, UID)
CASES: dict[str, tuple[str, Container]] = {
    "cgroupfs, guaranteed": (f"0::/kubepods/pod{UID}/{ID}", BOTH),
    "cgroupfs, burstable": (f"0::/kubepods/burstable/pod{UID}/{ID}", BOTH),
    "cgroupfs, best effort": (f"0::/kubepods/besteffort/pod{UID}/{ID}", BOTH),
    "systemd, containerd, burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope",
        BOTH,
    ),
    "systemd, containerd, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope",
        BOTH,
    ),
    "systemd, CRI-O": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/crio-{ID}.scope",
        BOTH,
    ),
    "systemd, CRI-O with a child": (f"0::/kubepods.slice/kubepods-pod{UID_}.slice/crio-{ID}.scope/container", BOTH),
    "systemd, CRI-O's monitor": (
        f"0::/kubepods.slice/kubepods-pod{UID_}.slice/crio-conmon-{ID}.scope",
        Container("", UID),
    ),
    "systemd, docker": (f"0::/kubepods.slice/kubepods-pod{UID_}.slice/docker-{ID}.scope", BOTH),
    "drivers that differ": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}",
        BOTH,
    ),
    "static pod, cgroupfs": (f"0::/kubepods/burstable/pod{STATIC}/{ID}", Container(ID, STATIC)),
    "static pod, systemd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope",
        Container(ID, STATIC),
    ),
    "kind, systemd": (
        "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope",
        BOTH,
    ),
    "kind, inside the node's own container": (
        f"0::/docker/{OTHER}/kubelet/kubepods/besteffort/pod{UID}/{ID}",
        BOTH,
    ),
    "docker, cgroupfs": (f"0::/docker/{ID}", Container(ID)),
    "docker, systemd": (f"0::/system.slice/docker-{ID}.scope", Container(ID)),
    "podman": (f"0::/machine.slice/libpod-{ID}.scope/container", Container(ID)),
    "v1, the line that tells most": (
        f"12:pids:/\n11:memory:/system.slice\n5:cpu,cpuacct:/docker/{OTHER}\n"
        f"4:devices:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/kubepods/burstable/pod{UID}\n0::/\n",
        BOTH,
    ),
    "relative, from another pod": (
        f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope",
        BOTH,
    ),
    "relative, from a sidecar": (f"0::/../cri-containerd-{ID}.scope", Container(ID)),
    "itself": ("0::/\n", NOWHERE),
    "no container": ("0::/user.slice/user-1000.slice/session-3.scope", NOWHERE),
    "the kubelet itself": ("0::/system.slice/kubelet.service", NOWHERE),
    "podman's monitor": (f"0::/machine.slice/libpod-conmon-{ID}.scope", NOWHERE),
    "a podman pod is no Kubernetes pod": (
        f"0::/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope",
        Container(ID),
    ),
    "docker inside a pod": (f"0::/kubepods/pod{UID}/{ID}/docker/{OTHER}", BOTH),
    "a cgroup that was removed": (f"0::/kubepods/pod{UID}/{ID} (deleted)", BOTH),
    "the pod's own cgroup": (f"0::/kubepods/burstable/pod{UID}", Container("", UID)),
    "a longer number is no id": (f"0::/docker/{ID}0", NOWHERE),
    "a shorter number is no id": (f"0::/docker/{ID[1:]}", NOWHERE),
    "empty": ("", NOWHERE),
}


@pytest.mark.parametrize("case", CASES)
def test_every_form_of_path_is_read(case: str) -> None:
    """Each form in which runtimes and the kubelet write cgroups gives the container and the pod, or nothing."""
    text, expected = CASES[case]
    assert parse_cgroup(text) == expected


_PIECES = st.sampled_from(
    [ID, OTHER, UID, UID_, STATIC, "pod", "/", "-", ":", ".slice", ".scope", "crio-", "conmon-", "..", "kubepods", "\n"]
)
_TEXTS = st.one_of(st.text(), st.lists(st.one_of(_PIECES, st.text(max_size=3)), max_size=20).map("".join))


@given(_TEXTS)
def test_no_text_gives_a_malformed_id(text: str) -> None:
    """Whatever stands in the file, nothing is raised and an id is 64 hex digits, a UID a UUID or 32 hex digits."""
    found = parse_cgroup(text)
    assert re.fullmatch(r"([0-9a-f]{64})?", found.id)
    assert re.fullmatch(r"([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})?", found.pod_uid)


def _process(proc: Path, pid: int, start: int, cgroup: str, command: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    before = " ".join(["S"] + ["1"] * 18)
    (folder / "stat").write_text(f"{pid} ({command}) {before} {start} 0 0\n")
    (folder / "cgroup").write_text(cgroup)


def test_a_process_is_read_once(tmp_path: Path) -> None:
    """The cgroup of a known process is not read again."""
    _process(tmp_path, 7, 100, f"0::/docker/{ID}")
    containers = Containers(tmp_path)
    assert containers.find(7) == Container(ID)
    (tmp_path / "7" / "cgroup").unlink()
    assert containers.find(7) == Container(ID)


@pytest.mark.parametrize("command", ["python", "a b", "x) S 1 (y", ") ) )", "("])
def test_a_pid_given_again_is_another_process(tmp_path: Path, command: str) -> None:
    """The start time tells two processes of one pid apart, whatever their command is called."""
    _process(tmp_path, 7, 100, f"0::/docker/{ID}", command)
    containers = Containers(tmp_path)
    assert containers.find(7) == Container(ID)
    _process(tmp_path, 7, 101, f"0::/docker/{OTHER}", command)
    assert containers.find(7) == Container(OTHER)


def test_a_process_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """A pid without a process gives None and leaves nothing behind."""
    _process(tmp_path, 7, 100, f"0::/docker/{ID}")
    containers = Containers(tmp_path)
    assert containers.find(7) == Container(ID)
    for name in ("stat", "cgroup"):
        (tmp_path / "7" / name).unlink()
    assert containers.find(7) is None
    assert len(containers) == 0


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    """However many processes come, only the ones asked for last are remembered."""
    containers = Containers(tmp_path, limit=3)
    for pid in range(1, 11):
        _process(tmp_path, pid, 100, f"0::/docker/{ID}")
        assert containers.find(pid) == Container(ID)
    assert len(containers) == 3


def test_a_process_may_enter_its_container_late(tmp_path: Path) -> None:
    """A process in no container yet is read again, because runtimes start it first and move it then."""
    _process(tmp_path, 7, 100, "0::/system.slice/containerd.service")
    containers = Containers(tmp_path)
    assert containers.find(7) == NOWHERE
    _process(tmp_path, 7, 100, f"0::/kubepods/pod{UID}/{ID}")
    assert containers.find(7) == BOTH


@pytest.mark.parametrize("stat", [b"", b"7 (x) S 1", b"\xff\xfe", b"7 x S " + b"1 " * 40])
def test_what_cannot_be_read_gives_none(tmp_path: Path, stat: bytes) -> None:
    """A stat file that is cut off or garbled gives None and no exception."""
    _process(tmp_path, 7, 100, f"0::/docker/{ID}")
    (tmp_path / "7" / "stat").write_bytes(stat)
    assert Containers(tmp_path).find(7) is None


@pytest.mark.parametrize("pid", [0, -1, 2**70])
def test_what_is_no_pid_gives_none(tmp_path: Path, pid: int) -> None:
    """Numbers that no process has give None."""
    assert Containers(tmp_path).find(pid) is None


def test_a_process_without_cgroup_gives_none(tmp_path: Path) -> None:
    """A process whose cgroup can't be read is unknown, which is not the same as being in no container."""
    _process(tmp_path, 7, 100, "")
    (tmp_path / "7" / "cgroup").unlink()
    assert Containers(tmp_path).find(7) is None


def test_our_own_process_is_readable() -> None:
    """On the real /proc our own process is found, in a container or in none."""
    assert Containers(Path("/proc")).find(os.getpid()) is not None
