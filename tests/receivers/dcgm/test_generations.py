"""One simulated node through the eyes of exporters of three generations: the same readings, owners and devices."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpulens.simulator
from gpulens.pipeline.data import Value
from gpulens.simulator.world import World
from tests.receivers.dcgm.reading import FACTS, SOURCE_METRICS, Node, Row, owners

WORLDS = Path(gpulens.simulator.__file__).with_name("worlds")
Key = tuple[frozenset[tuple[str, object]], str, frozenset[tuple[str, object]]]

COARSE = {"hw.gpu.utilization": 0.005, "gpu.memory.copy.utilization": 0.005, "hw.temperature": 0.5}
"""Metrics that old exporters print as whole percents or degrees: half a step is no difference."""


def world(naming: str) -> World:
    """The demo's node with an exporter of this generation."""
    text = (WORLDS / "demo.yaml").read_text()
    assert "naming: old," in text
    return World.load(text.replace("naming: old,", f'naming: "{naming}",'))


def read(naming: str, after_s: float) -> list[Row]:
    """What the receiver makes of the node's page."""
    node = world(naming)
    return Node().read(node.dcgm_page(node.start_s + after_s))


def readings(found: list[Row]) -> dict[Key, Value]:
    """Readings by identity, without the model's name (exporter 1.x does not print it)."""
    return {
        (
            frozenset(row.resource.items()),
            row.metric,
            frozenset(item for item in row.attributes.items() if item[0] != "hw.model"),
        ): row.value
        for row in found
        if row.metric not in FACTS | SOURCE_METRICS and row.value is not None
    }


@pytest.mark.parametrize("naming", ["4.9", "1.x"])
@pytest.mark.parametrize("after_s", [60, 600])
def test_generations_agree_on_readings(naming: str, after_s: float) -> None:
    """What two generations both report is the same number in the same unit."""
    old, other = readings(read("old", after_s)), readings(read(naming, after_s))
    common = old.keys() & other.keys()
    assert len(common) > 0.7 * len(other)
    for key in common:
        tolerance = max(COARSE.get(key[1], 0), 2e-3 * abs(old[key]))
        assert other[key] == pytest.approx(old[key], abs=tolerance), key


@pytest.mark.parametrize("naming", ["old", "4.9", "1.x"])
def test_generations_agree_on_owners(naming: str) -> None:
    """Allocations do not hang on how readings are called."""
    assert owners(read(naming, 60)) == owners(read("old", 60)) != set()


@pytest.mark.parametrize("naming", ["old", "4.9"])
def test_a_simulated_page_has_nothing_to_strike_out(naming: str) -> None:
    """Every family is known and every value plausible, at any time of the demo."""
    simulated, node = world(naming), Node()
    for after_s in range(30, 600, 60):
        node.read(simulated.dcgm_page(simulated.start_s + after_s))
        assert node.rejected == {}
        assert node.problem == ""


def test_refresh_is_seen_as_it_is() -> None:
    """The simulated exporter renews its values every 30 s; scraped every 10 s, that is what is learned."""
    simulated, node = world("old"), Node(collection_interval="10s")
    for tick in range(30):
        node.read(simulated.dcgm_page(simulated.start_s + 60 + 10 * tick), step_s=10)
    assert node.window_s == 30
