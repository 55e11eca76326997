"""The configuration of the `otlp_http` exporter; names and meaning are the Collector's exporter's."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from gpulens.config.types import Duration, Secret
from gpulens.pipeline.otlp_sending import OtlpConfig

_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Encoding(StrEnum):
    """The form of requests."""

    PROTO = "proto"
    JSON = "json"


def _header_name(name: str) -> str:
    if not _HEADER.fullmatch(name):
        raise ValueError("can't be the name of an HTTP header")
    return name


def _header_value(value: Secret) -> Secret:
    if any(char in "\r\n\0" for char in value.reveal()):
        raise ValueError("has line breaks")
    return value


class OtlpHttpConfig(OtlpConfig):
    """What the user writes under `otlp_http:`."""

    endpoint: Annotated[str, Field(description="Base URL; `/v1/metrics` is put behind it.")] = ""
    metrics_endpoint: Annotated[str, Field(validate_default=True, description="URL for metrics, taken as it is.")] = ""
    headers: Annotated[
        dict[Annotated[str, AfterValidator(_header_name)], Annotated[Secret, AfterValidator(_header_value)]],
        Field(description="Sent with every request; never printed."),
    ] = Field(default_factory=dict)
    encoding: Annotated[Encoding, Field(description="Protobuf or JSON.")] = Encoding.PROTO
    timeout: Annotated[Duration, Field(description="Time for each try; 0 = no limit.")] = 30.0

    @field_validator("endpoint", "metrics_endpoint")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f'"{url}" is not a URL, as in "http://otel-collector:4318"')
            if parts.username is not None or parts.password is not None:
                raise ValueError("a URL is printed and logged: put its credentials into 'headers' (Authorization)")
        return url

    @field_validator("metrics_endpoint")
    @classmethod
    def _check_endpoints(cls, metrics_endpoint: str, info: ValidationInfo) -> str:
        if not metrics_endpoint and info.data.get("endpoint") == "":  # absent when it is wrong itself
            raise ValueError("at least one endpoint must be specified")
        return metrics_endpoint

    @property
    def url(self) -> str:
        """Where metrics go."""
        return self.metrics_endpoint or self.endpoint.rstrip("/") + "/v1/metrics"

    def destination(self) -> str | None:
        """The URL for metrics."""
        return self.url
