"""The `gke:` block."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from gpulens.config.types import Duration
from gpulens.pipeline.discovery import DiscoveringPageConfig, Target


class GkeConfig(DiscoveringPageConfig):
    """Scrapes the page of GKE's device plugin (nvidia-metrics-collector), usually http://POD-IP:2112/metrics."""

    allocation_source: ClassVar[bool] = True  # by the pod labels of its page

    known_targets: ClassVar[tuple[Target, ...]] = (Target("k8s-app=nvidia-gpu-device-plugin", 2112, ("kube-system",)),)

    collection_interval: Annotated[Duration, Field(description="Time between two scrapes.")] = 30.0
    timeout: Annotated[Duration, Field(description="Deadline of one scrape; 0 is one interval.")] = 10.0
