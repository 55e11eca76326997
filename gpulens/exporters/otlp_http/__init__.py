"""Exporter `otlp_http` (alias `otlphttp`): pushes OTLP over HTTP."""

from gpulens.exporters.otlp_http.config import OtlpHttpConfig
from gpulens.exporters.otlp_http.sender import create
from gpulens.pipeline.component import ExporterFactory, Stability

FACTORY = ExporterFactory(
    name="otlp_http", config=OtlpHttpConfig, stability=Stability.BETA, metrics=create, alias="otlphttp"
)
