"""What a user writes under `attribution:`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from gpulens.config.ranges import NON_NEGATIVE, POSITIVE
from gpulens.config.types import ComponentConfig, Duration, StringList


class AttributionConfig(ComponentConfig):
    """Settings of the attribution processor; the defaults are those of the rule 'two snapshots that agree'."""

    needs_allocation_source: ClassVar[bool] = True

    hold: Annotated[Duration, NON_NEGATIVE] = Field(
        0.0,
        description="How long a reading waits for the snapshot after it; 0 = 1.5 intervals of the allocation source. "
        "What is held is lost in a crash.",
    )
    settle_time: Annotated[Duration, NON_NEGATIVE] = Field(
        15.0, description="Time after a node's first sign in which owner labels of pages do not count yet."
    )
    max_gap: Annotated[Duration, NON_NEGATIVE] = Field(
        60.0, description="Snapshots further apart than this do not vouch for the time between."
    )
    source_timeout: Annotated[Duration, POSITIVE] = Field(
        600.0, description="An allocation source that was silent for this long gives way to the next one."
    )
    grid: Annotated[Duration, POSITIVE] = Field(
        10.0, description="Step of the event-time grid on which gpu.attribution is reported."
    )
    lateness: Annotated[Duration, NON_NEGATIVE] = Field(
        2.0, description="How far the watermark stays behind the newest event."
    )
    sources: StringList = Field(
        ("self", "pod_resources", "process", "gke", "dcgm", "prometheus"),
        description="Allocation sources in the order of trust; one that is not listed is ignored.",
    )
    system_namespaces: StringList = Field(
        (
            "kube-system",
            "gke-managed-system",
            "gpu-operator",
            "nvidia-gpu-operator",
            "nvidia-device-plugin",
            "nvidia-dra-driver-gpu",
        ),
        description="Namespaces whose pods are never reported as rogue: they run the node's own daemons (the MPS "
        "control daemon, diagnostics).",
    )
