"""The `dcgm:` block."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from gpulens.config.types import Duration
from gpulens.pipeline.discovery import DiscoveringPageConfig, Target


class RatioNames(StrEnum):
    """What names mean that stand for two units (`DCGM_FI_DEV_GPU_UTIL_RATIO` holds percent up to DCGM 4.6)."""

    AUTO = "auto"
    OLD = "old"
    NEW = "new"


class DcgmConfig(DiscoveringPageConfig):
    """Scrapes one dcgm-exporter."""

    allocation_source: ClassVar[bool] = True  # by the pod labels of its page

    # GKE's managed one, the GPU Operator's (its namespace is the user's choice), the dcgm-exporter chart's.
    known_targets: ClassVar[tuple[Target, ...]] = (
        Target("app.kubernetes.io/name=gke-managed-dcgm-exporter", 9400, ("gke-managed-system",)),
        Target("app=nvidia-dcgm-exporter", 9400),
        Target("app.kubernetes.io/name=dcgm-exporter", 9400),
    )

    collection_interval: Annotated[Duration, Field(description="Time between two scrapes.")] = 15.0
    timeout: Annotated[Duration, Field(description="Deadline of one scrape; 0 is one interval.")] = 10.0
    refresh: Annotated[
        Duration,
        Field(
            ge=0,
            description="How often the exporter renews its values (its `--collect-interval`); 0 learns it from five "
            "changes, and takes 30 s until then.",
        ),
    ] = 0.0
    renamed_units: Annotated[
        RatioNames,
        Field(
            description="Units of names that stand for two: `old` is DCGM 4.6's, `new` exporter 4.9's; `auto` decides "
            "by the values and the version label, and reads nothing but zeros where neither tells."
        ),
    ] = RatioNames.AUTO
