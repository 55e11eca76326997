"""The generated pages."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from gpulens.config.types import Block, ComponentConfig, Duration, OptionalBlock, Secret, StringList
from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.pipeline.docs import (
    BEGIN,
    END,
    METRICS_PAGE,
    DocsError,
    checkout,
    config_table,
    generated,
    metrics_page,
    outdated,
    splice,
)
from gpulens.pipeline.registry import BUILT_IN, Registry


class Colour(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Retry(Block):
    """A nested block."""

    interval: Annotated[Duration, Field(description="Wait | pause.")] = 5.0
    limit: Duration | None = None


class Rule(Block):
    """An item of a list."""

    name: str


class Model(ComponentConfig):
    """One of every kind of key."""

    endpoint: str
    verbose: bool = False
    count: int = 3
    colour: Colour = Colour.RED
    mode: Literal["a", "b"] = "a"
    token: Secret | None = None
    names: StringList = ("x",)
    headers: dict[str, str] = Field(default_factory=dict)
    retry: OptionalBlock[Retry] = Retry()
    tls: OptionalBlock[Retry] = None
    rules: tuple[Rule, ...] = ()
    named: dict[str, Rule] = Field(default_factory=dict)


def test_a_config_table_names_every_key() -> None:
    """Keys, types in plain words, defaults as a user would write them, nested blocks by dots."""
    assert config_table(Model) == (
        "| Key | Type | Default | Meaning |\n"
        "| --- | --- | --- | --- |\n"
        "| `endpoint` | text | required |  |\n"
        "| `verbose` | true or false | `false` |  |\n"
        "| `count` | whole number | `3` |  |\n"
        "| `colour` | `red`, `blue` | `red` |  |\n"
        "| `mode` | `a`, `b` | `a` |  |\n"
        "| `token` | secret text |  |  |\n"
        '| `names` | list of texts | `["x"]` |  |\n'
        "| `headers` | map of texts |  |  |\n"
        "| `retry` | block | on |  |\n"
        "| `retry.interval` | duration | `5s` | Wait \\| pause. |\n"
        "| `retry.limit` | duration |  |  |\n"
        "| `tls` | block | off |  |\n"
        "| `tls.interval` | duration | `5s` | Wait \\| pause. |\n"
        "| `tls.limit` | duration |  |  |\n"
        "| `rules` | list of blocks |  |  |\n"
        "| `rules[].name` | text | required |  |\n"
        "| `named` | map of blocks |  |  |\n"
        "| `named.<name>.name` | text | required |  |\n"
    )


def test_a_component_without_keys_says_so() -> None:
    """An empty model gives a sentence, not an empty table."""
    assert config_table(ComponentConfig) == "It has no keys.\n"


def test_splicing_replaces_only_what_is_between_the_markers() -> None:
    """A README's own text stays; doing it twice changes nothing."""
    readme = f"# A\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = splice(readme, "new\n")
    assert once == f"# A\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    assert splice(once, "new\n") == once


def test_a_readme_without_markers_gets_a_section() -> None:
    """The table goes to the end under a heading of its own."""
    once = splice("# A\n", "new\n")
    assert once == f"# A\n\n## Configuration\n\n{BEGIN}\nnew\n{END}\n"
    assert splice(once, "new\n") == once


@pytest.mark.parametrize("readme", [BEGIN, END, f"{END}{BEGIN}"])
def test_broken_markers_are_an_error(readme: str) -> None:
    """One marker alone would make the generator eat the file; it refuses."""
    with pytest.raises(DocsError, match="marker"):
        splice(readme, "x")


def test_the_metrics_page_has_every_metric() -> None:
    """Each catalogued metric has one row with both of its names."""
    page = metrics_page()
    for name in CATALOGUE:
        assert page.count(f"\n| `{name}` | `") == 1
    assert "| `hw.energy` | `hw_energy_joules_total` | `J` | counter | device | last | `hw.type` (`hw_type`) |" in page


def test_what_differs_is_found(tmp_path: Path) -> None:
    """A missing file and a changed one are out of date, an equal one is not."""
    (tmp_path / "same").write_text("x")
    (tmp_path / "other").write_text("y")
    pages = {tmp_path / name: "x" for name in ("same", "other", "missing")}
    assert outdated(pages) == [tmp_path / "other", tmp_path / "missing"]


def test_generated_pages_are_up_to_date() -> None:
    """The checkout's pages are what the generator writes now: the metrics page and one README a component."""
    pages = generated(checkout(), Registry())
    assert checkout() / METRICS_PAGE in pages
    assert len(pages) == 1 + sum(map(len, BUILT_IN.values()))
    assert outdated(pages) == []
