"""Every registered component: its folder, its factory, its configuration."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from gpulens.config import load, render, resolve
from gpulens.config.ids import ComponentID, Kind
from gpulens.config.types import Block, ComponentConfig
from gpulens.pipeline.component import Stability
from gpulens.pipeline.errors import ConfigError
from gpulens.pipeline.registry import BUILT_IN, Registry
from tests.conformance.cases import CASES, Place
from tests.conformance.rig import ALL, Key, config_of, document, key_id
from tests.pipeline.parts import Bench

FIELDS = [
    (key, field) for key in ALL for field in Registry().config_model(*key).model_fields
]  # the keys of every component's own block

EVERY = pytest.mark.parametrize("key", ALL, ids=key_id)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for what cases need."""
    return Place(tmp_path)


def test_every_component_has_a_case() -> None:
    """A component that is registered and not in the table of cases would go untested."""
    assert set(CASES) == {(kind, name) for kind, names in BUILT_IN.items() for name in names}


@EVERY
def test_the_folder_is_the_block(key: Key) -> None:
    """`receivers/dcgm/` is the `dcgm:` block: FACTORY in __init__, config.py, and a README that begins with the
    name."""
    kind, name = key
    module = importlib.import_module(f"gpulens.{kind}.{name}")
    assert BUILT_IN[kind][name] == f"gpulens.{kind}.{name}:FACTORY"
    assert module.FACTORY.name == name
    assert module.__doc__
    assert module.FACTORY.config.__module__ == f"gpulens.{kind}.{name}.config"
    assert module.__file__ is not None
    readme = Path(module.__file__).with_name("README.md")
    assert readme.is_file(), "a component without a README can't be used"
    assert name in readme.read_text(encoding="utf-8").splitlines()[0]


@EVERY
def test_the_factory_is_well_formed(key: Key) -> None:
    """A stability level, a config model, at least one signal, and an alias that is none of the names."""
    registry = Registry()
    factory = registry.factory(*key)
    assert isinstance(factory.stability, Stability)
    assert issubclass(factory.config, ComponentConfig)
    assert key[0] is Kind.EXTENSIONS or registry.signals(*key)
    assert factory.alias not in registry.types(key[0])


@EVERY
def test_the_config_is_strict_and_documented(key: Key) -> None:
    """Every block of it forbids unknown keys, can't be changed and says what it is for."""
    seen: list[type[BaseModel]] = [Registry().config_model(*key)]
    for model in seen:
        assert issubclass(model, Block)
        assert (model.model_config.get("extra"), model.model_config.get("frozen")) == ("forbid", True)
        assert model.__doc__
        for info in model.model_fields.values():
            seen.extend(found for found in _models_in(info.annotation) if found not in seen)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]


@pytest.mark.parametrize(("key", "field"), FIELDS, ids=[f"{key_id(key)}-{field}" for key, field in FIELDS])
def test_every_key_is_in_the_readme(key: Key, field: str) -> None:
    """What a user may write is documented beside the code."""
    module = importlib.import_module(f"gpulens.{key[0]}.{key[1]}")
    assert module.__file__ is not None
    text = Path(module.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert f"`{field}`" in text


@EVERY
def test_the_smallest_config_is_printed_and_read_back(key: Key, place: Place) -> None:
    """print-config of the effective config is a config again, with the same meaning."""
    block = CASES[key].block(place)
    registry = Bench().registry()
    config = resolve(load([f"yaml:{document(key, block)}"], [], {}), registry)
    printed = render(config, mode="unredacted", format="yaml")
    assert yaml.safe_load(printed)
    again = resolve(load([f"yaml:{printed}"], [], {}), registry)
    at = key[0], ComponentID(key[1], "case")
    assert again.components[at].config == config.components[at].config == config_of(key, block)


def problem_of(key: Key, block: dict[str, object]) -> tuple[int, int, str]:
    """Line, column and text of the only problem that a block has."""
    with pytest.raises(ConfigError) as raised:
        config_of(key, block)
    (problem,) = raised.value.problems
    assert problem.source == "yaml"
    return problem.line, problem.column, str(problem)


def line_of(text: str, token: str) -> int:
    """The line, from 1, that first holds a token."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if token in line)


@EVERY
def test_an_unknown_key_is_told_with_its_place(key: Key, place: Place) -> None:
    """Line and column of the key itself, and the path of the block."""
    block = {**CASES[key].block(place), "no_such_key": 1}
    line, column, text = problem_of(key, block)
    assert line == line_of(document(key, block), '"no_such_key"')
    assert column > 1
    assert f"{key[0]}::{key[1]}/case" in text
    assert "has invalid keys: no_such_key" in text


@pytest.mark.parametrize(("key", "field"), FIELDS, ids=[f"{key_id(key)}-{field}" for key, field in FIELDS])
def test_a_wrong_value_is_told_with_its_place(key: Key, field: str, place: Place) -> None:
    """A list of lists fits no key: the problem stands within its value and names the key."""
    block = {**CASES[key].block(place), field: [[7]]}
    line, column, text = problem_of(key, block)
    written = document(key, block)
    first = line_of(written, json.dumps(field))
    last = max(number for number in range(first, first + 5) if "]" in written.splitlines()[number - 1])
    assert first <= line <= last, written
    assert column > 1
    assert field in text


@EVERY
@pytest.mark.parametrize("body", [[1], "text", 7, True])
def test_a_block_that_is_no_map_is_told_with_its_place(key: Key, body: object) -> None:
    """A list, a text or a number in place of the block."""
    text = document(key, {}).replace("{}", json.dumps(body), 1) if not isinstance(body, list) else None
    name = json.dumps(f"{key[1]}/case")
    text = document(key, {"x": 1}).replace(f'{name}: {{\n   "x": 1\n  }}', f"{name}: {json.dumps(body)}")
    assert f"{name}: {json.dumps(body)}" in text
    with pytest.raises(ConfigError) as raised:
        resolve(load([f"yaml:{text}"], [], {}), Bench().registry())
    (problem,) = raised.value.problems
    assert problem.line == line_of(text, name)
    assert f"{key[0]}::{key[1]}/case" in str(problem)
