"""The `tls` block of clients, and what gRPC and HTTP make of it.

Invariant: verification is off only when the user wrote so; files are read at start, and one that can't be read ends
the start with its name in the message.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

import grpc
from pydantic import Field, model_validator

from gpulens.config.types import Block
from gpulens.pipeline.errors import StartError

ReadFile = Callable[[str], bytes]
"""Reads a file by its path. Raises OSError."""


def read_file(path: str) -> bytes:
    """The file's bytes. Raises OSError."""
    return Path(path).read_bytes()


class ClientTLSConfig(Block):
    """The `tls` block; keys and meaning are the Collector's configtls."""

    insecure: Annotated[bool, Field(description="No TLS at all.")] = False
    insecure_skip_verify: Annotated[bool, Field(description="Takes any certificate.")] = False
    ca_file: Annotated[str, Field(description="Authorities to trust instead of the system's.")] = ""
    cert_file: Annotated[str, Field(description="Our certificate, where the server asks for one.")] = ""
    key_file: Annotated[str, Field(description="The key of `cert_file`.")] = ""
    server_name_override: Annotated[str, Field(description="The name that the certificate must have.")] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("for auth via TLS, provide both certificate and key, or neither")
        return self


def grpc_credentials(config: ClientTLSConfig, read: ReadFile = read_file) -> grpc.ChannelCredentials:
    """Credentials of a gRPC channel. Raises StartError."""
    ca, key, cert = (_read(path, read) for path in (config.ca_file, config.key_file, config.cert_file))
    return grpc.ssl_channel_credentials(ca, key, cert)


def ssl_context(config: ClientTLSConfig) -> ssl.SSLContext:
    """The context of an HTTPS client. Raises StartError."""
    context = ssl.create_default_context()
    if config.ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _loaded(config.ca_file, lambda: context.load_verify_locations(config.ca_file))
    if config.cert_file:
        _loaded(config.cert_file, lambda: context.load_cert_chain(config.cert_file, config.key_file))
    if config.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read(path: str, read: ReadFile) -> bytes | None:
    if not path:
        return None
    try:
        return read(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _loaded(path: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> StartError:
    return StartError(f"failed to load TLS config: {path}: {error.strerror or error}")
