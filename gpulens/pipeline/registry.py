"""Which components exist, by the name a YAML file gives them; imported only when one is named.

Invariant: importing this module imports no component. Third parties add components by entry points in the groups
`gpulens.receivers`, `gpulens.processors`, `gpulens.exporters`, `gpulens.connectors` and `gpulens.extensions`; a
built-in name can't be taken over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import cast

from gpulens.config.ids import Kind, Signal
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.component import (
    ConnectorFactory,
    ExporterFactory,
    ExtensionFactory,
    Factory,
    ProcessorFactory,
    ReceiverFactory,
)
from gpulens.pipeline.errors import StartError

BUILT_IN: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        Kind.RECEIVERS: {
            "dcgm": "gpulens.receivers.dcgm:FACTORY",
            "gke": "gpulens.receivers.gke:FACTORY",
            "k8s_pods": "gpulens.receivers.k8s_pods:FACTORY",
            "nvml": "gpulens.receivers.nvml:FACTORY",
            "otlp_json_file": "gpulens.receivers.otlp_json_file:FACTORY",
            "pod_resources": "gpulens.receivers.pod_resources:FACTORY",
            "prometheus": "gpulens.receivers.prometheus:FACTORY",
        },
        Kind.PROCESSORS: {"attribution": "gpulens.processors.attribution:FACTORY"},
        Kind.EXPORTERS: {
            "debug": "gpulens.exporters.debug:FACTORY",
            "file": "gpulens.exporters.file:FACTORY",
            "otlp_grpc": "gpulens.exporters.otlp_grpc:FACTORY",
            "otlp_http": "gpulens.exporters.otlp_http:FACTORY",
            "prometheus": "gpulens.exporters.prometheus:FACTORY",
        },
        Kind.CONNECTORS: {},
        Kind.EXTENSIONS: {"k8s_observer": "gpulens.extensions.k8s_observer:FACTORY"},
    }
)

ALIASES: Mapping[tuple[Kind, str], str] = MappingProxyType(
    {
        (Kind.EXPORTERS, "otlp"): "otlp_grpc",
        (Kind.EXPORTERS, "otlphttp"): "otlp_http",
        (Kind.RECEIVERS, "otlpjsonfile"): "otlp_json_file",
        (Kind.RECEIVERS, "podresources"): "pod_resources",
    }
)
"""Deprecated spellings; a test holds them equal to the factories' own `alias`."""

_FACTORY_TYPES: Mapping[Kind, type] = MappingProxyType(
    {
        Kind.RECEIVERS: ReceiverFactory,
        Kind.PROCESSORS: ProcessorFactory,
        Kind.EXPORTERS: ExporterFactory,
        Kind.CONNECTORS: ConnectorFactory,
        Kind.EXTENSIONS: ExtensionFactory,
    }
)


class Registry:
    """Looks factories up. `extra` adds factories under their own names (tests, embedding)."""

    def __init__(self, extra: Iterable[tuple[Kind, Factory]] = ()) -> None:
        self._loaded: dict[tuple[Kind, str], Factory] = {(kind, factory.name): factory for kind, factory in extra}

    def types(self, kind: Kind) -> list[str]:
        """Canonical names of a kind, sorted."""
        added = {name for have, name in self._loaded if have is kind}
        return sorted({*BUILT_IN[kind], *_third_party(kind), *added})

    def canonical(self, kind: Kind, name: str) -> tuple[str, bool]:
        """(canonical name, whether the spelling is a deprecated alias). Raises KeyError for an unknown name."""
        if (kind, name) in self._loaded or name in BUILT_IN[kind]:
            return name, False
        if (kind, name) in ALIASES:
            return ALIASES[kind, name], True
        others = _third_party(kind)
        if name in others:
            return name, False
        for candidate in others:
            try:
                alias = self.factory(kind, candidate).alias
            except StartError:
                continue  # it says so to whoever names it
            if alias == name:
                return candidate, True
        raise KeyError(name)

    def factory(self, kind: Kind, name: str) -> Factory:
        """The factory of a canonical name, imported now if it was not yet.

        Raises KeyError for an unknown name, StartError when its module can't be imported (a missing extra).
        """
        known = self._loaded.get((kind, name))
        if known is not None:
            return known
        target = BUILT_IN[kind].get(name)
        entry = _third_party(kind)[name] if target is None else EntryPoint(name, target, f"gpulens.{kind}")
        try:
            module, attribute = import_module(entry.module), entry.attr or ""
        except ImportError as error:
            raise StartError(f"{kind}::{name}: can't be imported: {error}; install the extra that brings it") from error
        except Exception as error:  # a third party's module may raise anything while it is imported
            raise StartError(f"{kind}::{name}: {entry.value} can't be imported: {error!r}") from error
        factory = getattr(module, attribute, None)
        if not isinstance(factory, _FACTORY_TYPES[kind]):
            raise StartError(f"{kind}::{name}: {entry.value} is no {_FACTORY_TYPES[kind].__name__}")
        checked = cast(Factory, factory)
        self._loaded[kind, name] = checked
        return checked

    def config_model(self, kind: Kind, name: str) -> type[ComponentConfig]:
        """The model that a component's block is read with."""
        return self.factory(kind, name).config

    def signals(self, kind: Kind, name: str) -> frozenset[Signal]:
        """The signals that a component supports (a connector: those that it takes)."""
        factory = self.factory(kind, name)
        if isinstance(factory, ExtensionFactory):
            return frozenset()
        if isinstance(factory, ConnectorFactory):
            return frozenset(source for source, _ in self.connector_pairs(name))
        makers = {Signal.METRICS: factory.metrics, Signal.LOGS: factory.logs}
        return frozenset(signal for signal, make in makers.items() if make is not None)

    def connector_pairs(self, name: str) -> frozenset[tuple[Signal, Signal]]:
        """The (from, to) signals of a connector."""
        factory = self.factory(Kind.CONNECTORS, name)
        if not isinstance(factory, ConnectorFactory):
            raise KeyError(name)
        makers = {
            (Signal.METRICS, Signal.METRICS): factory.metrics_to_metrics,
            (Signal.METRICS, Signal.LOGS): factory.metrics_to_logs,
            (Signal.LOGS, Signal.LOGS): factory.logs_to_logs,
        }
        return frozenset(pair for pair, make in makers.items() if make is not None)


@cache
def _third_party(kind: Kind) -> Mapping[str, EntryPoint]:
    found = {entry.name: entry for entry in entry_points(group=f"gpulens.{kind}")}
    return MappingProxyType({name: entry for name, entry in found.items() if name not in BUILT_IN[kind]})
