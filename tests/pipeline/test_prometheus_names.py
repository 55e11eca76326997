"""Names and labels on the Prometheus side."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.pipeline.data import KeyValues, Kind, Metric, Resource, Scope, Series, Temporality
from gpulens.pipeline.prometheus_names import (
    MAX_LABELS,
    LabelRules,
    hidden_reason,
    label_name,
    label_value,
    metric_name,
    prometheus_metric,
    target_info,
)

OWN = Scope("gpulens")
POD = Resource(
    {
        "k8s.namespace.name": "ml",
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": "0f3c",
        "k8s.container.name": "main",
        "k8s.node.name": "node-a",
        "service.name": "gpulens",
        "service.instance.id": "node-a",
    }
)
UTILIZATION = Metric("hw.gpu.utilization", "1")
UNITS = st.sampled_from(
    ["", "1", "s", "By", "J", "W", "Cel", "Hz", "%", "{x}", "By/s", "{USD}/h", "1/s", "a b/c", "/", "ms"]
)
METRICS = st.builds(
    Metric,
    name=st.text(max_size=30) | st.from_regex(r"[a-z]+([._][a-z0-9]+){0,4}(_total|_ratio|_bytes)?", fullmatch=True),
    unit=UNITS | st.text(max_size=8),
    kind=st.sampled_from(Kind),
    temporality=st.just(Temporality.CUMULATIVE),
    monotonic=st.booleans(),
)


def counter(name: str, unit: str) -> Metric:
    """A cumulative monotonic sum."""
    return Metric(name, unit, "", Kind.SUM, Temporality.CUMULATIVE, monotonic=True)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (Metric("hw.gpu.utilization", "1"), "hw_gpu_utilization_ratio"),
        (
            Metric("hw.gpu.memory.usage", "By", kind=Kind.SUM, temporality=Temporality.CUMULATIVE),
            "hw_gpu_memory_usage_bytes",
        ),
        (counter("hw.energy", "J"), "hw_energy_joules_total"),
        (counter("hw.errors", "{error}"), "hw_errors_total"),
        (Metric("hw.temperature", "Cel"), "hw_temperature_celsius"),
        (Metric("gpu.nvlink.throughput", "By/s"), "gpu_nvlink_throughput_bytes_per_second"),
        (Metric("gpu.cost.rate", "{USD}/h"), "gpu_cost_rate_per_hour"),
        (counter("gpu.cost", "{USD}"), "gpu_cost_total"),
        (Metric("gpu.state", ""), "gpu_state"),
        (Metric("hw.fan.speed_ratio", "1"), "hw_fan_speed_ratio"),
        (counter("requests.total", "1"), "requests_total"),
        (counter("jobs", "1"), "jobs_total"),
        (Metric("process.bytes.read", "By"), "process_bytes_read"),
        (Metric("a..b  c", "ms"), "a_b_c_milliseconds"),
        (Metric("3d.load", ""), "_3d_load"),
        (Metric("load", "%"), "load_percent"),
        (Metric("ns:rule", ""), "ns:rule"),
        (Metric("gpu.process.count", "{process}"), "gpu_processes"),
        (Metric("", ""), "unnamed"),
        (counter("total", ""), "unnamed_total"),
    ],
)
def test_metric_names(metric: Metric, name: str) -> None:
    """Names follow the specification: unit, `_ratio` for gauges of unit 1, `_total` for counters, nothing
    doubled."""
    assert metric_name(metric) == name


@given(METRICS)
@example(counter("a.total.total", "By/s"))
@example(Metric("1", "1"))
def test_translating_a_metric_twice_changes_nothing(metric: Metric) -> None:
    """A translated name is a legal name and is translated to itself."""
    name = metric_name(metric)
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name)
    assert metric_name(replace(metric, name=name)) == name


@given(st.text(max_size=30))
@example("__name__")
@example("1a")
def test_translating_a_label_twice_changes_nothing(key: str) -> None:
    """A translated label is legal, never one of Prometheus' own, and is translated to itself."""
    name = label_name(key)
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
    assert not name.startswith("__")
    assert label_name(name) == name


def test_catalogue_names_are_distinct_and_stable() -> None:
    """No two catalogued metrics share a Prometheus name, and each name is a fixed point."""
    names = [metric_name(entry.metric) for entry in CATALOGUE.values()]
    assert len(set(names)) == len(names)
    assert [metric_name(replace(e.metric, name=n)) for e, n in zip(CATALOGUE.values(), names, strict=True)] == names


def test_promtool_accepts_every_catalogued_metric(promtool: str) -> None:
    """Prometheus' linter has nothing to say about any metric of the catalogue."""
    page = ""
    for entry in CATALOGUE.values():
        metric = prometheus_metric(entry.metric)
        page += f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n{metric.name} 1\n"
    done = subprocess.run([promtool, "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_an_owner_becomes_labels() -> None:
    """The pod and the device get their short names; the pod's UID and the device's index stay off."""
    series = Series(
        UTILIZATION,
        {"hw.id": "GPU-1", "hw.name": "nvidia0", "hw.model": "T4", "hw.gpu.task": "general", "hw.parent": ""},
    )
    labels, cut = LabelRules().block(POD, OWN).of(series)
    assert labels == (
        ("container", "main"),
        ("gpu_model", "T4"),
        ("gpu_uuid", "GPU-1"),
        ("hw_gpu_task", "general"),
        ("namespace", "ml"),
        ("node", "node-a"),
        ("pod", "train-0"),
    )
    assert cut == 0


def test_owner_attributes_on_points_get_the_same_labels() -> None:
    """An agent that sends owners as point attributes shows the same labels as one that sends resources."""
    node = Resource({"k8s.node.name": "node-a"})
    on_points = Series(UTILIZATION, {"hw.id": "GPU-1", **{k: v for k, v in POD.map.items() if k.startswith("k8s.")}})
    on_resource = Series(UTILIZATION, {"hw.id": "GPU-1"})
    rules = LabelRules()
    assert rules.block(node, OWN).of(on_points) == rules.block(POD, OWN).of(on_resource)


def test_an_index_without_a_uuid_stays() -> None:
    """`hw.name` is a label where nothing better names the device."""
    labels, _ = LabelRules().block(Resource(), OWN).of(Series(UTILIZATION, {"hw.name": "nvidia0"}))
    assert labels == (("hw_name", "nvidia0"),)


def test_only_promoted_resource_attributes_become_labels() -> None:
    """The user lists what else is wanted; everything else of our resources stays off."""
    labels, _ = LabelRules(promote=("k8s.pod.uid",)).block(POD, OWN).of(Series(UTILIZATION))
    assert ("k8s_pod_uid", "0f3c") in labels
    assert not {"service_name", "job", "instance"} & dict(labels).keys()


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (Scope("gpulens", "1.0"), {}),
        (Scope("gpulens/dcgm", "1.0"), {"otel_scope_name": "gpulens/dcgm"}),
        (Scope("app", "2.0"), {"otel_scope_name": "app", "otel_scope_version": "2.0"}),
        (Scope(), {}),
    ],
)
def test_the_scope_keeps_sources_apart(scope: Scope, expected: dict[str, str]) -> None:
    """A source's scope is a label until sources are reconciled under the one name."""
    labels, _ = LabelRules().block(Resource(), scope).of(Series(UTILIZATION))
    assert {k: v for k, v in labels if k.startswith("otel_scope")} == expected


def test_foreign_resources_have_job_and_instance_and_target_info() -> None:
    """A foreign resource is named as the specification says; ours has no target_info."""
    resource = Resource(
        {
            "service.namespace": "shop",
            "service.name": "cart",
            "service.instance.id": "i-1",
            "host.name": "h",
            "a.b": 1,
            "a_b": 2,
        }
    )
    labels, _ = LabelRules().block(resource, Scope("app")).of(Series(UTILIZATION))
    assert dict(labels) == {"job": "shop/cart", "instance": "i-1", "otel_scope_name": "app"}
    assert dict(target_info(resource, Scope("app"))) == {
        "job": "shop/cart",
        "instance": "i-1",
        "host_name": "h",
        "a_b": "1;2",
    }
    assert target_info(resource, OWN) == ()
    assert target_info(Resource({"host.name": "h"}), Scope("app")) == ()


def test_values_under_one_name_are_joined() -> None:
    """Different values whose keys collide are joined in key order; the same value stands once."""
    labels, _ = (
        LabelRules().block(Resource(), OWN).of(Series(UTILIZATION, {"a.b": "x", "a-b": "y", "c.d": "z", "c_d": "z"}))
    )
    assert labels == (("a_b", "y;x"), ("c_d", "z"))


def test_a_constant_never_replaces_a_label() -> None:
    """Constant labels fill gaps only, so that they can't rename a pod."""
    labels, _ = LabelRules(constant={"pod": "fake", "cluster": "c1"}).block(POD, OWN).of(Series(UTILIZATION))
    assert (dict(labels)["pod"], dict(labels)["cluster"]) == ("train-0", "c1")


def test_labels_are_limited() -> None:
    """No series has more labels than the limit; the owner and device stay, and what is left off is
    counted."""
    own = {f"k{i:02}": "v" for i in range(30)} | {"hw.id": "GPU-1"}
    labels, cut = LabelRules(constant={"cluster": "c1"}).block(POD, OWN).of(Series(UTILIZATION, own))
    assert len(labels) == MAX_LABELS
    assert {"namespace", "pod", "container", "node", "gpu_uuid"} <= dict(labels).keys()
    assert cut == 4 + 31 + 1 - MAX_LABELS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (True, "true"),
        (7, "7"),
        (2**63 - 1, "9223372036854775807"),
        (0.5, "0.5"),
        (b"\x01", "AQ=="),
        (("a", 1), '["a",1]'),
        (KeyValues((("k", b"\x01"),)), '{"k":"AQ=="}'),
        (None, ""),
    ],
)
def test_label_values(value: object, text: str) -> None:
    """Values of every attribute type have one text."""
    assert label_value(value) == text  # type: ignore[arg-type]


def test_delta_sums_are_hidden() -> None:
    """A sum that is not cumulative has no form on the Prometheus side; the reason says which."""
    assert hidden_reason(replace(counter("a", ""), temporality=Temporality.DELTA)) == "delta"
    assert hidden_reason(replace(counter("a", ""), temporality=Temporality.UNSPECIFIED)) == "temporality"
    assert hidden_reason(counter("a", "")) == hidden_reason(UTILIZATION) == ""
