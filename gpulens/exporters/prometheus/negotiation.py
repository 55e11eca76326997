"""What a client asks for: which format, and whether compressed.

Invariant: OpenMetrics is served only to a client that names it and prefers it to plain text. Source: RFC 9110
sections 12.4 and 12.5 (quality values), the OpenMetrics 1.0 specification (content type).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def wants_open_metrics(accept: str) -> bool:
    """True when an Accept header names OpenMetrics (1.0.0 or no version) at least as willingly as plain
    text."""
    open_metrics = text = 0.0
    for media, parameters in _ranges(accept):
        quality = _quality(parameters)
        if media == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            open_metrics = max(open_metrics, quality)
        elif media == "text/plain":
            text = max(text, quality)
    return open_metrics > 0 and open_metrics >= text


def wants_gzip(accept_encoding: str) -> bool:
    """True when an Accept-Encoding header allows gzip."""
    allowed = {name: _quality(parameters) for name, parameters in _ranges(accept_encoding)}
    return allowed.get("gzip", allowed.get("*", 0.0)) > 0


def _ranges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The items of a header with their parameters, in lower case."""
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        pairs = (parameter.partition("=") for parameter in parameters)
        yield name, {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _quality(parameters: dict[str, str]) -> float:
    """The `q` parameter; 1 where there is none, 0 where it is no number."""
    text = parameters.get("q", "1")
    return float(text) if text.replace(".", "", 1).isdecimal() and text.isascii() else 0.0
