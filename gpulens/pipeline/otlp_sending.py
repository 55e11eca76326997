"""What the OTLP exporters share: batches to requests with owners where the user wants them, answers of the server.

Invariant: `owner` moves or copies identity and loses none: two series that differ before differ after.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from pydantic import Field

from gpulens import __version__
from gpulens.config.types import Secret
from gpulens.pipeline.client_tls import ClientTLSConfig
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Series
from gpulens.pipeline.departures import Departures
from gpulens.pipeline.exporting import SendingConfig
from gpulens.pipeline.lru import BytesLRU, SecondSight
from gpulens.pipeline.otlp_compiled import CompiledEncoder

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

USER_AGENT: Final = f"gpulens/{__version__}"

OWNER_KEYS: Final = ("k8s.namespace.name", "k8s.pod.name", "k8s.pod.uid", "k8s.container.name")
"""Resource attributes that say who owns a series."""

_OWNER_PREFIXES: Final = ("k8s.pod.", "k8s.container.", "gpu.owner.")
_SERIES_BYTES: Final = 1300  # an estimate of a mapped series with its attributes


class Owner(StrEnum):
    """Where the owner of a series stands on the wire."""

    RESOURCE = "resource"
    ATTRIBUTES = "attributes"
    BOTH = "both"


class Compression(StrEnum):
    """How requests are compressed; the empty text means none, as in the Collector."""

    GZIP = "gzip"
    NONE = "none"
    EMPTY = ""


class OtlpConfig(SendingConfig):
    """The keys that both OTLP exporters have."""

    tls: Annotated[ClientTLSConfig, Field(description="How the connection is secured.")] = ClientTLSConfig()
    headers: Annotated[dict[str, Secret], Field(description="Sent with every request; never printed.")] = Field(
        default_factory=dict
    )
    compression: Annotated[Compression, Field(description="Compression of requests.")] = Compression.GZIP
    owner: Annotated[
        Owner,
        Field(
            description="Where pod and container stand: on the resource, on the points (the resource is then the "
            "node's), or both. A Collector's `prometheus` exporter shows only what is on the points."
        ),
    ] = Owner.RESOURCE


class OwnerMapping:
    """Moves or copies the owner from resources to points; each block is mapped once and then remembered.

    `attributes` moves the four owner keys and everything else that belongs to the pod (`k8s.pod.*`,
    `k8s.container.*`, `gpu.owner.*`), which leaves the node's resource; `both` copies the four keys. A block whose
    points carry one of these keys with another value stays as it is. Opaque parts are not mapped.
    """

    def __init__(self, owner: Owner, limit_bytes: int = 32 * 2**20) -> None:
        self._owner = owner
        self.layouts: BytesLRU[Layout, Layout] = BytesLRU(
            "otlp_owner_layouts", limit_bytes // 2, lambda _, layout: 500 + 150 * layout.size
        )
        self.blocks: BytesLRU[Block, Block] = BytesLRU(
            "otlp_owner_blocks", limit_bytes // 2, lambda _, block: 1000 + _SERIES_BYTES * len(block)
        )
        # What is seen once may never come back: under churn it would only fill the room.
        self._seen: SecondSight[Layout | Block] = SecondSight(8192)

    def map(self, batch: Batch) -> Batch:
        """The batch with its owners where they should be; values are shared."""
        if self._owner is Owner.RESOURCE or not batch.layout.size:
            return batch
        layout = self.layouts.get(batch.layout)
        if layout is None:
            layout = Layout(self._block(block) for block in batch.layout.blocks)
            if self._seen.again(batch.layout):
                self.layouts.put(batch.layout, layout)
        return replace(batch, layout=layout)

    def _block(self, block: Block) -> Block:
        known = self.blocks.get(block)
        if known is None:
            known = self._map(block)
            if self._seen.again(block):
                self.blocks.put(block, known)
        return known

    def _map(self, block: Block) -> Block:
        resource = block.resource
        if not any(resource.text(key) for key in OWNER_KEYS[1:]):
            return block  # a namespace alone owns nothing
        if self._owner is Owner.BOTH:
            moved = {key: value for key, value in resource.attributes if key in OWNER_KEYS}
        else:
            moved = {k: v for k, v in resource.attributes if k in OWNER_KEYS or k.startswith(_OWNER_PREFIXES)}
            rest = {key: value for key, value in resource.attributes if key not in moved}
            resource = Resource(rest, resource.schema_url)
        if any(moved.get(key, value) != value for series in block.series for key, value in series.attributes):
            return block
        return Block(resource, block.scope, [Series(s.metric, {**s.map, **moved}) for s in block.series])


class OtlpEncoding:
    """Batches to encoded requests: owners, departures, compiled blocks. One for each exporter."""

    def __init__(self, settings: Settings, owner: Owner) -> None:
        self._owners = OwnerMapping(owner)
        self._departures = Departures()
        self._encoder = CompiledEncoder()
        _watch(settings, self._owners.layouts)
        _watch(settings, self._owners.blocks)
        _watch(settings, self._departures.streams)
        _watch(settings, self._encoder.cache)

    def encode(self, batch: Batch) -> tuple[bytes, int]:
        """The request and the number of its points, histograms and departures not counted."""
        mapped = self._departures.extend(self._owners.map(batch))
        points = mapped.layout.size - int.from_bytes(mapped.absent, "little").bit_count()
        return self._encoder.encode(mapped), points


def _watch(settings: Settings, cache: BytesLRU[K, V]) -> None:
    labels = {"exporter": str(settings.id), "cache": cache.name}
    settings.telemetry.watch("gpulens_cache_bytes", lambda: cache.bytes, **labels)
    settings.telemetry.watch("gpulens_cache_hits", lambda: cache.hits, **labels)
    settings.telemetry.watch("gpulens_cache_misses", lambda: cache.misses, **labels)
    settings.telemetry.watch("gpulens_cache_evictions", lambda: cache.evictions, **labels)


class Answers:
    """What servers say in a success: points that they did not take, and warnings. Counted always, logged on change;
    never a reason to send again (OTLP specification, "Partial Success")."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last = ""

    def take(self, response: ExportMetricsServiceResponse) -> None:
        """Reads one answer."""
        partial = response.partial_success
        if partial.rejected_data_points > 0:
            self._settings.telemetry.count(
                "gpulens_exporter_rejected_metric_points",
                partial.rejected_data_points,
                exporter=str(self._settings.id),
                reason="partial_success",
            )
        if partial.rejected_data_points or partial.error_message:
            self._say("Partial success.", partial.error_message, partial.rejected_data_points)
        else:
            self._last = ""

    def unreadable(self, problem: str) -> None:
        """A success whose answer can't be read: the data is there, so it is not sent again."""
        self._say("Answer not understood.", problem, 0)

    def _say(self, event: str, message: str, rejected: int) -> None:
        if message != self._last or not self._last:
            self._last = message or event
            self._settings.log.warning(event, error=message, dropped_items=rejected)


def parse_answer(data: bytes) -> ExportMetricsServiceResponse:
    """A protobuf answer. Raises ValueError."""
    try:
        return ExportMetricsServiceResponse.FromString(data)
    except ProtobufDecodeError as error:
        raise ValueError(f"not an ExportMetricsServiceResponse: {error}") from error


def parse_status(data: bytes) -> RpcStatus | None:
    """A google.rpc.Status, None for bytes that are none."""
    try:
        return RpcStatus.FromString(data)
    except ProtobufDecodeError:
        return None


def retry_delay(status: RpcStatus) -> float | None:
    """Seconds of the status' RetryInfo; None when it has none. A RetryInfo without a delay is 0."""
    for detail in status.details:
        if detail.type_url.rpartition("/")[2] == RetryInfo.DESCRIPTOR.full_name:
            try:
                delay = RetryInfo.FromString(detail.value).retry_delay
            except ProtobufDecodeError:
                return None
            return max(0.0, delay.seconds + delay.nanos / 1e9)
    return None
