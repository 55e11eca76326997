"""What `gpulens doctor` asks of the node: the kubelet's sockets, exporters' pages, Google's metadata, Kubernetes.

Invariant: every question has a deadline of its own, and a server that answers slowly, wrongly or not at all gives a
finding, never an exception.

The kubelet is asked with a request of our own rather than through the `pod_resources` receiver: List takes an empty
message and three nested fields of the reply are counted, so this works whatever state the components are in, and the
command line names no component.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import aiohttp
import grpc
import grpc.aio

from gpulens.nvml.protocol import Json
from gpulens.pipeline.doctor_driver import below
from gpulens.pipeline.doctor_report import Finding, Verdict
from gpulens.pipeline.errors import DecodeError, ScrapeError
from gpulens.pipeline.scrape_client import PageSource

POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"
PODS_API: Final = ("/var/lib/kubelet/pods-api/pods-api.sock", "/var/lib/kubelet/pods/kubelet.sock")
"""Of the kubelet's Pods API (KEP-4188): since 1.37 on by default, and the first path of 1.35."""
OWNERS: Final = "Pod Resources"
EXPORTER: Final = "dcgm-exporter"
DCGM_PAGE: Final = "http://127.0.0.1:9400/metrics"
METADATA: Final = "169.254.169.254"
"""By number: a name would ask a resolver, which no deadline of ours can interrupt."""

LIST_DEADLINE_S: Final = 3.0
PAGE_DEADLINE_S: Final = 3.0
METADATA_DEADLINE_S: Final = 1.0

_LISTS: Final = ("/v1.PodResourcesLister/List", "/v1alpha1.PodResourcesLister/List")
_MAX_REPLY_BYTES: Final = 64 * 2**20
_SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_UUID: Final = re.compile(rb'^DCGM_FI_[^{\n]*\{[^}\n]*\bUUID="([^"\n]*)"', re.MULTILINE)


# --- the kubelet -------------------------------------------------------------------------------------------------


async def pod_resources(
    path: Path, shown: str = POD_RESOURCES, what: str = OWNERS, deadline_s: float = LIST_DEADLINE_S
) -> Finding:
    """Whether the Pod Resources socket is there and answers List, and how many devices it tells."""
    check = "pod-resources" if what == OWNERS else what
    flaw = _flaw(path, shown)
    if flaw is not None:
        return Finding(check, what, Verdict.MISSING, *flaw)
    begun = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            reply = await _list(path)
        pods, devices = _count(reply)
    except TimeoutError:
        text = f"the kubelet did not answer List within {deadline_s:g}s"
        return Finding(check, what, Verdict.MISSING, text, "look at the kubelet: systemctl status kubelet, its log")
    except grpc.aio.AioRpcError as error:
        return Finding(check, what, Verdict.MISSING, *_refused(error, shown))
    except DecodeError as error:
        text = f"{shown} answers with something that is no List reply ({error})"
        return Finding(check, what, Verdict.MISSING, text, _mount(shown))
    took_ms = round((time.monotonic() - begun) * 1000)
    each = ", ".join(f"{name} {count}" for name, count in sorted(devices.items()))
    held = f"{devices.total()} ({each})" if each else "0"
    text = f"List answered in {took_ms} ms; pods: {pods}, devices held: {held}"
    facts: dict[str, Json] = {"pods": pods, "devices": dict(devices), "milliseconds": took_ms}
    return Finding(check, what, Verdict.OK, text, facts=facts)


def _mount(shown: str) -> str:
    folder = Path(shown).parent
    if folder == Path("/"):
        return "put the socket into a folder of its own, which can be mounted (hostPath), and name it there"
    return f"mount the host's directory {folder} (hostPath), not the socket file: each kubelet start makes a new one"


def _flaw(path: Path, shown: str) -> tuple[str, str] | None:
    """What is wrong with the socket's file, and what to do."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return f"no permission to look at {shown}", "run as root, or with the socket's group"
    except OSError:
        missing = shown if path.parent.is_dir() else str(Path(shown).parent)
        return f"there is no {missing}", _mount(shown)
    return None if stat.S_ISSOCK(mode) else (f"{shown} is no socket", _mount(shown))


async def _list(path: Path) -> bytes:
    """The encoded reply, of v1 or else of v1alpha1 (the same field numbers). Raises AioRpcError."""
    options = (
        ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.default_authority", "localhost"),
    )
    async with grpc.aio.insecure_channel(f"unix:{quote(str(path))}", options=options) as channel:
        newest, older = (channel.unary_unary(method, None, None) for method in _LISTS)
        try:
            return bytes(await newest(b""))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        return bytes(await older(b""))


def _refused(error: grpc.aio.AioRpcError, shown: str) -> tuple[str, str]:
    """What is wrong, and what to do."""
    code, text = error.code(), error.details() or ""
    if "permission denied" in text.lower():
        return f"no permission to open {shown}", "run as root, or with the socket's group"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"nobody listens on {shown}: the kubelet is down, or the file is stale", _mount(shown)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        fix = "the kubelet serves 100 calls a second to all clients of the node: find the one that asks too often"
        return f"the kubelet refuses List: {text}", fix
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{shown} serves no Pod Resources API", "check the kubelet's feature gate KubeletPodResources"
    return f"the kubelet answers List with {code.name}: {text}", "look at the kubelet's log"


def _count(reply: bytes) -> tuple[int, Counter[str]]:
    """Pods and devices by resource in a ListPodResourcesResponse. Raises DecodeError.

    Field numbers of the kubelet's pkg/apis/podresources/v1/api.proto: pod 1, its containers 3, their devices 2
    (resource_name 1, device_ids 2) and dynamic resources 5 (claim_resources 4, driver_name 2).
    """
    pods = 0
    devices: Counter[str] = Counter()
    for pod in _messages(reply, 1):
        pods += 1
        for container in _messages(pod, 3):
            for group in _messages(container, 2):
                names = [each.decode("utf-8", "replace") for each in _messages(group, 1)]
                devices[names[-1] if names else "?"] += sum(1 for _ in _messages(group, 2))
            for claim in _messages(container, 5):
                for device in _messages(claim, 4):
                    names = [each.decode("utf-8", "replace") for each in _messages(device, 2)]
                    devices[names[-1] if names else "?"] += 1
    return pods, devices


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The length-delimited fields of this number, in order. Raises DecodeError where it is no protobuf."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise DecodeError("a field is longer than its message")
            if key >> 3 == wanted:
                yield data[at : at + length]
            at += length
        else:
            raise DecodeError(f"wire type {kind}")
    if at > len(data):
        raise DecodeError("the message ends within a field")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise DecodeError("the message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number of more than ten bytes")


async def pods_api(root: Path, paths: Sequence[str] = PODS_API, deadline_s: float = LIST_DEADLINE_S) -> Finding:
    """Whether the kubelet serves its Pods API at one of these paths below `root`; without it pods are watched through
    the API server."""
    check, what = "pods-api", "kubelet Pods API"
    fix = "nothing to do: where this is not served (before Kubernetes 1.37) k8s_observer asks the API server"
    for shown in paths:
        path = below(root, shown)
        if not path.is_socket():
            continue
        try:
            async with asyncio.timeout(deadline_s):
                _, writer = await asyncio.open_unix_connection(path)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            text = f"{shown} is there, but takes no connection ({type(error).__name__})"
            return Finding(check, what, Verdict.WARN, text, "mount its directory (hostPath), not the socket file")
        return Finding(check, what, Verdict.OK, f"{shown} takes connections", facts={"path": shown})
    return Finding(check, what, Verdict.MISSING, "not served on this node", fix)


async def api_server(
    root: Path, environ: Mapping[str, str], endpoint: str, kubeconfig: str, deadline_s: float = PAGE_DEADLINE_S
) -> tuple[str, str]:
    """(how an observer would reach the API server, why it can't); one of them is empty.

    An `endpoint` is asked for its version. A service account and a kubeconfig are only looked for: asking with them
    would need their credentials and TLS.
    """
    if not has_client():
        return "", "lightkube is not installed: pip install '.[k8s]' in gpulens's checkout"
    if endpoint:
        said = await _asked(f"{endpoint.rstrip('/')}/version", deadline_s)
        return ("", f"{endpoint}: {said}") if said else (f"the API server at {endpoint}", "")
    if kubeconfig:
        readable = os.access(kubeconfig, os.R_OK)
        return (f"the API server of {kubeconfig}", "") if readable else ("", f"{kubeconfig} can't be read")
    if (account := _service_account(root, environ)).ok:
        return "the API server, by the service account", ""
    path = environ.get("KUBECONFIG") or f"{environ.get('HOME', '')}/.kube/config"
    return (f"the API server of {path}", "") if os.access(path, os.R_OK) else ("", account.finding)


async def _asked(url: str, deadline_s: float) -> str:
    """Why a server does not answer, "" when it does (a refusal is an answer)."""
    try:
        async with (
            asyncio.timeout(deadline_s),
            aiohttp.ClientSession(trust_env=False) as session,
            session.get(url, allow_redirects=False),
        ):
            return ""
    except TimeoutError:
        return f"no answer within {deadline_s:g}s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return str(error) or type(error).__name__


# --- exporters' pages --------------------------------------------------------------------------------------------


async def dcgm_page(pages: PageSource, url: str, what: str = EXPORTER, deadline_s: float = PAGE_DEADLINE_S) -> Finding:
    """Whether a dcgm-exporter answers here, for how many GPUs, and with which fields."""
    check = "dcgm-exporter" if what == EXPORTER else what
    body = await _fetch(pages, url, deadline_s)
    if isinstance(body, str):
        fix = (
            "an exporter in a pod has an address of its own (localhost never works on GKE): give the dcgm receiver"
            " `discovery: {}`, or its pod's address as `endpoint`"
        )
        return Finding(check, what, Verdict.MISSING, f"no page: {body}", fix, {"gpus": 0})
    gpus = len({each for each in _UUID.findall(body) if each})
    profiling = b"\nDCGM_FI_PROF_" in b"\n" + body
    facts: dict[str, Json] = {"gpus": gpus, "profiling": profiling, "bytes": len(body)}
    if not gpus:
        text = f"{url} answers, but with no GPU on its page"
        fix = "read the exporter's log: its driver library, mounts or permissions are missing"
        return Finding(check, what, Verdict.WARN, text, fix, facts)
    if not profiling:
        text = f"{gpus} GPU(s) at {url}, without profiling fields: no SM activity"
        fix = "add DCGM_FI_PROF_SM_ACTIVE and the like to the exporter's counters (privileged, or with SYS_ADMIN)"
        return Finding(check, what, Verdict.WARN, text, fix, facts)
    return Finding(check, what, Verdict.OK, f"{gpus} GPU(s) at {url}, profiling fields included", facts=facts)


async def any_page(pages: PageSource, url: str, what: str, deadline_s: float = PAGE_DEADLINE_S) -> Finding:
    """Whether a page answers, and with how many samples."""
    body = await _fetch(pages, url, deadline_s)
    if isinstance(body, str):
        fix = "check the address, and that the exporter runs; a pod has an address of its own: `discovery` finds it"
        return Finding(what, what, Verdict.MISSING, f"no page: {body}", fix, {"samples": 0})
    samples = sum(1 for line in body.splitlines() if line.strip() and not line.startswith(b"#"))
    facts: dict[str, Json] = {"samples": samples, "bytes": len(body)}
    if not samples:
        fix = "read the exporter's log: it runs and tells nothing"
        return Finding(what, what, Verdict.WARN, f"{url} answers with no sample", fix, facts)
    return Finding(what, what, Verdict.OK, f"{samples} samples at {url}", facts=facts)


async def _fetch(pages: PageSource, url: str, deadline_s: float) -> bytes | str:
    """The page, or why there is none."""
    try:
        async with asyncio.timeout(deadline_s):
            return (await pages.fetch()).data
    except TimeoutError:
        return f"{url}: no answer within {deadline_s:g}s"
    except ScrapeError as error:
        return str(error)
    finally:
        await pages.close()


# --- Google's metadata and Kubernetes ----------------------------------------------------------------------------


async def gke_metadata(environ: Mapping[str, str], deadline_s: float = METADATA_DEADLINE_S) -> Finding:
    """Whether this is GKE, of which cluster, and where: cloud exporters must know the cluster's location."""
    check, what = "gke-metadata", "GKE metadata"
    host = environ.get("GCE_METADATA_HOST") or METADATA
    base = f"http://{host}/computeMetadata/v1/instance/attributes"
    try:
        async with (
            asyncio.timeout(deadline_s),
            aiohttp.ClientSession(headers={"Metadata-Flavor": "Google"}, trust_env=False) as session,
        ):
            cluster = await _attribute(session, f"{base}/cluster-name")
            location = await _attribute(session, f"{base}/cluster-location")
    except (aiohttp.ClientError, OSError, TimeoutError):
        fix = "nothing to do off Google Cloud; on GKE allow the pod to reach 169.254.169.254 (network policies)"
        return Finding(check, what, Verdict.MISSING, f"no metadata server at {host}", fix)
    facts: dict[str, Json] = {"cluster": cluster, "location": location}
    if cluster is None and location is None:
        text = f"{host} answers, but not as Google's for a GKE node"
        fix = "nothing to do off GKE; elsewhere name cluster and location in the exporter's config"
        return Finding(check, what, Verdict.MISSING, text, fix, facts)
    if not cluster or not location:
        lacking = "cluster-location" if cluster else "cluster-name"
        fix = "name it in the exporter's config"
        return Finding(check, what, Verdict.WARN, f"the metadata server does not tell {lacking}", fix, facts)
    return Finding(check, what, Verdict.OK, f"cluster {cluster} in {location}", facts=facts)


async def _attribute(session: aiohttp.ClientSession, url: str) -> str | None:
    """An attribute's text; None where there is none. Other clouds answer at the same address, without the header."""
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200 or response.headers.get("Metadata-Flavor") != "Google":
            return None
        return (await response.content.read(1024)).decode("utf-8", "replace").strip() or None


def kubernetes(root: Path, environ: Mapping[str, str], configured_node: str = "") -> list[Finding]:
    """Whether we are a pod that may ask the API server, with what, and on which node."""
    return [_service_account(root, environ), _client(), _node_name(environ, configured_node)]


def _service_account(root: Path, environ: Mapping[str, str]) -> Finding:
    check, what = "service-account", "service account"
    token = below(root, _SERVICE_ACCOUNT)
    facts: dict[str, Json] = {"in_cluster": "KUBERNETES_SERVICE_HOST" in environ, "token": token.is_file()}
    fix = (
        "run as a pod whose service account may list and watch pods (a ClusterRole with these verbs on pods); only"
        " discovery, k8s_observer and k8s_pods need it"
    )
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return Finding(check, what, Verdict.MISSING, "not in a pod (KUBERNETES_SERVICE_HOST is not set)", fix, facts)
    if not token.is_file():
        fix = "set automountServiceAccountToken: true; only discovery, k8s_observer and k8s_pods need it"
        return Finding(check, what, Verdict.MISSING, "a pod without a service account's token", fix, facts)
    if not os.access(token, os.R_OK):
        fix = "run as the user that may read it (securityContext.fsGroup)"
        return Finding(check, what, Verdict.WARN, "its token may not be read", fix, facts)
    return Finding(check, what, Verdict.OK, "token and API server's address are there", facts=facts)


def has_client() -> bool:
    """Whether the extra `k8s` is installed; nothing is imported."""
    return importlib.util.find_spec("lightkube") is not None


def _client() -> Finding:
    check, what = "kubernetes-client", "Kubernetes client"
    if not has_client():
        fix = "pip install '.[k8s]' in gpulens's checkout; only discovery, k8s_observer and k8s_pods need it"
        return Finding(check, what, Verdict.MISSING, "lightkube is not installed", fix)
    return Finding(check, what, Verdict.OK, "lightkube is installed")


def _node_name(environ: Mapping[str, str], configured: str) -> Finding:
    check, what = "node-name", "node name"
    name = configured or environ.get("NODE_NAME", "")
    if name:
        how = "service::node" if configured else "NODE_NAME"
        return Finding(check, what, Verdict.OK, f"{name} ({how})", facts={"node": name})
    fix = "set NODE_NAME from the downward API: valueFrom: {fieldRef: {fieldPath: spec.nodeName}}"
    text = "NODE_NAME is not set, so the host's name is taken, which in a pod is the pod's"
    return Finding(check, what, Verdict.WARN, text, fix)
