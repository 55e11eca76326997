"""A mapping file, read: which samples of a vendor's page become which of our series.

Invariant: a mapping is data. What can't be used is told with file, line and column when the configuration is read,
never at a scrape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path

from gpulens.config.decode import Report, decode
from gpulens.config.nodes import Entry, Position
from gpulens.config.suggest import closest
from gpulens.config.yaml_nodes import MAX_BYTES, in_file, parse
from gpulens.pipeline.catalogue import CATALOGUE, MetricScope
from gpulens.pipeline.data import Metric
from gpulens.pipeline.errors import ConfigError, Problem
from gpulens.receivers.prometheus.schema import Combine, Info, MappingFile, MetricRow, OwnerBlock, Where
from gpulens.receivers.prometheus.templates import Template, first
from gpulens.receivers.prometheus.units import UNITS, Rule

_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE | re.ASCII)
# What Kubernetes takes as the name of a pod or namespace (RFC 1123). A placeholder for several pods is none.
_KUBERNETES = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_PACKAGE = "gpulens.receivers.prometheus"

Labels = Mapping[str, str]
"""Label values by name, without those that say nothing."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Label values that a sample must have, as texts or patterns with `*`; "" stands for a label that is missing or
    says nothing."""

    wanted: tuple[tuple[str, frozenset[str], tuple[str, ...]], ...]

    def holds(self, labels: Labels) -> bool:
        """Whether these labels satisfy it."""
        return all(_is_one_of(labels.get(label, ""), texts, patterns) for label, texts, patterns in self.wanted)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a mapping. `metric` is None where only the labels are read; `order` is its place in the file."""

    order: int
    names: tuple[str, ...]
    where: Condition
    metric: Metric | None
    scope: MetricScope | None
    attributes: tuple[tuple[str, tuple[Template, ...]], ...]
    rule: Rule
    combine: Combine
    owners: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A device, or a part of one, as a sample names it. `parent` is empty for a whole device; `speaks_for_whole` says
    that readings of the whole device stand on this sample, None that they belong to the part."""

    id: str
    parent: str = ""
    speaks_for_whole: bool | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a device."""

    namespace: str
    pod: str
    container: str = ""


class VendorMapping:
    """A mapping file, ready for use."""

    def __init__(self, file: MappingFile) -> None:
        self._file = file
        self.window_s = file.window
        self._prefixes = file.prefixes
        self._blank = frozenset(file.blank)
        self._device = file.device
        self._id = _templates(file.device.id)
        self._part = _templates(file.device.partition.id) if file.device.partition else ()
        self._when = _condition(file.device.partition.when if file.device.partition else {})
        self._whole_on = _condition(file.device.partition.whole_on if file.device.partition else {})
        self._name = _templates(file.device.name or ())
        self._model = _templates(file.device.model or ())
        self._info = _info(file.device.info)
        self._part_info = _info(file.device.partition.info if file.device.partition else {})
        self._owners = file.owners
        self._owner_labels = {label for keys in file.owners for label in (keys.namespace, keys.pod, keys.container)}
        self._not_owners = file.not_owners
        self.names_owners = bool(file.owners)
        self._rows: dict[str, list[Row]] = {}
        for order, row in enumerate(file.metrics):
            made = _row(order, row, file.drop)
            for name in row.names:
                self._rows.setdefault(name, []).append(made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VendorMapping) and self._file == other._file

    __hash__ = None  # type: ignore[assignment]  # a mapping is compared, never looked up

    def rows(self, name: str) -> tuple[str, list[Row]]:
        """The metric's name without what may stand before it, and the rows that read it."""
        for prefix in self._prefixes:
            bare = name.removeprefix(prefix)
            if name.startswith(prefix) and bare in self._rows:
                return bare, self._rows[bare]
        return name, []

    def labels(self, pairs: tuple[tuple[str, str], ...]) -> Labels:
        """What a sample's labels say."""
        return {key: value for key, value in pairs if value.strip() and value not in self._blank}

    def unowned(self, labels: Labels) -> tuple[tuple[str, str], ...]:
        """What a sample's labels say besides its owner."""
        return tuple(sorted((key, text) for key, text in labels.items() if key not in self._owner_labels))

    def part(self, labels: Labels) -> Part | None:
        """The device that a sample is about; None when it names none."""
        whole = first(self._id, labels)
        if not whole:
            return None
        part = first(self._part, labels) if self._when.holds(labels) else ""
        if not part or part == whole:
            return Part(whole)
        return Part(part, whole, self._whole_on.holds(labels) if self._whole_on.wanted else None)

    def describe(self, labels: Labels, part: bool) -> dict[str, str]:
        """What a sample says of its device (or, with `part`, of the part): `hw.name`, `hw.model` and join keys."""
        said = {"hw.model": first(self._model, labels)}
        if not part:
            said["hw.name"] = first(self._name, labels)
        for key, templates in self._part_info if part else self._info:
            text = first(templates, labels)
            said[key] = pci_address(text) if key == "gpu.pci.address" else text
        return {key: text for key, text in said.items() if text}

    def owner(self, labels: Labels) -> Owner | None:
        """The pod that holds a sample's device; None where the sample names none."""
        for keys in self._owners:
            owner = _owner(keys, labels)
            if owner is not None:
                return None if any(fnmatchcase(owner.pod, pattern) for pattern in self._not_owners) else owner
        return None


def pci_address(text: str) -> str:
    """A PCI address as the kernel writes it: lower case, four digits of domain; empty when the text is none."""
    found = _PCI.fullmatch(text)
    return f"{int(found['domain'] or '0', 16):04x}:{found['rest'].lower()}" if found else ""


def shipped() -> list[str]:
    """Names of the mappings that come with gpulens."""
    folder = resources.files(_PACKAGE) / "mappings"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_mapping(name: str) -> VendorMapping:
    """The shipped mapping of this name, else the one in the file at this path.

    Raises ConfigError with everything that is wrong in it, each with its place.
    """
    names = shipped()
    if name in names:
        return parse_mapping((resources.files(_PACKAGE) / "mappings" / f"{name}.yaml").read_text("utf-8"), name)
    try:
        with Path(name).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"no mapping of this name is shipped ({', '.join(names)}), and it can't be read as a file: {why}"
        raise ConfigError([Problem(name, 0, 0, "", message, closest(name, names))]) from error
    return parse_mapping(text, name)


def parse_mapping(text: str, source: str) -> VendorMapping:
    """The mapping in a text; `source` names it in messages. Raises ConfigError."""
    root, problems = parse(text, in_file(source))
    report = Report([source], problems)
    start = Position(source, 1, 1)
    file = decode(Entry(start, root), "", MappingFile, report) if root is not None else None
    if file is None or report.problems():
        raise ConfigError(report.problems())
    return VendorMapping(file)


def _templates(texts: tuple[str, ...]) -> tuple[Template, ...]:
    return tuple(map(Template.parse, texts))


def _info(info: Info) -> tuple[tuple[str, tuple[Template, ...]], ...]:
    return tuple((key, _templates(texts)) for key, texts in info.items())


def _condition(where: Where) -> Condition:
    return Condition(
        tuple(
            (label, frozenset(values), tuple(each for each in values if "*" in each)) for label, values in where.items()
        )
    )


def _is_one_of(text: str, texts: frozenset[str], patterns: tuple[str, ...]) -> bool:
    return text in texts or any(fnmatchcase(text, pattern) for pattern in patterns)


def _row(order: int, row: MetricRow, drop: tuple[float, ...]) -> Row:
    entry = CATALOGUE.get(row.to)
    attributes = tuple((key, _templates(texts)) for key, texts in row.attributes.items())
    where = _condition(row.where)
    if entry is None:
        return Row(order, row.names, where, None, None, attributes, Rule(), row.combine, row.owners)
    unit, scale, divide = UNITS.get(row.unit, ("", row.scale or 1.0, 1.0))
    least = -math.inf if unit == "Cel" else 0.0  # nothing else that a device reports can be negative
    rule = Rule(
        scale,
        divide,
        least if row.low is None else row.low,
        (100.0 if row.unit == "percent" else math.inf) if row.high is None else row.high,
        frozenset((*drop, *row.drop)),
        None if row.cases is None else {float(text): result for text, result in row.cases.items()},
        row.above,
        entry.metric.is_int,
        entry.binary,
    )
    return Row(order, row.names, where, entry.metric, entry.scope, attributes, rule, row.combine, row.owners)


def _owner(keys: OwnerBlock, labels: Labels) -> Owner | None:
    namespace, pod = labels.get(keys.namespace, ""), labels.get(keys.pod, "")
    if not (_KUBERNETES.fullmatch(namespace) and _KUBERNETES.fullmatch(pod)):
        return None
    return Owner(namespace, pod, labels.get(keys.container, ""))
