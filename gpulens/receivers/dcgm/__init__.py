"""dcgm-exporter's page as a source of device readings, device identities and allocations."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import create

FACTORY = ReceiverFactory(name="dcgm", config=DcgmConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
