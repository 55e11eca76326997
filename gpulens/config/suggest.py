"""The 'did you mean' of messages.

Invariant: a suggestion is always one of the valid values, or empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_WORD = 100
_MAX_CANDIDATES = 500
"""Comparing is slow, and nobody mistypes a name among more."""


def closest(word: str, candidates: Iterable[str]) -> str:
    """The candidate most like `word`; one that differs only in case or in `-` and `_` first; empty if none is
    near."""
    known = list(candidates)
    if len(word) > _MAX_WORD or len(known) > _MAX_CANDIDATES:
        return ""
    for candidate in known:
        if _plain(candidate) == _plain(word) and candidate != word:
            return candidate
    return next(iter(get_close_matches(word, known, n=1)), "")


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
