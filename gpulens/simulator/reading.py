"""Reads a world file and says where it is wrong.

Invariant: every problem found is reported at once, each with line and column. Scalars stay text until the
schema asks for a type, so YAML 1.1's guesses (`1:30`, `on`, `012`) can't change what was written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

from gpulens.pipeline.errors import ConfigError, Problem
from gpulens.simulator import schema
from gpulens.simulator.schema import WorldSpec

Loc: TypeAlias = tuple[str | int, ...]
Plain: TypeAlias = "str | list[Plain] | dict[str, Plain]"


def read_spec(source: Path | str) -> WorldSpec:
    """The spec in a file, in a shipped world of that name (`demo`, `gke`), or in the text itself.

    Text is told from a name by its line break. Raises ConfigError with all problems.
    """
    if isinstance(source, str) and "\n" in source:
        return parse_spec(source, "world")
    name = str(source)
    path = Path(source)
    if not path.is_file() and name in shipped_worlds():
        text = resources.files("gpulens.simulator").joinpath("worlds", f"{name}.yaml").read_text("utf-8")
        return parse_spec(text, name)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = _closest(name, shipped_worlds())
        problem = Problem(name, 0, 0, "", f"this world file can't be read: {error}", hint)
        raise ConfigError([problem]) from error
    return parse_spec(text, name)


def shipped_worlds() -> tuple[str, ...]:
    """Names of the worlds that come with the package."""
    folder = resources.files("gpulens.simulator").joinpath("worlds")
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def parse_spec(text: str, source: str) -> WorldSpec:
    """The spec in this text; `source` names it in messages. Raises ConfigError with all problems."""
    document = _Document(source)
    data = document.read(text)
    try:
        spec = WorldSpec.model_validate(data)
    except ValidationError as error:
        document.add(error)
        raise ConfigError(sorted(document.problems, key=lambda p: (p.line, p.column))) from error
    if document.problems:
        raise ConfigError(document.problems)
    return spec


class _Document:
    """YAML as plain text values, with the place of each key and value."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self._values: dict[Loc, yaml.Mark] = {}
        self._keys: dict[Loc, yaml.Mark] = {}
        self._open: set[int] = set()

    def read(self, text: str) -> Plain:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
            raise ConfigError([Problem(self.source, line, column, "", f"not YAML: {error}")]) from error
        return {} if root is None else self._plain(root, ())

    def _plain(self, node: yaml.Node, loc: Loc) -> Plain:
        self._values[loc] = node.start_mark
        if id(node) in self._open:
            self._problem(node.start_mark, loc, "this alias stands inside of what it names")
            return ""
        self._open.add(id(node))
        try:
            return self._content(node, loc)
        finally:
            self._open.discard(id(node))

    def _content(self, node: yaml.Node, loc: Loc) -> Plain:
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*loc, i)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return str(node.value)
        out: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in out:
                self._problem(key_node.start_mark, (*loc, key), "this key stands here twice")
            self._keys[(*loc, key)] = key_node.start_mark
            out[key] = self._plain(value_node, (*loc, key))
        return out

    def add(self, error: ValidationError) -> None:
        for item in error.errors(include_url=False):
            loc: Loc = tuple(item["loc"])
            if item["type"] == "extra_forbidden":
                known = _fields_at(loc[:-1])
                hint = _closest(str(loc[-1]), known)
                self._problem(self._keys.get(loc), loc, "unknown key", hint)
            else:
                self._problem(self._nearest(loc), loc, item["msg"].removeprefix("Value error, "))

    def _nearest(self, loc: Loc) -> yaml.Mark | None:
        while loc and loc not in self._values:
            loc = loc[:-1]
        return self._values.get(loc)

    def _problem(self, mark: yaml.Mark | None, loc: Loc, message: str, hint: str = "") -> None:
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        path = "::".join(str(part) for part in loc)
        self.problems.append(Problem(self.source, line, column, path, message, hint))


# Which model stands under which key of the file: only for 'did you mean'.
_MODELS: Mapping[str, type[BaseModel]] = {
    "gpus": schema.GpuSpec,
    "pods": schema.PodSpec,
    "faults": schema.FaultSpec,
    "phases": schema.PhaseSpec,
    "mig": schema.MigSpec,
    "xids": schema.XidSpec,
    "dcgm": schema.DcgmSpec,
    "gke": schema.GkeSpec,
    "kubelet": schema.KubeletSpec,
}


def _fields_at(loc: Loc) -> list[str]:
    names = [part for part in loc if isinstance(part, str)]
    model = _MODELS.get(names[-1], WorldSpec) if names else WorldSpec
    return [field.alias or name for name, field in model.model_fields.items()]


def _closest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else ""
