"""Exporter `debug`: writes what arrives into the log."""

from gpulens.exporters.debug.config import DebugConfig
from gpulens.exporters.debug.printer import create, create_logs
from gpulens.pipeline.component import ExporterFactory, Stability

FACTORY = ExporterFactory(name="debug", config=DebugConfig, stability=Stability.BETA, metrics=create, logs=create_logs)
