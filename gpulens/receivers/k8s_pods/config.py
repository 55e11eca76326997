"""The `k8s_pods:` block."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from gpulens.config.ids import ComponentID
from gpulens.config.types import Duration, StringList
from gpulens.pipeline.scraping import ScrapeConfig


def _component_id(text: str) -> str:
    ComponentID.parse(text)
    return text


class K8sPodsConfig(ScrapeConfig):
    """Which facts of pods are told."""

    names_owners_for: ClassVar[frozenset[str]] = frozenset({"nvml"})  # whose processes are known by pod UID alone

    collection_interval: Annotated[Duration, Field(description="Time between two batches.")] = 10.0
    initial_delay: Annotated[Duration, Field(description="Wait before the first batch.")] = 1.0
    timeout: Annotated[Duration, Field(description="Deadline of one batch; 0 is one interval.")] = 0.0
    observer: Annotated[
        str, AfterValidator(_component_id), Field(description="The extension that knows this node's pods.")
    ] = "k8s_observer"
    labels: Annotated[
        StringList, Field(description="Labels that are told as `k8s.pod.label.<key>`, exact or with `*`.")
    ] = ()
    annotations: Annotated[
        StringList,
        Field(description="Annotations that are told as `k8s.pod.annotation.<key>`, exact or with `*`."),
    ] = ()

    def needs_extensions(self) -> tuple[tuple[str, str], ...]:
        return (("observer", self.observer),)
