"""What the suite needs to know of each component: the smallest config that works, dead and, for a receiver, alive.

Invariant: every registered component has a case here; the suite fails when one is missing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpulens.config.ids import Kind
from gpulens.pipeline.component import Extension, Host
from gpulens.pipeline.pods import Container, Pod, PodsSeen
from gpulens.simulator.inventory import write_inventory
from gpulens.simulator.nvml.build import BuildError
from gpulens.simulator.nvml.state import FakeNvml, FakeProcess
from gpulens.simulator.server import Simulator

Block = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case may put things. `port` is free; nobody listens on port 1 of this machine."""

    folder: Path

    def port(self) -> int:
        """A TCP port of 127.0.0.1 nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port


@dataclass(frozen=True, slots=True)
class Case:
    """One component.

    - `block`: the smallest valid config; what it points to is not there.
    - `live`: for receivers, what to change so that it reads this simulated node.
    - `extensions`: what the host has for it, by id.
    - `silent`: it says nothing when its source is missing (it reads recordings and adds nothing of its own).
    """

    block: Callable[[Place], Block]
    live: Callable[[Place, Simulator], Block] | None = None
    silent: bool = False
    extensions: Mapping[str, Extension] = field(default_factory=dict)


DEAD_PAGE = "http://127.0.0.1:1/metrics"


class StaticPods:
    """An extension that knows some pods, always the same."""

    def __init__(self, seen: PodsSeen) -> None:
        self._seen = seen

    async def start(self, host: Host) -> None:
        """Has nothing to start."""

    async def shutdown(self) -> None:
        """Has nothing to stop."""

    def pods(self) -> PodsSeen:
        """The pods."""
        return self._seen


SOME_PODS = PodsSeen(
    {"u-1": Pod("u-1", "ml", "train-0", phase="Running", ready=True, containers=(Container("main", "f00", 1.0),))},
    synced=True,
    problem="",
)


def _recording(place: Place, node: Simulator) -> Block:
    path = place.folder / "recording.jsonl"
    write_inventory(node.world, path)
    return {"include": [str(path)], "poll_interval": "10ms"}


_DCGM_AS_A_VENDOR = """
device:
  id: "{UUID}"
  model: "{modelName}"
  info: {gpu.pci.address: "{pci_bus_id}"}
  partition: {id: "{UUID}/part{GPU_I_ID}", whole_on: {GPU_I_ID: "0"}}
owners: [{namespace: namespace, pod: pod, container: container}]
metrics:
  - {from: DCGM_FI_DEV_GPU_UTIL, to: hw.gpu.utilization, attributes: {hw.gpu.task: general}, unit: percent}
  - {from: DCGM_FI_DEV_FB_USED, to: hw.gpu.memory.usage, unit: MiB}
  - from: [DCGM_FI_DEV_GPU_TEMP, DCGM_FI_DEV_GPU_TEMP_CELSIUS]
    to: hw.temperature
    attributes: {hw.sensor_location: gpu}
    unit: Cel
  - {from: DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION, to: hw.energy, attributes: {hw.type: gpu}, unit: mJ}
"""


def _mapped_page(place: Place, node: Simulator) -> Block:
    path = place.folder / "mapping.yaml"
    path.write_text(_DCGM_AS_A_VENDOR)
    return {"endpoint": node.dcgm_url, "mapping": str(path)}


def _fake_gpus(place: Place, node: Simulator) -> Block:
    fake = FakeNvml(place.folder / "nvml")
    try:
        fake.install()
    except BuildError as error:
        pytest.skip(str(error))
    fake.processes(fake.add_gpu("H100", minor=0), [FakeProcess(os.getpid(), 448 << 20)])
    fake.set_mig(fake.add_gpu("A100", minor=1), ["3g.20gb"])
    # The first tick comes when activity's first window (1 s) is over, so that every series is there.
    return {"library_path": str(fake.folder), "host_pid": True, "initial_delay": "1500ms", "collection_interval": "1s"}


CASES: Mapping[tuple[Kind, str], Case] = {
    (Kind.RECEIVERS, "dcgm"): Case(lambda _: {"endpoint": DEAD_PAGE}, lambda _, node: {"endpoint": node.dcgm_url}),
    (Kind.RECEIVERS, "gke"): Case(lambda _: {"endpoint": DEAD_PAGE}, lambda _, node: {"endpoint": node.gke_url}),
    (Kind.RECEIVERS, "k8s_pods"): Case(
        lambda _: {"observer": "k8s_observer/away"},
        lambda _, __: {"observer": "k8s_observer/works"},
        extensions={"k8s_observer/away": StaticPods(PodsSeen()), "k8s_observer/works": StaticPods(SOME_PODS)},
    ),
    (Kind.RECEIVERS, "nvml"): Case(lambda place: {"library_path": f"{place.folder}/gone"}, _fake_gpus),
    (Kind.RECEIVERS, "pod_resources"): Case(
        lambda place: {"endpoint": f"unix://{place.folder}/gone.sock"},
        lambda _, node: {"endpoint": node.kubelet_endpoint},
    ),
    (Kind.RECEIVERS, "prometheus"): Case(lambda _: {"endpoint": DEAD_PAGE}, _mapped_page),
    (Kind.RECEIVERS, "otlp_json_file"): Case(
        lambda place: {"include": [f"{place.folder}/gone.jsonl"]}, _recording, silent=True
    ),
    (Kind.PROCESSORS, "attribution"): Case(lambda _: {}),
    (Kind.EXTENSIONS, "k8s_observer"): Case(lambda _: {"source": "kubernetes", "endpoint": "http://127.0.0.1:1"}),
    (Kind.EXPORTERS, "debug"): Case(lambda _: {}),
    (Kind.EXPORTERS, "file"): Case(lambda place: {"path": f"{place.folder}/out.jsonl"}),
    (Kind.EXPORTERS, "otlp_grpc"): Case(
        lambda _: {"endpoint": "127.0.0.1:1", "tls": {"insecure": True}, "retry_on_failure": {"enabled": False}}
    ),
    (Kind.EXPORTERS, "otlp_http"): Case(
        lambda _: {"endpoint": "http://127.0.0.1:1", "retry_on_failure": {"enabled": False}}
    ),
    (Kind.EXPORTERS, "prometheus"): Case(lambda place: {"endpoint": f"127.0.0.1:{place.port()}"}),
}
