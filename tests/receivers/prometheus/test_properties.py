"""Any page, with any of the shipped mappings or without one: nothing raises but a failed scrape, and what comes out
keeps the rules."""

from __future__ import annotations

import math
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.catalogue import CATALOGUE, DEVICE_KEYS
from gpulens.pipeline.errors import ScrapeError
from gpulens.pipeline.scraping import Scraped
from gpulens.receivers.prometheus.mapping import VendorMapping, load_mapping
from gpulens.receivers.prometheus.units import UNITS, Refusal, Rule
from tests.receivers.prometheus.kit import NODE, Page

_NAMES = {
    "amd": (
        "gpu_gfx_activity",
        "gpu_used_vram",
        "gpu_package_power",
        "gpu_power_usage",
        "gpu_energy_consumed",
        "gpu_health",
    ),
    "ascend": ("npu_chip_info_utilization", "npu_chip_info_power", "npu_chip_info_process_info", "npu_chip_info_name"),
    "intel": ("hw_gpu_info", "hw_memory_usage_bytes", "hw_energy_joules_total", "hw_status", "hw_errors_total"),
    "gaudi": ("habanalabs_utilization", "habanalabs_power_mW", "habanalabs_pending_rows_state"),
}
_LABELS = (
    "serial_number", "gpu_partition_id", "gpu_compute_partition_type", "vdie_id", "id", "process_id", "hw_id",
    "com_intel_subdevice_id", "hw_memory_location", "hw_sensor_location", "hw_type", "hw_state", "error_type", "UUID",
    "pci_bdf", "namespace", "pod", "pod_name", "container", "exported_namespace", "exported_pod",
)  # fmt: skip
_VALUES = (
    "",
    "0",
    "1",
    "a",
    "b",
    "cpx",
    "spx",
    "device",
    "card",
    "package",
    "gpu",
    "memory",
    "ok",
    "correctable",
    "N/A",
)
_NUMBERS = (
    "0",
    "1",
    "-1",
    "50",
    "101",
    "65535",
    "4294967295",
    "1.8446744073709552e+19",
    "NaN",
    "+Inf",
    "-Inf",
    "1e300",
)

_rows = st.tuples(
    st.dictionaries(st.sampled_from(_LABELS), st.sampled_from(_VALUES), max_size=6),
    st.sampled_from(_NUMBERS),
    st.sampled_from(["", " 1700000014000", " 1", " 99999999999999", " x"]),
)


@cache
def shipped_mapping(name: str) -> VendorMapping:
    """A shipped mapping, read once."""
    return load_mapping(name)


def render(name: str, labels: dict[str, str], number: str, time: str) -> str:
    """A line of a page."""
    block = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{block}}} {number}{time}\n"


def read(page: Page, text: str | bytes) -> Scraped | str:
    """What is made of a page; the reason where the scrape failed."""
    try:
        return page.read(text)
    except ScrapeError as error:
        return error.reason


def check(scraped: Scraped, mapped: bool) -> None:
    """What holds of every batch: catalogued, finite, owners on resources only, no series twice (the layout says so)."""
    batch = scraped.batch
    for (resource, _, series), value, time in zip(
        batch.layout.identities(), batch.readings(), batch.times(), strict=True
    ):
        assert time > 0
        if not mapped:
            assert resource == NODE
            continue
        entry = CATALOGUE[series.metric.name]
        assert set(series.map) <= {*entry.attributes, *DEVICE_KEYS}
        assert series.text("hw.id")
        assert (resource == NODE) == (series.metric.name != "gpu.allocated")
        assert value is None or math.isfinite(value)
        assert not entry.binary or value in (0, 1, None)
        if entry.metric.unit == "1":
            assert value is None or 0 <= value <= 1


@given(st.sampled_from(sorted(_NAMES)), st.data())
def test_any_page_of_a_vendor_is_read_or_refused(vendor: str, data: st.DataObject) -> None:
    """Ticks with pages that change in every way."""
    page = Page(shipped_mapping(vendor))
    lines = st.builds(lambda name, row: render(name, *row), st.sampled_from(_NAMES[vendor]), _rows)
    for text in data.draw(st.lists(st.lists(lines, max_size=8).map("".join), min_size=1, max_size=4)):
        scraped = read(page, text)
        assert not isinstance(scraped, str) or scraped == "nothing_mapped"
        if not isinstance(scraped, str):
            check(scraped, mapped=True)


@given(st.lists(st.lists(st.builds(lambda n, r: render(n, *r), st.sampled_from("abc"), _rows), max_size=8), max_size=4))
def test_any_page_passes_without_a_mapping(pages: list[list[str]]) -> None:
    """Typed as counters or not, with times or without."""
    page = Page()
    for lines in pages:
        check(page.read("# TYPE a counter\n" + "".join(lines)), mapped=False)


@given(st.binary(max_size=300), st.sampled_from(["", *sorted(_NAMES)]))
def test_arbitrary_bytes_are_a_page_or_a_failed_scrape(body: bytes, vendor: str) -> None:
    """Nothing else comes of them."""
    page = Page(shipped_mapping(vendor)) if vendor else Page()
    scraped = read(page, body)
    if isinstance(scraped, str):
        assert scraped in ("no_metrics", "nothing_mapped" if vendor else "no_metrics")
    else:
        check(scraped, mapped=bool(vendor))


@given(st.sampled_from(sorted(UNITS)), st.floats(allow_nan=True, allow_infinity=True), st.booleans())
def test_a_rule_gives_a_finite_number_or_a_reason(unit: str, number: float, whole: bool) -> None:
    """Whatever the number, and int64 where the metric is one."""
    _, scale, divide = UNITS[unit]
    value = Rule(scale, divide, whole=whole).read(number)
    if isinstance(value, Refusal):
        return
    assert value is not None
    assert math.isfinite(value)
    assert isinstance(value, int) is whole
    assert not whole or abs(value) < 2**63
