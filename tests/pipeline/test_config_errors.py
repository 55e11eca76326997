"""The mistakes of a configuration of real components: all at once, each at its own value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulens.config.document import load
from gpulens.config.resolve import resolve
from gpulens.config.service import ServiceConfig
from gpulens.pipeline.errors import ConfigError
from gpulens.pipeline.registry import Registry

QUEUE = "exporters::otlp_grpc::sending_queue"
PAGE = "http://127.0.0.1:1/metrics"

# Each line of the text ends with a comment that holds its problem: a column, a path and the start of a message.
MISTAKES = f"""\
receivers:
  dcgm:
    endpoint: {PAGE}
    collection_interval: -5s  # 26 receivers::dcgm: 'collection_interval' must be positive
    timeout: -1s  # 14 receivers::dcgm: 'timeout' must not be negative
  gke:
    endpoint: ${{env:NOPE}}  # 15 receivers::gke: needs either 'endpoint' (the page's address) or 'discovery' (the
    colour: red  # 5 receivers::gke: has invalid keys: colour
  pod_resources:
    endpoint: kubelet.sock  # 15 receivers::pod_resources: 'endpoint' "kubelet.sock" must name a socket by its whole
    reuse: -1s  # 12 receivers::pod_resources: 'reuse' must be non-negative
    collection_interval: 0s  # 26 receivers::pod_resources: 'collection_interval' must be positive
  otlp_json_file:
    include: []  # 14 receivers::otlp_json_file: 'include' must name at least one file
    start_at: end
    on_end: stop  # 13 receivers::otlp_json_file: 'on_end: stop' with 'start_at: end' would read nothing
processors:
  attribution:
    grid: 0s  # 11 processors::attribution: 'grid' must be positive
    hold: -1s  # 11 processors::attribution: 'hold' must be non-negative
exporters:
  otlp_grpc:
    endpoint: ''  # 15 exporters::otlp_grpc: requires a non-empty "endpoint"
    timeout: -1s  # 14 exporters::otlp_grpc: 'timeout' must be non-negative
    headers:
      bad name: x  # 7 exporters::otlp_grpc::headers: 'bad name' can't be the name of a gRPC header
      a: "\u00e9"  # 10 exporters::otlp_grpc::headers: 'a' has characters that gRPC does not send
    sending_queue:
      enabled: 1  # 16 {QUEUE}: 'enabled' expected type 'bool', got unconvertible type 'int'
      queue_size: 0  # 19 {QUEUE}: `queue_size` must be positive
      num_consumers: many  # 22 {QUEUE}: 'num_consumers' expected type 'int64', got
      storage: disk  # 16 {QUEUE}: `storage` arrives with the file_storage extension
      batch:
        flush_timeout: 0s  # 24 {QUEUE}::batch: `flush_timeout` must be positive, found 0s
        min_size: -1  # 19 {QUEUE}::batch: `min_size` must be non-negative, found -1
        sizer: requests  # 16 {QUEUE}::batch: `batch` supports only `items` or `bytes` sizer, found `requests`
    retry_on_failure:
      multiplier: -1  # 19 exporters::otlp_grpc::retry_on_failure: 'multiplier' must be non-negative
      randomization_factor: 2  # 29 exporters::otlp_grpc::retry_on_failure: 'randomization_factor' must be within
  otlp_grpc/related:
    endpoint: h:1
    retry_on_failure:
      initial_interval: 400s  # 25 exporters::otlp_grpc/related::retry_on_failure: 'max_elapsed_time' must not be less
    sending_queue:
      sizer: items
      num_consumers: 0  # 22 exporters::otlp_grpc/related::sending_queue: `num_consumers` must be positive
      queue_size: 5  # 19 exporters::otlp_grpc/related::sending_queue::batch: `min_size` must be less than or equal
      batch: {{}}
  otlp_grpc/unverified:
    endpoint: h:2
    tls:
      insecure_skip_verify: true  # 29 exporters::otlp_grpc/unverified: 'insecure_skip_verify' is not possible
  otlp_http:
    endpoint: ${{env:NOPE}}  # 15 exporters::otlp_http: at least one endpoint must be specified; ${{env:NOPE}} is not
    timeout: x  # 14 exporters::otlp_http: 'timeout' time: invalid duration "x"
    headers:
      a b: x  # 7 exporters::otlp_http::headers: 'a b' can't be the name of an HTTP header
      c: "x\\ny"  # 10 exporters::otlp_http::headers: 'c' has line breaks
  otlp_http/tls:
    endpoint: http://h:1
    tls:
      cert_file: ${{env:NOPE}}  # 18 exporters::otlp_http/tls::tls: for auth via TLS, provide both certificate and key
      key_file: k
  prometheus:
    endpoint: '9464'  # 15 exporters::prometheus: 'endpoint' "9464" is not host:port
  file:
    path: ''  # 11 exporters::file: 'path' must not be empty
  debug:
    verbosity: ${{env:NOPE}}x  # 16 exporters::debug: 'verbosity' should be 'basic', 'normal' or 'detailed'; ${{env
service:
  pipelines:
    metrics: {{receivers: [dcgm], exporters: [debug]}}
"""


def _resolve(path: Path, text: str, environ: Mapping[str, str] | None = None) -> ServiceConfig:
    path.write_text(text, encoding="utf-8")
    return resolve(load([str(path)], [], environ or {}), Registry())


def test_every_mistake_shows_at_once_at_its_own_value(tmp_path: Path) -> None:
    """One problem for each marked line, in order, and nothing else."""
    file = tmp_path / "c.yaml"
    with pytest.raises(ConfigError) as raised:
        _resolve(file, MISTAKES)
    marked = [
        (number, *line.split("  # ", 1)[1].split(" ", 1))
        for number, line in enumerate(MISTAKES.splitlines(), 1)
        if "  # " in line
    ]
    found = [str(problem) for problem in raised.value.problems]
    assert len(found) == len(marked), "\n".join(found)
    for problem, (number, column, text) in zip(found, marked, strict=True):
        assert problem.startswith(f"{file}:{number}:{column}: {text}")


def test_odd_but_valid_settings_are_warned_of(tmp_path: Path) -> None:
    """A timeout longer than the interval, a list that names one twice, and telemetry that nobody serves."""
    file = tmp_path / "c.yaml"
    text = f"""\
receivers:
  dcgm: {{endpoint: "{PAGE}", collection_interval: 5s}}
  gke: {{endpoint: "{PAGE}", timeout: 1m}}
exporters: {{debug: }}
service:
  telemetry: {{metrics: {{address: ":8888"}}}}
  pipelines: {{metrics: {{receivers: [dcgm, gke, dcgm], exporters: [debug, debug]}}}}
"""
    skipped = "while the source does not answer, ticks are skipped"
    pipeline = "service::pipelines::metrics"
    assert [warning.removeprefix(f"{file}:") for warning in _resolve(file, text).warnings] == [
        f"2:71: receivers::dcgm: 'timeout' (10s) is longer than 'collection_interval' (5s): {skipped}",
        f"3:58: receivers::gke: 'timeout' (1m) is longer than 'collection_interval' (30s): {skipped}",
        "6:34: service::telemetry::metrics: 'address' has no effect: this version does not serve the agent's own "
        "metrics",
        f'7:48: {pipeline}: references receiver "dcgm" multiple times; it is used once',
        f'7:74: {pipeline}: references exporter "debug" multiple times; it is used once',
    ]


def test_the_shipped_example_is_free_of_doubts() -> None:
    """What ships gives no warning."""
    assert resolve(load(["preset:demo"], [], {}), Registry()).warnings == ()
