"""print-config: what is in effect, and nothing secret."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gpulens.config.printing import render
from gpulens.config.types import ComponentConfig
from tests.config.fakes import GOOD, service

TEXT = """
receivers: {scrape: {include: [on, "012", "1:30", "0o17", '$${x}', '$$$$'], free: {a: [1, 2.5, null, {b: c}], d: 012}}}
processors: {idle: {windows: [90s, 1ms], prices: [{model: "NVIDIA.*", usd_per_hour: 9.8}]}}
exporters:
  otlp_grpc: {endpoint: x, headers: {a: "s3cret$$"}, sending_queue: {enabled: false}}
  otlp_grpc/b: {endpoint: y, sending_queue: {batch: {min_size: 3}}, tls: {insecure: true}}
extensions: {health_check: }
service:
  node: n1
  extensions: [health_check]
  telemetry: {metrics: {level: none}, resource: {service.name: x}}
  pipelines: {metrics: {receivers: [scrape], processors: [idle], exporters: [otlp_grpc, otlp_grpc/b]}}
"""


def _essence(text: str) -> tuple[object, ...]:
    found = service(text)
    configs: list[ComponentConfig] = [entry.config for entry in found.components.values()]
    return configs, list(found.components), found.pipelines, found.telemetry, found.node, found.extensions


def test_what_is_printed_unredacted_loads_back_the_same() -> None:
    """YAML and JSON both round-trip, with defaults written out."""
    assert _essence(render(service(TEXT), "unredacted")) == _essence(TEXT)
    assert _essence(render(service(TEXT), "unredacted", "json")) == _essence(TEXT)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_secrets_are_redacted(form: str) -> None:
    """The default mode shows that there is a secret, not what it is."""
    printed = render(service(TEXT), format="json" if form == "json" else "yaml")
    assert "s3cret" not in printed
    assert "[REDACTED]" in printed


def test_defaults_and_durations_are_written_out() -> None:
    """The effective value of every key shows, durations with their units."""
    tree = yaml.safe_load(render(service(TEXT)))
    assert tree["receivers"]["scrape"]["collection_interval"] == "10s"
    assert tree["processors"]["idle"]["windows"] == ["1m30s", "1ms"]
    assert tree["exporters"]["otlp_grpc"]["sending_queue"] == {"enabled": False}
    assert json.loads(render(service(TEXT), format="json"))["service"]["node"] == "n1"


@example("a\x85b")
@example("\U00010000")
@given(st.text(max_size=30))
def test_every_text_survives_printing(text: str) -> None:
    """Texts that look like numbers, words or references come back as they were."""
    config = service(GOOD, sets=[f"receivers.scrape.labels={json.dumps({'a': _escaped(text)})}"])
    for printed in (render(config, "unredacted"), render(config, "unredacted", "json")):
        again = service(printed)
        assert next(iter(again.components.values())).config == next(iter(config.components.values())).config


def _escaped(text: str) -> str:
    return text.replace("$", "$$")
