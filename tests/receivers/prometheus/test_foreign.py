"""Pages without a mapping: samples under their own names, counters with starts, few knobs."""

from __future__ import annotations

import math

import pytest

from gpulens.pipeline.data import Kind, Temporality
from gpulens.pipeline.errors import ScrapeError
from tests.receivers.prometheus.kit import NODE, START_NS, Page, S, points

PAGE = """\
# HELP requests_total Requests answered.
# TYPE requests_total counter
requests_total{code="200",instance="a"} 5
# TYPE queue gauge
queue 3.5
plain{x="",y="1"} 7
# TYPE latency histogram
latency_bucket{le="1"} 2
latency_bucket{le="+Inf"} 3
latency_sum 4.5
latency_count 3
# TYPE size summary
size{quantile="0.5"} NaN
size_sum 0
size_count 0
"""


def test_samples_pass_under_their_own_names() -> None:
    """On the node's resource, labels as attributes, a blank label as none, histogram parts as they stand."""
    scraped = Page().read(PAGE)
    assert points(scraped, NODE) == {
        ("", "requests_total", "code=200", "instance=a"): 5.0,
        ("", "queue"): 3.5,
        ("", "plain", "y=1"): 7.0,
        ("", "latency_bucket", "le=1"): 2.0,
        ("", "latency_bucket", "le=+Inf"): 3.0,
        ("", "latency_sum"): 4.5,
        ("", "latency_count"): 3.0,
        ("", "size_sum"): 0.0,
        ("", "size_count"): 0.0,
    }
    assert scraped.rejected == {}, "a quantile of nothing is no fault"
    metrics = {series.metric.name: series.metric for _, _, series in scraped.batch.layout.identities()}
    counter = metrics["requests_total"]
    assert (counter.kind, counter.temporality, counter.monotonic) == (Kind.SUM, Temporality.CUMULATIVE, True)
    assert counter.description == "Requests answered."
    assert {name for name, metric in metrics.items() if metric.kind is Kind.SUM} == {"requests_total"}


def test_openmetrics_names_a_counters_family_without_its_ending() -> None:
    """`# TYPE requests counter` is about `requests_total`; `_created` is a time, and a unit is a unit."""
    text = "# TYPE a_seconds counter\n# UNIT a_seconds seconds\na_seconds_total 1\na_seconds_created 1.7e9\n# EOF\n"
    layout = Page().read(text).batch.layout
    metrics = {series.metric.name: series.metric for _, _, series in layout.identities()}
    assert metrics["a_seconds_total"].is_counter
    assert metrics["a_seconds_total"].unit == "s"
    assert metrics["a_seconds_created"].kind is Kind.GAUGE


def test_a_counter_starts_at_its_first_sight_and_anew_after_a_reset() -> None:
    """The start is kept while the total grows; a fall is a reset with a start after the last point."""
    page = Page()
    text = "# TYPE c counter\nc {}\ng 1\n"
    batches = [page.read(text.format(value)).batch for value in (10, 14, 3)]
    starts = [batch.starts()[0] for batch in batches]
    ends = [batch.times()[0] for batch in batches]
    assert [batch.numbers()[0] for batch in batches] == [10.0, 14.0, 3.0]
    assert starts[0] == starts[1] == ends[0]
    assert ends[1] < starts[2] < ends[2]


def test_infinity_passes_but_not_in_a_counter() -> None:
    """A gauge may be infinite; an infinite total would stay infinite."""
    scraped = Page().read("# TYPE c counter\nc +Inf\ng -Inf\n")
    assert points(scraped) == {("", "g"): -math.inf, ("", "c"): None}


def test_keep_and_drop_choose_metrics() -> None:
    """`drop` takes from what `keep` lets through; what is left out is counted."""
    page = Page(keep=["latency_*", "queue"], drop=["*_bucket"])
    assert set(points(page.read(PAGE))) == {("", "queue"), ("", "latency_sum"), ("", "latency_count")}
    assert page.unmapped == 7


def test_labels_can_be_left_off_and_the_first_of_what_then_is_the_same_counts() -> None:
    """Nothing is added up behind the user's back."""
    scraped = Page(labels_drop=["pod", "in*"]).read('a{pod="x",z="1"} 1\na{instance="y",z="1"} 2\na{z="2"} 3\n')
    assert points(scraped) == {("", "a", "z=1"): 1.0, ("", "a", "z=2"): 3.0}
    assert scraped.rejected == {"duplicate": 1}


def test_the_layout_is_steady_and_an_absent_sample_leaves_late() -> None:
    """The same object tick after tick; a sample that is missing once is absent, not gone."""
    page = Page()
    first, second = page.read("a 1\nb 2\n"), page.read("b 4\na 3\n")
    assert first.batch.layout is second.batch.layout
    third = page.read("a 5\n")
    assert points(third) == {("", "a"): 5.0, ("", "b"): None}
    for _ in range(10):
        third = page.read("a 5\n")
    assert points(third) == {("", "a"): 5.0}


def test_a_samples_own_time_counts_within_five_minutes() -> None:
    """Older or from ahead of the clock it is struck out; `honor_timestamps: false` takes the scrape's time."""
    now_ms = START_NS // 10**6 + 15_000
    text = f"a 1 {now_ms - 20_000}\nb 2\nold 3 {now_ms - 400_000}\nahead 4 {now_ms + 120_000}\nzero 5 -5\n"
    scraped = Page().read(text)
    times = dict(
        zip((s.metric.name for _, _, s in scraped.batch.layout.identities()), scraped.batch.times(), strict=True)
    )
    assert times == {"a": START_NS - 5 * S, "b": START_NS + 15 * S}
    assert scraped.rejected == {"bad_time": 3}
    taken = Page(honor_timestamps=False).read(text)
    assert set(taken.batch.times()) == {START_NS + 15 * S}
    assert len(taken.batch.layout) == 5


def test_a_counter_whose_time_stands_still_stays_as_it_was() -> None:
    """An exporter that renews a value every minute is scraped more often: the point is told again, not dropped."""
    page = Page()
    stamp = START_NS // 10**6 + 10_000
    first = page.read(f"# TYPE c counter\nc 5 {stamp}\n").batch
    again = page.read(f"# TYPE c counter\nc 5 {stamp}\n").batch
    assert (first.times()[0], first.starts()[0], first.readings()) == (again.times()[0], again.starts()[0], [5.0])
    assert again.readings() == [5.0]
    later = page.read(f"# TYPE c counter\nc 7 {stamp + 20_000}\n").batch
    assert later.readings() == [7.0]
    assert later.starts()[0] == first.starts()[0]
    assert later.times()[0] == (stamp + 20_000) * 10**6


def test_bad_lines_cost_themselves_only() -> None:
    """Everything else on the page counts, and the loss is told by reason."""
    scraped = Page().read('a 1\n{} nonsense\nb{x="} 2\nc not-a-number\nd 4')
    assert points(scraped) == {("", "a"): 1.0}
    assert scraped.rejected == {"bad_name": 1, "bad_labels": 1, "truncated": 1}
    assert not scraped.problem


def test_a_page_of_a_login_is_a_failed_scrape() -> None:
    """HTTP 200 with no sample and lines that are none: silence would look like a program without metrics."""
    with pytest.raises(ScrapeError, match="no page of metrics: it starts with '<html>'"):
        Page().read("<html>\n<body>Sign in</body>\n")
    assert points(Page().read("# nothing yet\n")) == {}


def test_a_page_that_names_other_series_each_time_is_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series that are absent wait for some ticks, but not any number of them."""
    monkeypatch.setattr("gpulens.receivers.prometheus.scraper._MOST_SERIES", 25)
    page = Page()
    sizes = [
        page.read("".join(f'm{{request="{tick}-{i}"}} 1\n' for i in range(10))).batch.layout.size for tick in range(8)
    ]
    assert max(sizes) <= 25
    assert sizes[:2] == [10, 20]


def test_another_process_behind_the_page_starts_its_counters_anew() -> None:
    """The pod was replaced: a total that is higher than its predecessor's is no growth of it."""
    page = Page()
    text = "# TYPE c counter\nc {}\n"
    first = page.read(text.format(10), origin="pod-a").batch
    second = page.read(text.format(500), origin="pod-b").batch
    assert second.starts()[0] > first.times()[0]
    assert page.read(text.format(600), origin="pod-b").batch.starts()[0] == second.starts()[0]
