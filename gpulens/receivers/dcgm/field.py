"""What the table of fields is made of.

Invariant: a field says what is measured and for which entity; a name says in which unit it is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gpulens.receivers.dcgm.units import Either, Unit

Attribute = tuple[str, str]


class Level(Enum):
    """For which entity DCGM measures a field; the exporter prints every field on every row all the same."""

    GPU = "gpu"  # one value a physical GPU, repeated on each row of its MIG instances
    INSTANCE = "instance"  # one value a MIG instance, or a GPU where MIG is off
    WHOLE_GPU_ONLY = "whole gpu only"  # not defined while MIG is on: absent there, or a meaningless 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One canonical series that a field feeds. `unit` is left out where the name decides it."""

    metric: str
    attributes: tuple[Attribute, ...] = ()
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One DCGM field.

    - `number`: DCGM's field id; 0 for what the exporter computes itself.
    - `process_metric`: what a per-process row (time-slicing, exporter 4.5.3-4.8.2 and later) of it becomes.
    - `label_attributes`: labels of the row that tell series apart, and the attribute that each becomes.
    """

    number: int
    readings: tuple[Reading, ...]
    level: Level
    process_metric: str = ""
    label_attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """A name on the page: the field and the unit that it is printed in."""

    field: Field
    unit: Unit | Either


_PREFIX: Final = "DCGM_FI_"


class Table:
    """Collects names. `old` names also exist in lower case (`--use-old-namespace`), `new` ones (4.6 on) do
    not."""

    def __init__(self) -> None:
        self.exact: dict[str, Named] = {}
        self.lower: dict[str, Named] = {}

    def add(
        self,
        number: int,
        metric: str,
        *attributes: Attribute,
        old: Mapping[str, Unit | Either],
        new: Mapping[str, Unit | Either] | None = None,
        legacy: str = "",
        level: Level = Level.GPU,
        process: str = "",
        labels: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """One field that feeds one series. `legacy` is its name of exporter 1.x, in the unit of the first
        old name."""
        self.put(Field(number, (Reading(metric, attributes),), level, process, labels), old, new or {}, legacy)

    def put(
        self, field: Field, old: Mapping[str, Unit | Either], new: Mapping[str, Unit | Either], legacy: str = ""
    ) -> None:
        """One field under all its names."""
        for names in (old, new):
            for name, unit in names.items():
                self.exact[full_name(name)] = Named(field, unit)
        for name, unit in old.items():
            self.lower[full_name(name).lower()] = Named(field, unit)
        if legacy:
            self.lower[legacy] = Named(field, next(iter(old.values())))


def full_name(name: str) -> str:
    """A DCGM name without its usual prefix, with it; the exporter's own names have another one and stay."""
    return name if name.startswith("DCGM_") else _PREFIX + name
