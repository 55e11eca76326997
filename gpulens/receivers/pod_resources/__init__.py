"""The kubelet's Pod Resources socket as a source of allocations."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.pod_resources.config import PodResourcesConfig
from gpulens.receivers.pod_resources.scraper import create

FACTORY = ReceiverFactory(
    name="pod_resources",
    config=PodResourcesConfig,
    stability=Stability.BETA,
    metrics=create,
    alias="podresources",
)

__all__ = ["FACTORY"]
