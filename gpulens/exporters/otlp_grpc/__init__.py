"""Exporter `otlp_grpc` (alias `otlp`): pushes OTLP over gRPC."""

from gpulens.exporters.otlp_grpc.config import OtlpGrpcConfig
from gpulens.exporters.otlp_grpc.sender import create
from gpulens.pipeline.component import ExporterFactory, Stability

FACTORY = ExporterFactory(
    name="otlp_grpc", config=OtlpGrpcConfig, stability=Stability.BETA, metrics=create, alias="otlp"
)
