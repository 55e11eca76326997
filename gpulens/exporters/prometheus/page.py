"""Turns readings into a page: identities are compiled to text once, afterwards only numbers are written.

Invariant: a page is always well-formed. Families are contiguous and sorted, each with HELP and TYPE once; of
two series that would have the same name and labels one is shown and the other counted; what has no form here
is counted by reason. Formats: Prometheus text 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from gpulens.exporters.prometheus.latest import Held
from gpulens.pipeline.data import Block, Identity, Layout, Value, bitmap_slots
from gpulens.pipeline.lru import BytesLRU
from gpulens.pipeline.prometheus_names import (
    TARGET_INFO,
    LabelRules,
    Labels,
    PrometheusMetric,
    hidden_reason,
    is_own_scope,
    prometheus_metric,
    target_info,
)

SECTION_CACHE_BYTES = 16 * 1024 * 1024
PLAN_CACHE_BYTES = 16 * 1024 * 1024
MOST_COMPOSITIONS = 4
"""What is remembered goes with the layouts it was made for, at the latest when four others have followed: its key
keeps them alive, some 2 kB a series that no cache's bytes show (measured: 0.4 MiB for each change of 8 GPUs)."""

_TEXT_TYPES = {"info": "gauge"}
_OWNER_LABELS = ("container", "namespace", "pod")


@dataclass(frozen=True, slots=True)
class Section:
    """A block as text.

    - `heads[i]`: all that stands before the value of the block's i-th series; empty when it can't be shown.
    - `metrics[i]`: its family.
    - `target`: the head of the `target_info` line of a foreign resource, else empty.
    - `hidden`: why and how many series can't be shown.
    - `cut`: labels left off because a series had too many.
    """

    heads: tuple[str, ...]
    metrics: tuple[PrometheusMetric, ...]
    target: str
    hidden: Mapping[str, int]
    cut: int

    def weight(self) -> int:
        """Bytes that it holds, estimated."""
        return 500 + sum(len(head) + 60 for head in self.heads)


@dataclass(frozen=True, slots=True)
class Plan:
    """A page without its numbers: `heads[i]`, then the number `pick` takes as the i-th, and so on, then
    `tail`.

    - `hidden`: series left off, by reason (`delta`, `temporality`, `type_conflict`).
    - `duplicates`: series left off because another one has the same name and labels; `example` is one of
      them.
    - `ordered`: some series stand in several batches, so the plan holds only for this order of arrival.
    - `cut`: labels left off because a series had too many.
    """

    heads: tuple[str, ...]
    pick: tuple[int, ...]
    tail: str
    hidden: Mapping[str, int]
    duplicates: int
    example: str
    ordered: bool
    cut: int

    def weight(self) -> int:
        """Bytes that it holds beyond what the sections hold, estimated."""
        return 300 + 24 * len(self.heads)


@dataclass(frozen=True, slots=True)
class Page:
    """A page and the plan that it was written by."""

    text: str
    plan: Plan


class PageWriter:
    """Writes pages. `namespace` and `rules` decide names and labels; `timestamps` writes each sample's
    time."""

    def __init__(self, namespace: str, rules: LabelRules, timestamps: bool) -> None:
        self._namespace = namespace
        self._rules = rules
        self._timestamps = timestamps
        self._ordered = False
        self._compositions: OrderedDict[tuple[Layout, ...], set[Hashable]] = OrderedDict()
        self.sections: BytesLRU[Block, Section] = BytesLRU(
            "prometheus_sections", SECTION_CACHE_BYTES, lambda _, section: section.weight()
        )
        self.plans: BytesLRU[Hashable, Plan] = BytesLRU(
            "prometheus_plans", PLAN_CACHE_BYTES, lambda _, plan: plan.weight()
        )

    def write(self, held: Sequence[Held], open_metrics: bool) -> Page:
        """The page of these batches."""
        plan = self._plan(held, open_metrics)
        numbers: list[Value] = [number for part in held for number in part.batch.numbers()]
        numbers.append(1)  # the value of target_info
        texts = number_texts(_take(numbers, plan.pick))
        if self._timestamps:
            times = [time for part in held for time in part.batch.times()]
            times.append(0)
            texts = _with_times(texts, _take(times, plan.pick), open_metrics)
        pieces = [""] * (2 * len(texts))
        pieces[0::2] = plan.heads
        pieces[1::2] = texts
        return Page("".join(pieces) + plan.tail, plan)

    def _plan(self, held: Sequence[Held], open_metrics: bool) -> Plan:
        key = self._key(held, open_metrics)
        plan = self.plans.get(key)
        if plan is None:
            plan = _Planner(open_metrics).plan(held, [self._sections(part) for part in held])
            if plan.ordered != self._ordered:
                self._ordered = plan.ordered
                key = self._key(held, open_metrics)
            self.plans.put(key, plan)
            self._remember(tuple(part.batch.layout for part in held), key)
        return plan

    def _remember(self, layouts: tuple[Layout, ...], key: Hashable) -> None:
        """Notes which layouts a plan is for, and forgets what was made for those of long ago."""
        self._compositions.setdefault(layouts, set()).add(key)
        self._compositions.move_to_end(layouts)
        while len(self._compositions) > MOST_COMPOSITIONS:
            old, keys = self._compositions.popitem(last=False)
            for each in keys:
                self.plans.discard(each)
            # By content: the blocks of a new layout are often equal to those of the last one without being the same.
            kept = {block for recent in self._compositions for layout in recent for block in layout.blocks}
            for block in {block for layout in old for block in layout.blocks} - kept:
                self.sections.discard(block)

    def _key(self, held: Sequence[Held], open_metrics: bool) -> Hashable:
        # The order of arrival changes at every tick; it only matters where series stand in several batches.
        order = tuple(sorted(range(len(held)), key=lambda i: held[i].order)) if self._ordered else ()
        return (open_metrics, order, *((part.batch.stream, part.batch.layout, part.absent) for part in held))

    def _sections(self, held: Held) -> list[Section]:
        return [self._section(block) for block in held.batch.layout.blocks]

    def _section(self, block: Block) -> Section:
        # Compiled at first sight: without the text there is no page, and a page is written only when it is
        # asked for.
        section = self.sections.get(block)
        if section is None:
            section = compile_section(block, self._namespace, self._rules)
            self.sections.put(block, section)
        return section


def compile_section(block: Block, namespace: str, rules: LabelRules) -> Section:
    """Everything about a block that is not a number."""
    labels = rules.block(block.resource, block.scope)
    ours = is_own_scope(block.scope)
    heads: list[str] = []
    metrics: list[PrometheusMetric] = []
    hidden: Counter[str] = Counter()
    cut = 0
    for series in block.series:
        metric = prometheus_metric(series.metric, namespace)
        reason = hidden_reason(series.metric)
        metrics.append(metric)
        if reason:
            hidden[reason] += 1
            heads.append("")
            continue
        own, more = labels.of(series)
        cut += more
        heads.append(sample_head(metric.name, _nobodys(own) if ours else own))
    target = target_info(block.resource, block.scope)
    return Section(
        tuple(heads),
        tuple(metrics),
        sample_head(TARGET_INFO.name, target) if target else "",
        dict(hidden),
        cut,
    )


def _nobodys(labels: Labels) -> Labels:
    """The labels with the owner's ones empty where nobody is named. With honor_labels a missing label is filled in from
    the scrape target, so a free GPU would belong to the agent's own pod; an empty one stays empty, which is the same
    as no label at all."""
    named = {key for key, _ in labels}
    if "pod" in named:
        return labels
    return tuple(sorted((*labels, *((key, "") for key in _OWNER_LABELS if key not in named))))


def sample_head(name: str, labels: Labels) -> str:
    """What stands before a sample's value: `name{key="value"} `."""
    if not labels:
        return f"{name} "
    inside = ",".join(f'{key}="{escape(value)}"' for key, value in labels)
    return f"{name}{{{inside}}} "


def escape(text: str) -> str:
    """A label value as both formats write it between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_Place = tuple[int, int, str, Identity | None]
"""Where a series' number stands: the batch's order, the index among all numbers, the stream, the identity."""


class _Planner:
    """Decides once, for a set of layouts, what stands on the page and where."""

    def __init__(self, open_metrics: bool) -> None:
        self._open_metrics = open_metrics
        self._families: dict[str, tuple[PrometheusMetric, list[str]]] = {}
        self._shown: dict[str, _Place] = {}
        self._hidden: Counter[str] = Counter()
        self._ended: list[tuple[PrometheusMetric, str, _Place]] = []
        self._duplicates: list[str] = []
        self._ordered = False
        self._cut = 0

    def plan(self, held: Sequence[Held], sections: Sequence[Sequence[Section]]) -> Plan:
        """The plan of these batches; `sections` are those of each one's blocks."""
        one = sum(part.batch.layout.size for part in held)
        base = 0
        for part, compiled in zip(held, sections, strict=True):
            self._add(part, compiled, base, one)
            base += part.batch.layout.size
        self._leave_out_ended()
        heads: list[str] = []
        pick: list[int] = []
        for name in sorted(self._families):
            metric, lines = self._families[name]
            header = self._header(metric)
            for head in sorted(lines):
                heads.append(f"\n{header}{head}" if heads else f"{header}{head}")
                pick.append(self._shown[head][1])
                header = ""
        return Plan(
            heads=tuple(heads),
            pick=tuple(pick),
            tail=("\n" if heads else "") + ("# EOF\n" if self._open_metrics else ""),
            hidden=dict(self._hidden),
            duplicates=len(self._duplicates),
            example=min(self._duplicates, default="").strip(),
            ordered=self._ordered,
            cut=self._cut,
        )

    def _add(self, part: Held, sections: Sequence[Section], base: int, one: int) -> None:
        gone = set(bitmap_slots(part.absent))
        layout = part.batch.layout
        for block, section, start in zip(layout.blocks, sections, layout.offsets, strict=False):
            self._hidden.update(section.hidden)
            self._cut += section.cut
            any_shown = False
            for i, (head, metric) in enumerate(zip(section.heads, section.metrics, strict=True)):
                if not head:
                    continue
                identity = (block.resource, block.scope, block.series[i])
                place = (part.order, base + start + i, part.batch.stream, identity)
                if start + i in gone:
                    self._ended.append((metric, head, place))
                else:
                    self._show(metric, head, place)
                    any_shown = True
            if any_shown and section.target:
                self._show(TARGET_INFO, section.target, (part.order, one, "", None))

    def _show(self, metric: PrometheusMetric, head: str, place: _Place) -> None:
        name = self._family(metric)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = (metric, [])
        elif family[0].type != metric.type:
            self._hidden["type_conflict"] += 1
            return
        earlier = self._shown.get(head)
        if earlier is None:
            family[1].append(head)
            self._shown[head] = place
        elif place[3] is not None:
            self._choose(head, earlier, place)

    def _choose(self, head: str, earlier: _Place, place: _Place) -> None:
        """The newest stays. The same series in a later batch of its stream is news; anything else is a
        clash."""
        self._ordered = True
        if earlier[2:] != place[2:]:
            self._duplicates.append(head)
        if place[0] > earlier[0]:
            self._shown[head] = place

    def _leave_out_ended(self) -> None:
        """A series that a later batch of its stream names as absent is gone, though an earlier batch still
        has it."""
        for metric, head, place in self._ended:
            shown = self._shown.get(head)
            if shown is None or shown[2:] != place[2:]:
                continue
            self._ordered = True
            if place[0] > shown[0]:
                del self._shown[head]
                self._families[self._family(metric)][1].remove(head)

    def _family(self, metric: PrometheusMetric) -> str:
        return metric.family if self._open_metrics else metric.name

    def _header(self, metric: PrometheusMetric) -> str:
        if not self._open_metrics:
            kind = _TEXT_TYPES.get(metric.type, metric.type)
            text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
            return (f"# HELP {metric.name} {text}\n" if text else "") + f"# TYPE {metric.name} {kind}\n"
        text = escape(metric.help)
        return (
            f"# TYPE {metric.family} {metric.type}\n"
            + (f"# UNIT {metric.family} {metric.unit}\n" if metric.unit else "")
            + (f"# HELP {metric.family} {text}\n" if text else "")
        )


def _take(values: Sequence[Value], pick: Sequence[int]) -> Sequence[Value]:
    if len(pick) > 1:
        taken: tuple[Value, ...] = itemgetter(*pick)(values)
        return taken
    return [values[i] for i in pick]


_WORDS = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


def number_texts(numbers: Sequence[Value]) -> list[str]:
    """Numbers as both formats write them: whole ones plain, others the shortest text that reads back the
    same."""
    texts = [text[:-2] if text.endswith(".0") else text for text in map(repr, numbers)]
    if "n" in "".join(texts):  # only inf and nan are spelled with an n
        return [_WORDS.get(text, text) for text in texts]
    return texts


def _with_times(texts: list[str], times_ns: Sequence[Value], open_metrics: bool) -> list[str]:
    """Each number with its time: milliseconds, in OpenMetrics seconds. A time of 0 is none."""
    stamped = []
    for text, time_ns in zip(texts, times_ns, strict=True):
        ms = int(time_ns) // 1_000_000
        time = f"{ms // 1000}.{ms % 1000:03d}" if open_metrics else str(ms)
        stamped.append(f"{text} {time}" if ms else text)
    return stamped
