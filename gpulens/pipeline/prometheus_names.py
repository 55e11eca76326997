"""How OpenTelemetry metrics, resources and scopes are named on the Prometheus side: page, remote write, GMP.

Invariant: a name that has been translated is translated to itself, so data that crosses the border twice
keeps its names. The metric rules are the OpenTelemetry specification's "Prometheus and OpenMetrics
compatibility" page; the owner becomes point labels (`namespace pod container node`), because a scrape has no
resources.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gpulens.pipeline.data import (
    Attributes,
    AttributeValue,
    KeyValues,
    Kind,
    Metric,
    Resource,
    Scope,
    Series,
    Temporality,
)

Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name, none empty."""

MAX_LABELS: Final = 20
"""Labels of one series; what goes beyond is left off, constants and promoted ones first."""

_NO_WORD = re.compile(r"[^a-zA-Z0-9:]+")
_NO_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_ANNOTATION = re.compile(r"\{[^}]*\}")

_UNITS: Final = MappingProxyType(
    {
        "d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds",
        "us": "microseconds", "ns": "nanoseconds", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes",
        "GiBy": "gibibytes", "TiBy": "tebibytes", "KBy": "kilobytes", "kBy": "kilobytes", "MBy": "megabytes",
        "GBy": "gigabytes", "TBy": "terabytes", "m": "meters", "V": "volts", "A": "amperes", "J": "joules",
        "W": "watts", "g": "grams", "Cel": "celsius", "Hz": "hertz", "1": "", "%": "percent",
    }
)  # fmt: skip
_PER: Final = MappingProxyType(
    {
        "s": "second",
        "m": "minute",
        "min": "minute",
        "h": "hour",
        "d": "day",
        "w": "week",
        "mo": "month",
        "y": "year",
    }
)

# The plain translation ends in `_count`, which belongs to histograms: promtool complains about any other use.
_OWN_NAMES: Final = MappingProxyType({"gpu.process.count": "gpu_processes"})

# What a scrape's user looks for, by the attribute that says it.
_SHORT: Final = MappingProxyType(
    {
        "k8s.namespace.name": "namespace",
        "k8s.pod.name": "pod",
        "k8s.container.name": "container",
        "k8s.node.name": "node",
        "hw.id": "gpu_uuid",
        "hw.parent": "gpu_parent",
        "hw.model": "gpu_model",
        "gpu.mig.profile": "gpu_profile",
    }
)
_OWNER: Final = ("k8s.namespace.name", "k8s.pod.name", "k8s.container.name", "k8s.node.name")
_JOB: Final = ("service.namespace", "service.name", "service.instance.id")
_OWN_SCOPE: Final = "gpulens"


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    """A metric as Prometheus knows it.

    - `name`: of the samples; a counter's ends in `_total`.
    - `family`: as OpenMetrics names it, a counter's without `_total`.
    - `type`: `counter` or `gauge`.
    - `unit`: the words that `family` ends in (`bytes`, `bytes_per_second`, `ratio`), else empty.
    - `help`: the description as it is, not escaped.
    """

    name: str
    family: str
    type: str
    unit: str
    help: str


def hidden_reason(metric: Metric) -> str:
    """Why a metric can't be shown to Prometheus: `delta`, `temporality` (a sum that says none); empty when it
    can."""
    if metric.kind is not Kind.SUM or metric.temporality is Temporality.CUMULATIVE:
        return ""
    return "delta" if metric.temporality is Temporality.DELTA else "temporality"


def prometheus_metric(metric: Metric, namespace: str = "") -> PrometheusMetric:
    """Name, type and unit of a metric; `namespace` becomes the name's first words.

    A sum that is not monotonic is a gauge. Ask `hidden_reason` first: a delta sum has no form here.
    """
    counter = metric.kind is Kind.SUM and metric.monotonic
    words = _words(_OWN_NAMES.get(metric.name, metric.name))
    if counter and words[-1:] == ["total"]:
        words = words[:-1]
    unit = _unit_words(metric)
    words = _with_unit(words or ["unnamed"], unit)
    words = _words(namespace) + words
    family = "_".join(words)
    if family[0].isdigit():
        family = f"_{family}"
    suffix = "_".join(unit)
    return PrometheusMetric(
        name=f"{family}_total" if counter else family,
        family=family,
        type="counter" if counter else "gauge",
        unit=suffix if suffix and family.endswith(f"_{suffix}") else "",
        help=metric.description,
    )


def metric_name(metric: Metric) -> str:
    """The name of a metric's samples: `hw.energy` in J -> `hw_energy_joules_total`."""
    return prometheus_metric(metric).name


def _words(name: str) -> list[str]:
    """A name cut where Prometheus allows no character; underscores count as cuts, so repeated ones
    collapse."""
    return [word for word in _NO_WORD.split(name) if word]


def _unit_words(metric: Metric) -> list[str]:
    """The unit as words. `{x}` says nothing to Prometheus; `1` is a ratio only on a gauge."""
    if metric.unit == "1":
        return ["ratio"] if metric.kind is Kind.GAUGE else []
    main, slash, per = _ANNOTATION.sub("", metric.unit).strip().partition("/")
    words = _words(_UNITS.get(main, main))
    over = _words(_PER.get(per, per)) if slash else []
    return [*words, "per", *over] if over else words


def _with_unit(words: list[str], unit: list[str]) -> list[str]:
    """The name with those parts of the unit behind it (`bytes`, `per second`) that it does not have yet."""
    cut = unit.index("per") if "per" in unit else len(unit)
    for part in (unit[:cut], unit[cut:]):
        if part and not _contains(words, part):
            words = words + part
    return words


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


def label_name(key: str) -> str:
    """An attribute's key as a label: what is not allowed becomes `_`; a leading digit, or the leading `__`
    that Prometheus keeps for itself, gets `key_` before it."""
    name = _NO_LABEL.sub("_", key)
    if not name or name[0].isdigit():
        return f"key_{name}"
    return f"key{name}" if name.startswith("__") else name


def label_value(value: AttributeValue) -> str:
    """An attribute's value as text: numbers plain, booleans `true`/`false`, bytes base64, lists and maps as
    JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, separators=(",", ":"), ensure_ascii=False)


def _plain(value: AttributeValue) -> object:
    """The value in JSON's own types."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, KeyValues):
        return {key: _plain(item) for key, item in value.items}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def is_own_scope(scope: Scope) -> bool:
    """gpulens made these readings (`gpulens`, or `gpulens/<receiver>` before sources are reconciled)."""
    return scope.name == _OWN_SCOPE or scope.name.startswith(f"{_OWN_SCOPE}/")


@dataclass(frozen=True, slots=True)
class LabelRules:
    """What a user adds to the labels: `promote` names resource attributes (`k8s.pod.uid`), `constant` is the
    same on every series and never replaces a label that a series has."""

    promote: tuple[str, ...] = ()
    constant: Mapping[str, str] = field(default_factory=dict)

    def block(self, resource: Resource, scope: Scope) -> BlockLabels:
        """The labels that all series of one resource and scope share, ready to be joined with each one's
        own."""
        return BlockLabels(self, resource, scope)


class BlockLabels:
    """Makes the labels of the series of one block."""

    def __init__(self, rules: LabelRules, resource: Resource, scope: Scope) -> None:
        self._constant = tuple((label_name(key), value) for key, value in sorted(rules.constant.items()))
        self._promote = frozenset(rules.promote)
        self._first = [(key, resource.map.get(key)) for key in _OWNER]
        self._last: list[tuple[str, AttributeValue]] = []
        if not is_own_scope(scope):
            self._last.extend(_identity(resource))
            self._last.extend(_foreign_scope(scope))
        elif scope.name != _OWN_SCOPE:
            self._last.append(("otel_scope_name", scope.name))
        self._last.extend((key, resource.map.get(key)) for key in rules.promote if key not in _OWNER)

    def of(self, series: Series) -> tuple[Labels, int]:
        """The labels of a series, and how many more it would have had without the limit."""
        named = series.map
        own = [(key, value) for key, value in series.attributes if not self._is_left_off(key, named)]
        own.sort(key=_device_first)
        return _limit(_join([*self._first, *own, *self._last]), self._constant)

    def _is_left_off(self, key: str, named: Mapping[str, AttributeValue]) -> bool:
        if key == "hw.name":  # nvidia0 says less than the UUID and changes with the driver's order
            return bool(named.get("hw.id"))
        return key == "k8s.pod.uid" and key not in self._promote


def _device_first(pair: tuple[str, AttributeValue]) -> tuple[bool, str]:
    return pair[0] not in _SHORT, pair[0]


def _join(pairs: Iterable[tuple[str, AttributeValue]]) -> dict[str, str]:
    """Labels by name, in order of first sight; different values under one name are joined by `;` in the order
    of their keys."""
    found: dict[str, dict[str, str]] = {}
    for key, value in pairs:
        text = label_value(value)
        if text:
            found.setdefault(_SHORT.get(key) or label_name(key), {})[key] = text
    return {name: ";".join(dict.fromkeys(values[key] for key in sorted(values))) for name, values in found.items()}


def _limit(labels: dict[str, str], constant: Labels) -> tuple[Labels, int]:
    for name, value in constant:
        if value:
            labels.setdefault(name, value)
    kept = list(labels.items())[:MAX_LABELS]
    return tuple(sorted(kept)), len(labels) - len(kept)


def _identity(resource: Resource) -> list[tuple[str, AttributeValue]]:
    """`job` and `instance` of a foreign resource."""
    name, space = resource.text("service.name"), resource.text("service.namespace")
    job = f"{space}/{name}" if space and name else name
    return [("job", job), ("instance", resource.map.get("service.instance.id"))]


def _foreign_scope(scope: Scope) -> list[tuple[str, AttributeValue]]:
    named: Attributes = (("otel_scope_name", scope.name), ("otel_scope_version", scope.version))
    return [*named, *((f"otel_scope_{key}", value) for key, value in scope.attributes)]


TARGET_INFO: Final = PrometheusMetric("target_info", "target", "info", "", "Target metadata")
"""The metric that carries the attributes of foreign resources; its samples are 1."""


def target_info(resource: Resource, scope: Scope) -> Labels:
    """The labels of a foreign resource's `target_info`; empty for our own, and for one that has no more to
    say than `job` and `instance`, or neither of them."""
    identity = _join(_identity(resource))
    others = [(key, value) for key, value in resource.attributes if key not in _JOB]
    if is_own_scope(scope) or not identity:
        return ()
    more: dict[str, dict[str, str]] = {}
    for key, value in others:
        text = label_value(value)
        if text and label_name(key) not in identity:
            more.setdefault(label_name(key), {})[key] = text
    if not more:
        return ()
    joined = {name: ";".join(values[key] for key in sorted(values)) for name, values in more.items()}
    return tuple(sorted({**joined, **identity}.items()))
