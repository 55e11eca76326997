"""What must never be in the checkout: private paths, copied material, real folders for links."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.checkout import LINKS, REPO, checkout_files, text_of

MAX_LINES = 500
# One character of each stands in brackets so that this file does not match itself.
FORBIDDEN = {
    "a path of somebody's machine": r"/wor[k]/|/hom[e]/(?!kubernetes/bin)[a-z]|/Use[r]s/[A-Za-z]|/roo[t]/\.",
    "a host of a package registry": r"pyp[i]\.org|pythonhoste[d]\.org|npmj[s]\.(org|com)|deb\.debia[n]",
    "an unfinished mark": r"\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b|NotImplementedErro[r]",
    "a blanket suppression": r"type: ignor[e](?!\[)|# noq[a](?!:)",
    "a credential": r"AKI[A][0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KE[Y]|gh[p]_\w{30}|ya2[9]\.[\w-]{20}",
}


def _found(pattern: str) -> Iterator[str]:
    for path in checkout_files():
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if re.search(pattern, line):
                yield f"{path}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds_what_does_not_belong(what: str) -> None:
    """No file names a private path or a registry, holds a credential or is left unfinished."""
    assert list(_found(FORBIDDEN[what])) == []


def test_the_names_at_the_root_are_links() -> None:
    """The folders at the root are links into the package; a real folder would be a second copy."""
    assert {name: str((REPO / name).readlink()) for name in LINKS} == {name: f"gpulens/{name}" for name in LINKS}
    assert all((REPO / name).is_dir() for name in LINKS)


def _imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").partition(".")[0])
    return names


def test_no_module_is_imported_by_a_root_name_or_relatively() -> None:
    """Code imports from `gpulens`, so that no module is loaded twice under two names."""
    wrong = {
        str(path): names
        for path in checkout_files()
        if path.suffix == ".py" and (names := _imported(text_of(path)) & {*LINKS, "."})
    }
    assert wrong == {}


def _python_files() -> list[Path]:
    return [path for path in checkout_files() if path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def test_files_are_short_and_named_for_what_they_do() -> None:
    """No module is longer than one can hold in mind, and none is a drawer for odds and ends."""
    drawers = {"util", "utils", "helper", "helpers", "common", "misc"}
    assert [str(path) for path in _python_files() if path.stem in drawers] == []
    assert [str(path) for path in _python_files() if len(text_of(path).splitlines()) > MAX_LINES] == []


def _fingerprint(data: bytes) -> str:
    # White space is left out, so that a re-indented copy is a copy still.
    return hashlib.sha256(b"".join(data.split())).hexdigest()


def test_no_reference_page_is_copied(shared_dir: Path) -> None:
    """Pages of other projects are read where they lie; none of them is a file of this one."""
    pages = {
        _fingerprint(path.read_bytes()): path.name
        for path in shared_dir.rglob("*")
        if path.is_file() and path.stat().st_size > 0
    }
    ours = (path for path in checkout_files() if not (REPO / path).is_symlink() and (REPO / path).stat().st_size > 0)
    copies = {str(path): pages[key] for path in ours if (key := _fingerprint((REPO / path).read_bytes())) in pages}
    assert copies == {}
