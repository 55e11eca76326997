"""The device inventory of a simulated node: what NVML would say of which MIG UUID is which instance.

Invariant: it holds identities only, no readings and no owners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpulens.pipeline.catalogue import metric
from gpulens.pipeline.data import AttributeValue, Batch, Identity, Scope, Series, build_layout
from gpulens.pipeline.otlp import record_request
from gpulens.pipeline.otlp_json import encode_json
from gpulens.pipeline.scraping import node_resource
from gpulens.simulator.world import World

STREAM = "simulator/inventory"


def inventory(world: World) -> Batch:
    """`gpu.device.info` of every GPU and MIG instance, stamped with the world's start."""
    layout, _ = build_layout(_rows(world))
    return Batch.of(layout, [1] * layout.size, round(world.start_s * 1e9), STREAM)


def write_inventory(world: World, path: Path) -> None:
    """The inventory as a recording: one line of OTLP JSON. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_json(record_request(inventory(world))).rstrip(b"\n") + b"\n")


def _rows(world: World) -> Iterator[Identity]:
    resource, scope = node_resource(world.spec.node), Scope("gpulens/simulator")
    info = metric("gpu.device.info")
    for device in world.devices():
        board: dict[str, AttributeValue] = {
            "hw.id": device.uuid,
            "gpu.minor": str(device.minor),
            "gpu.pci.address": device.pci,
        }
        yield resource, scope, Series(info, board)
        for instance in device.mig:
            gi, ci = str(instance.gi), str(instance.ci)
            attrs = {"hw.id": instance.uuid, "hw.parent": device.uuid, "gpu.mig.gi": gi, "gpu.mig.ci": ci}
            yield resource, scope, Series(info, attrs)
