"""The kubelet's Pod Resources socket: one long-lived channel, v1 with a way back to v1alpha1.

Invariant: a failure says which mount, permission or limit is behind it; a kubelet that comes back is found
at the next call. Replies are handed on as bytes.

The kubelet shares 100 calls/s (burst 10) over all clients of the node and answers RESOURCE_EXHAUSTED beyond
that; an over-size reply has the same code, so the text decides (kubernetes
pkg/kubelet/apis/grpc/ratelimit.go; gRPC core).
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import grpc
import grpc.aio

from gpulens.pipeline.clock import Clock
from gpulens.pipeline.errors import ScrapeError

LIST_V1: Final = "/v1.PodResourcesLister/List"
ALLOCATABLE_V1: Final = "/v1.PodResourcesLister/GetAllocatableResources"
LIST_V1ALPHA1: Final = "/v1alpha1.PodResourcesLister/List"

RETRY_V1_S: Final = 300.0
"""How long a kubelet that lacks a method is not asked for it again; a lost connection (upgrade) ends the
wait."""

_Call = Callable[..., grpc.aio.UnaryUnaryCall[bytes, bytes]]


class KubeletClient:
    """Calls one socket. `timeout_s` is the deadline sent with each call (0 = none)."""

    def __init__(self, path: str, clock: Clock, timeout_s: float, max_message_bytes: int) -> None:
        self._path = path
        self._clock = clock
        self._timeout_s = timeout_s or None
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, _Call] = {}
        self._missing_until: dict[str, float] = {}

    async def list(self) -> bytes:
        """The encoded List reply (v1alpha1's has the same field numbers). Raises ScrapeError."""
        for method in (LIST_V1, LIST_V1ALPHA1):
            reply = await self._call_if_served(method)
            if reply is not None:
                return reply
        raise ScrapeError(
            f"the kubelet behind {self._path} serves neither v1 nor v1alpha1 of the Pod Resources API;"
            " check its feature gate KubeletPodResources",
            "unimplemented",
        )

    async def allocatable(self) -> bytes | None:
        """The encoded reply with every allocatable device; None where this kubelet has no such method
        (before 1.23, v1alpha1, or its feature gate is off). Raises ScrapeError."""
        return await self._call_if_served(ALLOCATABLE_V1)

    async def close(self) -> None:
        """Closes the channel; the next call opens a new one."""
        channel, self._channel = self._channel, None
        self._calls.clear()
        if channel is not None:
            await channel.close(None)

    async def _call_if_served(self, method: str) -> bytes | None:
        """The reply; None when the kubelet does not have the method, asked anew only after a while."""
        if self._clock.monotonic() < self._missing_until.get(method, 0.0):
            return None
        try:
            return await self._call(method)
        except grpc.aio.AioRpcError as error:
            if not _not_served(error):
                raise self._explained(error) from error
        self._missing_until[method] = self._clock.monotonic() + RETRY_V1_S
        return None

    async def _call(self, method: str) -> bytes:
        """One call. A channel that lost its peer is given up, and the call made once more on a new one:
        gRPC's own back-off (up to two minutes) would keep us blind after a kubelet's restart."""
        is_new = self._channel is None
        try:
            return await self._open(method)(b"", timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await self.close()
            self._missing_until.clear()  # it may come back as a newer kubelet
            if is_new:
                raise
        return await self._call(method)

    def _open(self, method: str) -> _Call:
        call = self._calls.get(method)
        if call is None:
            if self._channel is None:
                limit = ("grpc.max_receive_message_length", self._max_message_bytes)
                # Channels to one address share connections and their back-off unless told not to.
                alone = ("grpc.use_local_subchannel_pool", 1)
                authority = ("grpc.default_authority", "localhost")
                options = (limit, alone, authority)
                # gRPC reads a target as a URI: a bare %, # or ? in the path would name another file.
                self._channel = grpc.aio.insecure_channel(f"unix:{quote(self._path)}", options=options)
            call = self._calls[method] = self._channel.unary_unary(method, None, None)
        return call

    def _explained(self, error: grpc.aio.AioRpcError) -> ScrapeError:
        code, text = error.code(), error.details() or ""
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self._exhausted(text)
        if code is grpc.StatusCode.UNAVAILABLE:
            return ScrapeError(*why_unreachable(Path(self._path), text))
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ScrapeError(f"the kubelet did not answer on {self._path} within {self._timeout_s:g}s", "timeout")
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return ScrapeError(f"the kubelet refused the call on {self._path}: {text}", "permission_denied")
        return ScrapeError(f"the kubelet answered {code.name} on {self._path}: {text}", code.name.lower())

    def _exhausted(self, text: str) -> ScrapeError:
        lowered = text.lower()
        if "larger than max" in lowered:
            mib = self._max_message_bytes // (1 << 20)
            return ScrapeError(
                f"the kubelet's reply is larger than {mib} MiB ({text}); raise 'max_message_size_mib'",
                "message_too_large",
            )
        if "rate limit" in lowered:
            return ScrapeError(
                f"the kubelet rejected the call by its rate limit ({text}): it serves 100 calls a second to"
                " all clients of the node, and one of them asks too often",
                "rate_limited",
            )
        return ScrapeError(f"the kubelet is out of some resource: {text}", "resource_exhausted")


def _not_served(error: grpc.aio.AioRpcError) -> bool:
    """The method is not there. A switched-off feature gate comes as an error without a code and the word
    'disabled' (kubelet pkg/kubelet/apis/podresources/server_v1.go)."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return True
    return error.code() is grpc.StatusCode.UNKNOWN and "disabled" in (error.details() or "").lower()


def why_unreachable(path: Path, text: str) -> tuple[str, str]:
    """What stands between us and the socket: (message, reason). `text` is what gRPC said."""
    mount = f"mount the host's directory {path.parent} (hostPath), not the socket file"
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return (
            f"no permission to look into {path.parent}; run as root, or with the socket's group",
            "permission_denied",
        )
    except OSError:
        if path.parent.is_dir():
            return (
                f"there is no socket {path}: the kubelet is down or restarting, or is not on this node",
                "no_socket",
            )
        return f"there is no {path.parent}: {mount}", "no_socket"
    if "permission denied" in text.lower():
        return f"no permission to open {path}; run as root, or with the socket's group", "permission_denied"
    if not stat.S_ISSOCK(mode):
        return f"{path} is not a socket: {mount}", "no_socket"
    return (
        f"nobody listens on {path} ({text}): the kubelet is restarting; if this lasts, the socket file itself"
        f" was mounted and is stale since the restart: {mount}",
        "unavailable",
    )
