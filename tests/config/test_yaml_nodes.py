"""The YAML reader: positions, the core schema, bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulens.config.nodes import Entry, ListNode, MapNode, Node, Position, Scalar, ScalarValue
from gpulens.config.yaml_nodes import MAX_DEPTH, in_file, parse, resolve_plain
from gpulens.pipeline.errors import Problem


def _read(text: str) -> Node:
    node, problems = parse(text, in_file("c.yaml"))
    assert node is not None
    assert problems == []
    return node


def _entry(node: Node, *path: str) -> Entry:
    assert isinstance(node, MapNode)
    entry = node.entries[path[0]]
    return _entry(entry.node, *path[1:]) if path[1:] else entry


def _value(node: Node, *path: str) -> ScalarValue:
    scalar = _entry(node, *path).node
    assert isinstance(scalar, Scalar)
    return scalar.value


def _problem(text: str) -> Problem:
    problems = parse(text, in_file("c.yaml"))[1]
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("0b1", "0b1"),
        ("012", 12),
        ("-7", -7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.INF", -math.inf),
        ("~", None),
        ("", None),
        ("NULL", None),
        ("True", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("+", "+"),
        ("٣", "٣"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: ScalarValue) -> None:
    """What YAML 1.1 readers turn into booleans, octals or minutes stays what it looks like."""
    found = resolve_plain(text)
    assert (found, type(found)) == (value, type(value))


def test_a_number_with_leading_zeros_keeps_its_text() -> None:
    """`012` is twelve where a number is wanted and "012" where a text is."""
    scalar = _entry(_read("a: 012"), "a").node
    assert isinstance(scalar, Scalar)
    assert (scalar.value, scalar.original) == (12, "012")
    plain = _entry(_read("a: 12"), "a").node
    assert isinstance(plain, Scalar)
    assert plain.original is None


def test_quotes_make_a_text() -> None:
    """Quoted numbers and booleans are texts; explicit core tags are honoured."""
    node = _read("a: '5'\nb: \"true\"\nc: !!str 5\nd: !!float 5\ne: ! 5\nf: |\n  null\n")
    assert [_value(node, key) for key in "abcdef"] == ["5", "true", "5", 5.0, "5", "null\n"]


def test_keys_and_values_know_their_place() -> None:
    """Lines and columns count from 1, for keys, values, list items and flow style alike."""
    node = _read("a:\n  b: x\n  c: [1, {d: y}]\n")
    assert _entry(node, "a").key_at == Position("c.yaml", 1, 1)
    assert _entry(node, "a", "b").key_at == Position("c.yaml", 2, 3)
    assert _entry(node, "a", "b").node.at == Position("c.yaml", 2, 6)
    items = _entry(node, "a", "c").node
    assert isinstance(items, ListNode)
    assert _entry(items.items[1], "d").node.at == Position("c.yaml", 3, 14)


def test_merge_keys_give_way_to_written_keys_and_to_earlier_maps() -> None:
    """`<<` takes a map or a list of maps."""
    node = _read("x: &x {a: 1, b: 1, c: 1}\ny: &y {b: 2, d: 2}\nz: {<<: [*x, *y], a: 9}\n")
    assert [_value(node, "z", key) for key in "abcd"] == [9, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", (3, 1), 'mapping key "a" already defined at line 1'),
        ("a:\n\tb: 1\n", (2, 1), "a tab can't indent YAML; use spaces"),
        ("a: 'open\nb: 1\n", (1, 4), "found unexpected end of stream"),
        ("a: [1, 2\n", (2, 1), "not YAML"),
        ("a: b: c\n", (1, 5), "mapping values are not allowed"),
        ("a: \x00\n", (1, 4), "the character U+0000 is not allowed"),
        ('a: "\\U00110000"\n', (1, 1), "an escape sequence names no character"),
        ('a: "\\ud800"\n', (1, 4), "half a character"),
        ("a: 1\n---\nb: 1\n", (2, 1), "second YAML document"),
        ("a: *gone\n", (1, 4), 'the anchor "gone" is not defined before this alias'),
        ("a: &a [*a]\n", (1, 8), 'the anchor "a" is not defined before this alias'),
        ("a: !secret x\n", (1, 4), "the YAML tag !secret is not supported"),
        ("a: !!int x\n", (1, 4), "does not fit the value"),
        ("? [a]\n: 1\n", (1, 3), "a map key must be a name"),
        ("<<: 5\n", (1, 5), "map merge requires map or sequence of maps as the value"),
    ],
)
def test_what_is_no_yaml_is_a_problem_with_a_place(text: str, where: tuple[int, int], words: str) -> None:
    """Bad text gives one problem that points at it."""
    problem = _problem(text)
    assert words in problem.message
    if where != (1, 1):
        assert (problem.line, problem.column) == where


def test_nesting_is_bounded() -> None:
    """Deep text, plain or by aliases, is a problem and not a RecursionError."""
    assert f"more than {MAX_DEPTH} levels" in _problem("[" * 5000).message
    chain = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200))
    assert all("levels deep" in each.message for each in parse(chain, in_file("c.yaml"))[1])


def test_an_alias_bomb_is_refused() -> None:
    """Aliases that would multiply to millions of values are refused without building them."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "aliases followed" in _problem(bomb).message


def test_large_text_is_refused() -> None:
    """A source beyond the cap is refused at once."""
    assert "is larger than 1024 KiB" in _problem("a" * (1024 * 1024 + 1)).message


@given(st.text(alphabet=st.sampled_from("ab:,[]{}&*!|>'\"%@`#-?\\ \n\t0.<~$u\x00\x85é")) | st.text())
def test_any_text_gives_a_tree_or_problems(text: str) -> None:
    """The reader never raises, and always says something about text it can't read."""
    node, problems = parse(text, in_file("c.yaml"))
    assert node is not None or problems
