"""What the suite needs to know of each component: the smallest config that works, dead and, for a receiver, alive.

Invariant: every registered component has a case here; the suite fails when one is missing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulens.config.ids import Kind
from gpulens.simulator.inventory import write_inventory
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
    - `silent`: it says nothing when its source is missing (it reads recordings and adds nothing of its own).
    """

    block: Callable[[Place], Block]
    live: Callable[[Place, Simulator], Block] | None = None
    silent: bool = False


DEAD_PAGE = "http://127.0.0.1:1/metrics"


def _recording(place: Place, node: Simulator) -> Block:
    path = place.folder / "recording.jsonl"
    write_inventory(node.world, path)
    return {"include": [str(path)], "poll_interval": "10ms"}


CASES: Mapping[tuple[Kind, str], Case] = {
    (Kind.RECEIVERS, "dcgm"): Case(lambda _: {"endpoint": DEAD_PAGE}, lambda _, node: {"endpoint": node.dcgm_url}),
    (Kind.RECEIVERS, "gke"): Case(lambda _: {"endpoint": DEAD_PAGE}, lambda _, node: {"endpoint": node.gke_url}),
    (Kind.RECEIVERS, "pod_resources"): Case(
        lambda place: {"endpoint": f"unix://{place.folder}/gone.sock"},
        lambda _, node: {"endpoint": node.kubelet_endpoint},
    ),
    (Kind.RECEIVERS, "otlp_json_file"): Case(
        lambda place: {"include": [f"{place.folder}/gone.jsonl"]}, _recording, silent=True
    ),
    (Kind.PROCESSORS, "attribution"): Case(lambda _: {}),
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
