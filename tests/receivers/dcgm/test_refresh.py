"""The refresh: learned family by family, from what is charged to owners, and never shorter than is safe."""

from __future__ import annotations

import pytest

from gpulens.pipeline.errors import ScrapeError
from gpulens.receivers.dcgm.refresh import RefreshLearner
from tests.receivers.dcgm.reading import Node
from tests.receivers.dcgm.test_scraper import GPU, line


def window(node: Node, pace_s: dict[str, int], ticks: int = 60, extra: str = "") -> float:
    """The window after `ticks` scrapes, 5 s apart, of families that are renewed at these paces (0: never)."""
    for tick in range(ticks):
        page = "".join(line(name, 100 + (5 * tick // pace if pace else 0)) for name, pace in pace_s.items())
        node.read(page + extra.format(tick=tick), step_s=5)
    return node.window_s


@pytest.mark.parametrize(
    "pace_s",
    [
        {"DEV_FB_USED": 30, "DEV_GPU_UTIL": 5},
        {"DEV_GPU_UTIL": 5, "DEV_FB_USED": 30},
        {"DEV_FB_USED": 30, "PROF_SM_ACTIVE": 5, "DEV_POWER_USAGE": 5},
    ],
)
def test_a_slow_family_is_not_hidden_by_a_quick_one(pace_s: dict[str, int]) -> None:
    """With an interval for each watch, the slowest family that is charged to owners counts."""
    assert window(Node(collection_interval="5s"), pace_s) == 30


def test_a_family_slower_than_the_default_stretches_the_window() -> None:
    """The largest of what the families show counts, also above 30 s."""
    assert window(Node(collection_interval="5s"), {"DEV_FB_USED": 45, "DEV_GPU_UTIL": 5}) == 45


def test_what_is_not_charged_to_owners_teaches_nothing() -> None:
    """A foreign family, a device's power and a name without a meaning change at each scrape: still 30 s."""
    foreign = "process_cpu_seconds_total {tick}\n"
    assert window(Node(collection_interval="5s"), {"DEV_FB_USED": 30}, extra=foreign) == 30
    assert window(Node(collection_interval="5s"), {"DEV_POWER_USAGE": 5, "DEV_ODD": 5}, extra=foreign) == 30


def test_a_family_that_never_changes_keeps_the_window_at_the_default() -> None:
    """One family without five changes may be as slow as the default, however quick the others are."""
    assert window(Node(collection_interval="5s"), {"DEV_GPU_UTIL": 5, "DEV_FB_TOTAL": 0}) == 30


def test_a_page_whose_families_are_all_quick_has_a_short_window() -> None:
    """Below 30 s only when every family that is charged to owners has shown it; others need not."""
    node = Node(collection_interval="5s")
    pace_s = {"DEV_GPU_UTIL": 5, "DEV_FB_USED": 10, "DEV_POWER_USAGE": 0}
    assert window(node, pace_s, ticks=10) == 30
    assert window(node, pace_s) == 10


def test_a_family_that_comes_later_is_taken_to_be_as_slow_as_the_default() -> None:
    """A new family has shown nothing yet, and one that comes back is not quicker than it was."""
    node = Node(collection_interval="5s")
    assert window(node, {"DEV_GPU_UTIL": 5}) == 5
    assert window(node, {"DEV_GPU_UTIL": 5, "DEV_FB_USED": 60}, ticks=3) == 30
    assert window(node, {"DEV_GPU_UTIL": 5, "DEV_FB_USED": 60}, ticks=100) == 60
    assert window(node, {"DEV_GPU_UTIL": 5}, ticks=3) == 5
    assert window(node, {"DEV_GPU_UTIL": 5, "DEV_FB_USED": 60}, ticks=3) == 60


def test_groups_that_are_renewed_at_different_moments_do_not_look_quick() -> None:
    """Two GPUs of one family, each every 30 s, 5 s apart: a gap lies between two changes of one series."""
    node = Node(collection_interval="5s")
    other = GPU.replace("GPU-a", "GPU-b")
    for tick in range(80):
        node.read(line("DEV_FB_USED", tick // 6) + line("DEV_FB_USED", (tick + 1) // 6, other), step_s=5)
    assert node.window_s == 30


def test_a_slow_exporter_on_a_page_of_several_is_not_hidden_by_a_quick_one() -> None:
    """The rows of two nodes have the paces of two exporters."""
    node = Node(collection_interval="5s")
    quick, slow = (GPU.replace("GPU-a", f"GPU-{host}") + f',Hostname="{host}"' for host in "ab")
    for tick in range(80):
        node.read(line("DEV_FB_USED", tick, quick) + line("DEV_FB_USED", tick // 8, slow), step_s=5)
    assert node.window_s == 40


def test_an_exporter_that_was_away_has_to_show_its_pace_again() -> None:
    """It may come back with a longer interval; a pace slower than the default is kept until then."""
    for pace, after in ((5, 30), (60, 60)):
        node = Node(collection_interval="5s")
        assert window(node, {"DEV_GPU_UTIL": pace}, ticks=100) == pace
        with pytest.raises(ScrapeError):
            node.read("", step_s=5)
        assert window(node, {"DEV_GPU_UTIL": pace}, ticks=3) == after


def test_values_that_change_now_and_then_are_no_slow_exporter() -> None:
    """Memory that moves after 60, 300, 75, 600 and 90 s: the default stays, or owners would be unknown for minutes."""
    learner = RefreshLearner(15)
    moves = {60, 360, 435, 1035, 1125, 1425, 1500}
    value = 0
    for second in range(0, 1600, 15):
        value += second in moves
        learner.observe({"FB_USED": [str(value)]}, (10**9 + second) * 10**9)
    assert learner.refresh_s == 30


def test_a_slow_and_steady_family_counts() -> None:
    """A field that its watch renews every 60 s: readings reach back that far."""
    learner = RefreshLearner(15)
    for second in range(0, 1200, 15):
        learner.observe({"FB_USED": [str(second // 60)], "SM_ACTIVE": [str(second // 15)]}, (10**9 + second) * 10**9)
    assert learner.refresh_s == 60
