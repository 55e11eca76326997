"""One table for the Collector's rules R1 to R31: what a user who knows the Collector may rely on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from gpulens.config.document import load
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.errors import ConfigError
from tests.config.fakes import GOOD, Queue, complaints, exporter, receiver, service, with_receiver


@dataclass(frozen=True)
class Wrong:
    """A configuration, and texts that its problems hold, one a problem."""

    rule: str
    text: str
    expected: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    sets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Right:
    """Something that must come out as stated."""

    rule: str
    obtain: Callable[[], object]
    expected: object


NINE = "{endpoint: x, sending_queue: {queue_size: 9.0}}"
S3 = 's3:foo: unsupported scheme on URI "s3:foo" (valid values: [env file preset yaml])'
RAW = ("[1, 2", '"q"', "a #b", "x\n")
LABEL = "receivers.scrape.labels"
LATER = "receivers: {scrape: {labels: {a: z}}}"
WITH_LIST = with_receiver("{include: [a, b]}")
SHORTER_LIST = "receivers: {scrape: {include: [c]}}"
EXTENDED = (
    "receivers: {scrape: }\nexporters: {debug: }\nextensions: {health_check: , health_check/b: }\n"
    "service: {extensions: [health_check/b, health_check], "
    "pipelines: {metrics: {receivers: [scrape], exporters: [debug]}}}\n"
)


def _base(**sections: str) -> str:
    """A valid configuration with some of its sections, written in flow style, replaced."""
    given = sections.get("receivers", "{scrape: }")
    first = next(iter(given.strip("{}").split(": ")))
    parts = {
        "receivers": given,
        "exporters": "{debug: }",
        "service": f"{{pipelines: {{metrics: {{receivers: [{first}], exporters: [debug]}}}}}}",
        **sections,
    }
    return "".join(f"{key}: {value}\n" for key, value in parts.items())


def _pipelines(body: str) -> str:
    return _base(service=f"{{pipelines: {body}}}")


def _ids(text: str, kind: Kind) -> list[str]:
    return [str(component_id) for each, component_id in service(text).components if each is kind]


def _configs(*texts: str, sets: Sequence[str] = ()) -> list[ComponentConfig]:
    return [entry.config for entry in service(*texts, sets=sets).components.values()]


def _label(value: str, **environ: str) -> str:
    return receiver(f"{{labels: {{a: '{value}'}}}}", environ).labels["a"]


def _free(value: str, **environ: str) -> object:
    return receiver(f"{{free: {{a: '{value}'}}}}", environ).free["a"]


def _load_error(*configs: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(configs, [], {})
    return str(raised.value)


WRONG = (
    Wrong("R1", _base(receivers="{scrape: , 1x: }"), ('invalid character(s) in type "1x"',)),
    Wrong("R1", _base(receivers="{scrape: , scrape/a b: }"), ('invalid character(s) in name "a b"',)),
    Wrong("R1", _base(receivers="{scrape: , scrape/a+b: }"), ('invalid character(s) in name "a+b"',)),
    Wrong("R2", _base(receivers="{scrape: , ' ': }"), ("receivers: id must not be empty",)),
    Wrong("R2", _base(receivers="{scrape: , /x: }"), ('in "/x" id: the part before / should not be empty',)),
    Wrong("R2", _base(receivers="{scrape: , x/: }"), ('in "x/" id: the part after / should not be empty',)),
    Wrong("R3", _base(receivers="{scrape: , 'scrape ': }"), ('duplicate name "scrape" after unmarshaling',)),
    Wrong(
        "R4",
        _pipelines("{foo: {receivers: [scrape], exporters: [debug]}}"),
        ('service::pipelines: in "foo" id: unknown pipeline signal: "foo"',),
    ),
    Wrong("R4", _pipelines("{metric: {receivers: [scrape], exporters: [debug]}}"), ("did you mean 'metrics'?",)),
    Wrong("R6", GOOD + "foo: 1\n", ("has invalid keys: foo",)),
    Wrong("R6", GOOD + "Extensions: {}\n", ("has invalid keys: Extensions (did you mean 'extensions'?)",)),
    Wrong(
        "R7",
        _base(service="{pipeline: {}}"),
        (
            "service::pipelines: service must have at least one pipeline",
            "service: has invalid keys: pipeline (did you mean 'pipelines'?)",
        ),
    ),
    Wrong(
        "R8",
        with_receiver("text"),
        ("receivers::scrape: expected type 'map[string]interface {}', got unconvertible type 'string'",),
    ),
    Wrong(
        "R9",
        _base(exporters="{debug: , otlp_grpc: {endpoint: x, sending_queue: {queue_size: 0}}}"),
        ("exporters::otlp_grpc::sending_queue: `queue_size` must be positive",),
    ),
    Wrong(
        "R11",
        with_receiver("{collection_interval: 5}"),
        ("'collection_interval' 5 has no unit; the Collector would read it as 5 nanoseconds; write \"5s\"",),
    ),
    Wrong(
        "R11", with_receiver("{collection_interval: abc}"), ("'collection_interval' time: invalid duration \"abc\"",)
    ),
    Wrong(
        "R12",
        _base(exporters="{debug: , otlp_grpc: {endpoint: x, sending_queue: {queue_size: abc}}}"),
        ("'queue_size' expected type 'int64', got unconvertible type 'string'",),
    ),
    Wrong(
        "R12",
        _base(exporters="{debug: , otlp_grpc: {endpoint: x, tls: {insecure: 'true'}}}"),
        ("'insecure' expected type 'bool', got unconvertible type 'string'",),
    ),
    Wrong("R12", with_receiver("{labels: {a: 5}}"), ("'a' expected type 'string', got unconvertible type 'int'",)),
    Wrong("R12", with_receiver("{window: true}"), ("'window' expected type 'float64', got",)),
    Wrong("R15", GOOD, ("--set a.b: missing equal sign",), sets=("a.b",)),
    Wrong(
        "R16",
        GOOD,
        (
            "no receiver configuration specified",
            "service must have at least one pipeline",
        ),
        sets=("receivers=", "service.pipelines="),
    ),
    Wrong(
        "R19",
        with_receiver("{labels: {c: '1', c: '2'}}"),
        ('receivers::scrape::labels: mapping key "c" already defined at line 1',),
    ),
    Wrong(
        "R22",
        with_receiver("{labels: {a: '${env:1A}'}}"),
        ('environment variable "1A" has invalid name: must match regex ^[a-zA-Z_][a-zA-Z0-9_]*$',),
    ),
    Wrong(
        "R27", with_receiver("{labels: {a: '${A}'}}"), ("too many recursive expansions",), {"A": "${B}", "B": "${A}"}
    ),
    Wrong(
        "R29",
        with_receiver("{labels: {a: '${ and }'}}"),
        ('receivers::scrape::labels::a: environment variable " and " has invalid name',),
    ),
    Wrong(
        "R30",
        with_receiver("{labels: {a: '${env:A$B}'}}"),
        ("the uri \"env:A$B\" contains unsupported characters ('$')",),
    ),
    Wrong("R31", _base(receivers="{scrape: , '${X}/2': }"), ('invalid character(s) in type "${X}"',), {"X": "scrape"}),
)

RIGHT = (
    Right("R1", lambda: _ids(_base(receivers="{' scrape / é1 ': }"), Kind.RECEIVERS)[0], "scrape/é1"),
    Right("R2", lambda: ComponentID.parse("a/b/c"), ComponentID("a", "b/c")),
    Right("R4", lambda: PipelineID.parse("logs/x"), PipelineID(Signal.LOGS, "x")),
    Right("R5", lambda: _ids(_base(exporters="{debug: , otlp: {endpoint: x}}"), Kind.EXPORTERS)[1], "otlp"),
    Right("R7", lambda: service(EXTENDED).extensions, (ComponentID("health_check", "b"), ComponentID("health_check"))),
    Right("R8", lambda: receiver(""), receiver("{}")),
    Right("R9", lambda: _ids(_base(receivers="{scrape: , plain: }"), Kind.RECEIVERS), ["scrape", "plain"]),
    Right("R10", lambda: receiver("{include: }").include, ("default",)),
    Right("R10", lambda: receiver("{include: []}").include, ()),
    Right("R10", lambda: exporter("{endpoint: x}").sending_queue, Queue()),
    Right("R10", lambda: exporter("{endpoint: x, sending_queue: {enabled: false}}").sending_queue, None),
    Right("R10", lambda: exporter("{endpoint: x, tls: }").tls, None),
    Right("R11", lambda: receiver("{collection_interval: 1m30s}").collection_interval, 90.0),
    Right("R11", lambda: receiver("{include: 'a, b'}").include, ("a", "b")),
    Right(
        "R12", lambda: exporter("{endpoint: x, sending_queue: {queue_size: 9.0}}").sending_queue, Queue(queue_size=9)
    ),
    Right("R13", lambda: _load_error("s3:foo"), S3),
    Right("R14", lambda: _configs(GOOD, "receivers::scrape::window: 7.5"), _configs(with_receiver("{window: 7.5}"))),
    Right("R15", lambda: _configs(GOOD, sets=[LABEL + "={a: b=c}"]), _configs(with_receiver("{labels: {a: b=c}}"))),
    Right("R15", lambda: _configs(GOOD, LATER, sets=[LABEL + "={a: b}"]), _configs(with_receiver("{labels: {a: b}}"))),
    Right("R16", lambda: _configs(WITH_LIST, SHORTER_LIST), _configs(with_receiver("{include: [c]}"))),
    Right("R17", _load_error, "config: at least one config flag must be provided"),
    Right(
        "R18",
        lambda: _load_error("file:nope.yaml"),
        "nope.yaml: cannot retrieve the configuration: unable to read the file file:nope.yaml: "
        "open nope.yaml: no such file or directory",
    ),
    Right("R20", lambda: complaints(GOOD, sets=[LABEL + ".a=${env:1A}", LABEL + ".a=b"]), []),
    Right("R21", lambda: _label("${env:S}-${S}-${env:U:-d}-${yaml:y}-$S", S="s"), "s-s-d-y-$S"),
    Right("R23", lambda: _label("${env:U:-}"), ""),
    Right("R23", lambda: _label("x${env:E:-d}", E=""), "x"),
    Right("R23", lambda: receiver("{include: '${env:U}'}").include, ("default",)),
    Right("R24", lambda: _label("${env:N}", N="0123"), "0123"),
    Right("R24", lambda: _free("${env:N}", N="0123"), 123),
    Right("R24", lambda: _label("${env:T}", T="true"), "true"),
    Right("R24", lambda: _free("${env:L}", L="[x, {y: 0x10}]"), ["x", {"y": 16}]),
    Right("R25", lambda: _label("a-${env:N}-b z${env:L} ${U}.", N="0123", L="[x, y]"), "a-0123-b z[x, y] ."),
    Right("R26", lambda: [_free("${V}", V=text) for text in RAW], list(RAW)),
    Right("R27", lambda: _label("${env:U:-${env:R}}", R="${env:S}", S="deep"), "deep"),
    Right("R28", lambda: _label("$$ $${S} $$$${S} ${P}", S="v", P="pa$$word"), "$ ${S} $${S} pa$word"),
    Right("R28", lambda: _label("$$${S}", S="v"), "$v"),
    Right("R29", lambda: _label("$${S}-${S}-$${S}", S="v"), "${S}-v-${S}"),
    Right("R31", lambda: receiver("{labels: {'${X}': a}}", {"X": "y"}).labels, {"${X}": "a"}),
)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.rule)
def test_what_the_collector_refuses_is_refused_in_its_words(case: Wrong) -> None:
    """Each wrong configuration gives exactly the problems stated, in document order."""
    found = complaints(case.text, case.environ, case.sets)
    assert len(found) == len(case.expected), found
    for problem, expected in zip(found, case.expected, strict=True):
        assert expected in problem


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.rule)
def test_what_the_collector_takes_is_taken_in_its_sense(case: Right) -> None:
    """Each statement about a valid configuration, or about how sources are named, holds."""
    assert case.obtain() == case.expected


def test_every_rule_has_a_case() -> None:
    """The table is complete: R1 to R31."""
    rules = {case.rule for case in (*WRONG, *RIGHT)}
    assert rules == {f"R{number}" for number in range(1, 32)}
