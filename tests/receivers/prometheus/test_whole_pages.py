"""The shipped mappings on whole pages, written by their exporters' documentation: every row, unit, sentinel, condition
and label that a mapping names is on its vendor's page and makes a difference there.

Readings are asserted with exact values, so that a wrong unit is found; whatever is taken out of a mapping changes them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import resources

import pytest
import yaml
from pydantic import ValidationError

from gpulens.receivers.prometheus.mapping import VendorMapping, load_mapping, shipped
from gpulens.receivers.prometheus.schema import MappingFile
from tests.receivers.prometheus.kit import Page, infos, owners, points
from tests.receivers.prometheus.vendor_pages import AMD, ASCEND, GAUDI, GAUDI_DEVICE, INTEL

PAGES = {"amd": AMD, "ascend": ASCEND, "gaudi": GAUDI, "intel": INTEL}

CORRECTED, UNCORRECTED, GPU = "error.type=corrected", "error.type=uncorrected", "hw.type=gpu"
ECC, AGGREGATE = "gpu.error.source=ecc", "gpu.error.source=ecc_aggregate"
BUSY = ("hw.gpu.utilization", "hw.gpu.task=general")
CORE, MEMORY = "hw.sensor_location=gpu", "hw.sensor_location=memory"
SM_CLOCK, MEMORY_CLOCK = "gpu.clock=sm", "gpu.clock=memory"
MIB = 2**20


def reasons(device: str, power: int | None, thermal: int | None, slowdown: int | None) -> dict[tuple[object, ...], int]:
    """A device's throttle reasons; None is absent."""
    found = {"sw_power_cap": power, "hw_thermal": thermal, "hw_slowdown": slowdown}
    return {
        (device, "gpu.clock.throttle.reason", f"gpu.clock.reason={name}"): value
        for name, value in found.items()
        if value is not None
    }


def test_amd_readings_are_canonical() -> None:
    """Percent, MiB, microjoules and MHz become ratios, bytes, joules and hertz; the fastest of several dies' clocks
    counts; MI2xx' names stand in where MI3xx' are missing or have a sentinel."""
    fed = Page(mapping="amd")
    scraped = fed.read(AMD)
    assert points(scraped) == {
        ("SN0", *BUSY): 0.57,
        ("SN1", *BUSY): 0.09,
        ("SN2/partition0", *BUSY): 0.4,
        ("SN3/partition1", *BUSY): 0.3,
        ("SN4/partition1", *BUSY): 0.45,
        ("SN5/partition1", *BUSY): 0.5,
        ("SN0", "gpu.memory.copy.utilization"): 0.12,
        ("SN0", "gpu.sm.active"): 0.15,
        ("SN0", "gpu.sm.occupancy"): 0.42,
        ("SN0", "gpu.pipe.active", "gpu.pipe=tensor"): 0.05,
        ("SN0", "hw.gpu.memory.usage"): 283 * MIB,
        ("SN0", "hw.gpu.memory.limit"): 196592 * MIB,
        ("SN0", "gpu.memory.free"): 196309 * MIB,
        ("SN0", "hw.power", GPU): 255.0,
        ("SN1", "hw.power", GPU): 251.0,
        ("SN2", "hw.power", GPU): 90.0,
        ("SN0", "hw.energy", GPU): 1500.0,
        ("SN0", "hw.temperature", CORE): 61.0,
        ("SN1", "hw.temperature", CORE): 40.0,
        ("SN2", "hw.temperature", CORE): 41.0,
        ("SN0", "hw.temperature", MEMORY): 55.0,
        ("SN0", "gpu.clock.frequency", SM_CLOCK): 2.1e9,
        ("SN1", "gpu.clock.frequency", SM_CLOCK): 1.7e9,
        ("SN0", "gpu.clock.frequency", MEMORY_CLOCK): 9.5e8,
        ("SN1", "gpu.clock.frequency", MEMORY_CLOCK): 8e8,
        **reasons("SN0", 1, 1, 1),
        **reasons("SN1", None, 1, None),
        **reasons("SN2", 0, 1, 0),
        ("SN0", "hw.errors", CORRECTED, ECC, GPU): 4,
        ("SN0", "hw.errors", UNCORRECTED, ECC, GPU): 1,
        ("SN0", "hw.status", "hw.state=ok", GPU): 1,
        ("SN0", "hw.status", "hw.state=failed", GPU): 0,
        ("SN1", "hw.status", "hw.state=ok", GPU): 0,
        ("SN1", "hw.status", "hw.state=failed", GPU): 1,
        ("SN0", "gpu.pcie.replays"): 2,
        ("SN0", "hw.gpu.io", "network.io.direction=receive"): 4096,
        ("SN0", "hw.gpu.io", "network.io.direction=transmit"): 8192,
    }
    assert scraped.rejected == {"blank": 16, "out_of_range": 3}
    assert fed.unmapped == 4
    assert owners(scraped) == {("SN0", "ml", "train-0", "main"), ("SN3/partition1", "ml", "batch-0", "c")}
    said = infos(scraped)
    assert said["SN0"] == {"hw.model": "MI300X", "gpu.serial": "SN0", "gpu.driver.version": "6.10.5"}
    assert said["SN1"] == {"hw.model": "102-G30211-0C", "gpu.serial": "SN1"}
    assert said["UU-6"] == {"hw.model": "102-G30211-0C"}
    assert said["SN2/partition0"] == {"hw.model": "102-G30211-0C", "hw.parent": "SN2"}
    assert all("k8s.pod.name" not in series.map for _, _, series in scraped.batch.layout.identities())


def test_ascend_readings_are_canonical() -> None:
    """Percent, MiB and MHz become ratios, bytes and hertz; the cores' utilization stands in for the chip's."""
    fed = Page(mapping="ascend")
    scraped = fed.read(ASCEND)
    assert points(scraped) == {
        ("VDIE-0", *BUSY): 0.8,
        ("VDIE-1", *BUSY): 0.1,
        ("VDIE-0", "gpu.pipe.active", "gpu.pipe=tensor"): 0.33,
        ("VDIE-0", "gpu.pipe.active", "gpu.pipe=vector"): 0.21,
        ("VDIE-0", "gpu.memory.bandwidth.utilization"): 0.44,
        ("VDIE-0", "hw.gpu.memory.usage"): 3000 * MIB,
        ("VDIE-0", "hw.gpu.memory.limit"): 64 * 2**30,
        ("VDIE-2", "hw.gpu.memory.usage"): 2500 * MIB,
        ("VDIE-2", "hw.gpu.memory.limit"): 24 * 2**30,
        ("VDIE-0", "hw.power", GPU): 245.5,
        ("VDIE-3", "hw.power", GPU): 70.0,
        ("VDIE-0", "hw.temperature", CORE): 48.0,
        ("VDIE-0", "hw.temperature", MEMORY): 52.0,
        ("VDIE-0", "gpu.clock.frequency", SM_CLOCK): 1.8e9,
        ("VDIE-0", "hw.errors", CORRECTED, ECC, GPU): 3,
        ("VDIE-0", "hw.errors", UNCORRECTED, ECC, GPU): 1,
        ("VDIE-0", "hw.errors", CORRECTED, AGGREGATE, GPU): 30,
        ("VDIE-0", "hw.errors", UNCORRECTED, AGGREGATE, GPU): 2,
        ("VDIE-0", "gpu.pages.retired", CORRECTED): 5,
        ("VDIE-0", "gpu.pages.retired", UNCORRECTED): 4,
        ("VDIE-0", "hw.status", "hw.state=ok", GPU): 1,
        ("VDIE-0", "hw.status", "hw.state=failed", GPU): 0,
        ("VDIE-1", "hw.status", "hw.state=ok", GPU): 0,
        ("VDIE-1", "hw.status", "hw.state=failed", GPU): 1,
        ("VDIE-0", "gpu.process.count"): 1,
        ("VDIE-0", "gpu.process.memory.usage", "process.pid=4711"): 2800 * MIB,
    }
    assert scraped.rejected == {"blank": 3}
    assert fed.unmapped == 5
    assert owners(scraped) == {("VDIE-0", "ml", "train-0", "main"), ("VDIE-2", "ml", "batch-0", "c")}
    said = infos(scraped)
    assert said["VDIE-0"] == {
        "hw.model": "910B3",
        "hw.name": "davinci0",
        "gpu.pci.address": "0000:c0:00.0",
        "gpu.serial": "S-77",
    }
    assert said["VDIE-1"] == {"hw.name": "davinci1", "gpu.pci.address": "0000:c1:00.0"}
    assert "VDIE-4" in said


def test_intel_readings_are_taken_by_where_they_are_measured() -> None:
    """Modules of memory add up, the card's power goes before the package's, tiles are devices of their own; a memory is
    well only where each module is."""
    fed = Page(mapping="intel")
    scraped = fed.read(INTEL)
    a, b, c, tile = "1234-0", "1234-1", "1234-2", "1234-0/tile1"
    others = ("failed", "warning", "critical", "needs_cleaning", "predicted_failure", "throttled", "unknown")
    fine: dict[tuple[object, ...], int] = {(a, "hw.status", f"hw.state={state}", GPU): 0 for state in others}
    assert points(scraped) == {
        (a, *BUSY): 0.125,
        (tile, *BUSY): 0.25,
        (a, "gpu.engine.active"): 0.75,
        (a, "hw.gpu.memory.usage"): 1500,
        (a, "hw.gpu.memory.limit"): 6000,
        (a, "gpu.memory.free"): 4500,
        (a, "gpu.memory.bandwidth.utilization"): 0.5,
        (a, "hw.power", GPU): 350.0,
        (b, "hw.power", GPU): 200.5,
        (c, "hw.power", GPU): 55.0,
        (a, "hw.energy", GPU): 5.0,
        (b, "hw.energy", GPU): 3.0,
        (c, "hw.energy", GPU): 7.0,
        (a, "gpu.power.limit", "gpu.power.limit.type=management"): 600.0,
        (b, "gpu.power.limit", "gpu.power.limit.type=management"): 450.0,
        (a, "hw.temperature", CORE): 48.0,
        (b, "hw.temperature", CORE): 50.0,
        (tile, "hw.temperature", CORE): 51.0,
        (a, "hw.temperature", MEMORY): 60.0,
        (a, "gpu.clock.frequency", SM_CLOCK): 1.2e9,
        (a, "gpu.clock.frequency", MEMORY_CLOCK): 1.3e9,
        (a, "hw.errors", CORRECTED, GPU): 11,
        (a, "hw.errors", CORRECTED, "hw.type=memory"): 7,
        (a, "hw.errors", UNCORRECTED, GPU): 3,
        (a, "hw.errors", UNCORRECTED, "hw.type=memory"): 4,
        (a, "hw.status", "hw.state=ok", GPU): 1,
        (a, "hw.status", "hw.state=ok", "hw.type=memory"): 0,
        (a, "hw.status", "hw.state=degraded", "hw.type=memory"): 1,
        (a, "hw.status", "hw.state=degraded", GPU): 0,
        **fine,
        (a, "hw.gpu.io", "network.io.direction=receive"): 1_000_000,
        (a, "hw.gpu.io", "network.io.direction=transmit"): 2_000_000,
    }
    assert scraped.rejected == {"out_of_range": 4}
    assert owners(scraped) == set()
    assert infos(scraped)[a] == {"hw.model": "Max 1550", "gpu.pci.address": "0000:05:00.0", "gpu.serial": "SN-1"}
    assert infos(scraped)[tile] == {"hw.parent": a}


def test_gaudi_readings_are_canonical() -> None:
    """Milliwatts and MHz become watts and hertz; what has no certain unit or meaning is left."""
    fed = Page(mapping="gaudi")
    scraped = fed.read(GAUDI)
    a = GAUDI_DEVICE
    assert points(scraped) == {
        (a, *BUSY): 0.97,
        ("S-C", *BUSY): 0.05,
        (a, "hw.gpu.memory.usage"): 1024,
        (a, "hw.gpu.memory.limit"): 98 * 2**30,
        (a, "gpu.memory.free"): 98 * 2**30 - 1024,
        (a, "hw.power", GPU): 420.5,
        (a, "gpu.power.limit", "gpu.power.limit.type=management"): 600.0,
        (a, "hw.temperature", CORE): 66.0,
        (a, "hw.temperature.limit", "hw.limit_type=throttled"): 105.0,
        (a, "hw.temperature.limit", "hw.limit_type=critical"): 120.0,
        (a, "gpu.clock.frequency", "gpu.clock=soc"): 1.65e9,
        (a, "gpu.rows.remap.pending"): 0,
        ("UUID-B", "gpu.rows.remap.pending"): 1,
        (a, "gpu.pcie.replays"): 3,
    }
    assert scraped.rejected == {"blank": 2}
    assert fed.unmapped == 3
    assert owners(scraped) == {(a, "ml", "llm-0", "c"), ("UUID-B", "ml", "batch-0", "d")}
    assert infos(scraped) == {
        a: {"hw.model": "HL-225", "gpu.pci.address": "0000:19:00.0", "gpu.serial": "S-A"},
        "UUID-B": {"hw.model": "HL-325L", "gpu.pci.address": "0000:1a:00.0"},
        "S-C": {"gpu.serial": "S-C"},
    }


def test_gaudis_rows_with_errors_are_no_total_of_errors() -> None:
    """They are rows, whose number falls when they are replaced: no counter of ours is made of it."""
    page = Page(mapping="gaudi")
    for rows, waits in ((2, 1), (0, 0)):
        labels = '{UUID="A"}'
        scraped = page.read(
            f"habanalabs_pending_rows_with_single_bit_ecc_errors{labels} {rows}\n"
            f"habanalabs_pending_rows_with_double_bit_ecc_errors{labels} {rows}\n"
            f"habanalabs_pending_rows_state{labels} {waits}\n"
        )
        assert points(scraped) == {("A", "gpu.rows.remap.pending"): waits}


def tree_of(name: str) -> dict[str, object]:
    """A shipped mapping's file as dicts and lists."""
    text = (resources.files("gpulens.receivers.prometheus") / "mappings" / f"{name}.yaml").read_text("utf-8")
    tree = yaml.safe_load(text)
    assert isinstance(tree, dict)
    return tree


def outcome(mapping: VendorMapping, page: str) -> tuple[object, ...]:
    """Everything that comes of a page."""
    scraped = Page(mapping).read(page)
    return points(scraped), infos(scraped), owners(scraped), scraped.rejected, scraped.window_s


def changed(node: object, at: str) -> Iterator[str]:
    """Changes a mapping's file at or below `node`, yields what is changed, and puts it back: each key and each item is
    out once, and each unit is a wrong one once."""
    if isinstance(node, dict):
        for key, value in list(node.items()):
            before = dict(node)
            del node[key]
            if key == "unit":
                node["scale"] = 7.0
            yield f"{at}.{key}"
            node.clear()
            node.update(before)
            yield from changed(value, f"{at}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(list(node)):
            del node[index]
            yield f"{at}[{index}] ({value})"
            node.insert(index, value)
            yield from changed(value, f"{at}[{index}]")


@pytest.mark.parametrize("name", shipped())
def test_whatever_a_mapping_says_makes_a_difference_on_its_page(name: str) -> None:
    """A row, a name, a unit, a sentinel, a condition or a label that is on no page of ours is one that nobody tried."""
    tree = tree_of(name)
    page = PAGES[name]
    assert VendorMapping(MappingFile.model_validate(tree)) == load_mapping(name)
    usual = outcome(load_mapping(name), page)
    del tree["description"]
    untried: list[str] = []
    for what in changed(tree, name):
        try:
            file = MappingFile.model_validate(copy.deepcopy(tree))
        except ValidationError:
            continue  # not without it: it goes with what it stands in
        if outcome(VendorMapping(file), page) == usual:
            untried.append(what)
    assert untried == []
