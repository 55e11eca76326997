"""What a user may write in a `pod_resources` block."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from gpulens.config.ranges import NON_NEGATIVE
from gpulens.config.types import Duration, StringList
from gpulens.pipeline.scraping import ScrapeConfig

_UNIX = "unix:"


class PodResourcesConfig(ScrapeConfig):
    """The kubelet's socket and how its devices are read."""

    allocation_source: ClassVar[bool] = True

    endpoint: Annotated[str, Field(description="The kubelet's socket. Mount its directory, not the socket file.")] = (
        "unix:///var/lib/kubelet/pod-resources/kubelet.sock"
    )
    collection_interval: Annotated[Duration, Field(description="Time between two scrapes.")] = 10.0
    timeout: Annotated[Duration, Field(description="How long a scrape may take; 0 is one interval.")] = 5.0
    reuse: Annotated[
        Duration,
        NON_NEGATIVE,
        Field(description="How long the last allocations stay in force while the kubelet does not answer."),
    ] = 60.0
    resource_names: Annotated[
        StringList,
        Field(
            description="Only these resources and DRA drivers, exact or with `*`; without it the device ids decide"
            " what is a GPU."
        ),
    ] = ()
    sharing_mode: Annotated[
        Literal["", "time_slicing", "mps"],
        Field(description="What replicas of a whole GPU are: the ids can't tell time-slicing from MPS."),
    ] = ""
    max_message_size_mib: Annotated[int, Field(ge=1, le=1024, description="Largest reply that is taken, in MiB.")] = 64

    @property
    def socket_path(self) -> str:
        """The socket's path on this machine."""
        return _socket_path(self.endpoint)

    @field_validator("endpoint")
    @classmethod
    def _names_a_socket(cls, endpoint: str) -> str:
        if not _socket_path(endpoint).startswith("/"):
            raise ValueError(
                f'"{endpoint}" must name a socket by its whole path, as in'
                ' "unix:///var/lib/kubelet/pod-resources/kubelet.sock"'
            )
        return endpoint


def _socket_path(endpoint: str) -> str:
    path = endpoint.removeprefix(_UNIX)
    return path.removeprefix("//") if path.startswith("///") else path
