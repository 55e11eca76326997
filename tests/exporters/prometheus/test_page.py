"""The page itself: formats, order, and what can't be shown."""

from __future__ import annotations

import logging
import math
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from gpulens.exporters.prometheus.page import number_texts
from gpulens.pipeline.catalogue import CATALOGUE, metric
from gpulens.pipeline.data import Batch, Block, Kind, Layout, Metric, Resource, Scope, Series, Temporality
from gpulens.pipeline.exposition import PageParser
from tests.exporters.prometheus.serving import NODE, START_NS, make, own_batch, pod

GPU = {"hw.id": "GPU-1", "hw.name": "nvidia0", "hw.model": "NVIDIA T4"}
COUNTER = Metric("jobs", "1", "Jobs.", Kind.SUM, Temporality.CUMULATIVE, monotonic=True, is_int=True)


def foreign(
    metric: Metric,
    value: float,
    stream: str = "otlp",
    resource: Resource | None = None,
    scope: str = "app",
    help_text: str | None = None,
) -> Batch:
    """A partial batch with one point of a foreign sender."""
    series = Series(metric if help_text is None else Metric(metric.name, description=help_text))
    layout = Layout([Block(resource or Resource(), Scope(scope), [series])])
    return Batch.of(layout, [value], START_NS, stream, complete=False)


def test_the_text_format() -> None:
    """Families are sorted and contiguous, with HELP and TYPE once; whole numbers are plain."""
    served = make()
    served.take(
        own_batch(
            (pod("a"), "hw.gpu.utilization", {**GPU, "hw.gpu.task": "general"}, 0.25),
            (NODE, "hw.energy", GPU, 1234.0),
            (NODE, "gpu.xid.last", GPU, 2**62 + 1),
        ),
        own_batch((NODE, "hw.energy", {"hw.id": "GPU-0"}, 0.1), stream="other"),
    )
    assert served.page() == (
        f"# HELP gpu_xid_last {CATALOGUE['gpu.xid.last'].metric.description}\n"
        "# TYPE gpu_xid_last gauge\n"
        'gpu_xid_last{container="",gpu_model="NVIDIA T4",gpu_uuid="GPU-1",namespace="",node="node-a",pod=""} '
        "4611686018427387905\n"
        "# HELP hw_energy_joules_total Energy drawn since the driver was loaded.\n"
        "# TYPE hw_energy_joules_total counter\n"
        'hw_energy_joules_total{container="",gpu_model="NVIDIA T4",gpu_uuid="GPU-1",namespace="",node="node-a",pod=""} '
        "1234\n"
        'hw_energy_joules_total{container="",gpu_uuid="GPU-0",namespace="",node="node-a",pod=""} 0.1\n'
        f"# HELP hw_gpu_utilization_ratio {CATALOGUE['hw.gpu.utilization'].metric.description}\n"
        "# TYPE hw_gpu_utilization_ratio gauge\n"
        'hw_gpu_utilization_ratio{container="main",gpu_model="NVIDIA T4",gpu_uuid="GPU-1",'
        'hw_gpu_task="general",namespace="ml",node="node-a",pod="a"} 0.25\n'
    )


def test_the_open_metrics_format() -> None:
    """OpenMetrics has counters' families without `_total`, UNIT lines and an end mark."""
    served = make()
    served.take(own_batch((NODE, "hw.energy", {"hw.id": "GPU-0"}, 5.0)))
    assert served.page(open_metrics=True) == (
        "# TYPE hw_energy_joules counter\n"
        "# UNIT hw_energy_joules joules\n"
        "# HELP hw_energy_joules Energy drawn since the driver was loaded.\n"
        'hw_energy_joules_total{container="",gpu_uuid="GPU-0",namespace="",node="node-a",pod=""} 5\n'
        "# EOF\n"
    )


def test_an_empty_page_is_a_page() -> None:
    """Before the first batch the page has no samples and is still well-formed."""
    served = make()
    assert (served.page(), served.page(open_metrics=True)) == ("", "# EOF\n")


def test_what_left_a_complete_stream_is_gone_at_the_next_tick() -> None:
    """A pod that ended is off the page with the next complete batch."""
    served = make()
    work = (pod("a"), "hw.gpu.utilization", GPU, 0.5)
    power = (NODE, "hw.power", GPU, 70.0)
    served.take(own_batch(work, power))
    assert 'pod="a"' in served.page()
    served.take(own_batch(power))
    assert 'pod="a"' not in served.page()
    assert "hw_power_watts" in served.page()


def test_absent_is_not_zero() -> None:
    """A slot without a reading has no line, not even its family's; a reading of 0 has one."""
    served = make()
    served.take(own_batch((NODE, "hw.power", GPU, None), (NODE, "hw.temperature", GPU, 0.0)))
    assert "hw_power" not in served.page()
    assert list(served.samples().values()) == ["0"]


def test_partial_series_expire() -> None:
    """A foreign sender's series leaves the page metric_expiration after its last point, by the exporter's
    clock."""
    served = make(metric_expiration="60s")
    clock = served.clock
    served.take(foreign(COUNTER, 1))
    clock._elapsed_ns = 59 * 10**9
    assert list(served.samples().values()) == ["1"]
    clock._elapsed_ns = 60 * 10**9
    assert served.page() == ""


def test_a_series_that_its_sender_ended_is_gone_at_once() -> None:
    """A foreign point without a recorded value (an absent slot) takes the series off before it expires."""
    served = make()
    other = Metric("other")
    served.take(foreign(COUNTER, 1), foreign(other, 1))
    layout = Layout([Block(Resource(), Scope("app"), [Series(COUNTER), Series(Metric("third"))])])
    served.take(Batch.of(layout, [None, 3], START_NS, "otlp", complete=False))
    assert list(served.samples()) == ['other{otel_scope_name="app"}', 'third{otel_scope_name="app"}']
    served.take(foreign(COUNTER, 9))
    assert 'jobs_total{otel_scope_name="app"}' in served.samples()


def test_two_series_of_one_name_never_fail_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """The newest of two series with the same name and labels is shown; the other is counted and logged
    once."""
    served = make()
    one, two = Resource({"host.name": "one"}), Resource({"host.name": "two"})
    with caplog.at_level(logging.WARNING, "gpulens"):
        served.take(foreign(COUNTER, 1, "otlp/a", one), foreign(COUNTER, 2, "otlp/b", two))
        assert list(served.samples().values()) == ["2"]
        served.take(foreign(COUNTER, 3, "otlp/a", one))
        assert list(served.samples().values()) == ["3"]
        served.take(foreign(COUNTER, 4, "otlp/b", two))
        assert list(served.samples().values()) == ["4"]
    assert served.telemetry.value("gpulens_exporter_duplicate_series", exporter="prometheus") == 3
    assert len(caplog.records) == 1


def test_news_of_a_series_is_no_clash() -> None:
    """The same series in two batches of one stream shows its later reading and counts nothing."""
    served = make()
    life = (NODE, "gpu.source.up", {"gpu.source": "dcgm"}, 1)
    served.take(own_batch(life, (NODE, "hw.power", GPU, 70.0)))
    served.take(own_batch((NODE, "gpu.source.up", {"gpu.source": "dcgm"}, 0), complete=False))
    assert sorted(served.samples().values()) == ["0", "70"]
    assert served.telemetry.value("gpulens_exporter_duplicate_series") == 0


def test_a_family_has_one_type() -> None:
    """A second metric that would give a family another type is left off and counted; the page stays valid."""
    served = make()
    served.take(foreign(Metric("jobs_total"), 7, "a"), foreign(COUNTER, 8, "b"))
    assert list(served.samples().values()) == ["7"]
    assert served.telemetry.value("gpulens_exporter_not_shown", reason="type_conflict") == 1


def test_what_has_no_form_here_is_counted_by_reason() -> None:
    """Delta sums and histograms are not on the page and are counted."""
    served = make()
    delta = Metric("d", kind=Kind.SUM, temporality=Temporality.DELTA, monotonic=True)
    histogram = ResourceMetrics()
    metric = histogram.scope_metrics.add().metrics.add(name="latency")
    metric.histogram.data_points.add(count=1)
    metric.histogram.data_points.add(count=2)
    batch = foreign(delta, 1)
    served.take(
        Batch(
            batch.layout,
            batch.values,
            START_NS,
            "otlp",
            complete=False,
            opaque=(histogram.SerializeToString(), b"\xff\xff"),
        )
    )
    assert served.page() == ""
    counted = {reason: served.telemetry.value("gpulens_exporter_not_shown", reason=reason) for reason in
               ("delta", "histogram", "unreadable")}  # fmt: skip
    assert counted == {"delta": 1, "histogram": 2, "unreadable": 1}


def test_a_sum_that_can_fall_is_a_gauge() -> None:
    """Memory in use is an up-down sum in OTel and a gauge in Prometheus."""
    served = make()
    served.take(own_batch((NODE, "hw.gpu.memory.usage", GPU, 448 << 20)))
    assert "# TYPE hw_gpu_memory_usage_bytes gauge" in served.page()


def test_two_pods_that_share_a_gpu_have_distinct_series() -> None:
    """Owner series of two pods of one namespace on one GPU are two."""
    served = make()
    served.take(own_batch(*((pod(name), "gpu.allocated", GPU, 1) for name in ("a", "b"))))
    assert len(served.samples()) == 2
    assert served.telemetry.value("gpulens_exporter_duplicate_series") == 0


def test_one_pod_with_two_gpus_has_distinct_series() -> None:
    """A pod's series are told apart by the GPU's UUID, also when both GPUs have the same model."""
    served = make()
    served.take(own_batch(*((pod("a"), "gpu.allocated", {**GPU, "hw.id": uuid}, 1) for uuid in ("GPU-1", "GPU-2"))))
    assert len(served.samples()) == 2
    assert served.telemetry.value("gpulens_exporter_duplicate_series") == 0


def test_sources_are_kept_apart_by_scope() -> None:
    """While nothing reconciles them, two receivers' readings of one device are two series."""
    served = make()
    for source in ("dcgm", "nvml"):
        served.take(own_batch((NODE, "hw.power", GPU, 70.0), stream=source, scope=Scope(f"gpulens/{source}")))
    assert len(served.samples()) == 2


def test_foreign_resources_have_target_info_and_ours_have_none() -> None:
    """What a foreign resource says beyond job and instance is on one target_info line for all its scopes."""
    served = make()
    shop = Resource({"service.name": "cart", "service.instance.id": "i", "host.name": "h"})
    served.take(
        foreign(COUNTER, 1, resource=shop),
        foreign(Metric("x"), 2, resource=shop, scope="lib"),
        own_batch((pod("a"), "gpu.allocated", GPU, 1)),
    )
    lines = [head for head in served.samples() if head.startswith("target_info")]
    assert lines == ['target_info{host_name="h",instance="i",job="cart"}']
    assert served.telemetry.value("gpulens_exporter_duplicate_series") == 0
    assert "# TYPE target info\n# HELP target Target metadata\ntarget_info{" in served.page(open_metrics=True)


def test_timestamps_on_request() -> None:
    """send_timestamps writes each sample's own time: milliseconds in text, seconds in OpenMetrics."""
    served = make(send_timestamps=True)
    served.take(own_batch((NODE, "hw.power", {}, 70.5), time_ns=START_NS + 1_234_567_890))
    assert served.page().endswith(" 70.5 1700000001234\n")
    assert served.page(open_metrics=True).endswith(" 70.5 1700000001.234\n# EOF\n")


def test_namespace_constants_and_promoted_attributes() -> None:
    """namespace goes before the name, const_labels and promote add labels."""
    served = make(namespace="lab", const_labels={"cluster": "c1"}, promote="k8s.pod.uid")
    served.take(own_batch((pod("a"), "hw.gpu.utilization", {}, 1.0)))
    (head,) = served.samples()
    assert head.startswith("lab_hw_gpu_utilization_ratio{")
    assert 'cluster="c1"' in head
    assert 'k8s_pod_uid="uid-a"' in head


def test_texts_are_escaped() -> None:
    """Label values and help texts can't break a line."""
    served = make()
    series = Series(Metric("m", description='say "a\\b"\nc'), {"k": 'x"\\\n'})
    layout = Layout([Block(NODE, Scope("gpulens"), [series])])
    served.take(Batch.of(layout, [1.0], START_NS, "s"))
    assert served.page() == (
        '# HELP m say "a\\\\b"\\nc\n# TYPE m gauge\n'
        'm{container="",k="x\\"\\\\\\n",namespace="",node="node-a",pod=""} 1\n'
    )
    assert '# HELP m say \\"a\\\\b\\"\\nc\n' in served.page(open_metrics=True)


@given(st.lists(st.floats() | st.integers(-(2**63), 2**63 - 1)))
def test_numbers_read_back(numbers: list[float | int]) -> None:
    """Every number's text reads back as the same number, with the format's spelling of what is no number."""
    for number, text in zip(numbers, number_texts(numbers), strict=True):
        assert text in ("NaN", "+Inf", "-Inf") or text[-1].isdigit()
        if isinstance(number, int):
            assert int(text) == number
        else:
            assert float(text) == number or math.isnan(number)


ATTRIBUTES = st.dictionaries(
    st.sampled_from(["hw.id", "a.b", "a_b", "pod", "k8s.pod.name", "1"]),
    st.text(max_size=6) | st.booleans(),
    max_size=3,
)
FOREIGN = st.builds(
    Metric,
    name=st.sampled_from(["x", "x.y", "x_y", "x_total", "target_info", "y", ""]),
    unit=st.sampled_from(["", "1", "s"]),
    description=st.text(max_size=8),
    kind=st.sampled_from(Kind),
    temporality=st.sampled_from(Temporality),
    monotonic=st.booleans(),
    is_int=st.just(True),
)
BLOCKS = st.builds(
    Block,
    st.builds(Resource, ATTRIBUTES | st.just({"service.name": "s", "z": "1"})),
    st.builds(Scope, st.sampled_from(["", "gpulens", "app"])),
    st.lists(st.builds(Series, FOREIGN, ATTRIBUTES), min_size=1, max_size=5, unique=True),
)


@given(
    st.lists(
        st.tuples(
            st.lists(BLOCKS, max_size=3, unique_by=lambda b: (b.resource, b.scope)),
            st.booleans(),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_any_data_gives_a_readable_page(parts: list[tuple[list[Block], bool, bool]]) -> None:
    """Whatever arrives, every line of the page can be read, no series stands twice and families are
    contiguous."""
    served = make()
    for blocks, complete, other in parts:
        layout = Layout(blocks)
        stream = "b" if other else "a"
        served.take(Batch.of(layout, list(range(layout.size)), START_NS, stream, complete))
    text = served.page()
    page = PageParser().parse(text.encode())
    assert not page.errors.keys() - {"invalid_utf8"}  # so the parser takes a U+FFFD that was in the data
    assert len(set(page.layout.samples)) == len(page.layout.samples)
    names = [sample.name for sample in page.layout.samples]
    assert names == sorted(names)
    assert text.count("# TYPE ") == len(set(names))
    assert served.page(open_metrics=True).endswith("# EOF\n")


def test_a_steady_stream_is_planned_once() -> None:
    """While layouts stay, a page is written from the plan of the last one."""
    served = make()
    batches = [own_batch((NODE, "hw.power", GPU, 70.0), stream=stream, scope=Scope(stream)) for stream in "ab"]
    for _ in range(5):
        served.take(*batches)
        served.page()
        batches.reverse()
    plans = served.exporter._writer.plans
    assert (plans.misses, plans.hits) == (1, 4)


def test_a_page_is_written_once_for_each_state_of_the_data() -> None:
    """Two scrapes without a batch between them get the same bytes."""
    served = make()
    served.take(own_batch((NODE, "hw.power", GPU, 70.0)))
    assert served.exporter.page() is served.exporter.page()


def test_promtool_accepts_a_page_of_every_metric(promtool: str) -> None:
    """Prometheus' linter has nothing to say about a page with every catalogued metric on it."""
    served = make()
    readings = [
        (pod("a"), name, {**GPU, **dict.fromkeys(entry.attributes, "x")}, 1) for name, entry in CATALOGUE.items()
    ]
    served.take(own_batch(*readings))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=served.exporter.page(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_series_without_an_owner_says_so_with_empty_labels() -> None:
    """With honor_labels Prometheus fills a missing label in from its target: a free GPU would be the agent's own.
    Foreign series keep what they have."""
    served = make()
    foreign = Block(Resource({"service.name": "other"}), Scope("other"), [Series(Metric("m"))])
    layout = Layout(
        [Block(NODE, Scope("gpulens/dcgm"), [Series(metric("hw.gpu.utilization"), {"hw.id": "GPU-1"})]), foreign]
    )
    served.take(Batch.of(layout, [0.5, 1.0], START_NS, "s"))
    lines = [line for line in served.page().splitlines() if not line.startswith("#")]
    owned = next(line for line in lines if line.startswith("hw_gpu"))
    assert all(f'{label}=""' in owned for label in ("pod", "namespace", "container"))
    assert not any('pod=""' in line for line in lines if not line.startswith("hw_gpu"))
