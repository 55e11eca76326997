"""One state for a component of four tiers.

Invariant: the component is well only while every tier is; each change is told once.
"""

from __future__ import annotations

from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.status import Report, Status


class Health:
    """Puts the tiers' states, and what a good tick still lacks, together."""

    def __init__(self, report: Report, log: ComponentLog) -> None:
        self._report = report
        self._log = log
        self._problems: dict[str, str] = {}
        self._notes: dict[str, str] = {}

    def of(self, tier: str) -> Report:
        """What a tier reports to: (status, reason)."""

        def report(status: Status, reason: str) -> bool:
            before = self._problems.get(tier, "")
            problem = "" if status is Status.OK else reason
            elsewhere = {each for other, each in self._problems.items() if other != tier}
            self._problems[tier] = problem
            self._tell()
            return before != problem and (problem not in elsewhere or not problem)

        return report

    def note(self, tier: str, text: str) -> None:
        """What a tier lacks although it was read; empty when nothing."""
        if text == self._notes.get(tier, ""):
            return
        elsewhere = [each for other, each in self._notes.items() if other != tier and each]
        self._notes[tier] = text
        if text and text not in elsewhere:
            self._log.warning("GPUs did not answer.", tier=tier, reason=text)
        elif not text and not elsewhere:
            self._log.info("Every GPU answers again.")
        self._tell()

    def _tell(self) -> None:
        texts = [text for text in (*self._problems.values(), *self._notes.values()) if text]
        self._report(Status.RECOVERABLE if texts else Status.OK, texts[0] if texts else "")
