"""Arbitrary batches for the OTLP tests."""

from __future__ import annotations

import math
from array import array

from hypothesis import strategies as st

from gpulens.pipeline.data import (
    AttributeValue,
    Batch,
    Block,
    KeyValues,
    Kind,
    Layout,
    Metric,
    Resource,
    Scope,
    Series,
    Temporality,
    Times,
    attributes,
)

_KEYS = st.sampled_from(["hw.id", "gpu", "k8s.pod.name", "ä", ""])
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TIME = st.integers(0, 2**64 - 1)
_SCALARS: st.SearchStrategy[AttributeValue] = st.one_of(
    st.text(max_size=8), st.booleans(), _INT64, st.floats(), st.binary(max_size=4), st.none()
)


def _nest(inner: st.SearchStrategy[AttributeValue]) -> st.SearchStrategy[AttributeValue]:
    lists: st.SearchStrategy[AttributeValue] = st.lists(inner, max_size=2).map(tuple)
    maps: st.SearchStrategy[AttributeValue] = st.dictionaries(_KEYS, inner, max_size=2).map(
        lambda pairs: KeyValues(attributes(pairs))
    )
    return st.one_of(lists, maps)


_VALUES = st.recursive(_SCALARS, _nest, max_leaves=3)
_ATTRIBUTES = st.dictionaries(_KEYS, _VALUES, max_size=3)
_URLS = st.sampled_from(["", "https://example.com/1"])
_METRICS = st.builds(
    Metric,
    name=st.sampled_from(["hw.power", "hw.energy", "x" * 130]),
    unit=st.sampled_from(["", "W"]),
    description=st.sampled_from(["", "d" * 200]),
    kind=st.sampled_from(Kind),
    temporality=st.sampled_from(Temporality),
    monotonic=st.booleans(),
    is_int=st.booleans(),
).map(lambda m: m if m.kind is Kind.SUM else Metric(m.name, m.unit, m.description, is_int=m.is_int))
_SERIES = st.builds(Series, _METRICS, _ATTRIBUTES)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of up to three blocks; the last attribute keeps the series of two blocks apart."""
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        series = draw(st.lists(_SERIES, min_size=1, max_size=6, unique=True))
        resource = Resource({**draw(_ATTRIBUTES), "block": number}, draw(_URLS))
        scope = Scope(draw(st.sampled_from(["", "gpulens"])), draw(st.text(max_size=2)), draw(_ATTRIBUTES), draw(_URLS))
        blocks.append(Block(resource, scope, series))
    return Layout(blocks)


@st.composite
def batches(draw: st.DrawFn, layout: Layout | None = None) -> Batch:
    """Batches with any numbers, times, starts and absences."""
    layout = draw(layouts()) if layout is None else layout
    readings = [
        draw(st.one_of(st.none(), _INT64 if is_int else st.floats(), _INT64 if is_int else st.floats()))
        for is_int in layout.is_int
    ]
    return Batch.of(layout, readings, draw(_columns(layout)), "dcgm/fast", draw(st.booleans()), draw(_columns(layout)))


def _columns(layout: Layout) -> st.SearchStrategy[Times]:
    several: st.SearchStrategy[Times] = st.lists(
        st.one_of(st.just(0), _TIME), min_size=layout.size, max_size=layout.size
    ).map(lambda times: array("Q", times))
    return st.one_of(st.just(0), _TIME, several)


def same_batch(a: Batch, b: Batch) -> bool:
    """The same readings, bit by bit, with the same identity and times (one time for all or the same for each)."""
    return (
        a.layout == b.layout
        and all(_same(x, y) for x, y in zip(a.readings(), b.readings(), strict=True))
        and list(a.times()) == list(b.times())
        and list(a.starts()) == list(b.starts())
        and a.opaque == b.opaque
    )


def _same(a: float | None, b: float | None) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b
