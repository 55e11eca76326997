"""Mapping files: what is wrong in one is told with its place, all at once; what is right is right by the catalogue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.config import ComponentConfig, ServiceConfig, load, resolve
from gpulens.config.ids import Kind
from gpulens.pipeline.catalogue import CATALOGUE, MetricScope
from gpulens.pipeline.errors import ConfigError, Problem
from gpulens.receivers.prometheus.mapping import VendorMapping, load_mapping, parse_mapping, pci_address, shipped
from gpulens.receivers.prometheus.schema import MappingFile, targets
from gpulens.receivers.prometheus.templates import Template, first
from tests.pipeline.parts import Bench

HEAD = 'device: {id: "{uuid}"}\nmetrics:\n'
ROW = "  - {from: a, to: gpu.sm.active, unit: percent}\n"


def problems(text: str) -> list[str]:
    """What is wrong with a mapping, as it is printed."""
    with pytest.raises(ConfigError) as raised:
        parse_mapping(text, "m.yaml")
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("row", "at", "says"),
    [
        ("{from: a, to: gpu.sm.activ, unit: percent}", "gpu.sm.activ,", "did you mean 'gpu.sm.active'"),
        ("{from: a, to: gpu.allocated}", "gpu.allocated", "no metric that a page can fill"),
        ("{from: a, to: gpu.sm.active, unit: procent}", "procent", "did you mean 'percent'"),
        ("{from: a, to: gpu.sm.active, unit: W}", "W}", "does not fit gpu.sm.active, which is in 1"),
        ("{from: a, to: hw.power}", "hw.power", "is in W: say the page's 'unit'"),
        ("{from: a, to: hw.power, unit: W, scale: 2}", "2}", "exclude each other"),
        ("{from: a, to: hw.power, scale: 0}", "0}", "'scale'"),
        ("{from: a, to: gpu.pipe.active, unit: ratio, attributes: {gpu.pip: x}}", "x}", "did you mean 'gpu.pipe'"),
        ("{from: a, to: gpu.pcie.replays, attributes: {x: y}}", "y}", "no attribute of gpu.pcie.replays"),
        ('{from: a, to: gpu.pipe.active, unit: ratio, attributes: {gpu.pipe: "{x"}}', '"{x"', "brace"),
        ("{from: a, to: gpu.sm.active, unit: ratio, above: 1}", "1}", "makes 0/1 of a number"),
        ("{from: a, to: hw.status, values: {on: 1}}", "1}", "'on' is no number"),
        ('{from: a, to: hw.status, values: {"1": 2}}', "2}", "must become 0 or 1"),
        ('{from: a, to: hw.status, above: 0, values: {"1": 1}}', "0,", "exclude each other"),
        ("{from: a, to: hw.power, unit: W, combine: average}", "average", "combine"),
        ("{from: a, unit: W}", "W}", "has no meaning without 'to'"),
        ("{from: [], to: hw.power, unit: W}", "[]", "must not be empty"),
        ("{to: hw.power, unit: W}", "{", "'from' is required"),
        ("{from: 5, to: hw.power, unit: W}", "5", "from"),
        ("{from: a, where: {x: 1}, to: hw.power, unit: W}", "1}", "x"),
        ("{from: a, fron: b, to: hw.power, unit: W}", "fron", "did you mean 'from'"),
        ("{from: a, to: hw.power, unit: W, drop: [x]}", "x]", "drop"),
        ("just text", "just", "expected type"),
        ("{from: nimbus_*, to: hw.power, unit: W}", "nimbus_*", "without '*'"),
        ("{from: a-b, to: hw.power, unit: W}", "a-b", "can't be a metric's name"),
        ("{from: a, where: {x-y: z}, to: hw.power, unit: W}", "x-y", "can't be a label's name"),
        ("{from: a, where: {x: []}, to: hw.power, unit: W}", "[]", "must not be empty"),
        ("{from: a, where: {x: 7}, to: hw.power, unit: W}", "7}", "put it in quotes"),
        ("{from: a, to: gpu.xid.errors, attributes: {gpu.xid: 79}}", "79", "put it in quotes"),
        ("{from: a, to: hw.power, scale: .inf}", ".inf", "'scale'"),
        ("{from: a, to: hw.power, unit: W, max: .nan}", ".nan", "is no number"),
        ("{from: a, to: hw.power, unit: W, drop: [.nan]}", ".nan", "is no number"),
        ("{from: a, to: hw.power, unit: W, min: 5, max: 1}", "5,", "no number would pass"),
        ("{from: a, to: hw.status, values: {}}", "values", "must not be empty"),
        ("{from: a, to: hw.status, values: {nan: 1}}", "1}", "'nan' is no number"),
        ('{from: a, to: hw.status, values: {"1": 1, "1.0": 0}}', "0}", "are the same number"),
    ],
)
def test_each_mistake_in_a_row_is_told_with_its_place(row: str, at: str, says: str) -> None:
    """Line and column of the value, or of the key that is wrong; a hint where there is one."""
    (problem,) = problems(f"{HEAD}  - {row}\n")
    assert problem.startswith(f"m.yaml:3:{5 + row.index(at)}: "), problem
    assert says in problem


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("metrics: []\n", "1:1", "'device' is required"),
        ('device: {id: ""}\nmetrics: []\n', "1:14", "must not be empty"),
        ('device: {id: "{}"}\nmetrics: []\n', "1:14", "brace"),
        ('device: {id: [a, "}"]}\nmetrics: []\n', "1:18", "brace"),
        ('device: {id: a, info: {gpu.pci: "{x}"}}\nmetrics: []\n', "1:24", "gpu.device.info"),
        ("device: {id: a, partition: {}}\nmetrics: []\n", "1:17", "'id' is required"),
        ("device: {id: a}\nmetrics: []\nowners: [{pod: p}]\n", "3:10", "'namespace' is required"),
        ("device: {id: a}\nmetrics: []\nwindow: 5\n", "3:9", "has no unit"),
        ("device: {id: a}\nmetrics: []\nwindow: -5s\n", "3:9", "non-negative"),
        ("device: {id: a}\nmetrics: []\ndevices: {}\n", "3:1", "did you mean 'device'"),
        ("device: {id: a}\nmetrics: []\ndevice: {id: b}\n", "3:1", "already defined"),
        ("device: {id: a\n", "2:1", "not YAML"),
        ("- a\n", "1:1", "expected type"),
        ("device: {id: a}\nmetrics: []\n", "2:10", "must not be empty"),
        (f"prefixes: []\n{HEAD}{ROW}", "1:11", "must not be empty"),
        (f"owners: [{{namespace: a, pod: b.c}}]\n{HEAD}{ROW}", "1:30", "can't be a label's name"),
        ("a: \x01\n", "1:4", "not allowed"),
        ("", "1:1", "'device' is required"),
    ],
)
def test_each_mistake_around_the_rows_is_told_with_its_place(text: str, where: str, says: str) -> None:
    """Blocks, durations, repeated keys, and what is no YAML at all."""
    found = problems(text)
    assert any(problem.startswith(f"m.yaml:{where}: ") and says in problem for problem in found), found


def test_all_mistakes_are_told_at_once_in_order() -> None:
    """One look at the file is enough to mend it."""
    rows = "  - {from: a, to: nope}\n  - {from: b, to: hw.power, unit: Wat}\n  - {from: c, tu: x}\n"
    assert [problem.split(":")[1] for problem in problems(HEAD + rows)] == ["3", "4", "5"]


def configuration(mapping: object, **keys: object) -> str:
    """A whole configuration with a prometheus receiver in it, a key a line."""
    block = {"endpoint": "http://h", "mapping": mapping, **keys}
    pipelines = {"metrics": {"receivers": ["prometheus"], "exporters": ["tap"]}}
    whole = {"receivers": {"prometheus": block}, "exporters": {"tap": {}}, "service": {"pipelines": pipelines}}
    return json.dumps(whole, indent=1)


def config_problems(text: str) -> tuple[str, ...]:
    """What `validate` says of a configuration."""
    with pytest.raises(ConfigError) as raised:
        resolve(load([f"yaml:{text}"], [], {}), Bench().registry())
    return tuple(str(problem) for problem in raised.value.problems)


def config_in(resolved: ServiceConfig) -> ComponentConfig:
    """The receiver's configuration."""
    (config,) = [each.config for (kind, _), each in resolved.components.items() if kind is Kind.RECEIVERS]
    return config


def test_validate_finds_what_is_wrong_in_a_mapping_file(tmp_path: Path) -> None:
    """At the key `mapping` of the configuration stands the place in the mapping file."""
    path = tmp_path / "nimbus.yaml"
    path.write_text(f"{HEAD}  - {{from: a, to: gpu.sm.activ, unit: percent}}\n")
    (problem,) = config_problems(configuration(str(path)))
    assert problem.startswith("yaml:5:15: receivers::prometheus: ")
    assert f"{path}:3:19: metrics[0]: " in problem
    assert "did you mean 'gpu.sm.active'" in problem


def test_a_mapping_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    """Neither shipped nor a file; a near name is offered."""
    (problem,) = config_problems(configuration("ascent"))
    assert "amd, ascend, gaudi, intel" in problem
    assert "did you mean 'ascend'" in problem
    (problem,) = config_problems(configuration(str(tmp_path)))
    assert "directory" in problem
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    (problem,) = config_problems(configuration(str(tmp_path / "latin.yaml")))
    assert "utf-8" in problem


def test_a_valid_mapping_is_kept_with_the_configuration(tmp_path: Path) -> None:
    """What was read is what runs, whatever becomes of the file; equal files make equal configurations."""
    path = tmp_path / "m.yaml"
    path.write_text(HEAD + ROW)
    text = configuration(str(path))
    one, two = (resolve(load([f"yaml:{text}"], [], {}), Bench().registry()) for _ in range(2))
    assert config_in(one) == config_in(two)
    path.write_text(HEAD + ROW.replace("percent", "ratio"))
    three = resolve(load([f"yaml:{text}"], [], {}), Bench().registry())
    assert config_in(one) != config_in(three)


@pytest.mark.parametrize("name", ["amd", "ascend", "gaudi", "intel"])
def test_the_shipped_mappings_are_right(name: str) -> None:
    """They load, say what is unverified, and fill no metric that only we may make."""
    assert name in shipped()
    assert isinstance(load_mapping(name), VendorMapping)
    text = Path(__file__).parents[3].joinpath("gpulens/receivers/prometheus/mappings", f"{name}.yaml").read_text()
    assert "UNVERIFIED" in text
    assert "Source" in text


def test_only_readings_can_be_filled() -> None:
    """Facts and derived series are not a page's to say."""
    scopes = {CATALOGUE[name].scope for name in targets() if not name.startswith("gpu.process.")}
    assert scopes == {MetricScope.WORK, MetricScope.DEVICE}
    assert "gpu.allocated" not in targets()
    assert "gpu.device.info" not in targets()


def test_every_key_of_a_mapping_file_is_described() -> None:
    """The schema is what docs and messages are made of."""
    assert all(field.description for field in MappingFile.model_fields.values())


def outcome(text: str) -> tuple[Problem, ...] | None:
    """What is wrong with a text; None when it is a mapping."""
    try:
        parse_mapping(text, "m")
    except ConfigError as error:
        return error.problems
    return None


@given(st.text(max_size=300))
def test_any_text_is_a_mapping_or_a_list_of_problems(text: str) -> None:
    """Never another exception."""
    found = outcome(text)
    assert found is None or found


_KEYS = st.sampled_from(["from", "to", "where", "unit", "values", "attributes", "combine", "device", "id", "metrics"])
_TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.just("{uuid}"), _KEYS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(_KEYS, _TREES, max_size=4), st.lists(st.dictionaries(_KEYS, _TREES, max_size=5), max_size=3))
def test_any_tree_is_a_mapping_or_a_list_of_problems(tree: dict[str, object], rows: list[object]) -> None:
    """Right keys with wrong values, anywhere."""
    whole = {"device": {"id": "{uuid}"}, **tree, "metrics": rows}
    found = outcome(json.dumps(whole))
    assert found is None or (found and all(problem.line for problem in found))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00000000:c1:00.0", "0000:c1:00.0"),
        ("c1:00.0", "0000:c1:00.0"),
        ("10000:01:00.7", "10000:01:00.7"),
        ("0000:c1:00", ""),
        ("+0:c1:00.0", ""),
        ("0000:c1:00.8", ""),
        ("", ""),
    ],
)
def test_pci_addresses_are_normalised(text: str, expected: str) -> None:
    """Lower case and four digits of domain, or nothing."""
    assert pci_address(text) == expected


def test_a_template_gives_all_or_nothing() -> None:
    """A label that is missing leaves no half text; the first template that gives one counts."""
    whole = Template.parse("{a}/part{b}")
    assert whole.fill({"a": "x", "b": "1"}) == "x/part1"
    assert whole.fill({"a": "x"}) == ""
    assert first([whole, Template.parse("only {a}")], {"a": "x"}) == "only x"
