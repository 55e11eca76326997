"""The configuration of the `prometheus` exporter; names and meaning are the Collector's exporter's."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field, field_validator

from gpulens.config.types import Block, ComponentConfig, Duration, StringList

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%a-z]+\]|[^:/\s\[\]]*):(?P<port>[0-9]{1,5})")
PAGE_PATH: Final = "/metrics"


class ServerTLS(Block):
    """The certificate that the page is served with."""

    cert_file: str
    key_file: str
    client_ca_file: Annotated[str, Field(description="Clients must show a certificate of this authority.")] = ""


class PrometheusConfig(ComponentConfig):
    """What the user writes under `prometheus:`."""

    endpoint: Annotated[str, Field(description="Address to listen on, `host:port`; the page is at `/metrics`.")]
    namespace: Annotated[str, Field(description="Words put before every metric name.")] = ""
    const_labels: Annotated[
        dict[str, str], Field(description="Labels for every series; one that a series has by itself stays.")
    ] = Field(default_factory=dict)
    send_timestamps: Annotated[bool, Field(description="Writes each sample's own time on the page.")] = False
    metric_expiration: Annotated[
        Duration, Field(gt=0, description="How long a series of a partial stream stays after its last point.")
    ] = 300.0
    enable_open_metrics: Annotated[
        bool,
        Field(description="Has no effect: a client that asks for OpenMetrics gets it anyway."),
    ] = False
    promote: Annotated[
        StringList, Field(description="Resource attributes that become labels, such as `k8s.pod.uid`.")
    ] = ()
    tls: Annotated[ServerTLS | None, Field(description="Serves HTTPS with this certificate.")] = None

    @field_validator("endpoint")
    @classmethod
    def _names_a_port(cls, endpoint: str) -> str:
        split_endpoint(endpoint)
        return endpoint

    def destination(self) -> str | None:
        """The address: two exporters can't listen on one."""
        return self.endpoint


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host (empty for all addresses) and port. Raises ValueError when it is no `host:port`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f'"{endpoint}" is not host:port, as in "0.0.0.0:9464"')
    return match["host"].strip("[]"), int(match["port"])
