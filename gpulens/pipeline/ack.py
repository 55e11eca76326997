"""The acknowledgement handle: a source learns when everyone who kept its data has it safely.

Invariant: the handle settles exactly once, when the last share is given back; the first error wins.
"""

from __future__ import annotations

from collections.abc import Callable


class Ack:
    """A counted handle that travels with a batch (semantics: contract of `consume`).

    The maker holds the first share. Whoever keeps data beyond the call takes a share and settles it later: a memory
    queue on enqueue, a durable one after its commit. `on_settled(None)` means safe, else the first error.
    """

    __slots__ = ("_error", "_on_settled", "_shares", "can_resend")

    def __init__(self, on_settled: Callable[[Exception | None], None] | None = None, can_resend: bool = True) -> None:
        self.can_resend = can_resend
        """The source keeps what is refused and offers it again; a scraper does not."""
        self._shares = 1
        self._error: Exception | None = None
        self._on_settled = on_settled

    @property
    def settled(self) -> bool:
        """Every share was given back."""
        return self._shares == 0

    def share(self) -> Ack:
        """Takes one more share; returns the handle. Raises RuntimeError when it has settled already."""
        if self._shares == 0:
            raise RuntimeError("the acknowledgement has settled; a share must be taken during consume")
        self._shares += 1
        return self

    def settle(self, error: Exception | None = None) -> None:
        """Gives one share back. Raises RuntimeError when none is left."""
        if self._shares == 0:
            raise RuntimeError("the acknowledgement was settled more often than it was shared")
        self._error = self._error or error
        self._shares -= 1
        if self._shares == 0 and self._on_settled is not None:
            self._on_settled(self._error)
