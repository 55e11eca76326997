"""Any Prometheus page as a source: as it stands, or read by a vendor's mapping file."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.prometheus.config import PrometheusConfig
from gpulens.receivers.prometheus.scraper import create

FACTORY = ReceiverFactory(name="prometheus", config=PrometheusConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
