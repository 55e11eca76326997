"""The rules that a test run is judged by: which skips pass, and what a golden file holds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import pytest

from tests.conftest import Golden
from tests.packaging.checkout import REPO


class _Skips(Protocol):
    def forbidden_skips(self, report: str, *, shared_present: bool) -> list[str]: ...

    def main(self, arguments: list[str]) -> int: ...


@pytest.fixture(scope="module")
def skips() -> _Skips:
    """CI's script for skips; it is no part of a package, so it is loaded from its file."""
    spec = importlib.util.spec_from_file_location("ci_skips", REPO / ".ci" / "skips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("_Skips", module)


_REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_runs"/>
<testcase classname="tests.a" name="test_expected"><skipped type="pytest.xfail" message="known"/></testcase>
<testcase classname="tests.a" name="test_pages">
  <skipped type="pytest.skip" message="needs shared: no such folder">x.py:1: …</skipped>
</testcase>
{more}</testsuite></testsuites>"""


def test_a_skip_for_the_missing_reference_folder_passes_only_while_it_is_missing(skips: _Skips) -> None:
    """The reference pages may be absent, and then their tests may be skipped; once present they must run."""
    report = _REPORT.format(more="")
    assert skips.forbidden_skips(report, shared_present=False) == []
    (line,) = skips.forbidden_skips(report, shared_present=True)
    assert line.startswith("tests.a::test_pages: needs shared")


def test_any_other_skip_fails_the_run(skips: _Skips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A peer that CI could have installed is no reason to skip; the message names test and reason."""
    more = '<testcase classname="tests.b" name="test_page"><skipped message="needs promtool"/></testcase>'
    report = tmp_path / "report.xml"
    report.write_text(_REPORT.format(more=more))
    assert skips.main([str(report), "--shared", str(tmp_path / "absent")]) == 1
    assert "tests.b::test_page: needs promtool" in capsys.readouterr().err


def test_a_module_that_is_skipped_whole_is_judged_by_its_reason(skips: _Skips) -> None:
    """pytest reports a module-level skip in other words; its reason is found there too."""
    text = "('tests/c.py', 3, 'Skipped: needs shared: the folder is not beside this checkout')"
    skipped = f'<skipped message="collection skipped">{text}</skipped>'
    report = _REPORT.format(more=f'<testcase classname="" name="tests.c">{skipped}</testcase>')
    assert skips.forbidden_skips(report, shared_present=False) == []
    assert skips.forbidden_skips(report, shared_present=True)[1].startswith("::tests.c: needs shared")


def test_a_golden_file_is_written_on_demand_and_compared_otherwise(tmp_path: Path) -> None:
    """A missing file is a failure that says what to do, an update writes it, and a difference fails."""
    write, compare = Golden(tmp_path / "golden", update=True), Golden(tmp_path / "golden", update=False)
    with pytest.raises(AssertionError, match="make goldens"):
        compare("page.txt", "a\n")
    write("page.txt", "a\n")
    compare("page.txt", "a\n")
    compare("page.txt", b"a\n")
    with pytest.raises(AssertionError, match="differs"):
        compare("page.txt", "b\n")
    with pytest.raises(AssertionError, match="differs"):
        compare("page.txt", b"a\r\n")


def test_a_free_port_can_be_bound(free_port: Callable[[], int]) -> None:
    """Ports that are handed to servers under test are real ones."""
    assert all(1024 <= free_port() <= 65535 for _ in range(3))
