"""What `gpulens doctor` found, as values, as text and as JSON.

Invariant: a finding that is not ok says what to do about it; the report is healthy exactly when every need is met.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpulens import __version__
from gpulens.nvml.protocol import Json

HELP: Final = (
    "Says what of a GPU node is there and what is missing, each with its fix. Exit code 0 when nothing that is needed"
    " is missing, else 1. Needed is, with --config, what the receivers of its pipelines read; without it, a reader of"
    " the GPUs (NVML with at least one GPU, or a dcgm-exporter on localhost:9400) and who holds them (the kubelet's Pod"
    " Resources socket). Nothing on the machine is changed."
)

JSON_VERSION: Final = 1
"""Rises when a key of the JSON report changes its meaning or goes away."""

_FIX_WIDTH: Final = 118
_INDENT: Final = " " * 9
_RESET: Final = "\x1b[0m"


class Verdict(StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"  # there, but not as it should be, or less can be known because of it
    MISSING = "missing"  # needed and not there
    ABSENT = "absent"  # not there, and nothing here needs it
    UNKNOWN = "unknown"  # could not be found out


_COLOURS: Final[Mapping[Verdict, str]] = {
    Verdict.OK: "\x1b[32m",
    Verdict.WARN: "\x1b[33m",
    Verdict.MISSING: "\x1b[31m",
    Verdict.ABSENT: "\x1b[90m",
    Verdict.UNKNOWN: "\x1b[36m",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `check` is its fixed name for machines, `what` the name for people, `facts` what a machine may want
    in figures."""

    check: str
    what: str
    verdict: Verdict
    finding: str
    fix: str = ""
    facts: Mapping[str, Json] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing to do here."""
        return self.verdict is Verdict.OK


@dataclass(frozen=True, slots=True)
class Need:
    """Something without which the agent can't do its work here; `reason` says what is missing, "" when it is met.

    `lines` are the findings (their `what`) one of which would meet it, `causes` those that may say why none does.
    """

    what: str
    reason: str = ""
    lines: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """It is there."""
        return not self.reason

    @property
    def label(self) -> str:
        """The lines of the report that it is about, and what for."""
        lines = " or ".join(self.lines)
        return self.what if lines in ("", self.what) else f"{lines} ({self.what})"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings in the order of the checks, what is needed, and one plain sentence (`note`, may be empty)."""

    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]
    note: str = ""

    @property
    def healthy(self) -> bool:
        """Nothing that is needed is missing."""
        return all(need.met for need in self.needs)


def settled(findings: Iterable[Finding], needs: Sequence[Need]) -> tuple[Finding, ...]:
    """The findings with MISSING only for what an open need wants; what else is not there is ABSENT."""
    wanted = {line for need in needs if not need.met for line in (*need.lines, *need.causes)}
    return tuple(
        replace(each, verdict=Verdict.ABSENT) if each.verdict is Verdict.MISSING and each.what not in wanted else each
        for each in findings
    )


def as_text(report: Report, *, colour: bool) -> str:
    """One line for each check, its fix below it, a summary line at the end."""
    width = max((len(each.what) for each in report.findings), default=0) + 1
    lines: list[str] = []
    for each in report.findings:
        verdict = f"{each.verdict:<7}"
        if colour:
            verdict = f"{_COLOURS[each.verdict]}{verdict}{_RESET}"
        lines.append(f"{verdict}  {_printable(each.what) + ':':<{width}} {_printable(each.finding)}")
        if each.fix:
            wrapped = textwrap.wrap(
                f"fix: {_printable(each.fix)}",
                width=_FIX_WIDTH,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT + "     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines.extend(wrapped)
    lines.extend(("", _printable(_summary(report))))
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> str:
    """The report as one JSON object; `version` says which keys to expect."""
    document = {
        "version": JSON_VERSION,
        "gpulens": __version__,
        "healthy": report.healthy,
        "note": report.note,
        "needs": [{"what": need.what, "met": need.met, "reason": need.reason} for need in report.needs],
        "findings": [
            {
                "check": each.check,
                "what": each.what,
                "verdict": each.verdict.value,
                "finding": each.finding,
                "fix": each.fix,
                "facts": dict(each.facts),
            }
            for each in report.findings
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _summary(report: Report) -> str:
    counts = Counter(each.verdict for each in report.findings)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    note = f"{report.note} " if report.note else ""
    lacking = "; ".join(need.label for need in report.needs if not need.met)
    if lacking:
        return f"{note}{parts}. Needed and missing: {lacking}."
    return f"{note}{parts}. Nothing that is needed is missing."


def _printable(text: str) -> str:
    """What came from a page or a driver must not drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text).strip()
