"""What a mapping file may say, and the rules that tell a mistake in one.

Invariant: a file that passes here can be used: its metrics and attributes are the catalogue's, its units fit them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpulens.config.ranges import NON_NEGATIVE
from gpulens.config.suggest import closest
from gpulens.config.types import Block, Duration
from gpulens.pipeline.catalogue import CATALOGUE, Entry, MetricScope
from gpulens.receivers.prometheus.templates import Template
from gpulens.receivers.prometheus.units import UNITS

INFO_KEYS: Final = CATALOGUE["gpu.device.info"].attributes
_OWNERS_METRICS: Final = "gpu.process."
"""Metrics of scope `owner` that a page may fill; the others are derived."""


def targets() -> list[str]:
    """The metrics that a row may fill."""
    wanted = (MetricScope.WORK, MetricScope.DEVICE)
    return [n for n, entry in CATALOGUE.items() if entry.scope in wanted or n.startswith(_OWNERS_METRICS)]


def _hint(word: str, known: list[str]) -> str:
    near = closest(word, known)
    return f" (did you mean '{near}'?)" if near else ""


def _template(text: str) -> str:
    Template.parse(text)
    return text


def _one_or_many(value: object) -> object:
    if isinstance(value, bool | int | float):
        raise ValueError("must be a text: put it in quotes")
    return (value,) if isinstance(value, str) else value


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("must not be empty")
    return value


def _known(names: Callable[[], list[str]], what: str) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names():
            raise ValueError(f'"{name}" is no {what}{_hint(name, names())}')
        return name

    return check


def _spelled(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    """A check of names on the page: one that no page can have would be a row that never reads anything."""

    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            star = "; names are read as they stand, without '*'" if "*" in name else ""
            raise ValueError(f'"{name}" can\'t be a {what}{star}')
        return name

    return check


def _number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("is no number; samples that are none are left out anyway")
    return value


_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)

Number = Annotated[float, AfterValidator(_number)]
Label = Annotated[str, AfterValidator(_spelled(_LABEL_NAME, "label's name"))]
MetricName = Annotated[str, AfterValidator(_spelled(_METRIC_NAME, "metric's name"))]
TemplateText = Annotated[str, AfterValidator(_template)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
Templates = Annotated[tuple[TemplateText, ...], BeforeValidator(_one_or_many), AfterValidator(_not_empty)]
SomeTexts = Annotated[Texts, AfterValidator(_not_empty)]
Names = Annotated[tuple[MetricName, ...], BeforeValidator(_one_or_many), AfterValidator(_not_empty)]
Info = dict[Annotated[str, AfterValidator(_known(lambda: list(INFO_KEYS), "attribute of gpu.device.info"))], Templates]
Where = dict[Label, SomeTexts]


class Combine(StrEnum):
    """What becomes of several samples of one reading. AGREE: copies of it under several owners must be equal, and of
    several names the first that has a value counts."""

    AGREE = "agree"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    MEAN = "mean"


class PartitionBlock(Block):
    """Rows that speak of a part of a device (AMD's compute partitions, Intel's tiles)."""

    when: Annotated[Where, Field(description="Labels that such a row has; none means whenever `id` gives a text.")] = (
        Field(default_factory=dict)
    )
    id: Annotated[Templates, Field(description="`hw.id` of the part.")]
    whole_on: Annotated[
        Where,
        Field(
            description="Which of these rows carry the readings of the whole device (power, temperature, errors); "
            "on the others they are left out. Without it such readings belong to the part."
        ),
    ] = Field(default_factory=dict)
    info: Annotated[Info, Field(description="Attributes of the part's `gpu.device.info`.")] = Field(
        default_factory=dict
    )


class DeviceBlock(Block):
    """How a row names its device. Of several templates the first counts that gives a text."""

    id: Annotated[Templates, Field(description="`hw.id`.")]
    name: Annotated[Templates | None, Field(description="`hw.name`.")] = None
    model: Annotated[Templates | None, Field(description="`hw.model`.")] = None
    info: Annotated[Info, Field(description="Attributes of `gpu.device.info`; PCI addresses are normalised.")] = Field(
        default_factory=dict
    )
    partition: Annotated[PartitionBlock | None, Field(description="Rows about parts of a device.")] = None


class OwnerBlock(Block):
    """Which labels name the pod that holds the device."""

    namespace: Annotated[Label, Field(description="Label with the namespace.")]
    pod: Annotated[Label, Field(description="Label with the pod's name.")]
    container: Annotated[Label, Field(description="Label with the container's name.")] = ""


class MetricRow(Block):
    """One metric of the page. Without `to` its labels are read and its value is not."""

    names: Annotated[Names, Field(alias="from", description="Its name on the page, or several names.")]
    where: Annotated[Where, Field(description="Labels that the sample has; one text, also with `*`, or several.")] = (
        Field(default_factory=dict)
    )
    to: Annotated[
        str,
        AfterValidator(_known(targets, "metric that a page can fill")),
        Field(description="The metric it becomes (docs/metrics.md)."),
    ] = ""
    attributes: Annotated[dict[str, Templates], Field(description="Attributes of the metric.")] = Field(
        default_factory=dict
    )
    unit: Annotated[
        str,
        AfterValidator(_known(lambda: list(UNITS), "known unit")),
        Field(description="Unit on the page; `MB` is 10^6 bytes, `MiB` 2^20."),
    ] = ""
    scale: Annotated[float | None, Field(gt=0, lt=math.inf, description="What to multiply by, in place of a unit.")] = (
        None
    )
    low: Annotated[Number | None, Field(alias="min", description="The least plausible number, in the page's unit.")] = (
        None
    )
    high: Annotated[Number | None, Field(alias="max", description="The greatest plausible number.")] = None
    drop: Annotated[tuple[Number, ...], Field(description="Numbers that mean 'not available' for this metric.")] = ()
    cases: Annotated[
        dict[str, int] | None, Field(alias="values", description="The result by the number on the page.")
    ] = None
    above: Annotated[Number | None, Field(description="Makes a 0/1 of a number: 1 above this.")] = None
    combine: Annotated[Combine, Field(description="What becomes of several samples of one reading.")] = Combine.AGREE
    owners: Annotated[bool, Field(description="Whether its labels name the device's owner.")] = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.to:
            self._check_labels_only()
            return self
        entry = CATALOGUE[self.to]
        self._check_attributes(entry)
        self._check_numbers(entry)
        return self

    def _check_labels_only(self) -> None:
        keys = {"names", "where", "owners"}
        for name in sorted(self.model_fields_set - keys):
            key = type(self).model_fields[name].alias or name
            raise ValueError(f"'{key}' has no meaning without 'to'")

    def _check_attributes(self, entry: Entry) -> None:
        for key in self.attributes:
            if key not in entry.attributes:
                raise ValueError(f"'{key}' is no attribute of {self.to}{_hint(key, list(entry.attributes))}")

    def _check_numbers(self, entry: Entry) -> None:
        if self.unit and self.scale is not None:
            raise ValueError("'scale' and 'unit' exclude each other: take one of them out")
        if self.unit and UNITS[self.unit][0] != entry.metric.unit:
            raise ValueError(
                f"'unit: {self.unit}' does not fit {self.to}, which is in {entry.metric.unit or 'no unit'}"
            )
        made = [key for key, value in (("values", self.cases), ("above", self.above)) if value is not None]
        if len(made) > 1:
            raise ValueError("'above' and 'values' exclude each other: take one of them out")
        if made and not entry.binary:
            raise ValueError(f"'{made[0]}' makes 0/1 of a number, and {self.to} is none")
        if made and (self.unit or self.scale is not None):
            raise ValueError(f"'{made[0]}' leaves nothing for a unit or a scale to do")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("'min' is above 'max': no number would pass")
        if entry.metric.unit in _MEASURED and not (self.unit or self.scale is not None):
            raise ValueError(f"'to: {self.to}' is in {entry.metric.unit}: say the page's 'unit'")
        if self.cases is not None:
            _check_cases(self.cases)


_MEASURED: Final = frozenset(base for base, _, _ in UNITS.values())


def _check_cases(cases: dict[str, int]) -> None:
    if not cases:
        raise ValueError("'values' must not be empty")
    known: dict[float, str] = {}
    for text, result in cases.items():
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"'{text}' is no number")
        if result not in (0, 1):
            raise ValueError(f"'{text}' must become 0 or 1")
        if number in known:
            raise ValueError(f"'{text}' and '{known[number]}' are the same number")
        known[number] = text


def _some_rows(rows: tuple[MetricRow, ...]) -> tuple[MetricRow, ...]:
    if not rows:
        raise ValueError("must not be empty")
    return rows


class MappingFile(Block):
    """A whole mapping file."""

    description: Annotated[str, Field(description="What it reads, for people.")] = ""
    window: Annotated[
        Duration, NON_NEGATIVE, Field(description="How far back a reading reaches: how often the exporter renews them.")
    ] = 0.0
    prefixes: Annotated[SomeTexts, Field(description="What may stand before the names on the page.")] = ("",)
    blank: Annotated[Texts, Field(description="Label values that say nothing.")] = ()
    drop: Annotated[tuple[Number, ...], Field(description="Numbers that mean 'not available' on every metric.")] = ()
    device: Annotated[DeviceBlock, Field(description="How a row names its device.")]
    owners: Annotated[
        tuple[OwnerBlock, ...], Field(description="Labels that name the owner; the first that names a pod counts.")
    ] = ()
    not_owners: Annotated[Texts, Field(description="Pods that own nothing, as names or with `*`.")] = ()
    metrics: Annotated[
        tuple[MetricRow, ...], AfterValidator(_some_rows), Field(description="What becomes of the page's metrics.")
    ]
