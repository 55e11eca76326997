"""References in values: the scanner, and expansion from every source."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.config.expand import MAX_EXPANSIONS, Reference, escape, scan
from tests.config.fakes import complaints, receiver, service, with_receiver


def _label(value: str, **environ: str) -> str:
    return receiver(f"{{labels: {{a: {value}}}}}", environ).labels["a"]


@given(st.text(alphabet="$${}ab:") | st.text())
def test_escaped_text_expands_to_itself(text: str) -> None:
    """`escape` is the inverse of the scanner for every text."""
    assert "".join(str(part) for part in scan(escape(text))) == text


@given(st.text(alphabet="$${}ab:"))
def test_scanning_loses_no_text_between_dollars(text: str) -> None:
    """The scanner reads every text to its end: braces and letters that belong to no reference come out."""

    def letters(parts: tuple[str | Reference, ...]) -> str:
        return "".join(part if isinstance(part, str) else letters(part.parts) for part in parts)

    assert letters(scan(text)).count("a") == text.count("a")


def test_references_nest() -> None:
    """The inside of a reference holds references of its own."""
    assert scan("a${b${c}}d") == ("a", Reference(("b", Reference(("c",)))), "d")


def test_an_open_reference_is_text() -> None:
    """`${` that is never closed stays as written, and does not hide a reference behind it."""
    assert scan("x${y ${z}") == ("x${y ", Reference(("z",)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0x10", 16), ("1e3", 1000.0), ("true", True), ("on", "on"), ("", None), ("2024-01-02", "2024-01-02")],
)
def test_a_whole_reference_takes_the_type_of_its_content(text: str, expected: object) -> None:
    """The value is typed as YAML while a text field gets the text as it stands."""
    assert receiver("{free: {a: '${env:V}'}}", {"V": text}).free["a"] == expected
    assert _label("'${env:V}'", V=text) == text


def test_a_default_counts_for_unset_variables_only() -> None:
    """A variable that is set to nothing is blank, not absent."""
    assert _label("'[${env:E:-d}][${env:U:-d}]'", E="") == "[][d]"


def test_the_default_scheme_takes_defaults_too() -> None:
    """`${NAME:-x}` without `env:` is a variable with a default."""
    assert _label("'${NAME:-x}'") == "x"
    assert _label("'${X:-x}'") == "x"


def test_unset_variables_are_warned_of_once() -> None:
    """Each unset variable gives one warning, at its first place, however often it is used."""
    found = service(with_receiver("{labels: {a: 'x${env:U}', b: 'y${U}'}}"))
    assert found.warnings == ('yaml:1:34: Configuration references unset environment variable "U"',)


def test_a_variable_that_is_not_set_is_named_where_it_stands(tmp_path: Path) -> None:
    """In a file that a value brings in, the place is in that file; `--set` is a place, too."""
    part = tmp_path / "part.yaml"
    part.write_text("labels:\n  a: x${env:U}\n", encoding="utf-8")
    found = service(with_receiver(f"'${{file:{part}}}'"), sets=["service.node=${env:V}"])
    assert found.warnings == (
        '--set service.node: Configuration references unset environment variable "V"',
        f'{part}:2:6: Configuration references unset environment variable "U"',
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{window: 'x${env:U}'}", "1:30: receivers::scrape: 'window' expected type 'float64', got unconvertible type "),
        ("{level: 'x${env:U}'}", "1:29: receivers::scrape: 'level' should be 'low' or 'high'"),
        ("'x${env:U}'", "1:21: receivers::scrape: expected type 'map[string]interface {}', got unconvertible type "),
        ("{level: '${V}'}", "1:29: receivers::scrape: 'level' should be 'low' or 'high'"),
    ],
)
def test_a_wrong_value_says_which_variable_is_not_set(body: str, expected: str) -> None:
    """The problem is at the value, and ends with the reason."""
    (problem,) = complaints(with_receiver(body), {"V": "x${U}"})
    assert problem.startswith(f"yaml:{expected}"), problem
    assert problem.endswith("; ${env:U} is not set")


def test_all_variables_of_a_value_are_named_once() -> None:
    """Several unset variables in one value are one reason."""
    (problem,) = complaints(with_receiver("{level: '${U}${env:W}${U}'}"))
    assert problem.endswith("; ${env:U} and ${env:W} are not set")


def test_what_is_missing_because_of_a_variable_says_so() -> None:
    """A required key, a list of a pipeline, an id and a whole section that come from an unset variable."""
    text = (
        "receivers: {scrape: }\nexporters: {otlp_grpc: {endpoint: '${env:U}'}}\n"
        "service: {pipelines: {metrics: {receivers: ['${env:U}'], exporters: '${env:U}'}}}\n"
    )
    why = "; ${env:U} is not set"
    assert complaints(text) == [
        f"yaml:2:35: exporters::otlp_grpc: 'endpoint' is required{why}",
        f"yaml:3:45: service::pipelines::metrics::receivers: id must not be empty{why}",
        f"yaml:3:58: service::pipelines::metrics: must have at least one exporter{why}",
    ]
    assert complaints("receivers: '${env:U}'\nexporters: {debug: }\nservice: {pipelines: '${env:U}'}\n") == [
        f"yaml:1:1: no receiver configuration specified in config{why}",
        f"yaml:3:11: service::pipelines: service must have at least one pipeline{why}",
    ]


def test_values_are_expanded_inside_lists_and_maps_from_variables() -> None:
    """A list that comes from a variable may hold references."""
    assert receiver("{include: '${env:L}'}", {"L": "['${env:S}', b]", "S": "a"}).include == ("a", "b")


def test_files_are_typed_whole_and_text_inside_a_text(tmp_path: Path) -> None:
    """`${file:}` gives a tree with places of its own when it is the whole value, its text otherwise."""
    part = tmp_path / "part.yaml"
    part.write_text("window: 2.5\nlabels: {a: 5}\n", encoding="utf-8")
    problems = complaints(with_receiver(f"'${{file:{part}}}'"))
    message = "'a' expected type 'string', got unconvertible type 'int'"
    assert problems == [f"{part}:2:13: receivers::scrape::labels: {message}"]
    token = tmp_path / "token"
    token.write_text("s3cret\n", encoding="utf-8")
    assert _label(f"'${{file:{token}}}'") == "s3cret\n"


def test_network_and_unknown_schemes_are_refused_with_a_reason() -> None:
    """No configuration is fetched over the network."""
    (problem,) = complaints(with_receiver("{labels: {a: '${https://x/y}'}}"))
    assert 'unsupported scheme on URI "https://x/y": gpulens fetches no configuration' in problem
    (problem,) = complaints(with_receiver("{labels: {a: '${s3:x}'}}"))
    assert "valid values: [env file preset yaml]" in problem


def test_references_that_multiply_are_stopped() -> None:
    """Exponential growth ends at the limit of expansions for one value."""
    environ = {f"V{i}": f"${{V{i + 1}}}${{V{i + 1}}}" for i in range(40)}
    (problem,) = complaints(with_receiver("{labels: {a: 'x${V0}'}}"), environ)
    assert "too many recursive expansions" in problem
    many = "${V40}" * (MAX_EXPANSIONS + 1)
    assert complaints(with_receiver(f"{{labels: {{a: '{many}'}}}}"), {"V40": ""}) != []


def test_deep_values_within_values_are_stopped() -> None:
    """Nested lists that lead to nested lists end in a problem, not in a full stack."""
    environ = {f"V{i}": "[" * 40 + f"'${{V{i + 1}}}'" + "]" * 40 for i in range(60)}
    (problem,) = complaints(with_receiver("{free: {a: '${V0}'}}"), environ)
    assert "too many recursive expansions" in problem


def test_text_that_grows_is_stopped() -> None:
    """What a value expands to is bounded in size."""
    (problem,) = complaints(with_receiver("{labels: {a: '${A}${A}${A}'}}"), {"A": "x" * 600_000})
    assert "expands to more than 1024 KiB" in problem


def test_a_failed_reference_is_the_only_complaint_about_its_field() -> None:
    """A value that could not be had is not also reported as missing or mistyped."""
    assert len(complaints(with_receiver("{window: '${env:1A}', labels: '${env:2B}'}"))) == 2
    (problem,) = complaints(
        "receivers: '${file:/nonexistent}'\nexporters: {debug: }\n"
        "service: {pipelines: {metrics: {receivers: [scrape], exporters: [debug]}}}\n"
    )
    assert "yaml:1:12: receivers: cannot retrieve the configuration" in problem
