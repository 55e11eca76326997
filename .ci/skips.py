"""Fails a test run in which a test was skipped that could have run.

Invariant: the only skip let through is one whose reason starts with `needs shared`,
and only while that folder is absent.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

ALLOWED_WITHOUT_SHARED = "needs shared"


def forbidden_skips(report: str, *, shared_present: bool) -> list[str]:
    """Lists the skips of a JUnit XML `report` that must not be, one `test: reason` each.

    Expected failures (`xfail`) stand in the report as skips too; they ran, so they are not listed.
    Raises `xml.etree.ElementTree.ParseError` for text that is no XML.
    """
    found: list[str] = []
    for case in ET.fromstring(report).iter("testcase"):
        for skip in case.findall("skipped"):
            if skip.get("type") == "pytest.xfail":
                continue
            # The reason is the message; of a module that is skipped whole it stands in the text.
            reason = skip.get("message") or ""
            if reason == "collection skipped":
                reason = (skip.text or "").rpartition("Skipped: ")[2].rstrip("')\n ")
            if reason.startswith(ALLOWED_WITHOUT_SHARED) and not shared_present:
                continue
            found.append(f"{case.get('classname', '')}::{case.get('name', '')}: {reason}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Reads the report named in `arguments`; returns 1 when it holds a skip that must not be, else 0."""
    parser = argparse.ArgumentParser(prog="skips.py")
    parser.add_argument("report", type=Path)
    parser.add_argument("--shared", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = forbidden_skips(options.report.read_text("utf-8"), shared_present=options.shared.is_dir())
    for line in found:
        print(f"skipped, but could have run: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
