"""Prints the configuration in effect, defaults included.

Invariant: what `unredacted` prints loads back to the same configuration; `redacted` shows no secret.
"""

from __future__ import annotations

import json
from typing import Literal

import yaml

from gpulens.config.expand import escape
from gpulens.config.ids import Kind
from gpulens.config.service import ServiceConfig
from gpulens.config.types import UNREDACTED_CONTEXT, Block
from gpulens.config.yaml_nodes import resolve_plain

Mode = Literal["redacted", "unredacted"]
Format = Literal["yaml", "json"]


def render(config: ServiceConfig, mode: Mode = "redacted", format: Format = "yaml") -> str:  # noqa: A002 - the flag's name
    """The configuration as text that ends with a newline."""
    tree = _escaped(_tree(config, mode == "unredacted"))
    if format == "json":
        return json.dumps(tree, indent=2) + "\n"
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _tree(config: ServiceConfig, unredacted: bool) -> dict[str, object]:
    tree: dict[str, object] = {}
    for kind in Kind:
        section = {
            str(entry.id): _dump(entry.config, unredacted)
            for (entry_kind, _), entry in config.components.items()
            if entry_kind is kind
        }
        if section:
            tree[kind.value] = section
    tree["service"] = {
        "extensions": [str(each) for each in config.extensions],
        "pipelines": {
            str(pipeline_id): {
                "receivers": [str(each) for each in pipeline.receivers],
                "processors": [str(each) for each in pipeline.processors],
                "exporters": [str(each) for each in pipeline.exporters],
            }
            for pipeline_id, pipeline in config.pipelines.items()
        },
        "telemetry": _dump(config.telemetry, unredacted),
        "node": config.node,
    }
    return tree


def _dump(block: Block, unredacted: bool) -> dict[str, object]:
    return block.model_dump(mode="json", by_alias=True, context={UNREDACTED_CONTEXT: unredacted})


def _escaped(value: object) -> object:
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(inner) for inner in value]
    return escape(value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else (PyYAML knows YAML 1.1's words
    only)."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


def _style(text: str) -> str | None:
    if not text.isprintable():
        return '"'  # the one style with escapes: some characters (U+0085) are line breaks to YAML elsewhere
    return None if isinstance(resolve_plain(text), str) else "'"


_Dumper.add_representer(str, _text)
