"""Every row of the receiver's table on every device, the latency of each call, and the event set."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.device.gateway import WINDOW_S, Gpu, TimedGateway, Timings, level_of, read_all, told
from bench.device.markdown import table
from gpulens.nvml.gateway import Line
from gpulens.nvml.reason import Failure
from gpulens.nvml.table import BY_KEY, Reading

_HIDDEN_FACTS: Final = frozenset({"gpu.serial"})
_EVENT_WAIT_MS: Final = 200


def rows(line: Line, found: Sequence[Gpu], pause_s: float) -> str:
    """Values and reasons: whole for the first device of a kind, and how the others of that kind differ from it."""
    for gpu in found:  # windows and samples begin here
        for _, instance in gpu.devices():
            read_all(line, gpu, instance)
    time.sleep(max(pause_s, 1.1 * WINDOW_S))
    parts, first = [], dict[str, tuple[str, dict[str, Reading]]]()
    for gpu in found:
        for name, instance in gpu.devices():
            values = read_all(line, gpu, instance)
            profile = instance.profile if instance is not None else ""
            kind = f"{gpu.board.identity.name} {profile or level_of(line, gpu, instance).name}"
            known = first.setdefault(kind, (name, values))
            parts.append(_all_rows(name, kind, values) if known[0] == name else _difference(name, *known, values))
    return "\n\n".join(parts)


def _all_rows(name: str, kind: str, values: Mapping[str, Reading]) -> str:
    lines = [(f"`{key}`", _series(key), _said(value)) for key, value in values.items()]
    told_rows = sum(not isinstance(value, Failure) for value in values.values())
    why = Counter(value.reason.value for value in values.values() if isinstance(value, Failure))
    tail = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
    head = f"### {name}: {kind}\n\n{told_rows} of {len(values)} rows have a value{f'; {tail}' if tail else ''}.\n\n"
    return head + table(("row", "series", "value, or why there is none"), lines)


def _difference(name: str, like: str, first: Mapping[str, Reading], values: Mapping[str, Reading]) -> str:
    differing = [
        f"`{key}`: {_said(value)}"
        for key, value in values.items()
        if isinstance(value, Failure) != isinstance(first.get(key), Failure)
    ]
    return f"### {name}\n\nThe rows of {like}" + (f", but {'; '.join(differing)}" if differing else "") + "."


def _series(key: str) -> str:
    row = BY_KEY[key]
    inner = ", ".join(f"{name}={value}" for name, value in row.attributes)
    return f"`{row.metric}{{{inner}}}`" if inner else f"`{row.metric}`"


def _said(value: Reading) -> str:
    if isinstance(value, Failure):
        return f"none: {told(value)}"
    if isinstance(value, list):
        shown = [
            " ".join([_said(p.value), *(f"{k}={v}" for k, v in p.more if k not in _HIDDEN_FACTS)]) for p in value[:4]
        ]
        more = f" and {len(value) - 4} more" if len(value) > 4 else ""
        return f"{len(value)}: {'; '.join(shown)}{more}" if value else "no series"
    return f"{value:.12g}"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Timings by call, and in how many rounds over all rows of a GPU they were taken."""

    calls: Mapping[str, Timings] = field(default_factory=dict)
    rounds: int = 0


def latency(gateway: TimedGateway, line: Line, gpu: Gpu, rounds: int, limit_s: float) -> Latencies:
    """Reads every row of a GPU and its instances over and over, as the receiver does, and times each call.

    What the device can't do is asked once and not again, as in the receiver.
    """
    gateway.capabilities.forget()
    timings: defaultdict[str, Timings] = defaultdict(Timings)
    gateway.timings = timings
    end = time.monotonic() + limit_s
    done = 0
    try:
        while done < rounds:
            done += 1
            for _, instance in gpu.devices():
                read_all(line, gpu, instance)
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    finally:
        gateway.timings = None
    return Latencies(dict(timings), done)


def latency_table(idle: Latencies, busy: Latencies, watched: bool) -> str:
    """The timings in microseconds; those under load where they were taken."""
    lines = []
    for call, entry in sorted(idle.calls.items(), key=lambda item: -statistics.median(item[1].whole)):
        whole = sorted(entry.whole)
        overhead = [a - b for a, b in zip(entry.whole, entry.inside, strict=True)]
        under = busy.calls.get(call)
        lines.append(
            (
                f"`{call}`",
                len(whole),
                _us(statistics.median(whole)),
                _us(whole[-(-len(whole) * 99 // 100) - 1]),
                _us(whole[-1]),
                _us(statistics.median(overhead)) if watched else "?",
                _us(statistics.median(under.whole)) if under else "",
                _us(max(under.whole)) if under else "",
                entry.said,
            )
        )
    head = (
        "call",
        "count",
        "median",
        "p99",
        "max",
        "of it binding",
        "median under load",
        "max under load",
        "last said",
    )
    total = sum(sum(entry.whole) for entry in idle.calls.values())
    return (
        "Microseconds, through the receiver's own gateway (the binding's Python around the library is in `of it "
        f"binding`). Calls that are made once are those that the device can't answer.\n\n{table(head, lines)}\n\n"
        f"All rows of a GPU and its instances took {1e3 * total / max(1, idle.rounds):.2f} ms in calls a round "
        f"(mean of {idle.rounds} rounds)."
    )


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def events(line: Line, found: Sequence[Gpu]) -> str:
    """Registers an event set for every GPU and waits for a moment. Nothing should happen."""
    created = line.ask(lambda one: one, "nvmlEventSetCreate")
    if isinstance(created, Failure):
        return f"No event set: {told(created)}"
    lines = []
    try:
        for gpu in found:
            types = line.ask(int, "nvmlDeviceGetSupportedEventTypes", gpu.target.handle, on=gpu.target)
            if isinstance(types, Failure):
                lines.append((f"GPU {gpu.index}", told(types), ""))
                continue
            done = line.ask(
                lambda _: "registered", "nvmlDeviceRegisterEvents", gpu.target.handle, types, created, on=gpu.target
            )
            lines.append((f"GPU {gpu.index}", hex(types), told(done) if isinstance(done, Failure) else done))
        begin = time.monotonic()
        got = line.ask(
            lambda event: f"event type {event.eventType:#x}, data {event.eventData}",
            "nvmlEventSetWait_v2", created, _EVENT_WAIT_MS,
        )  # fmt: skip
        took = 1e3 * (time.monotonic() - begin)
    finally:
        line.ask(lambda _: None, "nvmlEventSetFree", created)
    text = f"nothing (code {got.code}; 10 is 'timeout')" if isinstance(got, Failure) else got
    return f"{table(('GPU', 'supported types', 'registration'), lines)}\n\nWaited {took:.0f} ms: {text}."
