"""The classes of XID codes."""

from __future__ import annotations

from gpulens.pipeline.xids import COUNTED_FROM_START, XID_CLASSES, XidClass, xid_class


def test_every_code_that_is_counted_from_the_start_has_a_class() -> None:
    """They are there because they matter; none of them is the application's."""
    assert {xid_class(code) for code in COUNTED_FROM_START} == {XidClass.HARDWARE, XidClass.DRIVER, XidClass.LINK}


def test_what_the_application_does_is_no_fault_of_the_gpu() -> None:
    """The codes that NVIDIA's device plugin leaves out of its health check."""
    assert {code for code in (13, 31, 43, 45, 68, 109) if xid_class(code) is not XidClass.APPLICATION} == set()


def test_an_unlisted_code_is_unknown() -> None:
    """Not being in the table is no proof of harmlessness."""
    assert 999 not in XID_CLASSES
    assert xid_class(999) is XidClass.UNKNOWN
