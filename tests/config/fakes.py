"""A registry of a few invented components, enough to reach every rule of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from gpulens.config.document import load
from gpulens.config.ids import Kind, Signal
from gpulens.config.ranges import NON_NEGATIVE, require
from gpulens.config.resolve import resolve
from gpulens.config.service import ServiceConfig
from gpulens.config.types import Block, ComponentConfig, Duration, OptionalBlock, Secret, StringList
from gpulens.pipeline.errors import ConfigError

METRICS = frozenset({Signal.METRICS})


class OnEnd(StrEnum):
    STOP = "stop"
    WAIT = "wait"


class Price(Block):
    model: str
    usd_per_hour: float


POSITIVE = AfterValidator(require(lambda value: value > 0, "`{key}` must be positive"))


class Batch(Block):
    flush_timeout: Duration = 0.2
    min_size: int = 8192


class Queue(Block):
    num_consumers: Annotated[int, POSITIVE] = 10
    queue_size: Annotated[int, POSITIVE] = 1000
    storage: str | None = None
    batch: OptionalBlock[Batch] = None

    @model_validator(mode="after")
    def _sizes(self) -> Queue:
        if self.batch is not None and self.batch.min_size > self.queue_size * 10:
            raise ValueError("`min_size` must be less than or equal to ten times `queue_size`")
        return self


class TLS(Block):
    insecure: bool = False
    cert_file: str = ""
    key_file: str = ""

    @model_validator(mode="after")
    def _pair(self) -> TLS:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("provide both certificate and key, or neither")
        return self


class OtlpConfig(ComponentConfig):
    endpoint: str
    timeout: Annotated[Duration, NON_NEGATIVE] = 5.0
    headers: dict[str, Secret] = Field(default_factory=dict)
    tls: TLS | None = None
    sending_queue: OptionalBlock[Queue] = Queue()

    def destination(self) -> str | None:
        return self.endpoint


class ScrapeConfig(ComponentConfig):
    allocation_source: ClassVar[bool] = True

    collection_interval: Annotated[Duration, Field(gt=0)] = 10.0
    include: StringList = ("default",)
    on_end: OnEnd = OnEnd.STOP
    labels: dict[str, str] = Field(default_factory=dict)
    window: float = 1.0
    level: Literal["low", "high"] = "low"
    free: dict[str, object] = Field(default_factory=dict)

    def doubts(self) -> tuple[str, ...]:
        return ("'window' is longer than 'collection_interval'",) if self.window > self.collection_interval else ()


class PlainConfig(ComponentConfig):
    pass


class IdleConfig(ComponentConfig):
    derives: ClassVar[bool] = True

    windows: tuple[Duration, ...] = (300.0,)
    prices: tuple[Price, ...] = ()


class JoinConfig(ComponentConfig):
    needs_allocation_source: ClassVar[bool] = True


_MODELS: Mapping[tuple[Kind, str], type[ComponentConfig]] = {
    (Kind.RECEIVERS, "scrape"): ScrapeConfig,
    (Kind.RECEIVERS, "plain"): PlainConfig,
    (Kind.PROCESSORS, "idle"): IdleConfig,
    (Kind.PROCESSORS, "join"): JoinConfig,
    (Kind.EXPORTERS, "otlp_grpc"): OtlpConfig,
    (Kind.EXPORTERS, "debug"): PlainConfig,
    (Kind.CONNECTORS, "forward"): PlainConfig,
    (Kind.CONNECTORS, "events"): PlainConfig,
    (Kind.EXTENSIONS, "health_check"): PlainConfig,
}
_ALIASES = {(Kind.EXPORTERS, "otlp"): "otlp_grpc"}


class FakeLookup:
    """Implements ComponentLookup."""

    def types(self, kind: Kind) -> Sequence[str]:
        return [name for each, name in _MODELS if each is kind]

    def canonical(self, kind: Kind, type_name: str, /) -> tuple[str, bool]:
        if (alias := _ALIASES.get((kind, type_name))) is not None:
            return alias, True
        if (kind, type_name) not in _MODELS:
            raise KeyError(type_name)
        return type_name, False

    def config_model(self, kind: Kind, type_name: str, /) -> type[ComponentConfig]:
        return _MODELS[kind, type_name]

    def signals(self, kind: Kind, type_name: str, /) -> frozenset[Signal]:
        return frozenset({Signal.METRICS, Signal.LOGS}) if type_name in ("debug", "otlp_grpc") else METRICS

    def connector_pairs(self, type_name: str, /) -> frozenset[tuple[Signal, Signal]]:
        target = Signal.METRICS if type_name == "forward" else Signal.LOGS
        return frozenset({(Signal.METRICS, target)})


GOOD = """\
receivers: {scrape: }
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [scrape], exporters: [debug]}}}
"""


def service(text: str, *more: str, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()) -> ServiceConfig:
    """The service of inline YAML sources."""
    return resolve(load([f"yaml:{each}" for each in (text, *more)], sets, environ or {}), FakeLookup())


def complaints(text: str, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()) -> list[str]:
    """Every problem of inline YAML as it is printed; empty when it is valid."""
    try:
        service(text, environ=environ, sets=sets)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def with_receiver(body: str) -> str:
    """A valid configuration but for the body of its one receiver, which is written in flow style."""
    return (
        f"receivers: {{scrape: {body}}}\n"
        "exporters: {debug: }\n"
        "service: {pipelines: {metrics: {receivers: [scrape], exporters: [debug]}}}\n"
    )


def receiver(body: str, environ: Mapping[str, str] | None = None) -> ScrapeConfig:
    """The typed receiver of `with_receiver`."""
    found = service(with_receiver(body), environ=environ)
    config = next(entry.config for (kind, _), entry in found.components.items() if kind is Kind.RECEIVERS)
    assert isinstance(config, ScrapeConfig)
    return config


def exporter(body: str, environ: Mapping[str, str] | None = None) -> OtlpConfig:
    """A typed `otlp_grpc` exporter with this body in flow style."""
    text = (
        f"receivers: {{scrape: }}\nexporters: {{otlp_grpc: {body}}}\n"
        "service: {pipelines: {metrics: {receivers: [scrape], exporters: [otlp_grpc]}}}\n"
    )
    found = service(text, environ=environ)
    config = next(entry.config for (kind, _), entry in found.components.items() if kind is Kind.EXPORTERS)
    assert isinstance(config, OtlpConfig)
    return config
