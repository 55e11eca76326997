"""Facts about this node's pods as series: phase, readiness, start, top owner, labels."""

from gpulens.pipeline.component import ReceiverFactory, Stability
from gpulens.receivers.k8s_pods.config import K8sPodsConfig
from gpulens.receivers.k8s_pods.scraper import create

FACTORY = ReceiverFactory(name="k8s_pods", config=K8sPodsConfig, stability=Stability.BETA, metrics=create)

__all__ = ["FACTORY"]
