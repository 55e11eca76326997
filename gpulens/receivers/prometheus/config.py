"""The `prometheus:` block of receivers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from gpulens.config.types import Duration, Secret, StringList
from gpulens.pipeline.client_tls import ClientTLSConfig
from gpulens.pipeline.discovery import DiscoveringPageConfig
from gpulens.pipeline.errors import ConfigError
from gpulens.receivers.prometheus.credentials import is_token
from gpulens.receivers.prometheus.mapping import VendorMapping, load_mapping


def _readable(mapping: str) -> str:
    if mapping:
        try:
            load_mapping(mapping)
        except ConfigError as error:
            raise ValueError("\n".join(map(str, error.problems))) from error
    return mapping


def _token(token: Secret | None) -> Secret | None:
    if token is not None and not is_token(token.reveal()):
        raise ValueError("must be one word of printable ASCII")
    return token


def _tls(tls: ClientTLSConfig | None) -> ClientTLSConfig | None:
    if tls is not None and tls.insecure:
        raise ValueError("'insecure' means nothing here: an http:// address is what goes without TLS")
    return tls


class PrometheusConfig(DiscoveringPageConfig):
    """Scrapes any page in Prometheus' text format, as it is or read by a vendor's mapping."""

    collection_interval: Annotated[Duration, Field(description="Time between two scrapes.")] = 15.0
    timeout: Annotated[Duration, Field(description="Deadline of one scrape; 0 is one interval.")] = 10.0
    mapping: Annotated[
        str,
        AfterValidator(_readable),
        Field(
            description="`amd`, `ascend`, `gaudi`, `intel`, or the path of a mapping file, from the working directory"
            " where it does not begin with `/`; none takes all as it is."
        ),
    ] = ""
    keep: Annotated[StringList, Field(description="Metrics to read, by name or with `*`; none means all.")] = ()
    drop: Annotated[StringList, Field(description="Metrics to leave, of those that `keep` lets through.")] = ()
    labels_drop: Annotated[
        StringList, Field(description="Labels to leave off, by name or with `*`; only without a mapping.")
    ] = ()
    honor_timestamps: Annotated[
        bool, Field(description="A sample's own time counts, where it has one; else the time of the scrape.")
    ] = True
    bearer_token: Annotated[Secret | None, AfterValidator(_token), Field(description="Sent with each request.")] = None
    bearer_token_file: Annotated[str, Field(description="File with the token; read again when it changes.")] = ""
    tls: Annotated[ClientTLSConfig | None, AfterValidator(_tls), Field(description="For https:// pages.")] = None

    _mapping: VendorMapping | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _fits_together(self) -> PrometheusConfig:
        if self.bearer_token is not None and self.bearer_token_file:
            raise ValueError("'bearer_token_file' and 'bearer_token' exclude each other: take one of them out")
        if (self.bearer_token is not None or self.bearer_token_file) and any(
            name.lower() == "authorization" for name in self.headers
        ):
            raise ValueError("'headers' has an Authorization of its own beside the bearer token: take one of them out")
        if self.mapping and self.labels_drop:
            raise ValueError(
                "'labels_drop' means nothing with a mapping: a mapping takes no label that it does not name"
            )
        if self.mapping:
            try:
                self._mapping = load_mapping(self.mapping)
            except ConfigError as error:  # it changed a moment ago
                raise ValueError(f"'mapping' can't be read: {error}") from error
        return self

    def tells_owners(self) -> bool:
        return self._mapping is not None and self._mapping.names_owners

    def vendor(self) -> VendorMapping | None:
        """The mapping that was read with the configuration; None without one."""
        return self._mapping

    def doubts(self) -> tuple[str, ...]:
        has_token = self.bearer_token is not None or self.bearer_token_file
        scheme = self.discovery.scheme if self.discovery is not None else self.endpoint.partition(":")[0]
        if has_token and scheme == "http":
            key = "bearer_token_file" if self.bearer_token_file else "bearer_token"
            return (*super().doubts(), f"'{key}' goes over http://, where everybody on the way can read it")
        return super().doubts()
