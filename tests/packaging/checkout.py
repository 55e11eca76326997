"""The files of this checkout as git sees them: tracked, or new and not ignored."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LINKS = ("pipeline", "receivers", "processors", "exporters", "config")
_NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__"}


def checkout_files() -> list[Path]:
    """Paths relative to the root, sorted; links are listed as themselves, never followed.

    Without git, or outside a clone, every file is listed except what builds and tools leave behind.
    """
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPO,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = {Path(name) for name in listing.split("\0") if name}
    except (FileNotFoundError, subprocess.CalledProcessError):
        found = {
            path.relative_to(REPO)
            for path in REPO.rglob("*")
            if (path.is_file() or path.is_symlink())
            and not any(part in _NOT_OURS or part.endswith(("_cache", ".egg-info")) for part in path.parts)
        }
    return sorted(path for path in found if (REPO / path).is_symlink() or (REPO / path).is_file())


def text_of(path: Path) -> str:
    """The text of a file of the checkout; empty for a link, a folder or what is no UTF-8."""
    full = REPO / path
    if full.is_symlink():
        return ""
    try:
        return full.read_text("utf-8")
    except UnicodeDecodeError:
        return ""
