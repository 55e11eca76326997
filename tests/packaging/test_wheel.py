"""What is built from the checkout: one top-level name, everything of it inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path, PurePosixPath

import pytest

import gpulens
from tests.packaging.checkout import LINKS, REPO, checkout_files

_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links kept, so that a build leaves nothing behind in the checkout itself."""
    tree = tmp_path_factory.mktemp("source")
    for path in checkout_files():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / path, target, follow_symlinks=False)
    return tree


def _build(tree: Path, hook: str, out: Path) -> Path:
    """Runs one hook of the build backend in `tree`, offline and without isolation; returns the archive."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, hook, os.fspath(out)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, open for reading."""
    with zipfile.ZipFile(_build(source_tree, "build_wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def _metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"gpulens-{gpulens.__version__}.dist-info/{name}").decode()


def test_the_only_top_level_name_is_gpulens(wheel: zipfile.ZipFile) -> None:
    """Installing gpulens adds the package, its metadata and no other name: nobody's `config` is lost."""
    names = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    assert names == {"gpulens", f"gpulens-{gpulens.__version__}.dist-info"}
    assert _metadata(wheel, "top_level.txt").split() == ["gpulens"]


def test_every_file_of_the_package_is_inside(wheel: zipfile.ZipFile) -> None:
    """Every module and data file (presets, worlds, message definitions, py.typed) is packed."""
    expected = {path.as_posix() for path in checkout_files() if path.parts[0] == "gpulens"}
    packed = {name for name in wheel.namelist() if name.startswith("gpulens/")}
    assert "gpulens/py.typed" in packed
    assert packed == expected


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder with modules but no __init__.py would be left out of the wheel without a word."""
    folders = {path.parent for path in checkout_files() if path.parts[0] == "gpulens" and path.suffix == ".py"}
    assert [str(folder) for folder in sorted(folders) if not (REPO / folder / "__init__.py").is_file()] == []


def test_the_wheel_offers_the_command_and_names_its_licence(wheel: zipfile.ZipFile) -> None:
    """The installed package brings the `gpulens` command, its licence text and no unstated Python version."""
    assert "gpulens = gpulens.pipeline.cli:main" in _metadata(wheel, "entry_points.txt")
    metadata = message_from_string(_metadata(wheel, "METADATA"))
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert "Apache License" in _metadata(wheel, "licenses/LICENSE")


def test_the_source_archive_builds_the_same_wheel(source_tree: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The source archive holds no twin of a package, and the wheel built from it has the same files."""
    archive = _build(source_tree, "build_sdist", tmp_path)
    with tarfile.open(archive) as source:
        tops = {PurePosixPath(name).parts[1] for name in source.getnames() if len(PurePosixPath(name).parts) > 1}
        # Member by member: extractall's `filter` is missing before 3.11.4 and asked for from 3.12 on.
        for member in source:
            if member.isfile() and (content := source.extractfile(member)) is not None:
                target = tmp_path / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    assert not tops & set(LINKS)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    out = tmp_path / "again"
    out.mkdir()
    with zipfile.ZipFile(_build(unpacked, "build_wheel", out)) as rebuilt:
        assert sorted(rebuilt.namelist()) == sorted(wheel.namelist())
