"""GKE's nvidia-metrics-collector page as a source of duty cycle, memory and allocations."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.gke.config import GkeConfig
from gpulens.receivers.gke.scraper import create

FACTORY = ReceiverFactory(name="gke", config=GkeConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
