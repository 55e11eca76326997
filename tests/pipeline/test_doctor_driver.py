"""What doctor reads from files, on a machine made of files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulens.nvml.places import LIBRARY_FOLDERS
from gpulens.pipeline.doctor_driver import (
    LIBRARY,
    binding,
    device_nodes,
    driver_library,
    hardware,
    in_first_namespace,
    versions,
    visibility,
)
from gpulens.pipeline.doctor_report import Finding, Verdict

CALL = "def nvmlGpmQueryDeviceSupport(device): ...\n"


def _file(root: Path, path: str, content: bytes = b"x") -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _card(root: Path, name: str, vendor: str, kind: str) -> None:
    _file(root, f"/sys/bus/pci/devices/{name}/vendor", f"{vendor}\n".encode())
    _file(root, f"/sys/bus/pci/devices/{name}/class", f"{kind}\n".encode())


def _says_what_to_do(finding: Finding) -> bool:
    return finding.ok or bool(finding.fix)


def test_cards_are_counted_by_vendor_and_class(tmp_path: Path) -> None:
    """NVIDIA's display and 3D controllers are GPUs, its audio and bridges are not; others' accelerators are told."""
    _card(tmp_path, "0000:00:04.0", "0x10de", "0x030200")
    _card(tmp_path, "0000:00:05.0", "0x10de", "0x030000")
    _card(tmp_path, "0000:00:05.1", "0x10de", "0x040300")
    _card(tmp_path, "0000:00:06.0", "0x10de", "0x068000")
    _card(tmp_path, "0000:00:07.0", "0x1002", "0x120000")
    found = hardware(tmp_path)
    assert found.ok
    assert found.facts == {"nvidia": 2, "others": 1}


def test_a_machine_without_gpu_is_told_so(tmp_path: Path) -> None:
    """A bus without an NVIDIA card is missing a GPU; no bus at all is not known."""
    assert hardware(tmp_path).verdict is Verdict.UNKNOWN
    _card(tmp_path, "0000:00:01.0", "0x8086", "0x060000")
    found = hardware(tmp_path)
    assert found.verdict is Verdict.MISSING
    assert "no NVIDIA GPU" in found.finding
    assert "gpulens demo" in found.fix


def test_device_nodes_are_all_needed(tmp_path: Path) -> None:
    """The control node and at least one GPU's node must be there; others of NVIDIA's nodes don't count."""
    assert device_nodes(tmp_path).verdict is Verdict.MISSING
    _file(tmp_path, "/dev/nvidia-uvm")
    _file(tmp_path, "/dev/nvidia0")
    half = device_nodes(tmp_path)
    assert half.verdict is Verdict.MISSING
    assert "/dev/nvidiactl is not there" in half.finding
    _file(tmp_path, "/dev/nvidiactl")
    _file(tmp_path, "/dev/nvidia11")
    found = device_nodes(tmp_path)
    assert found.ok
    assert found.facts == {"control": True, "gpus": ["nvidia0", "nvidia11"]}


def test_device_nodes_must_be_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that may not be read and written is named."""
    # Root may read everything, so the mode decides here as it does for everybody else.
    monkeypatch.setattr(os, "access", lambda path, _mode: bool(Path(path).stat().st_mode & 0o400))
    _file(tmp_path, "/dev/nvidiactl")
    _file(tmp_path, "/dev/nvidia0").chmod(0)
    found = device_nodes(tmp_path)
    assert found.verdict is Verdict.WARN
    assert found.finding == "no permission for /dev/nvidia0"


@pytest.mark.parametrize(
    ("folder", "environ", "by_loader"),
    [
        ("/opt/driver", {"LD_LIBRARY_PATH": "/nowhere:/opt/driver"}, True),
        ("/usr/lib64", {}, True),
        (LIBRARY_FOLDERS[0], {}, False),
        (LIBRARY_FOLDERS[1], {}, False),
    ],
)
def test_the_library_is_found_where_it_may_be(
    tmp_path: Path, folder: str, environ: dict[str, str], by_loader: bool
) -> None:
    """LD_LIBRARY_PATH, the loader's folders and GKE's folders are looked into; the file's name tells the version."""
    real = _file(tmp_path, f"{folder}/libnvidia-ml.so.590.48.01")
    (real.parent / LIBRARY).symlink_to(real.name)
    found = driver_library(tmp_path, environ)
    assert (found.folder, found.by_loader, found.version) == (folder, by_loader, "590.48.01")
    assert found.finding.ok


def test_the_loaders_cache_is_read(tmp_path: Path) -> None:
    """A folder that only /etc/ld.so.cache knows is found, and before the usual folders."""
    strings = (LIBRARY, f"/opt/odd/{LIBRARY}", "libz.so.1", "/lib/libz.so.1")
    _file(
        tmp_path, "/etc/ld.so.cache", b"glibc-ld.so.cache1.1\0\x01\x02" + b"".join(s.encode() + b"\0" for s in strings)
    )
    _file(tmp_path, f"/usr/lib/{LIBRARY}")
    assert driver_library(tmp_path, {}).folder == "/usr/lib"  # the cache names a file that is not there
    _file(tmp_path, f"/opt/odd/{LIBRARY}")
    assert driver_library(tmp_path, {}).folder == "/opt/odd"


def test_the_configs_folders_come_first(tmp_path: Path) -> None:
    """`library_path` of a config is looked into before LD_LIBRARY_PATH."""
    for folder in ("/a", "/b"):
        _file(tmp_path, f"{folder}/{LIBRARY}")
    found = driver_library(tmp_path, {"LD_LIBRARY_PATH": "/b"}, ["/a"])
    assert (found.folder, found.by_loader) == ("/a", False)


def test_no_library_gives_the_mounts(tmp_path: Path) -> None:
    """Without the library the fix names GKE's mount and the NVIDIA runtime."""
    found = driver_library(tmp_path, {})
    assert found.folder == ""
    assert found.finding.verdict is Verdict.MISSING
    assert "/home/kubernetes/bin/nvidia" in found.finding.fix
    assert "runtimeClassName" in found.finding.fix


def test_files_that_only_look_like_the_library(tmp_path: Path) -> None:
    """An empty file and a link to nothing are reported, and a good one behind them is taken."""
    _file(tmp_path, f"/usr/lib64/{LIBRARY}", b"")
    dangling = tmp_path / "usr/lib" / LIBRARY
    dangling.parent.mkdir(parents=True)
    dangling.symlink_to("libnvidia-ml.so.535.1")
    found = driver_library(tmp_path, {})
    assert found.finding.verdict is Verdict.WARN
    assert "empty file" in found.finding.finding
    assert "a link to a file that is not there" in found.finding.finding
    _file(tmp_path, f"{LIBRARY_FOLDERS[0]}/{LIBRARY}")
    assert driver_library(tmp_path, {}).finding.ok


def _distribution(folder: Path, name: str, version: str, record: str) -> None:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    _file(folder, f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode())
    _file(folder, f"{info}/RECORD", record.encode())


def test_the_binding_is_found(tmp_path: Path) -> None:
    """NVIDIA's own distribution is fine, and its version tells for which driver it was made."""
    _distribution(tmp_path, "nvidia-ml-py", "13.590.48", "example.py,,\npynvml.py,sha256=x,1\n")
    _file(tmp_path, "pynvml.py", CALL.encode())
    found = binding([str(tmp_path)])
    assert found.finding.ok
    assert found.finding.finding == "nvidia-ml-py 13.590.48"
    assert found.driver == 590


def test_no_binding_names_the_extra(tmp_path: Path) -> None:
    """Without the module the fix is the extra."""
    found = binding([str(tmp_path)])
    assert found.finding.verdict is Verdict.MISSING
    assert found.finding.fix == "pip install '.[nvidia]' in gpulens's checkout"


def test_a_fork_is_named(tmp_path: Path) -> None:
    """A fork that wrote over the module is named as its owner, and the fix takes it away."""
    _distribution(tmp_path, "nvidia-ml-py3", "7.352.0", "pynvml.py,sha256=x,1\n")
    _file(tmp_path, "pynvml.py", b"def nvmlInit(): ...\n")
    found = binding([str(tmp_path)]).finding
    assert found.verdict is Verdict.WARN
    assert "belongs to nvidia-ml-py3 7.352.0" in found.finding
    assert found.fix.startswith("pip uninstall nvidia-ml-py3 &&")


def test_two_owners_of_one_module(tmp_path: Path) -> None:
    """With a fork beside NVIDIA's the module may be either's, even when it looks right."""
    for name, version in (("nvidia-ml-py", "13.590.48"), ("nvidia-ml-py3", "7.352.0")):
        _distribution(tmp_path, name, version, "pynvml.py,sha256=x,1\n")
    _file(tmp_path, "pynvml.py", CALL.encode())
    found = binding([str(tmp_path)]).finding
    assert found.verdict is Verdict.WARN
    assert "nvidia-ml-py3" in found.fix


def test_an_old_binding_is_not_enough(tmp_path: Path) -> None:
    """NVIDIA's own, but too old for GPM: it is to be replaced, and nothing else uninstalled."""
    _distribution(tmp_path, "nvidia-ml-py", "11.450.51", "pynvml.py,sha256=x,1\n")
    _file(tmp_path, "pynvml.py", b"def nvmlInit(): ...\n")
    found = binding([str(tmp_path)]).finding
    assert found.verdict is Verdict.WARN
    assert found.fix.startswith("pip install")


def test_the_distribution_pynvml_is_told_of(tmp_path: Path) -> None:
    """The distribution of that name is no owner of the module, but runs in every interpreter."""
    _distribution(tmp_path, "nvidia-ml-py", "13.590.48", "pynvml.py,sha256=x,1\n")
    _distribution(tmp_path, "pynvml", "13.0.1", "_pynvml_redirector.pth,,\n")
    _file(tmp_path, "pynvml.py", CALL.encode())
    found = binding([str(tmp_path)]).finding
    assert found.verdict is Verdict.WARN
    assert found.fix.startswith("pip uninstall pynvml")


def test_what_a_broken_uninstall_leaves_is_no_trouble(tmp_path: Path) -> None:
    """An empty dist-info folder is passed over."""
    (tmp_path / "half_gone-1.0.dist-info").mkdir()
    assert binding([str(tmp_path)]).finding.verdict is Verdict.MISSING


CLOSED = b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
OPEN = b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build\nGCC version: gcc 12.2.0\n"


@pytest.mark.parametrize(
    ("text", "library", "made_for", "told", "verdict", "driver"),
    [
        (CLOSED, "535.104.05", 590, "", Verdict.OK, "535.104.05"),
        (OPEN, "595.45.04", 595, "", Verdict.OK, "595.45.04"),
        (OPEN, "595.45.04", 590, "", Verdict.WARN, "595.45.04"),
        (OPEN, "590.48.01", 615, "", Verdict.WARN, "595.45.04"),
        (OPEN, "", 0, "", Verdict.OK, "595.45.04"),
        (b"", "590.48.01", 615, "", Verdict.MISSING, ""),
        (b"", "", 615, "590.48.01", Verdict.OK, "590.48.01"),
        (b"something else entirely", "", 615, "", Verdict.MISSING, ""),
    ],
)
def test_versions_are_held_against_each_other(
    tmp_path: Path, text: bytes, library: str, made_for: int, told: str, verdict: Verdict, driver: str
) -> None:
    """Driver, library and binding: none loaded, one newer than the binding, or a library of another driver is told."""
    if text:
        _file(tmp_path, "/proc/driver/nvidia/version", text)
    found = versions(tmp_path, library, made_for, told)
    assert found.verdict is verdict
    assert found.facts["driver"] == driver
    assert _says_what_to_do(found)


def test_processes_of_others_need_the_first_namespace(tmp_path: Path) -> None:
    """The kernel's fixed number marks the machine's first PID namespace; hostPID is the fix elsewhere."""
    link = tmp_path / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    assert in_first_namespace(tmp_path) is None
    link.symlink_to("pid:[4026531836]")
    assert in_first_namespace(tmp_path) is True
    link.unlink()
    link.symlink_to("pid:[4026532712]")
    assert in_first_namespace(tmp_path) is False
    assert visibility(True).ok
    assert visibility(None).verdict is Verdict.UNKNOWN
    assert visibility(False).verdict is Verdict.WARN
    assert "hostPID: true" in visibility(False).fix
