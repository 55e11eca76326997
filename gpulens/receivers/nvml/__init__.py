"""NVIDIA's driver library as a source: activity, memory, power, errors, processes and XIDs of this node's GPUs."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.nvml.config import NvmlConfig
from gpulens.receivers.nvml.scraper import create

FACTORY = ReceiverFactory(name="nvml", config=NvmlConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
