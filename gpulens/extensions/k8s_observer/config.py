"""The `k8s_observer:` block."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gpulens.config.ranges import POSITIVE, require
from gpulens.config.types import ComponentConfig, Duration

KUBELET_ENDPOINT: Final = "unix:///var/lib/kubelet/pods-api/pods-api.sock"
ALPHA_KUBELET_PATH: Final = "/var/lib/kubelet/pods/kubelet.sock"
"""Where Kubernetes 1.35 served the API while it was alpha; looked at where the default socket is not there."""

MIN_WATCH_S: Final = 1.0
"""Each watch may cost a list; the API server takes whole seconds."""
EXTRA: Final = "the extra 'k8s' (in gpulens's checkout: pip install '.[k8s]')"


def socket_path(endpoint: str) -> str:
    """The path on this machine of `unix:PATH` or `unix:///PATH`."""
    path = endpoint.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


def _names_a_socket(endpoint: str) -> str:
    if not socket_path(endpoint).startswith("/"):
        raise ValueError(f'"{endpoint}" must name a socket by its whole path, as in "{KUBELET_ENDPOINT}"')
    return endpoint


def _names_a_server(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f'"{endpoint}" is not an http:// or https:// address')
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address is printed and logged: credentials belong into a kubeconfig")
    return endpoint


class K8sObserverConfig(ComponentConfig):
    """One watch of this node's pods."""

    node: Annotated[str, Field(description="The node's name in Kubernetes; without it that of the service.")] = ""
    source: Annotated[
        Literal["auto", "kubernetes", "kubelet"],
        Field(
            description="Who tells: the API server, the kubelet's Pods API, or (`auto`) the kubelet where its socket is"
            " served and else the API server."
        ),
    ] = "auto"
    kubelet_endpoint: Annotated[
        str,
        AfterValidator(_names_a_socket),
        Field(description="Socket of the kubelet's Pods API. Mount its directory, not the socket file."),
    ] = KUBELET_ENDPOINT
    kubeconfig: Annotated[
        str, Field(description="Path of a kubeconfig; without it the pod's service account, or the user's kubeconfig.")
    ] = ""
    endpoint: Annotated[
        str,
        AfterValidator(_names_a_server),
        Field(description="Address of an API server that asks for no credentials (`kubectl proxy`)."),
    ] = ""
    timeout: Annotated[Duration, POSITIVE, Field(description="Deadline of a list, and of the answer to a watch.")] = (
        30.0
    )
    watch_timeout: Annotated[
        Duration,
        AfterValidator(require(lambda value: value >= MIN_WATCH_S, "'{key}' must be at least 1s")),
        Field(
            description="After this time a watch is begun anew: the API server is asked to end it then, and the"
            " kubelet's pods are listed again, since it drops events for slow readers. At least 1s."
        ),
    ] = 300.0

    @property
    def socket_paths(self) -> tuple[str, ...]:
        """Where the kubelet may serve its pods, in the order in which to look."""
        path = socket_path(self.kubelet_endpoint)
        return (path, ALPHA_KUBELET_PATH) if self.kubelet_endpoint == KUBELET_ENDPOINT else (path,)

    def doubts(self) -> tuple[str, ...]:
        if self.source == "kubelet" or importlib.util.find_spec("lightkube") is not None:
            return ()
        if self.source == "kubernetes":
            return (f"'source' is the API server, and asking it needs {EXTRA}, which is not installed",)
        return (
            f"'source' is auto, and asking the API server needs {EXTRA}, which is not installed: pods are known only"
            " where the kubelet serves its Pods API",
        )

    @model_validator(mode="after")
    def _has_one_server(self) -> K8sObserverConfig:
        if self.kubeconfig and self.endpoint:
            raise ValueError("'endpoint' and 'kubeconfig' exclude each other: take one of them out")
        return self
