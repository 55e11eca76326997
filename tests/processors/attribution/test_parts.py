"""Tiles and compute partitions: held with their card, or each by itself."""

from __future__ import annotations

import pytest

from gpulens.pipeline.data import Resource, Series
from tests.processors.attribution.kit import (
    NODE,
    Row,
    Sink,
    activity,
    at,
    described,
    feed,
    holders,
    message,
    pod,
    processor,
)
from tests.processors.attribution.test_vendor_pages import page

CARD = {"hw.id": "X1", "gpu.device.plugin.id": "card0"}
TILE0, TILE1 = "X1/tile0", "X1/tile1"
TILES = ({"hw.id": TILE0, "hw.parent": "X1"}, {"hw.id": TILE1, "hw.parent": "X1"})


def owner(held: dict[str, list[Resource]], device: str, *facts: dict[str, str]) -> str:
    """The pod of a reading of `device` while the kubelet says `held`."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), *facts), holders(at(1), held), activity(at(5), device=device), holders(at(11), held))
    return sink.owner_of_last()


def test_whoever_holds_the_card_holds_its_tiles() -> None:
    """The kubelet names the card alone."""
    assert owner({"card0": [pod("a")]}, TILE0, CARD, *TILES) == "a"
    assert owner({"card0": [pod("a")]}, "X1", CARD, *TILES) == "a"


def test_another_cards_tiles_are_not_touched() -> None:
    """Only the parts of that card."""
    other = {"hw.id": "X2/tile0", "hw.parent": "X2"}
    assert owner({"card0": [pod("a")]}, "X2/tile0", CARD, *TILES, other) == ""


def test_a_tile_that_is_held_by_itself_counts_for_nobody_else() -> None:
    """Neither for its sibling nor for the card."""
    held = {TILE0: [pod("a")]}
    assert owner(held, TILE0, CARD, *TILES) == "a"
    assert owner(held, TILE1, CARD, *TILES) == ""
    assert owner(held, "X1", CARD, *TILES) == ""


def test_a_card_that_is_named_beside_one_of_its_tiles_is_not_held_whole() -> None:
    """AMD's plugin names the first part by the card's PCI address and the others by ids of their own."""
    held = {"card0": [pod("a")], TILE0: [pod("b")]}
    assert owner(held, TILE0, CARD, *TILES) == "b"
    assert owner(held, TILE1, CARD, *TILES) == ""


@pytest.mark.parametrize(("other", "expected"), [("amdgpu_xcp_1", ""), ("card7", "a"), ("0000:c2:00.0", "a")])
def test_an_id_that_may_be_any_part_keeps_a_cards_owner_from_its_parts(other: str, expected: str) -> None:
    """A whole card's id by its form does not."""
    assert owner({"card0": [pod("a")], other: [pod("b")]}, TILE1, CARD, *TILES) == expected


def test_two_words_about_a_tiles_card_join_nothing() -> None:
    """Streams that contradict each other name no card."""
    facts = (CARD, *TILES, {"hw.id": TILE0, "hw.parent": "X2"})
    sink = Sink()
    join = processor(sink)
    held = {"card0": [pod("a")]}
    feed(join, described(at(0), *facts[:3]), described(at(0), facts[3], stream="other"))
    feed(join, holders(at(1), held), activity(at(5), device=TILE0), holders(at(11), held))
    assert sink.owner_of_last() == ""


def test_a_mig_instance_is_not_held_with_its_gpu() -> None:
    """A GPU in MIG mode can't be held whole."""
    gpu = "GPU-00000000-0000-0000-0000-000000000001"
    facts = ({"hw.id": gpu}, {"hw.id": "MIG-1", "hw.parent": gpu}, {"hw.id": f"{gpu}/gi3", "hw.parent": gpu})
    for device in ("MIG-1", f"{gpu}/gi3"):
        assert owner({gpu: [pod("a")]}, device, *facts) == ""


def test_a_page_that_names_the_tile_goes_before_the_cards_owner() -> None:
    """A source names the part itself; while it does not, the card's owner has it."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 140, 10):
        told = {TILE0: ["b"]} if 30 <= second < 80 else {}
        feed(join, holders(at(second), {"card0": [pod("a")]}))
        feed(join, page(at(second + 1), told, devices=[CARD, *TILES], window_s=10))
    found = {when: name for name, device, _, when in sink.points("gpu.sm.active") if device == TILE0}
    assert [found[second] for second in (11, 31, 51, 61, 81, 111)] == ["a", "", "b", "b", "", "a"]
    assert sink.reasons()["a", TILE0] == ("pod_resources", "")


def test_what_a_page_says_of_the_card_holds_for_its_tiles() -> None:
    """The page stands in for the card, and so for its parts; one that names a tile hands the card out in parts."""
    sink = Sink()
    join = processor(sink)
    for second in range(0, 140, 10):
        told = {"X1": ["a"]} if second < 70 else {"X1": ["a"], TILE1: ["b"]}
        feed(join, holders(at(second), {"card5": []}))
        feed(join, page(at(second + 1), told, devices=[{"hw.id": "X1"}, *TILES]))
    found = {when: name for name, device, _, when in sink.points("gpu.sm.active") if device == TILE0}
    assert found[51] == "a"
    assert found[111] == ""


def test_the_report_tells_how_each_part_was_found() -> None:
    """The card and its tiles under the card's owner, with the parent; a card of which parts are held has no row."""
    sink = Sink()
    join = processor(sink)
    feed(join, described(at(0), CARD, *TILES), holders(at(1), {"card0": [pod("a")]}), holders(at(15), {}))
    feed(join, holders(at(16), {"card0": [pod("a")]}), holders(at(31), {"card0": [pod("a")]}))
    assert {key: told[0] for key, told in sink.reasons().items()} == {
        ("a", each): "pod_resources" for each in ("X1", TILE0, TILE1)
    }
    feed(join, holders(at(41), {TILE0: [pod("a")]}), holders(at(61), {TILE0: [pod("a")]}))
    assert set(sink.reasons()) == {("a", TILE0), ("", TILE1)}
    newest = next(batch for batch in reversed(sink.batches) if batch.stream == "attribution")
    assert {series.text("hw.parent") for _, _, series in newest.layout.identities()} == {"X1"}


def test_a_reading_keeps_the_parent_that_its_receiver_gave_it() -> None:
    """Whether the device is described or not, of work and of the device, owned or not."""
    told = {"hw.id": TILE0, "hw.parent": "X1"}
    for facts in ((), (CARD, *TILES)):
        sink = Sink()
        join = processor(sink)
        rows: list[Row] = [
            (NODE, "gpu.sm.active", told, 0.5),
            (NODE, "hw.temperature", {**told, "hw.sensor_location": "gpu"}, 50.0),
        ]
        feed(join, described(at(0), *facts), holders(at(1), {"card0": [pod("a")]}))
        feed(join, message("prometheus", at(5), rows), holders(at(11), {"card0": [pod("a")]}))
        found: list[Series] = [
            series
            for batch in sink.batches
            for _, _, series in batch.layout.identities()
            if series.metric.name in ("gpu.sm.active", "hw.temperature")
        ]
        assert [series.text("hw.parent") for series in found] == ["X1", "X1"]
