"""The configuration of the `otlp_grpc` exporter; names and meaning are the Collector's exporter's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from gpulens.config.types import Block, Duration, OptionalBlock, Secret
from gpulens.pipeline.otlp_sending import OtlpConfig

_HOST_PORT: Final = re.compile(r"(\[[0-9a-fA-F:.%a-z]+\]|[^:/\s\[\]]+):([0-9]{1,5})")
_HEADER: Final = re.compile(r"[0-9A-Za-z_.-]+")


class KeepaliveConfig(Block):
    """The `keepalive` block: pings on a quiet connection."""

    time: Annotated[Duration, Field(gt=0, description="Quiet time before a ping.")] = 10.0
    timeout: Annotated[Duration, Field(gt=0, description="How long an answer may take.")] = 20.0
    permit_without_stream: Annotated[bool, Field(description="Also while no request is under way.")] = False


@dataclass(frozen=True, slots=True)
class Target:
    """Where gRPC connects to. `secure` is None where the scheme does not decide."""

    address: str
    secure: bool | None


def parse_target(endpoint: str) -> Target:
    """`host:port`, with `http://` (never TLS) or `https://` (always TLS) before it, or `unix:` and `dns:` names as
    gRPC has them. Raises ValueError."""
    if not endpoint:
        raise ValueError("must not be empty; write host:port")
    if endpoint.startswith(("unix:", "dns:")):
        return Target(endpoint, None)
    scheme, separator, rest = endpoint.partition("://")
    address = rest.removesuffix("/") if separator else endpoint
    if separator and scheme not in ("http", "https"):
        raise ValueError(f'"{endpoint}": the scheme "{scheme}" is unknown; write host:port')
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65535:
        raise ValueError(f'"{endpoint}" is not host:port, as in "otel-collector:4317"')
    return Target(address, {"http": False, "https": True}[scheme] if separator else None)


def _header_name(name: str) -> str:
    if not _HEADER.fullmatch(name) or name.lower().startswith("grpc-"):
        raise ValueError("can't be the name of a gRPC header")
    return name


def _header_value(value: Secret) -> Secret:
    text = value.reveal()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("has characters that gRPC does not send")
    return value


class OtlpGrpcConfig(OtlpConfig):
    """What the user writes under `otlp_grpc:`."""

    endpoint: Annotated[str, Field(description="`host:port`, also with `http://` or `https://`, or `unix:/path`.")]
    headers: Annotated[
        dict[Annotated[str, AfterValidator(_header_name)], Annotated[Secret, AfterValidator(_header_value)]],
        Field(description="Sent with every request; never printed."),
    ] = Field(default_factory=dict)
    wait_for_ready: Annotated[bool, Field(description="Waits for the connection instead of failing a try.")] = False
    authority: Annotated[str, Field(description="The `:authority` header, if not the endpoint.")] = ""
    keepalive: Annotated[
        OptionalBlock[KeepaliveConfig], Field(description="Pings on a quiet connection; off when absent.")
    ] = None

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if not endpoint:
            raise ValueError('requires a non-empty "endpoint"')
        parse_target(endpoint)
        return endpoint

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls.insecure_skip_verify and self.secure:
            raise ValueError(
                "'insecure_skip_verify' is not possible with gRPC here: name the server's authority in 'ca_file' "
                "(and 'server_name_override' if the name differs), or use 'insecure: true' for no TLS"
            )
        return self

    @property
    def secure(self) -> bool:
        """TLS is used: the endpoint's scheme decides, else `tls.insecure`."""
        secure = parse_target(self.endpoint).secure
        return not self.tls.insecure if secure is None else secure

    def destination(self) -> str | None:
        """The address that gRPC connects to."""
        return parse_target(self.endpoint).address
