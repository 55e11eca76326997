"""The page parser against generated pages: what is written comes back, and nothing makes it raise."""

from __future__ import annotations

import math
import string

from hypothesis import given
from hypothesis import strategies as st

from gpulens.pipeline.exposition import REASONS, Page, PageParser

Sample = tuple[str, dict[str, str], str]

names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,20}", fullmatch=True)
label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,12}", fullmatch=True)
label_values = st.text(st.characters(codec="utf-8", exclude_characters="\r\ufffd"), max_size=30)
numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True).map(repr), st.integers(-(2**63), 2**63 - 1).map(str))
samples = st.tuples(names, st.dictionaries(label_names, label_values, max_size=5), numbers)
pages = st.lists(samples, max_size=30)


def escape(text: str) -> str:
    """A label value as it stands between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def render(page: list[Sample]) -> bytes:
    """The page as a well-behaved exporter prints it."""
    lines = []
    for name, labels, number in page:
        block = ",".join(f'{key}="{escape(value)}"' for key, value in labels.items())
        lines.append(f"{name}{{{block}}} {number}\n" if labels else f"{name} {number}\n")
    return "".join(lines).encode()


def same(a: float, b: float) -> bool:
    """Equal, NaN included."""
    return a == b or (math.isnan(a) and math.isnan(b))


@given(pages)
def test_what_is_rendered_comes_back(page: list[Sample]) -> None:
    """parse(render(page)) is the page: names, labels in order, texts and numbers."""
    parsed = PageParser().parse(render(page))
    assert parsed.errors == {}
    assert [key.name for key in parsed.layout.samples] == [name for name, _, _ in page]
    assert [dict(key.labels) for key in parsed.layout.samples] == [labels for _, labels, _ in page]
    assert list(parsed.tokens) == [number for _, _, number in page]
    assert all(same(value, float(number)) for value, (_, _, number) in zip(parsed.values, page, strict=True))


@given(pages, st.data())
def test_a_warm_parser_reads_what_a_cold_one_reads(page: list[Sample], data: st.DataObject) -> None:
    """Whatever a parser saw before, a page reads the same."""
    warm = PageParser()
    warm.parse(render(page))
    changed = [(name, labels, data.draw(numbers)) for name, labels, _ in page]
    order = data.draw(st.permutations(changed))
    for later in (changed, order):
        body = render(later)
        found, expected = warm.parse(body), PageParser().parse(body)
        assert found.errors == expected.errors
        assert sorted(pairs(found)) == sorted(pairs(expected))


def pairs(page: Page) -> list[str]:
    """Each sample with its token, as text."""
    return [f"{key} {token}" for key, token in zip(page.layout.samples, page.tokens, strict=True)]


@given(pages, st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 6)), max_size=12))
def test_mutated_pages_never_raise_and_every_line_is_accounted_for(
    page: list[Sample], mutations: list[tuple[int, bytes, int]]
) -> None:
    """Bytes overwritten, inserted and cut out: the parser reads on, before and after, cold and warm."""
    parser = PageParser(max_series=20, max_line=200)
    parser.parse(render(page))
    body = bytearray(render(page))
    for position, replacement, cut in mutations:
        at = position % (len(body) + 1)
        body[at : at + cut] = replacement
    for _ in range(2):
        parsed = parser.parse(bytes(body))
        assert len(parsed.layout) == len(parsed.tokens) == len(parsed.values) <= 20
        assert parsed.errors.keys() <= REASONS.keys()
        assert len(parsed.examples) <= 5


@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_raise(body: bytes) -> None:
    """Not even a page's first byte has to make sense."""
    parsed = PageParser().parse(body)
    assert len(parsed.layout) == len(parsed.values)


@given(st.text(alphabet=string.printable + '{}",=\\#', max_size=200), numbers)
def test_one_line_never_harms_its_neighbours(line: str, number: str) -> None:
    """Whatever stands between them, the line before and the line after are read."""
    body = f'before{{a="b"}} {number}\n{line}\nafter {number}\n'.encode()
    parsed = PageParser().parse(body)
    found = {key.name for key in parsed.layout.samples}
    assert "before" in found
    assert "after" in found or "after_eof" in parsed.errors
