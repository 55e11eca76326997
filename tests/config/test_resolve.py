"""Validation of a whole configuration: all problems at once, each at its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulens.config.document import load
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.resolve import resolve
from gpulens.pipeline.errors import ConfigError
from tests.config.fakes import GOOD, FakeLookup, complaints, receiver, service, with_receiver

FIVE_ERRORS = """\
receivers:
  scrape:
    colection_interval: 10s
processors:
  idle:
    windows: [5m, 30]
exporters:
  otlp_grpc:
    timeout: 5s
  debgu:
service:
  pipelines:
    metrics:
      receivers: [scrape]
      processors: [idle]
      exporters: [otlp_grcp]
"""


def test_five_errors_show_in_one_go_each_at_its_place(tmp_path: Path) -> None:
    """Five different mistakes give five lines with file, line, column, path, reason and suggestion."""
    path = tmp_path / "c.yaml"
    path.write_text(FIVE_ERRORS, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        resolve(load([str(path)], [], {}), FakeLookup())
    assert str(raised.value).replace(str(path), "c.yaml").splitlines() == [
        "c.yaml:3:5: receivers::scrape: has invalid keys: colection_interval (did you mean 'collection_interval'?)",
        "c.yaml:6:19: processors::idle: 'windows[1]' 30 has no unit; the Collector would read it as 30 nanoseconds; "
        'write "30s"',
        "c.yaml:8:3: exporters::otlp_grpc: 'endpoint' is required",
        'c.yaml:10:3: exporters: unknown type: "debgu" for id: "debgu" (valid values: [debug otlp_grpc]) '
        "(did you mean 'debug'?)",
        'c.yaml:16:19: service::pipelines::metrics: references exporter "otlp_grcp" which is not configured '
        "(did you mean 'otlp_grpc'?)",
    ]


def test_a_valid_configuration_becomes_a_service() -> None:
    """Ids are kept as typed, types are canonical, lists keep their order."""
    found = service(
        """
receivers: {scrape: , scrape/b: }
processors: {idle: , join: }
exporters: {otlp: {endpoint: x}, debug: }
extensions: {health_check: }
service:
  extensions: [health_check]
  node: 007
  telemetry: {logs: {level: debug}, metrics: {level: detailed}}
  pipelines:
    metrics/a: {receivers: "scrape/b,scrape", processors: [join, idle], exporters: [otlp, debug, otlp]}
"""
    )
    assert found.node == "007"
    assert found.telemetry.logs.level == "debug"
    assert found.telemetry.metrics.level == "detailed"
    assert found.extensions == (ComponentID("health_check"),)
    pipeline = found.pipelines[PipelineID(Signal.METRICS, "a")]
    assert [str(each) for each in pipeline.receivers] == ["scrape/b", "scrape"]
    assert [str(each) for each in pipeline.exporters] == ["otlp", "debug"]
    assert found.components[Kind.EXPORTERS, ComponentID("otlp")].type == "otlp_grpc"
    assert found.warnings == (
        'yaml:4:13: exporters: "otlp" is a deprecated alias of the exporter type "otlp_grpc"; write "otlp_grpc" '
        '(id "otlp")',
        'yaml:11:98: service::pipelines::metrics/a: references exporter "otlp" multiple times; it is used once',
    )


def test_an_empty_configuration_says_so() -> None:
    """Nothing at all is an empty file and no pipeline."""
    assert complaints("") == [
        "yaml:1:1: empty configuration file",
        "yaml:1:1: service::pipelines: service must have at least one pipeline",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("exporters:", "no exporter configuration specified in config"),
        ("service: {extensions: [zpages]}", 'service::extensions: references extension "zpages" which is not conf'),
        (
            "service: {pipelines: {metrics: {processors: [idle]}}}",
            'service::pipelines::metrics: references processor "idle" which is not configured',
        ),
        ("service: {pipelines: {metrics: {receivers: }}}", "metrics: must have at least one receiver"),
        ("service: {pipelines: {metrics: {exporters: []}}}", "metrics: must have at least one exporter"),
        ("service: {pipelines: {metrics: {exporters: '${yaml:[]}'}}}", "metrics: must have at least one exporter"),
        (
            "processors: {idle: }\nservice: {pipelines: {metrics: {processors: [idle, idle]}}}",
            'service::pipelines::metrics: references processor "idle" multiple times',
        ),
        (
            "service: {pipelines: {logs: {receivers: [scrape], exporters: [debug]}}}",
            'failed to create "scrape" receiver for data type "logs": telemetry type is not supported',
        ),
        ("connectors: {debug: }", 'unknown type: "debug" for id: "debug" (valid values: [events forward])'),
        ("service: {pipelines: {metrics: {receiver: [scrape]}}}", "has invalid keys: receiver (did you mean 'receiv"),
        ("service: {pipelines: {metrics: {receivers: {a: b}}}}", "expected type '[]component.ID', got unconvertible"),
        ("service: {pipelines: {metrics: {receivers: [scrape, {}]}}}", "expected type 'component.ID', got unconvert"),
        ("service: {pipelines: [x]}", "service::pipelines: expected type 'map[string]interface {}'"),
        ("service: {node: [x]}", "service: 'node' must be a text"),
        (
            "service: {telemetry: {logs: {level: debgu}}}",
            "service::telemetry::logs: 'level' should be 'debug', 'info', 'warn', 'error'",
        ),
        ("service: {telemetry: {metric: {}}}", "has invalid keys: metric (did you mean 'metrics'?)"),
    ],
)
def test_each_mistake_has_the_collectors_text(change: str, expected: str) -> None:
    """A good configuration with one mistake merged in gives that mistake's text."""
    with pytest.raises(ConfigError) as raised:
        service(GOOD, change)
    assert expected in str(raised.value)


def test_connectors_that_share_an_id_with_an_exporter_are_ambiguous() -> None:
    """The text names both and the way out."""

    class Both(FakeLookup):
        def canonical(self, kind: Kind, type_name: str, /) -> tuple[str, bool]:
            return ("forward", False) if kind is Kind.CONNECTORS else super().canonical(kind, type_name)

    document = load([f"yaml:{GOOD}connectors: {{debug: }}"], [], {})
    with pytest.raises(ConfigError, match='ambiguous ID: Found both "debug" exporter and "debug" connector') as raised:
        resolve(document, Both())
    assert raised.value.problems[0].path == "connectors::debug"


def test_constraints_and_choices_point_at_the_value() -> None:
    """Limits and fixed choices are told with the key, the place and the nearest choice."""
    assert complaints(with_receiver("{collection_interval: 0s}")) == [
        "yaml:1:43: receivers::scrape: 'collection_interval' should be greater than 0"
    ]
    (problem,) = complaints(with_receiver("{on_end: stpo}"))
    assert re.search(r"'on_end' should be 'stop' or 'wait' \(did you mean 'stop'\?\)$", problem)


BLOCK = """\
receivers: {scrape: }
exporters:
  otlp_grpc:
    endpoint: x
    timeout: -1s
    sending_queue:
      enabled: 1
      queue_size: many
      bogus: 1
      num_consumers: -3
      batch: {enabeld: true}
    tls:
      bogus: 1
      cert_file: c
service: {pipelines: {metrics: {receivers: [scrape], exporters: [otlp_grpc]}}}
"""


def test_all_errors_of_a_block_show_at_once() -> None:
    """Neither a wrong switch, nor a wrong type, nor an unknown key hides anything else of the block."""
    queue = "exporters::otlp_grpc::sending_queue"
    assert complaints(BLOCK) == [
        "yaml:5:14: exporters::otlp_grpc: 'timeout' must be non-negative",
        f"yaml:7:16: {queue}: 'enabled' expected type 'bool', got unconvertible type 'int'",
        f"yaml:8:19: {queue}: 'queue_size' expected type 'int64', got unconvertible type 'string'",
        f"yaml:9:7: {queue}: has invalid keys: bogus",
        f"yaml:10:22: {queue}: `num_consumers` must be positive",
        f"yaml:11:15: {queue}::batch: has invalid keys: enabeld (did you mean 'enabled'?)",
        "yaml:12:5: exporters::otlp_grpc::tls: provide both certificate and key, or neither",
        "yaml:13:7: exporters::otlp_grpc::tls: has invalid keys: bogus",
    ]


@pytest.mark.parametrize(
    ("queue", "value"),
    [("{queue_size: 5, batch: {min_size: 51}}", "5,"), ("{batch: {min_size: 10001}}", "10001")],
)
def test_a_rule_for_two_keys_points_at_the_first_that_is_written(queue: str, value: str) -> None:
    """The text quotes two keys: the place is a value of the block, or else of a block in it."""
    text = f"receivers: {{scrape: }}\nexporters: {{debug: , otlp_grpc: {{endpoint: x, sending_queue: {queue}}}}}\n"
    (problem,) = complaints(text + "service: {pipelines: {metrics: {receivers: [scrape], exporters: [debug]}}}\n")
    message = "`min_size` must be less than or equal to ten times `queue_size`"
    column = text.splitlines()[1].index(value) + 1
    assert problem == f"yaml:2:{column}: exporters::otlp_grpc::sending_queue: {message}"


def test_doubts_of_a_block_are_warnings_at_the_value() -> None:
    """What a block finds odd in itself goes out with the place of the key that it is about."""
    assert service(with_receiver("{window: 20}")).warnings == (
        "yaml:1:30: receivers::scrape: 'window' is longer than 'collection_interval'",
    )
    assert service(with_receiver("{collection_interval: 500ms}")).warnings == (
        "yaml:1:43: receivers::scrape: 'window' is longer than 'collection_interval'",
    )


def test_telemetry_that_nothing_serves_is_warned_of() -> None:
    """The Collector would listen there; here nobody does, and the user is told."""
    found = service(GOOD, "service: {telemetry: {metrics: {address: ':8888', readers: [{}], level: basic}}}")
    assert [re.sub(r"has no effect.*", "", warning) for warning in found.warnings] == [
        "yaml:1:42: service::telemetry::metrics: 'address' ",
        "yaml:1:60: service::telemetry::metrics: 'readers' ",
    ]


def test_problems_inside_lists_of_blocks_point_at_the_item() -> None:
    """A missing key points at the item, an unknown one at itself, with the names the item may have."""
    text = """
receivers: {scrape: }
processors:
  idle:
    prices:
      - {model: a, usd_per_hour: 1}
      - {model: a, usd_per_hour: 1, modle: b}
      - {model: a}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [scrape], processors: [idle], exporters: [debug]}}}
"""
    assert complaints(text) == [
        "yaml:7:37: processors::idle::prices[1]: has invalid keys: modle (did you mean 'model'?)",
        "yaml:8:9: processors::idle::prices[2]: 'usd_per_hour' is required",
    ]


def test_a_null_among_free_keys_is_an_empty_text() -> None:
    """An unset variable in a map of texts leaves an empty text, as in the Collector."""
    assert receiver("{labels: {a: '${env:U}'}}").labels == {"a": ""}


def test_problems_of_loading_and_of_validation_come_together() -> None:
    """A duplicate key, a failed reference and a wrong type are shown in one go, in document order."""
    text = with_receiver("{labels: {a: '${env:1A}'}, window: x, window: 1, level: medium}")
    found = complaints(text)
    assert ["1A" in found[0], "'window'" in found[1], '"window"' in found[2], "'level'" in found[3]] == [True] * 4


def test_two_exporters_may_not_share_a_destination() -> None:
    """Exporters in use for one signal that write to one place are refused; for two signals they are fine."""
    text = "receivers: {scrape: }\nexporters: {otlp_grpc: {endpoint: x}, otlp_grpc/b: {endpoint: x}}\n"
    both = "service: {pipelines: {metrics: {receivers: [scrape], exporters: [otlp_grpc, otlp_grpc/b]}}}\n"
    assert complaints(text + both) == [
        "yaml:2:39: exporters::otlp_grpc/b: writes metrics to the same destination as exporter "
        '"otlp_grpc" (x); use one exporter'
    ]
    one = "service: {pipelines: {metrics: {receivers: [scrape], exporters: [otlp_grpc]}}}\n"
    assert complaints(text + one) == []


def test_two_pipelines_may_not_derive_into_one_exporter() -> None:
    """Two writers of one derived series would overwrite each other."""
    text = "receivers: {scrape: }\nprocessors: {idle: }\nexporters: {debug: , debug/b: }\n"
    pipeline = "{{receivers: [scrape], processors: [idle], exporters: [{}]}}"
    pair = "service: {{pipelines: {{metrics/a: {}, metrics/b: {}}}}}\n"
    (problem,) = complaints(text + pair.format(pipeline.format("debug"), pipeline.format("debug")))
    assert 'metrics/b: derives series into exporter "debug", and so does pipeline "metrics/a"' in problem
    assert complaints(text + pair.format(pipeline.format("debug"), pipeline.format("debug/b"))) == []


def test_a_join_without_allocations_is_warned_of() -> None:
    """Attribution with nobody who tells owners is valid and surely not meant."""
    text = "receivers: {plain: , scrape: }\nprocessors: {join: }\nexporters: {debug: }\n"
    pipeline = "service: {{pipelines: {{metrics: {{receivers: [{}], processors: [join], exporters: [debug]}}}}}}\n"
    (warning,) = service(text + pipeline.format("plain")).warnings
    assert 'yaml:4:66: service::pipelines::metrics: processor "join" has no allocation source' in warning
    assert service(text + pipeline.format("plain, scrape")).warnings == ()
