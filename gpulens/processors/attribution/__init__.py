"""The `attribution` processor: gives every GPU series its true owner."""

from gpulens.pipeline.component import ProcessorFactory, Stability
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.join import create

FACTORY = ProcessorFactory(name="attribution", config=AttributionConfig, stability=Stability.BETA, metrics=create)
