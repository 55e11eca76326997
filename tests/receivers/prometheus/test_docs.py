"""docs/vendors.md: its invented exporter, read by the mapping that stands there, gives what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from gpulens.processors.attribution.devices import DeviceFact, DeviceMap
from gpulens.receivers.pod_resources.device_ids import parse_device_id
from gpulens.receivers.prometheus.mapping import parse_mapping
from gpulens.receivers.prometheus.schema import MetricRow
from tests.receivers.prometheus.kit import Page, infos, owners, points

TEXT = (Path(__file__).parents[3] / "docs" / "vendors.md").read_text()


def block(name: str) -> str:
    """The code block between two markers."""
    found = re.search(rf"<!-- {name}:begin -->\n```\w+\n(.*?)```\n<!-- {name}:end -->", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_worked_example_works() -> None:
    """Every row of the result's table, the owner, the struck-out value and the metric that is left."""
    fed = Page(parse_mapping(block("mapping"), "docs/vendors.md"))
    scraped = fed.read(block("page"))
    table: dict[tuple[object, ...], float] = {}
    for line in re.findall(r"^\| `([^`]+)` \| ([\d.]*) \| ?([\d.]*) ?\|$", TEXT, re.MULTILINE):
        series, *values = line
        name, _, attributes = series.rstrip("}").partition("{")
        for board, value in zip(("NB-0042", "NB-0043"), values, strict=True):
            if value:
                table[board, name, *filter(None, attributes.split(","))] = float(value)
    assert len(table) == 9
    assert points(scraped) == table
    assert owners(scraped) == {("NB-0042", "ml", "train-0", "main")}
    assert scraped.rejected == {"blank": 1}
    assert fed.unmapped == 1
    assert infos(scraped)["NB-0042"]["hw.model"] == "Nimbus N2"


def test_the_kubelets_pci_address_finds_the_board() -> None:
    """What a device plugin hands out by address is joined through what the page says of its devices."""
    scraped = Page(parse_mapping(block("mapping"), "docs/vendors.md")).read(block("page"))
    devices = DeviceMap()
    facts = [
        DeviceFact.of({"hw.id": str(device), **{k: str(v) for k, v in said.items()}})
        for device, said in infos(scraped).items()
    ]
    devices.learn("prometheus", facts, True)
    assert devices.resolve(parse_device_id("00000000:81:00.0").hw_id) == ("NB-0042",)


def test_every_key_of_a_row_is_explained() -> None:
    """The table of keys is the schema's."""
    found = re.search(r"<!-- keys:begin -->\n(.*?)<!-- keys:end -->", TEXT, re.DOTALL)
    assert found is not None
    explained = {key for line in found[1].splitlines() for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert explained == {field.alias or name for name, field in MetricRow.model_fields.items()}
