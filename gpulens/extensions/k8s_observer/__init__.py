"""This node's pods, watched once for every component that asks."""

from gpulens.extensions.k8s_observer.config import K8sObserverConfig
from gpulens.extensions.k8s_observer.observer import create
from gpulens.pipeline.component import ExtensionFactory, Stability

FACTORY = ExtensionFactory(name="k8s_observer", config=K8sObserverConfig, stability=Stability.BETA, create=create)

__all__ = ["FACTORY"]
