"""What a user may write in a `file` exporter's block; names and meaning are the Collector's."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator

from gpulens.config.types import Block, ComponentConfig, Duration, OptionalBlock


class RotationConfig(Block):
    """When a new file is begun and how many old ones stay."""

    max_megabytes: Annotated[int, Field(ge=1, description="A file that would grow beyond it is closed.")] = 100
    max_days: Annotated[int, Field(ge=0, description="Older files are deleted; 0 keeps them.")] = 0
    max_backups: Annotated[int, Field(ge=0, description="Old files that stay; 0 keeps all.")] = 100
    localtime: Annotated[bool, Field(description="Names old files by local time, not UTC.")] = False


class FileConfig(ComponentConfig):
    """Where the lines go."""

    path: Annotated[str, Field(description="The file; its directory must be there.")]
    format: Annotated[Literal["json"], Field(description="A line of OTLP JSON a batch.")] = "json"
    compression: Annotated[Literal["none"], Field(description="Lines are not packed.")] = "none"
    append: Annotated[
        bool,
        Field(description="Goes on with a file that is there; otherwise it is emptied. Rotation always goes on."),
    ] = False
    flush_interval: Annotated[
        Duration,
        Field(gt=0, description="The longest time that a line may wait. Lines are in fact written as they come."),
    ] = 1.0
    rotation: Annotated[
        OptionalBlock[RotationConfig], Field(description="Begins new files by size. Off unless it is there.")
    ] = None

    def destination(self) -> str | None:
        """Two exporters would write over each other in one file."""
        return f"file {os.path.normpath(self.path)}"

    @field_validator("path")
    @classmethod
    def _names_a_file(cls, path: str) -> str:
        if not path:
            raise ValueError("'path' must not be empty")
        return path
