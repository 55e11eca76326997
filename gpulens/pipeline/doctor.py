"""`gpulens doctor`: what of a GPU node is there, what is missing, and how to mend it.

Invariant: it ends within the longest deadline of its parts and changes nothing on the machine; what it looks at comes
as `Surroundings`.

What is needed: with a config, what its pipelines' receivers read; without one, somebody who reads the GPUs (NVML with
at least one GPU, or a dcgm-exporter on localhost) and somebody who knows their owners (the kubelet's Pod Resources).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulens.config import ServiceConfig
from gpulens.config.ids import ComponentID, Kind
from gpulens.config.service import ComponentEntry
from gpulens.nvml.launch import COMMAND
from gpulens.pipeline import doctor_driver, doctor_node, doctor_nvml, doctor_report
from gpulens.pipeline.doctor_nvml import Answer, Dcgm
from gpulens.pipeline.doctor_report import Finding, Need, Report, Verdict
from gpulens.pipeline.scrape_client import DEFAULT_MAX_PAGE_BYTES, HttpPages, PageScrapeConfig

_OWN_WAYS: Final = frozenset({"tls", "bearer_token", "bearer_token_file"})
"""Keys of a receiver that make its requests other than ours."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What doctor looks at: files below `root`, the environment, where Python's packages are, how NVML's child is
    started, addresses, and how long each may take (seconds)."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    child: Sequence[str] = COMMAND
    dcgm_url: str = doctor_node.DCGM_PAGE
    nvml_deadline_s: float = doctor_nvml.DEADLINE_S
    nvml_window_s: float = doctor_nvml.WINDOW_S
    list_deadline_s: float = doctor_node.LIST_DEADLINE_S
    page_deadline_s: float = doctor_node.PAGE_DEADLINE_S
    metadata_deadline_s: float = doctor_node.METADATA_DEADLINE_S


async def examine(around: Surroundings, config: ServiceConfig | None = None) -> Report:
    """Looks at everything, what may wait side by side."""
    receivers = _receivers(config)
    library = doctor_driver.driver_library(around.root, around.environ, _library_path(receivers))
    binding = doctor_driver.binding(around.python_path)
    # `ask` keeps its own deadline, so the thread it runs in always ends.
    asking = asyncio.to_thread(
        doctor_nvml.ask,
        around.child,
        around.environ,
        folders=[library.folder] if library.folder and not library.by_loader else [],
        deadline_s=around.nvml_deadline_s,
        window_s=around.nvml_window_s,
    )
    observers = _observers(config)
    answer, sockets, watches, pages, metadata = await asyncio.gather(
        asking,
        _all(_sockets(around, receivers)),
        _all(_watches(around, observers)),
        _all(_pages(around, receivers, has_config=config is not None)),
        doctor_node.gke_metadata(around.environ, around.metadata_deadline_s),
    )
    hardware = doctor_driver.hardware(around.root)
    nodes = doctor_driver.device_nodes(around.root)
    findings = (
        hardware,
        nodes,
        library.finding,
        binding.finding,
        doctor_driver.versions(around.root, library.version, binding.driver, str(answer.driver.get("driver") or "")),
        doctor_nvml.nvml(answer),
        *doctor_nvml.gpus(answer, _metric_of(), _dcgm(receivers, pages)),
        doctor_driver.visibility(_every_process(around, answer)),
        *sockets,
        *watches,
        *pages,
        metadata,
        *doctor_node.kubernetes(around.root, around.environ, config.node if config else ""),
    )
    has_gpu = hardware.ok or nodes.ok or bool(answer.gpus)
    needs = _needs(findings, answer) if config is None else _needs_of(receivers, observers, findings, answer)
    note = "" if has_gpu else "This machine has no NVIDIA GPU that can be seen."
    return Report(doctor_report.settled(findings, needs), tuple(needs), note)


async def _all(work: Sequence[Awaitable[Finding]]) -> list[Finding]:
    return list(await asyncio.gather(*work))


def _metric_of() -> Mapping[str, str]:
    from gpulens.nvml.table import ROWS

    return {row.key: row.metric for row in ROWS}


def _every_process(around: Surroundings, answer: Answer) -> bool | None:
    told = answer.every_process
    return doctor_driver.in_first_namespace(around.root) if told is None else told


# --- what a config adds ------------------------------------------------------------------------------------------


def _receivers(config: ServiceConfig | None) -> list[ComponentEntry]:
    """The receivers that a pipeline uses, each once."""
    if config is None:
        return []
    used = {each for pipeline in config.pipelines.values() for each in pipeline.receivers}
    return [entry for (kind, id_), entry in config.components.items() if kind is Kind.RECEIVERS and id_ in used]


def _library_path(receivers: Sequence[ComponentEntry]) -> list[str]:
    """The folders that the config's nvml receivers name for the driver's library."""
    found: list[str] = []
    for entry in receivers:
        given: object = getattr(entry.config, "library_path", None)
        if isinstance(given, str):
            found += given.split(":")
        elif isinstance(given, list | tuple):
            found += map(str, given)
    return [folder for folder in found if folder]


def _sockets(around: Surroundings, receivers: Sequence[ComponentEntry]) -> list[Awaitable[Finding]]:
    """The Pod Resources sockets: the config's, else the usual one."""
    named = [(f"receiver {entry.id}", path) for entry in receivers if (path := _socket_path(entry))]
    if not named:
        usual = doctor_driver.below(around.root, doctor_node.POD_RESOURCES)
        return [doctor_node.pod_resources(usual, deadline_s=around.list_deadline_s)]
    return [doctor_node.pod_resources(Path(path), path, what, around.list_deadline_s) for what, path in named]


def _socket_path(entry: ComponentEntry) -> str:
    given: object = getattr(entry.config, "socket_path", "") if entry.type == "pod_resources" else ""
    return given if isinstance(given, str) else ""


def _pages(around: Surroundings, receivers: Sequence[ComponentEntry], *, has_config: bool) -> list[Awaitable[Finding]]:
    """The pages that the config's receivers read by address; without a config the dcgm-exporter on localhost."""
    if not has_config:
        pages = HttpPages(around.dcgm_url, {}, DEFAULT_MAX_PAGE_BYTES)
        return [doctor_node.dcgm_page(pages, around.dcgm_url, deadline_s=around.page_deadline_s)]
    return [
        _page(entry, entry.config, around.page_deadline_s)
        for entry in receivers
        if isinstance(entry.config, PageScrapeConfig) and entry.config.endpoint
    ]


async def _page(entry: ComponentEntry, settings: PageScrapeConfig, deadline_s: float) -> Finding:
    what = f"receiver {entry.id}"
    if _OWN_WAYS & settings.model_fields_set:
        text = f"{settings.endpoint} was not asked: the receiver has TLS settings or a token of its own"
        return Finding(what, what, Verdict.UNKNOWN, text, "run the config and look at the receiver's status")
    pages = HttpPages(settings.endpoint, settings.headers, settings.max_page_size)
    check = doctor_node.dcgm_page if entry.type == "dcgm" else doctor_node.any_page
    return await check(pages, settings.endpoint, what, deadline_s)


def _observers(config: ServiceConfig | None) -> list[ComponentEntry]:
    """The extensions that would run and watch pods."""
    if config is None:
        return []
    entries = (config.components.get((Kind.EXTENSIONS, each)) for each in config.extensions)
    return [entry for entry in entries if entry is not None and entry.type == "k8s_observer"]


def _watches(around: Surroundings, observers: Sequence[ComponentEntry]) -> list[Awaitable[Finding]]:
    """Who tells each of the config's observers of pods; without one, whether the kubelet would."""
    if not observers:
        return [doctor_node.pods_api(around.root, deadline_s=around.list_deadline_s)]
    return [_watch(around, entry) for entry in observers]


async def _watch(around: Surroundings, entry: ComponentEntry) -> Finding:
    """Asks as the observer would: the kubelet's socket, else the API server, as far as its `source` allows."""
    what = _line(entry)
    source, problems, fixes = _text(entry, "source"), [], []
    if source != "kubernetes":
        paths: object = getattr(entry.config, "socket_paths", ())
        named = tuple(map(str, paths)) if isinstance(paths, tuple) else ()
        usual = _text(entry, "kubelet_endpoint").endswith(doctor_node.PODS_API[0])
        root = around.root if usual else Path("/")
        kubelet = await doctor_node.pods_api(root, named, around.list_deadline_s)
        if kubelet.ok:
            return Finding(what, what, Verdict.OK, f"pods by the kubelet: {kubelet.finding}", facts=kubelet.facts)
        problems.append(f"{' and '.join(named)}: {kubelet.finding}")
        fixes.append("mount the folder of the kubelet's Pods API (Kubernetes 1.37)")
    if source != "kubelet":
        way, problem = await doctor_node.api_server(
            around.root,
            around.environ,
            _text(entry, "endpoint"),
            _text(entry, "kubeconfig"),
            around.page_deadline_s,
        )
        if way:
            return Finding(what, what, Verdict.OK, f"pods by {way}")
        problems.append(f"the API server: {problem}")
        fixes.append("give a way to the API server (service account, kubeconfig or endpoint)")
    return Finding(
        what, what, Verdict.MISSING, "no way to this node's pods: " + "; ".join(problems), ", or ".join(fixes)
    )


def _line(entry: ComponentEntry) -> str:
    return f"extension {entry.id}"


def _text(entry: ComponentEntry, key: str) -> str:
    given: object = getattr(entry.config, key, "")
    return given if isinstance(given, str) else ""


def _dcgm(receivers: Sequence[ComponentEntry], pages: Sequence[Finding]) -> Dcgm:
    """What is known of SM activity by a dcgm-exporter."""
    told = [each.facts["profiling"] for each in pages if "profiling" in each.facts]
    if any(told):
        return Dcgm.TELLS
    asked = {each.check for each in pages if "profiling" in each.facts}
    if any(entry.type == "dcgm" and f"receiver {entry.id}" not in asked for entry in receivers):
        return Dcgm.UNSEEN
    return Dcgm.PLAIN if told else Dcgm.NONE


# --- what is needed ----------------------------------------------------------------------------------------------

_NVML: Final = "NVML"
_NVML_CAUSES: Final = ("GPUs", "device nodes", "driver library", "Python binding", "driver")
"""Findings that say why NVML does not work."""


def _needs(findings: Sequence[Finding], answer: Answer) -> list[Need]:
    page = any(each.check == "dcgm-exporter" and each.facts.get("gpus") for each in findings)
    reads = "" if (answer.up and answer.gpus) or page else "neither NVML nor a dcgm-exporter on this host shows a GPU"
    return [
        Need("a reader of the GPUs", reads, (_NVML, doctor_node.EXPORTER), _NVML_CAUSES),
        Need("who holds them", _lacking(findings, "pod-resources"), (doctor_node.OWNERS,)),
    ]


def _needs_of(
    receivers: Sequence[ComponentEntry],
    observers: Sequence[ComponentEntry],
    findings: Sequence[Finding],
    answer: Answer,
) -> list[Need]:
    watching = {entry.id: _line(entry) for entry in observers}
    needs = []
    for entry in receivers:
        what = f"receiver {entry.id}"
        if entry.type == "nvml":
            reason = "" if answer.up and answer.gpus else "NVML shows no GPU"
            needs.append(Need(what, reason, (_NVML,), _NVML_CAUSES))
        elif entry.type == "pod_resources" or (isinstance(entry.config, PageScrapeConfig) and entry.config.endpoint):
            needs.append(Need(what, _lacking(findings, what), (what,)))
        lines = [watching.get(ComponentID.parse(each), "") for _, each in entry.config.needs_extensions()]
        needs += [Need(what, _lacking(findings, line), (line,)) for line in lines if line]
    return needs


def _lacking(findings: Sequence[Finding], check: str) -> str:
    """Why a check's thing is missing, "" when it is there."""
    return "; ".join(each.finding for each in findings if each.check == check and each.verdict is Verdict.MISSING)
