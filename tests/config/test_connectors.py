"""Connectors: both sides, signals, cycles."""

from __future__ import annotations

from tests.config.fakes import complaints

HEAD = "receivers: {scrape: }\nexporters: {debug: }\nconnectors: {forward: , forward/b: , events: }\n"


def _pipelines(**pipelines: str) -> str:
    bodies = ", ".join(f"{name.replace('_', '/')}: {{{body}}}" for name, body in pipelines.items())
    return f"{HEAD}service: {{pipelines: {{{bodies}}}}}\n"


def test_a_connector_joins_two_pipelines() -> None:
    """Same signal by one type, metrics to logs by another; unused connectors are fine."""
    text = _pipelines(
        metrics_a="receivers: [scrape], exporters: [forward, events]",
        metrics_b="receivers: [forward], exporters: [debug]",
        logs="receivers: [events], exporters: [debug]",
    )
    assert complaints(text) == []


def test_a_connector_needs_both_sides() -> None:
    """Used on one side only is told at that place."""
    (problem,) = complaints(_pipelines(metrics="receivers: [scrape], exporters: [forward]"))
    assert problem.endswith(
        'connectors::forward: connector "forward" used as exporter in [metrics] pipeline '
        "but not used in any supported receiver pipeline"
    )
    (problem,) = complaints(_pipelines(metrics="receivers: [scrape, forward], exporters: [debug]"))
    assert "used as receiver in [metrics] pipeline but not used in any supported exporter pipeline" in problem


def test_a_connector_needs_signals_it_supports() -> None:
    """Metrics to metrics is not what a connector to logs does: both ends are told."""
    text = _pipelines(
        metrics_a="receivers: [scrape], exporters: [events]", metrics_b="receivers: [events], exporters: [debug]"
    )
    assert len(complaints(text)) == 2


def test_cycles_are_found_once_and_shown_whole() -> None:
    """A way back to the same pipeline is refused, whether direct or through another."""
    (problem,) = complaints(_pipelines(metrics="receivers: [scrape, forward], exporters: [forward]"))
    assert 'cycle detected: pipeline "metrics" -> connector "forward" -> pipeline "metrics"' in problem
    text = _pipelines(
        metrics_a="receivers: [scrape, forward/b], exporters: [forward]",
        metrics_b="receivers: [forward], exporters: [forward/b, debug]",
    )
    (problem,) = complaints(text)
    assert 'pipeline "metrics/a" -> connector "forward" -> pipeline "metrics/b" -> connector "forward/b"' in problem
