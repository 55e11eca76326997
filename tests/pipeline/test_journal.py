"""Component logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gpulens.pipeline.journal import ROOT, ComponentLog, configure


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Puts the process' logging back as it was."""
    logger = logging.getLogger(ROOT)
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate, level = before
    logger.setLevel(level)


def lines(level: str, encoding: str, log: ComponentLog) -> list[str]:
    """What one event of each level writes."""
    out = io.StringIO()
    configure(level, encoding, out)
    for write in (log.debug, log.info, log.warning, log.error):
        write(f"{write.__name__} happened.", count=3, text="a b", none=None)
    return out.getvalue().splitlines()


def test_console_lines_carry_component_and_fields() -> None:
    """Level, event, the component's kind and id, then key=value, quoted where needed."""
    (line,) = lines("error", "console", ComponentLog("receivers", "dcgm/a"))
    assert line.split("\t")[1:] == [
        "error",
        "error happened.",
        "otelcol.component.kind=receivers",
        "otelcol.component.id=dcgm/a",
        "count=3",
        'text="a b"',
        "none=None",
    ]


def test_json_lines_carry_the_same() -> None:
    """One object a line, fields with their types."""
    (line,) = lines("error", "json", ComponentLog("receivers", "dcgm/a"))
    found = json.loads(line)
    assert found.pop("ts")
    assert found == {
        "level": "error",
        "msg": "error happened.",
        "otelcol.component.kind": "receivers",
        "otelcol.component.id": "dcgm/a",
        "count": 3,
        "text": "a b",
        "none": None,
    }


@pytest.mark.parametrize(
    ("level", "count"), [("debug", 4), ("info", 3), ("warn", 2), ("WARN", 2), ("error", 1), ("ERROR", 1)]
)
def test_levels_have_the_collectors_names(level: str, count: int) -> None:
    """What is below the level is not written."""
    assert len(lines(level, "console", ComponentLog())) == count


def test_the_service_itself_has_no_component() -> None:
    """Without an id there are no component fields."""
    assert "otelcol" not in "".join(lines("debug", "console", ComponentLog()))


def test_configuring_again_replaces_the_first() -> None:
    """A second configuration writes once, to the new place."""
    first = io.StringIO()
    configure("info", "console", first)
    assert len(lines("info", "console", ComponentLog())) == 3
    assert first.getvalue() == ""


def test_a_value_can_not_forge_a_line() -> None:
    """Line breaks, tabs and terminal controls in a value are quoted; a field may be called `event`."""
    out = io.StringIO()
    configure("info", "console", out)
    ComponentLog().info("Read.", text="a\r\nfake\terror\x1b[2J", empty="", event="e")
    (line,) = out.getvalue().split("\n")[:-1]
    assert line.endswith('\tRead.\ttext="a\\r\\nfake\\terror\\u001b[2J"\tempty=""\tevent=e')
