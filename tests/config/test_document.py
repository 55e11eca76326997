"""Loading: files, presets, --set, merging, and sources that can't be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulens.config.document import Document, load
from gpulens.config.nodes import Position, Scalar
from gpulens.config.resolve import resolve
from gpulens.config.service import ServiceConfig
from gpulens.config.sources import presets
from gpulens.pipeline.errors import ConfigError, Problem
from tests.config.fakes import GOOD, FakeLookup, service


def _problems(configs: list[str], sets: list[str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        load(configs, sets or [], {})
    return raised.value.problems


def _keys(document: Document) -> list[str]:
    return list(document.root.entries)


def test_files_merge_in_order_and_keep_their_places(tmp_path: Path) -> None:
    """Each value knows the file that gave it; the later file wins."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("receivers:\n  scrape:\n    window: 1\n", encoding="utf-8")
    second.write_text("\ufeffreceivers:\n  scrape:\n\n    window: 2\n", encoding="utf-8")
    document = load([str(first), f"file:{second}"], [], {})
    scrape = document.root.entries["receivers"].node.entries["scrape"].node  # type: ignore[union-attr]
    window = scrape.entries["window"]  # type: ignore[union-attr]
    assert window.key_at == Position(str(second), 4, 5)
    assert isinstance(window.node, Scalar)
    assert window.node.value == 2


def test_lists_are_replaced_and_null_removes() -> None:
    """The classic traps of the Collector's merge are kept as they are."""
    found = service(GOOD, "receivers: {scrape: {include: [a, b]}}", "receivers: {scrape: {include: [c]}}")
    assert next(iter(found.components.values())).config.include == ("c",)  # type: ignore[attr-defined]
    emptied = load([f"yaml:{GOOD}", "yaml:receivers:"], [], {}).root.entries["receivers"].node
    assert isinstance(emptied, Scalar)
    assert emptied.value is None


def test_set_comes_last_and_is_parsed_as_yaml() -> None:
    """`--set` wins over every file, and its value is YAML."""
    found = service(GOOD, sets=["receivers.scrape.include=[x, 'y']", "receivers.scrape.window=2"])
    config = next(iter(found.components.values())).config
    assert (config.include, config.window) == (("x", "y"), 2.0)  # type: ignore[attr-defined]


def test_a_bad_set_is_named_without_its_value() -> None:
    """The value of `--set` may be a secret, so only its key shows."""
    (problem,) = _problems([f"yaml:{GOOD}"], ["exporters.x.token=[s3cret"])
    assert problem.source == "--set exporters.x.token"
    assert "s3cret" not in str(problem)
    (problem,) = _problems([f"yaml:{GOOD}"], ["a..b=1"])
    assert problem.message == 'empty key in "a..b"'


def test_paths_in_keys_clash_with_the_same_key_written_out() -> None:
    """A value given by `a::b` and by `a: {b: }` in one source is a duplicate; `::1` is no path."""
    document = load(["yaml:a::b: 1\na: {c: 2, b: 3}\n'::1': x\n"], [], {})
    assert [problem.message for problem in document.problems] == ['mapping key "a::b" already defined']
    assert _keys(document) == ["a", "::1"]


def test_configuration_comes_from_a_variable() -> None:
    """`env:NAME` holds a whole configuration, with lines of its own in messages."""
    document = load(["env:CONFIG"], [], {"CONFIG": "a: 1\nb:\n  c: 2\n"})
    assert document.root.entries["b"].key_at == Position("env:CONFIG", 2, 1)
    (warning,) = load(["env:GONE"], [], {}).warnings
    assert str(warning) == 'env:GONE: Configuration references unset environment variable "GONE"'


def test_every_shipped_preset_loads() -> None:
    """Presets are read from the package and are good YAML."""
    for name in presets():
        document = load([f"preset:{name}"], [], {})
        assert document.problems == ()
        assert "service" in document.root.entries


def test_an_unknown_preset_gets_a_suggestion() -> None:
    """A typing error in a preset's name is told, and no path leads out of the presets."""
    (problem,) = _problems(["preset:dmo"])
    assert 'unknown preset "dmo"' in problem.message
    assert problem.suggestion == "demo"
    assert "unknown preset" in _problems(["preset:../__init__"])[0].message


def test_every_unreadable_source_is_reported(tmp_path: Path) -> None:
    """Several bad sources give their problems together."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [\n", encoding="utf-8")
    problems = _problems(["nope.yaml", str(bad), "s3:x", "yaml:text"], ["x"])
    assert [problem.source for problem in problems] == ["nope.yaml", str(bad), "s3:x", "yaml", "--set x"]
    assert problems[3].message == "a configuration must be a map, not string"


def test_a_directory_and_a_path_with_nul_are_problems(tmp_path: Path) -> None:
    """What open() refuses is a problem that says why."""
    assert "is a directory" in _problems([str(tmp_path)])[0].message
    assert "unable to read the file" in _problems(["a\0b"])[0].message


def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path) -> None:
    """A file beyond the cap is refused without being read to its end."""
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        os.truncate(file.fileno(), 100 * 1024 * 1024)
    assert "it is larger than 1024 KiB" in _problems([str(huge)])[0].message


def test_binary_is_refused_with_its_place(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are a problem at their line and column."""
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe\n")
    (problem,) = _problems([str(binary)])
    assert (problem.line, problem.column) == (2, 4)
    assert "it is not UTF-8 text (byte 0xff)" in problem.message


def _outcome(configs: list[str], sets: list[str], environ: dict[str, str]) -> ServiceConfig | ConfigError:
    try:
        return resolve(load(configs, sets, environ), FakeLookup())
    except ConfigError as error:
        return error


@settings(max_examples=200)
@given(st.text(alphabet="{}[]:, \n-a$&*<#'\"\\0") | st.text(), st.lists(st.text(max_size=20), max_size=2))
def test_loading_raises_nothing_but_config_errors(text: str, sets: list[str]) -> None:
    """Whatever the text and the --set values, the outcome is a service or a ConfigError that says something."""
    outcome = _outcome([f"yaml:{text}"], sets, {"a": text})
    assert isinstance(outcome, ServiceConfig) or outcome.problems


_WORDS = (
    "receivers exporters connectors service pipelines metrics scrape debug otlp forward include free window "
    "endpoint sending_queue batch processors idle prices telemetry"
)
_NAMES = st.sampled_from(_WORDS.split())
_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _NAMES | st.just("${env:a}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=200)
@given(st.dictionaries(_NAMES, st.dictionaries(_NAMES, _TREES, max_size=4), max_size=5))
def test_resolving_raises_nothing_but_config_errors(tree: dict[str, object]) -> None:
    """Trees of the right words in the wrong places never get past with another exception."""
    outcome = _outcome([f"yaml:{json.dumps(tree)}"], [], {"a": "[1, x]"})
    assert isinstance(outcome, ServiceConfig) or all(str(problem) for problem in outcome.problems)
