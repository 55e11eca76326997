"""Reads recordings: files with one line of OTLP JSON a batch."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.otlp_json_file.config import OtlpJsonFileConfig
from gpulens.receivers.otlp_json_file.reader import create

FACTORY = ReceiverFactory(
    name="otlp_json_file",
    config=OtlpJsonFileConfig,
    stability=Stability.BETA,
    metrics=create,
    alias="otlpjsonfile",
)

__all__ = ["FACTORY"]
