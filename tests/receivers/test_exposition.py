"""The page parser: what it reads, what it survives, and that it does the work for one page layout once."""

from __future__ import annotations

import math
import random

import pytest

from gpulens.pipeline.exposition import REASONS, Family, PageParser
from gpulens.pipeline.exposition_line import SampleKey


def page(*lines: str, end: str = "\n") -> bytes:
    """A page of these lines."""
    return ("\n".join(lines) + end).encode()


def read(*lines: str) -> dict[str, float]:
    """The values of a page by metric name."""
    parsed = PageParser().parse(page(*lines))
    return {key.name: value for key, value in zip(parsed.layout.samples, parsed.values, strict=True)}


def test_reads_names_labels_values_and_families() -> None:
    """A sample has its name, its labels in the page's order, its text and its number; families keep type and help."""
    parsed = PageParser().parse(
        page("# HELP power Draw (in W).", "# TYPE power gauge", 'power{gpu="0",UUID="GPU-a"} 71.500000', "up 1")
    )
    assert parsed.layout.samples == (
        SampleKey("power", (("gpu", "0"), ("UUID", "GPU-a"))),
        SampleKey("up", ()),
    )
    assert list(parsed.tokens) == ["71.500000", "1"]
    assert parsed.values == [71.5, 1.0]
    assert parsed.layout.families == {"power": Family("gauge", "Draw (in W).")}
    assert parsed.errors == {}


def test_the_same_layout_object_comes_back_while_only_values_change() -> None:
    """Identity is worked out once: a page with new numbers has the very same layout."""
    parser = PageParser()
    first = parser.parse(page("# TYPE a gauge", 'a{x="1"} 1', 'a{x="2"} 2'))
    second = parser.parse(page("# TYPE a gauge", 'a{x="1"} 10', 'a{x="2"} 20.5'))
    assert second.layout is first.layout
    assert second.values == [10.0, 20.5]


def test_another_order_of_the_same_lines_is_the_same_layout() -> None:
    """Entity groups come in random order: values follow their series, and the layout object stays."""
    parser = PageParser()
    lines = [f'm{{i="{i}"}}' for i in range(50)]
    first = parser.parse(page(*(f"{line} {i}" for i, line in enumerate(lines))))
    numbered = list(enumerate(lines))
    for seed in range(6):
        random.Random(seed).shuffle(numbered)
        again = parser.parse(page(*(f"{line} {i}" for i, line in numbered)))
        assert again.layout is first.layout
        assert again.values == first.values


def test_a_page_that_flaps_between_two_layouts_makes_two_layouts() -> None:
    """A series that comes and goes costs no new layout each time."""
    parser = PageParser()
    with_b, without_b = page("a 1", "b 2"), page("a 1")
    layouts = {id(parser.parse(data).layout) for data in (with_b, without_b, with_b, without_b, with_b)}
    assert len(layouts) == 2


def test_equal_lines_stay_two_samples() -> None:
    """A series that stands twice on the page stands twice in the layout, in the page's order."""
    parser = PageParser()
    first = parser.parse(page('a{x="1"} 1', 'a{x="1"} 2', "b 3"))
    second = parser.parse(page("b 3", 'a{x="1"} 1', 'a{x="1"} 2'))
    assert first.values == [1.0, 2.0, 3.0]
    assert second.layout is first.layout
    assert second.values == [1.0, 2.0, 3.0]


def test_int64_tokens_are_kept_exactly() -> None:
    """What a double can't hold is still in the token."""
    parsed = PageParser().parse(page("energy 9223372036854775794"))
    assert parsed.tokens[0] == "9223372036854775794"
    assert parsed.values[0] == 2.0**63


@pytest.mark.parametrize(
    ("token", "value"),
    [("+Inf", math.inf), ("-Inf", -math.inf), ("inf", math.inf), ("1e3", 1000.0), (".5", 0.5), ("-0", 0.0)],
)
def test_reads_the_spellings_of_numbers(token: str, value: float) -> None:
    """Infinity, exponents and bare fractions are numbers."""
    assert read(f"a {token}") == {"a": value}


def test_nan_is_a_number_and_no_error() -> None:
    """NaN is what the page says, not a failure to read it."""
    parsed = PageParser().parse(page("a NaN", "b 1"))
    assert math.isnan(parsed.values[0])
    assert parsed.errors == {}


@pytest.mark.parametrize(
    "token", ["ERROR - FAILED TO CONVERT TO STRING", "1_000", "١٢", "0x10", "", "9" * 100, "1 2 3"]
)
def test_text_as_a_value_keeps_its_slot_and_is_counted(token: str) -> None:
    """A value that is no number leaves NaN in its place and harms no other sample, on a warm page as on a cold one."""
    parser = PageParser()
    for other in ("5", "6"):
        parsed = parser.parse(page(f'a{{x="1"}} {token}', f"b {other}"))
        kept = {key.name: value for key, value in zip(parsed.layout.samples, parsed.values, strict=True)}
        assert kept["b"] == float(other)
        if token:
            assert math.isnan(kept["a"])
            assert parsed.errors == {"bad_value": 1}
        else:
            assert parsed.errors == {"no_value": 1}


def test_a_value_that_turns_to_text_keeps_the_layout() -> None:
    """Number, text, number: one layout, and the number is back when the page has it back."""
    parser = PageParser()
    pages = [parser.parse(page(f'a{{x="1"}} {token}', "b 1")) for token in ("1", "oops", "3")]
    assert pages[0].layout is pages[1].layout is pages[2].layout
    assert math.isnan(pages[1].values[0])
    assert pages[2].values == [3.0, 1.0]
    assert pages[2].errors == {}


@pytest.mark.parametrize(
    ("block", "labels"),
    [
        ('gpu="0", UUID="GPU-a"', (("gpu", "0"), ("UUID", "GPU-a"))),
        ('a="1",', (("a", "1"),)),
        ('a = "1" , b = "2"', (("a", "1"), ("b", "2"))),
        ('a="x}y"', (("a", "x}y"),)),
        ('a="x} 3"', (("a", "x} 3"),)),
        (r'a="q\"q\\n\n"', (("a", 'q"q\\n\n'),)),
        ('note="quote " inside"', (("note", 'quote " inside'),)),
        ('note="a " b",pod="p"', (("note", 'a " b'), ("pod", "p"))),
        (r'path="C:\dir"', (("path", r"C:\dir"),)),
        (r'path="C:\",pod="p"', (("path", "C:\\"), ("pod", "p"))),
        ('m="bad "{x}" end",pod="p"', (("m", 'bad "{x}" end'), ("pod", "p"))),
        ('a=""', (("a", ""),)),
        ("", ()),
    ],
)
def test_reads_label_blocks(block: str, labels: tuple[tuple[str, str], ...]) -> None:
    """Escaped, raw and oddly spaced label values are read as what they must mean."""
    parsed = PageParser().parse(page(f"a{{{block}}} 5"))
    assert parsed.layout.samples == (SampleKey("a", labels),)
    assert parsed.values == [5.0]
    assert parsed.errors == {}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('a{pod="trunc', "bad_labels"),
        ("a{pod=unquoted} 1", "bad_labels"),
        ("a{,} 1", "bad_labels"),
        ('{a="b"} 1', "bad_name"),
        ("9lives 1", "bad_name"),
        ("a-b 1", "bad_name"),
        ("lonely", "no_value"),
        ('lonely{a="b"}', "no_value"),
        ('lonely{a="b"} ', "no_value"),
    ],
)
def test_a_broken_line_is_counted_and_harms_no_other(line: str, reason: str) -> None:
    """One line that can't be read is counted by its reason, with an example, and its neighbours are kept."""
    parsed = PageParser().parse(page("before 1", line, "after 2"))
    assert [key.name for key in parsed.layout.samples] == ["before", "after"]
    assert parsed.errors == {reason: 1}
    assert parsed.examples[0].line == 2
    assert parsed.examples[0].reason == reason
    assert reason in REASONS


def test_a_last_line_without_line_feed_is_not_trusted() -> None:
    """A page that was cut within a number must not leave a wrong number."""
    parsed = PageParser().parse(page("a 1", "b 10", end=""))
    assert [key.name for key in parsed.layout.samples] == ["a"]
    assert parsed.errors == {"truncated": 1}


def test_timestamps_are_read_and_leave_the_layout_alone() -> None:
    """A time behind the value is kept in ms, and a page whose times move on is still the same layout."""
    parser = PageParser()
    first = parser.parse(page('a{x="1"} 1 1700000000000', "b 2"))
    second = parser.parse(page('a{x="1"} 3 1700000015000', "b 2"))
    assert (first.times_ms, second.times_ms) == ({0: 1700000000000}, {0: 1700000015000})
    assert second.values == [3.0, 2.0]
    assert second.layout is first.layout


def test_openmetrics_pages_are_read() -> None:
    """Seconds with a fraction, exemplars, units and the end mark are OpenMetrics' and are understood."""
    parsed = PageParser().parse(
        page(
            "# TYPE io counter",
            "# UNIT io bytes",
            'io_total{a="b"} 5 1700000000.250 # {trace="x"} 0.67 1700000000.1',
            'io_total{a="c"} 6 # {trace="y"} 9',
            "# EOF",
            "late 1",
        )
    )
    assert parsed.values == [5.0, 6.0]
    assert parsed.times_ms == {0: 1700000000250}
    assert parsed.layout.families["io"] == Family("counter", "", "bytes")
    assert parsed.errors == {"after_eof": 1}


def test_line_ends_marks_and_blanks_do_not_matter() -> None:
    """CRLF, a byte order mark, tabs, blank lines, indents and free comments change nothing."""
    data = b'\xef\xbb\xbfa{x="1"} 1\r\n\r\n  \n#comment\n  # another\n\tb\t2\n  c{y="2"}\t 3 \n'
    parsed = PageParser().parse(data)
    assert {key.name: value for key, value in zip(parsed.layout.samples, parsed.values, strict=True)} == {
        "a": 1.0,
        "b": 2.0,
        "c": 3.0,
    }
    assert parsed.errors == {}


def test_invalid_utf8_is_kept_and_counted() -> None:
    """A label in another encoding costs its characters, not its sample."""
    parser = PageParser()
    for _ in range(2):
        parsed = parser.parse(b'a{x="\xff\xfe"} 1\nb 2\n')
        assert parsed.values == [1.0, 2.0]
        assert parsed.errors == {"invalid_utf8": 1}


def test_a_label_that_stands_twice_counts_with_its_last_value() -> None:
    """The exporter prints pod labels before its own, so the last one is its own."""
    parser = PageParser()
    for value in ("1", "2"):
        parsed = parser.parse(page(f'a{{pod="label",pod="real"}} {value}', "b 1"))
        assert parsed.layout.samples[0].labels == (("pod", "real"),)
        assert parsed.errors == {"duplicate_label": 1}


def test_too_many_series_are_counted_and_the_first_are_kept() -> None:
    """Over the limit nothing more is kept, and the page says how much it was."""
    parsed = PageParser(max_series=3).parse(page(*(f'a{{i="{i}"}} {i}' for i in range(10))))
    assert parsed.values == [0.0, 1.0, 2.0]
    assert parsed.errors == {"too_many_series": 7}


def test_an_endless_line_is_counted_and_the_rest_is_kept() -> None:
    """A line over the limit is dropped whole, wherever it stands."""
    parser = PageParser(max_line=1000)
    parsed = parser.parse(page("a 1", "x" * 5000, 'b{y="' + "z" * 5000 + '"} 2', "c 3"))
    assert parsed.values == [1.0, 3.0]
    assert parsed.errors == {"line_too_long": 2}
    assert all(len(example.text) <= 120 for example in parsed.examples)


def test_a_known_line_that_grows_an_endless_number_is_counted() -> None:
    """The warm path has the same limits as the cold one."""
    parser = PageParser()
    parser.parse(page("a 1", "b 2"))
    parsed = parser.parse(page("a " + "1" * 100_000, "b 2"))
    assert math.isnan(parsed.values[0])
    assert parsed.values[1] == 2.0
    assert parsed.errors == {"bad_value": 1}


def test_a_new_help_text_is_a_new_layout() -> None:
    """What a family says of itself is part of the layout."""
    parser = PageParser()
    first = parser.parse(page("# HELP a one", "a 1"))
    second = parser.parse(page("# HELP a two", "a 1"))
    assert second.layout is not first.layout
    assert second.layout.families["a"].help == "two"


def test_families_may_be_repeated_and_come_late() -> None:
    """The exporter repeats HELP and TYPE for each entity group."""
    parsed = PageParser().parse(
        page("# TYPE a gauge", "a 1", "# TYPE b counter", "b 1", "# TYPE a gauge", 'a{x="1"} 2')
    )
    assert parsed.layout.families["a"].type == "gauge"
    assert parsed.values == [1.0, 1.0, 2.0]


def test_an_empty_page_is_a_page() -> None:
    """No bytes, no samples, no errors."""
    parsed = PageParser().parse(b"")
    assert (len(parsed.layout), list(parsed.tokens), parsed.values, parsed.errors) == (0, [], [], {})


def test_memory_is_bounded_while_pages_change() -> None:
    """A page that names other series each time leaves no more behind than the last few pages."""
    parser = PageParser(max_series=100)
    for round_ in range(50):
        parser.parse(page(*(f'a{{i="{round_}-{i}"}} 1' for i in range(100))))
    assert len(parser._known) + len(parser._older) <= 200
    assert len(parser._arrangements) <= 4


def test_a_very_large_page_is_read_and_not_remembered() -> None:
    """What is too large to keep is still read."""
    parser = PageParser()
    filler = "# " + "x" * 60_000
    parsed = parser.parse(page("a 1", *[filler] * 150))
    assert parsed.values == [1.0]
    assert not parser._arrangements
