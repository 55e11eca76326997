"""Writes what passes into a file, one line of OTLP JSON a batch: a recording."""

from gpulens.exporters.file.config import FileConfig
from gpulens.exporters.file.writer import create
from gpulens.pipeline.component import ExporterFactory, Stability

FACTORY = ExporterFactory(name="file", config=FileConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
