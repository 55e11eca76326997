"""The sections that define components: ids, types, and each component's own configuration.

Invariant: a component is declared as soon as its id can be read, so that a reference to one whose
configuration is wrong is not reported as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpulens.config.decode import Report, decode, expected_map, join_path
from gpulens.config.ids import ComponentID, Kind
from gpulens.config.nodes import PATH_DELIMITER, Entry, MapNode, Position
from gpulens.config.service import ComponentLookup
from gpulens.config.suggest import closest
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.errors import StartError


@dataclass(frozen=True, slots=True)
class Declared:
    """A component as the document names it. `type` is canonical and empty when unknown; `config` is None when
    wrong; `written` is its block."""

    id: ComponentID
    at: Position
    type: str = ""
    alias: bool = False
    config: ComponentConfig | None = None
    written: Entry | None = None

    def place(self, path: str) -> Position:
        """Where a key of its block stands; of one that is not written the nearest block around it."""
        entry = self.written
        if entry is None:
            return self.at
        for key in path.split(PATH_DELIMITER):
            if not isinstance(entry.node, MapNode) or key not in entry.node.entries:
                break
            entry = entry.node.entries[key]
        return entry.key_at


@dataclass(frozen=True, slots=True)
class Sections:
    """All declared components; `unreadable` sections are those whose content is not known."""

    declared: Mapping[Kind, Mapping[ComponentID, Declared]]
    unreadable: frozenset[Kind] = frozenset()

    def of(self, kind: Kind) -> Mapping[ComponentID, Declared]:
        """Components of one section."""
        return self.declared[kind]

    def find(self, component_id: ComponentID, kinds: Sequence[Kind]) -> tuple[Kind, Declared] | None:
        """The component that an id means where one of these kinds is expected."""
        for kind in kinds:
            if (declared := self.declared[kind].get(component_id)) is not None:
                return kind, declared
        return None

    def check_reference(
        self, component_id: ComponentID, kinds: Sequence[Kind], at: Position, path: str, report: Report
    ) -> None:
        """Reports an id that none of these sections declares; the first kind names it."""
        if self.find(component_id, kinds) is not None or self.unreadable.intersection(kinds):
            return
        known = [str(each) for kind in kinds for each in self.declared[kind]]
        message = f'references {kinds[0].singular} "{component_id}" which is not configured'
        report.add(at, path, message, closest(str(component_id), known))


def read_sections(root: MapNode, lookup: ComponentLookup, report: Report) -> Sections:
    """Reads every component section of the document."""
    declared: dict[Kind, Mapping[ComponentID, Declared]] = {kind: {} for kind in Kind}
    unreadable = set()
    for kind in Kind:
        entry = root.entries.get(kind.value)
        if entry is None:
            continue
        block = expected_map(report, entry, kind.value)
        if block is None:
            unreadable.add(kind)
        else:
            declared[kind] = _read_section(kind, block, lookup, report)
    sections = Sections(declared, frozenset(unreadable))
    _check_ambiguous(sections, report)
    return sections


def _read_section(
    kind: Kind, block: MapNode, lookup: ComponentLookup, report: Report
) -> Mapping[ComponentID, Declared]:
    found: dict[ComponentID, Declared] = {}
    for key, entry in block.entries.items():
        try:
            component_id = ComponentID.parse(key)
        except ValueError as error:
            report.add(entry.key_at, kind.value, str(error))
            continue
        if component_id in found:
            report.add(entry.key_at, kind.value, f'duplicate name "{component_id}" after unmarshaling')
            continue
        found[component_id] = _read_component(kind, component_id, entry, lookup, report)
    return found


def _read_component(
    kind: Kind, component_id: ComponentID, entry: Entry, lookup: ComponentLookup, report: Report
) -> Declared:
    at = entry.key_at
    try:
        canonical, is_alias = lookup.canonical(kind, component_id.type)
    except KeyError:
        types = sorted(lookup.types(kind))
        valid = f"(valid values: [{' '.join(types)}])"
        message = f'unknown type: "{component_id.type}" for id: "{component_id}" {valid}'
        report.add(at, kind.value, message, closest(component_id.type, types))
        return Declared(component_id, at)
    try:
        model = lookup.config_model(kind, canonical)
    except StartError as error:
        report.add(at, kind.value, str(error))
        return Declared(component_id, at)
    config = decode(entry, join_path(kind.value, str(component_id)), model, report)
    return Declared(component_id, at, canonical, is_alias, config, entry)


def _check_ambiguous(sections: Sections, report: Report) -> None:
    for kind in (Kind.RECEIVERS, Kind.EXPORTERS):
        for component_id, declared in sections.of(Kind.CONNECTORS).items():
            if component_id in sections.of(kind):
                message = (
                    f'ambiguous ID: Found both "{component_id}" {kind.singular} and "{component_id}" '
                    "connector. Change one of the components' IDs to eliminate ambiguity "
                    f'(e.g. rename "{component_id}" connector to "{component_id}/connector")'
                )
                report.add(declared.at, join_path(Kind.CONNECTORS.value, str(component_id)), message)
