"""Configuration: loaded, merged, expanded, validated with positions, printed.

Invariant: it knows components only through the ComponentLookup it is given.
"""

from gpulens.config.document import Document, load
from gpulens.config.ids import ComponentID, Kind, PipelineID, Signal
from gpulens.config.printing import render
from gpulens.config.resolve import resolve
from gpulens.config.service import (
    ComponentEntry,
    ComponentLookup,
    PipelineConfig,
    ServiceConfig,
    TelemetryConfig,
)
from gpulens.config.types import Block, ComponentConfig, Duration, OptionalBlock, Secret, StringList

__all__ = [
    "Block",
    "ComponentConfig",
    "ComponentEntry",
    "ComponentID",
    "ComponentLookup",
    "Document",
    "Duration",
    "Kind",
    "OptionalBlock",
    "PipelineConfig",
    "PipelineID",
    "Secret",
    "ServiceConfig",
    "Signal",
    "StringList",
    "TelemetryConfig",
    "load",
    "render",
    "resolve",
]
