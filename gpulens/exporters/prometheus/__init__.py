"""Exporter `prometheus`: serves the latest readings as a page for a Prometheus server to scrape."""

from gpulens.exporters.prometheus.config import PrometheusConfig
from gpulens.exporters.prometheus.server import create
from gpulens.pipeline.component import ExporterFactory, Stability

FACTORY = ExporterFactory(name="prometheus", config=PrometheusConfig, stability=Stability.BETA, metrics=create)
