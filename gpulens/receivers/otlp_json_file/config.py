"""What a user may write in an `otlp_json_file` block; names are the Collector's where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from gpulens.config.types import ComponentConfig, Duration, StringList


class OtlpJsonFileConfig(ComponentConfig):
    """Which files are read, and what happens at their end."""

    include: Annotated[StringList, Field(description="Paths or globs (`**` too) of the files to read.")]
    exclude: Annotated[StringList, Field(description="Paths or globs of files that are left out.")] = ()
    start_at: Annotated[
        Literal["beginning", "end"],
        Field(description="Where files that are there at the start are begun. The Collector's default is `end`."),
    ] = "beginning"
    on_end: Annotated[
        Literal["stop", "keep"],
        Field(description="`stop` reads every file once and ends the service; `keep` waits for what is appended."),
    ] = "keep"
    poll_interval: Annotated[Duration, Field(gt=0, description="Time between two looks for new lines and files.")] = 0.2

    @field_validator("include")
    @classmethod
    def _names_files(cls, include: tuple[str, ...]) -> tuple[str, ...]:
        if not include or "" in include:
            raise ValueError("'include' must name at least one file")
        return include

    @field_validator("on_end")
    @classmethod
    def _reads_something(cls, on_end: str, info: ValidationInfo) -> str:
        if on_end == "stop" and info.data.get("start_at") == "end":
            raise ValueError("'on_end: stop' with 'start_at: end' would read nothing")
        return on_end
