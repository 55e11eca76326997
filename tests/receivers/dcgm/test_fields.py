"""The table of fields: every name means one field, in one unit, and feeds catalogued metrics only."""

from __future__ import annotations

import pytest

from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.receivers.dcgm import units as u
from gpulens.receivers.dcgm.fields import LOWER_NAMES, NAMES, SILENT, all_fields, find, is_dcgm_name
from gpulens.receivers.dcgm.units import Either

LEGACY = {
    "dcgm_board_limit_violation": 243, "dcgm_dec_utilization": 207, "dcgm_ecc_dbe_aggregate_total": 313,
    "dcgm_ecc_dbe_volatile_total": 311, "dcgm_ecc_sbe_aggregate_total": 312, "dcgm_ecc_sbe_volatile_total": 310,
    "dcgm_enc_utilization": 206, "dcgm_fb_free": 251, "dcgm_fb_used": 252, "dcgm_fi_prof_dram_active": 1005,
    "dcgm_fi_prof_gr_engine_active": 1001, "dcgm_fi_prof_pcie_rx_bytes": 1010, "dcgm_fi_prof_pcie_tx_bytes": 1009,
    "dcgm_fi_prof_pipe_tensor_active": 1004, "dcgm_fi_prof_sm_active": 1002, "dcgm_fi_prof_sm_occupancy": 1003,
    "dcgm_gpu_temp": 150, "dcgm_gpu_utilization": 203, "dcgm_low_util_violation": 244,
    "dcgm_mem_copy_utilization": 204, "dcgm_memory_clock": 101, "dcgm_memory_temp": 140,
    "dcgm_nvlink_bandwidth_total": 449, "dcgm_nvlink_data_crc_error_count_total": 419,
    "dcgm_nvlink_flit_crc_error_count_total": 409, "dcgm_nvlink_recovery_error_count_total": 439,
    "dcgm_nvlink_replay_error_count_total": 429, "dcgm_pcie_replay_counter": 202, "dcgm_pcie_rx_throughput": 201,
    "dcgm_pcie_tx_throughput": 200, "dcgm_power_usage": 155, "dcgm_power_violation": 240,
    "dcgm_reliability_violation": 245, "dcgm_retired_pages_dbe": 391, "dcgm_retired_pages_pending": 392,
    "dcgm_retired_pages_sbe": 390, "dcgm_sm_clock": 100, "dcgm_sync_boost_violation": 242,
    "dcgm_thermal_violation": 241, "dcgm_total_energy_consumption": 156, "dcgm_xid_errors": 230,
}  # fmt: skip


def test_every_reading_is_catalogued_with_its_attributes() -> None:
    """The table emits catalogued metrics with catalogued attributes, integers where the catalogue has integers."""
    for field in all_fields():
        extra = {attribute for _, attribute in field.label_attributes}
        for reading in field.readings:
            entry = CATALOGUE[reading.metric]
            assert {key for key, _ in reading.attributes} | extra <= set(entry.attributes), reading
        if field.process_metric:
            assert field.process_metric in CATALOGUE


@pytest.mark.parametrize("name", sorted({*NAMES, *LOWER_NAMES}))
def test_units_fit_the_catalogues_number_type(name: str) -> None:
    """An int64 metric is read by a unit that yields integers, a double one by a unit that yields doubles."""
    named = find(name)
    assert named is not None
    for reading in named.field.readings:
        unit = reading.unit or named.unit
        for each in (unit.old, unit.new, unit.by_size) if isinstance(unit, Either) else (unit,):
            yields_int = each.exact or each.mask != 0
            assert yields_int == CATALOGUE[reading.metric].metric.is_int, (name, reading.metric)


@pytest.mark.parametrize(("name", "number"), LEGACY.items())
def test_legacy_names_of_exporter_1_are_known(name: str, number: int) -> None:
    """All 41 names that go-dcgm lists as legacy lead to their field numbers."""
    named = find(name)
    assert named is not None
    assert named.field.number == number


@pytest.mark.parametrize(
    ("old", "new", "old_unit", "new_unit"),
    [
        ("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_SM_CLOCK_HERTZ", u.MEGAHERTZ, u.HERTZ),
        ("DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", u.MEGAHERTZ, u.HERTZ),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", u.MILLIJOULES, u.JOULES),
        ("DCGM_FI_DEV_FB_TOTAL", "DCGM_FI_DEV_FB_CAPACITY_BYTES", u.MEBIBYTES, u.BYTES),
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", u.PERCENT, u.UTIL_RATIO),
        ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS", u.WATTS, u.WATTS),
        ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", u.RATIO, u.RATIO),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL",
         u.MEGABYTES_PER_SECOND, u.NVLINK_RATE),
    ],
)  # fmt: skip
def test_renamed_fields_keep_their_metric_and_change_their_unit(
    old: str, new: str, old_unit: object, new_unit: object
) -> None:
    """The unit hangs on the exact name; both names feed the same series."""
    before, after = find(old), find(new)
    assert before is not None
    assert after is not None
    assert before.field.readings == after.field.readings
    assert (before.unit, after.unit) == (old_unit, new_unit)


def test_the_suffix_of_openmetrics_conversion_is_looked_through() -> None:
    """`_total` behind a counter's name changes nothing; a name that ends so by itself stays its own."""
    assert find("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total") == find("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    assert find("dcgm_gpu_temp_total") == find("dcgm_gpu_temp")
    assert find("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL_total") == find("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL")
    assert find("dcgm_fi_dev_ecc_dbe_vol_total") == find("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL")


def test_rates_and_totals_of_pcie_are_told_apart() -> None:
    """PROF_PCIE_TX_BYTES is a rate and its _TOTAL a counter; the old namespace only ever had the rate."""
    rate, total = find("DCGM_FI_PROF_PCIE_TX_BYTES"), find("DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL")
    assert rate is not None
    assert total is not None
    assert rate.field.readings[0].metric == "gpu.pcie.throughput"
    assert total.field.readings[0].metric == "hw.gpu.io"
    assert find("dcgm_fi_prof_pcie_tx_bytes") == rate
    assert find("dcgm_fi_prof_pcie_tx_bytes_total") == rate


@pytest.mark.parametrize("name", ["DCGM_FI_DEV_NO_SUCH_FIELD", "go_goroutines", "DCGM_FI_DEV_GPU_TEMPS", "_total", ""])
def test_unknown_names_are_not_guessed_at(name: str) -> None:
    """What is not in the table has no meaning here."""
    assert find(name) is None


def test_only_names_that_claim_to_be_dcgms_are_worth_a_count() -> None:
    """Foreign families pass in silence, and so do fields that gpulens has no metric for."""
    assert is_dcgm_name("DCGM_FI_DEV_NO_SUCH_FIELD")
    assert is_dcgm_name("dcgm_no_such_field")
    assert not is_dcgm_name("go_goroutines")
    assert not any(is_dcgm_name(name) for name in SILENT)
