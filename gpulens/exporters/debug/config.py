"""The configuration of the `debug` exporter; names, meaning and defaults are the Collector's exporter's."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from gpulens.config.types import ComponentConfig


class Verbosity(StrEnum):
    """How much is written of a batch."""

    BASIC = "basic"
    NORMAL = "normal"
    DETAILED = "detailed"


class DebugConfig(ComponentConfig):
    """What the user writes under `debug:`."""

    verbosity: Annotated[
        Verbosity,
        Field(description="`basic`: counts of each batch; `normal`: a line a point; `detailed`: everything."),
    ] = Verbosity.BASIC
    sampling_initial: Annotated[
        int, Field(ge=1, description="Batches written in each second before sampling begins.")
    ] = 2
    sampling_thereafter: Annotated[
        int, Field(ge=1, description="After those, every n-th batch of the second is written; 1 writes all.")
    ] = 1
