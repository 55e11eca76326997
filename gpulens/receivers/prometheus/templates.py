"""Texts made of a sample's labels: `{serial_number}/partition{gpu_partition_id}`.

Invariant: a template gives a text only when every label in it says something; it never gives half of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_PART = re.compile(r"\{(?P<label>[a-zA-Z_][a-zA-Z0-9_]*)\}|(?P<text>[^{}]+)")


@dataclass(frozen=True, slots=True)
class Template:
    """Parts in order: (text, "") stands for itself, ("", label) for what the label says."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Reads a template. Raises ValueError when it is empty or a brace names no label."""
        parts: list[tuple[str, str]] = []
        end = 0
        while end < len(text):
            found = _PART.match(text, end)
            if found is None:
                raise ValueError(f'"{text}" has a brace that names no label; write "{{label}}"')
            parts.append((found["text"] or "", found["label"] or ""))
            end = found.end()
        if not parts:
            raise ValueError("must not be empty")
        return cls(tuple(parts))

    def fill(self, labels: Mapping[str, str]) -> str:
        """The text, empty when a label is missing."""
        filled = [text or labels.get(label, "") for text, label in self.parts]
        return "".join(filled) if all(filled) else ""


def first(templates: Iterable[Template], labels: Mapping[str, str]) -> str:
    """What the first template gives that gives anything; empty when none does."""
    return next(filter(None, (template.fill(labels) for template in templates)), "")
