"""The `gke:` block."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpulens.config.types import Duration
from gpulens.pipeline.scrape_client import PageScrapeConfig


class GkeConfig(PageScrapeConfig):
    """Scrapes the page of GKE's device plugin (nvidia-metrics-collector), usually http://POD-IP:2112/metrics."""

    collection_interval: Annotated[Duration, Field(description="Time between two scrapes.")] = 30.0
    timeout: Annotated[Duration, Field(description="Deadline of one scrape; 0 is one interval.")] = 10.0
