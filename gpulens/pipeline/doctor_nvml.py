"""What `gpulens doctor` learns from NVML, by way of the same child process that the agent uses.

Invariant: `ask` ends within its deadline and a few seconds, whatever the driver does: the child is stopped, then
killed, and one that survives that is left behind. What it told until then is still used.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gpulens.nvml.launch import environment
from gpulens.nvml.protocol import HEADER, Do, Json, Message, ProtocolError, Say, Tier, frame, message, size
from gpulens.nvml.reason import Reason
from gpulens.pipeline.doctor_report import Finding, Verdict

DEADLINE_S: Final = 20.0
"""Starting NVML takes seconds on a node without the persistence daemon."""
WINDOW_S: Final = 1.2
"""A GPM figure is a mean over at least one second; the child takes the first sample when it finds a GPU."""

SM_ACTIVE: Final = "gpu.sm.active"

CALL_TIMEOUT_S: Final = 5.0
GOODBYE_S: Final = 3.0
"""How long the child may take to end when asked to, and again when killed."""
_TAIL_BYTES: Final = 2000
_LINE: Final = 200

_HANG_FIX: Final = "look for XIDs in the kernel's log (dmesg | grep Xid); a GPU that hangs needs a reset or a reboot"
_FIXES: Final[Mapping[int, str]] = {
    4: "run as root, or give this user the device nodes /dev/nvidiactl and /dev/nvidiaN",
    9: "load the NVIDIA driver on the node (GKE: gpu-driver-version=latest on the node pool)",
    12: "make the loader find libnvidia-ml.so.1: see the driver library above",
    15: "drain and reboot the node: a GPU fell off the bus",
    18: "restart this pod so that the driver's new library is mounted, or reboot the node after a driver upgrade",
    999: "restart this pod: after a systemd daemon-reload a container may lose its GPU devices",
}
"""By NVML's error code (nvmlReturn_t)."""


class Dcgm(Enum):
    """What is known of a dcgm-exporter beside NVML."""

    NONE = "none"  # there is none
    UNSEEN = "unseen"  # the config reads one whose page was not asked here
    PLAIN = "plain"  # its page has no profiling fields
    TELLS = "tells"  # its page has profiling fields


_NO_ACTIVITY_FIX: Final[Mapping[Dcgm, str]] = {
    Dcgm.NONE: "below Hopper only DCGM tells SM activity: run dcgm-exporter with DCGM_FI_PROF_SM_ACTIVE and name it"
    " under receivers as dcgm; until then utilisation says only that a kernel was there",
    Dcgm.UNSEEN: "below Hopper only DCGM tells SM activity: see that the exporter that the dcgm receiver reads has"
    " DCGM_FI_PROF_SM_ACTIVE (its page was not asked here)",
    Dcgm.PLAIN: "below Hopper only DCGM tells SM activity: add DCGM_FI_PROF_SM_ACTIVE to the counters of the"
    " dcgm-exporter that is there",
}


@dataclass(slots=True)
class Answer:
    """What the child told. `problem` says why the conversation ended early, "" when it did not."""

    driver: Message = field(default_factory=dict)
    asked: dict[Tier, list[str]] = field(default_factory=dict)
    shapes: dict[tuple[str, str], Message] = field(default_factory=dict)  # (GPU, tier) -> the newest
    readings: dict[tuple[str, str], Message] = field(default_factory=dict)
    silent: dict[str, Message] = field(default_factory=dict)
    hung: list[tuple[str, str]] = field(default_factory=list)
    problem: str = ""
    stderr: str = ""

    @property
    def up(self) -> bool:
        """NVML works."""
        return self.driver.get("up") is True

    @property
    def gpus(self) -> list[str]:
        """UUIDs, in the order in which they were told."""
        return list(dict.fromkeys([*(gpu for gpus in self.asked.values() for gpu in gpus), *self.silent]))

    @property
    def every_process(self) -> bool | None:
        """Whether all of the node's processes can be seen; None where it was not told."""
        pids = self.driver.get("pids")
        return pids if isinstance(pids, bool) else None

    def take(self, told: Message) -> None:
        """One frame."""
        gpu, tier = str(told.get("gpu") or ""), str(told.get("tier") or "")
        match told.get("say"):
            case Say.DRIVER:
                self.driver = told
            case Say.ASKED:
                listed = told.get("gpus")
                self.asked[Tier(tier)] = [str(each) for each in listed] if isinstance(listed, list) else []
            case Say.SHAPE:
                self.shapes[gpu, tier] = told
            case Say.READINGS:
                self.readings[gpu, tier] = told
            case Say.SILENT:
                self.silent[gpu] = told
            case Say.HUNG:
                self.hung.append((gpu, str(told.get("call") or "")))

    def complete(self, tier: Tier) -> bool:
        """Every GPU that was asked for this tier has answered, or said that it can't."""
        if tier not in self.asked:
            return False
        return all((gpu, tier.value) in self.readings or gpu in self.silent for gpu in self.asked[tier])


class _Conversation:
    """One child and the frames that came from it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], deadline: float, goodbye_s: float) -> None:
        self.answer = Answer()
        self._goodbye_s = goodbye_s
        self._deadline = deadline
        self._buffer = bytearray()
        self._tail = bytearray()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._open = selectors.DefaultSelector()
        self._open.register(self._stdout, selectors.EVENT_READ)
        self._open.register(self._stderr, selectors.EVENT_READ)

    def say(self, told: Message) -> None:
        with contextlib.suppress(OSError):  # it is gone; reading says so
            self._stdin.write(frame(told))

    def until(self, done: Callable[[], bool], before: float | None = None) -> bool:
        """Reads until `done`, at most until the deadline or `before`. False when it was not done by then."""
        limit = self._deadline if before is None else min(before, self._deadline)
        while not done():
            left = limit - time.monotonic()
            if left <= 0:
                if before is None:
                    self.answer.problem = self.answer.problem or "did not answer in time"
                return False
            if self.answer.problem or not self._read(left):
                return False
        return True

    def _read(self, seconds: float) -> bool:
        """Takes what comes within some seconds; False when nothing more can come."""
        for key, _ in self._open.select(seconds):
            data = os.read(key.fd, 1 << 16)
            if key.fileobj is self._stderr:
                self._tail += data
                del self._tail[:-_TAIL_BYTES]
            self._buffer += data if key.fileobj is self._stdout else b""
            if not data:
                self._open.unregister(key.fileobj)
        try:
            self._unpack()
        except (ProtocolError, ValueError) as error:
            self.answer.problem = f"answered with something that is no frame ({error})"
            return False
        if self._stdout not in {key.fileobj for key in self._open.get_map().values()}:
            self.answer.problem = "ended"
            return False
        return True

    def _unpack(self) -> None:
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + size(bytes(self._buffer[: HEADER.size]))
            if len(self._buffer) < end:
                return
            told = message(bytes(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
            self.answer.take(told)

    def close(self) -> None:
        """Asks the child to end, then kills it; one that even that does not end is left behind."""
        self.say({"do": Do.STOP.value})
        self._stdin.close()
        if not self._ended(self._goodbye_s):
            self._process.kill()
            if not self._ended(self._goodbye_s):
                self.answer.problem = "can't be killed: it hangs inside the driver, and only a reboot may end it"
        self._drain()
        self._open.close()
        self._stdout.close()
        self._stderr.close()
        self.answer.stderr = self._tail.decode("utf-8", "replace").strip()

    def _drain(self) -> None:
        """What was still written to stderr, as far as it is there already."""
        os.set_blocking(self._stderr.fileno(), False)
        with contextlib.suppress(OSError):
            self._tail += os.read(self._stderr.fileno(), 1 << 16)
        del self._tail[:-_TAIL_BYTES]

    def _ended(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def ask(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    folders: Sequence[str] = (),
    deadline_s: float = DEADLINE_S,
    window_s: float = WINDOW_S,
    goodbye_s: float = GOODBYE_S,
    call_timeout_s: float = CALL_TIMEOUT_S,
) -> Answer:
    """Starts the child, asks for the inventory and for one set of readings, and ends it.

    `folders` are put before LD_LIBRARY_PATH. Never raises for anything that the child does or fails to do.
    """
    begun = time.monotonic()
    try:
        talk = _Conversation(command, environment(environ, folders), begun + deadline_s, goodbye_s)
    except OSError as error:
        return Answer(problem=f"could not be started: {error}")
    try:
        _interview(talk, window_s, call_timeout_s)
    finally:
        talk.close()
    return talk.answer


def _interview(talk: _Conversation, window_s: float, call_timeout_s: float) -> None:
    answer = talk.answer
    talk.say(
        {
            "do": Do.CONFIGURE.value,
            "call_timeout_s": call_timeout_s,
            "hung": [],
            "proc": "/proc",
            "host_pid": "auto",
            "processes": True,
        }
    )
    if not talk.until(lambda: bool(answer.driver)) or not answer.up:
        return
    talk.say({"do": Do.READ.value, "tick": 1, "tier": Tier.INVENTORY.value})
    talk.until(lambda: answer.complete(Tier.INVENTORY))
    talk.until(lambda: False, before=time.monotonic() + window_s)
    talk.say({"do": Do.READ.value, "tick": 2, "tier": Tier.FAST.value})
    talk.until(lambda: answer.complete(Tier.FAST))


# --- findings ----------------------------------------------------------------------------------------------------


def nvml(answer: Answer) -> Finding:
    """Whether NVML starts in the child."""
    told = answer.driver
    facts: dict[str, Json] = {"up": answer.up, "gpus": list(answer.gpus), "code": told.get("code")}
    if answer.up:
        versions = f"driver {told.get('driver') or '?'}, NVML {told.get('nvml') or '?'}"
        if answer.problem or answer.hung:
            calls = ", ".join(f"{call} of {gpu or 'no GPU'}" for gpu, call in answer.hung)
            text = f"starts ({versions}), then " + (f"hung in {calls}" if calls else answer.problem)
            return Finding("nvml", "NVML", Verdict.WARN, text, _HANG_FIX, facts)
        if not answer.gpus:
            text = f"starts ({versions}), but shows no GPU"
            fix = "give this container the device nodes /dev/nvidiaN; look for XIDs in the kernel's log"
            return Finding("nvml", "NVML", Verdict.MISSING, text, fix, facts)
        return Finding("nvml", "NVML", Verdict.OK, f"{versions}, {len(answer.gpus)} GPU(s)", facts=facts)
    if told:
        code = told.get("code")
        reason = told.get("text") or told.get("reason") or "no reason given"
        text = f"does not start: {reason}" + (f" (code {code})" if code else "")
        known = _HANG_FIX if told.get("reason") == Reason.HUNG else "see the checks above"
        fix = _FIXES.get(code if isinstance(code, int) else 0, known)
        return Finding("nvml", "NVML", Verdict.MISSING, text, fix, facts)
    last = answer.stderr.splitlines()[-1][-_LINE:] if answer.stderr else ""
    text = f"the process that asks it {answer.problem or 'told nothing'}" + (f": {last}" if last else "")
    fix = "run `python -m gpulens.nvml` by hand and read what it writes; a hang is the driver's: see dmesg"
    return Finding("nvml", "NVML", Verdict.UNKNOWN, text, fix, facts)


def gpus(answer: Answer, metric_of: Mapping[str, str], dcgm: Dcgm = Dcgm.NONE) -> list[Finding]:
    """One finding for each GPU, by name (those that tell none last): model, MIG instances, and whether it tells its SM
    activity (GPM).

    `metric_of` gives the metric of a row's key, `dcgm` says whether a dcgm-exporter tells SM activity.
    """
    found = [_gpu(answer, gpu, metric_of, dcgm) for gpu in answer.gpus]
    return sorted(found, key=lambda each: (each.what == each.facts["uuid"], _natural(each.what)))


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which nvidia2 comes before nvidia10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _gpu(answer: Answer, gpu: str, metric_of: Mapping[str, str], dcgm: Dcgm) -> Finding:
    whole, instances = _entities(answer, gpu)
    name = str(whole.get("hw.name") or gpu)
    model = str(whole.get("hw.model") or "unknown model")
    profiles = Counter(str(each.get("gpu.mig.profile") or "?") for each in instances)
    gpm = _gpm(answer, gpu, metric_of)
    facts: dict[str, Json] = {
        "uuid": gpu,
        "model": model,
        "gpm": gpm,
        "mig_instances": dict(sorted(profiles.items())),
    }
    if gpu in answer.silent:
        reason = answer.silent[gpu].get("reason") or "no reason given"
        text = f"{model} does not answer: {reason}"
        fix = "look for XIDs in the kernel's log; a GPU that is lost needs a reset, or the node a reboot"
        return Finding(f"gpu:{gpu}", name, Verdict.WARN, text, fix, facts)
    sets = ", ".join(f"{count} x {profile}" for profile, count in sorted(profiles.items()))
    mig = f"MIG: {sets}" if sets else "no MIG instances"
    if gpm is None:
        fix = "run doctor again; the first reading may come too early"
        return Finding(f"gpu:{gpu}", name, Verdict.UNKNOWN, f"{model}, {mig}, activity was not read", fix, facts)
    if gpm:
        return Finding(f"gpu:{gpu}", name, Verdict.OK, f"{model}, {mig}, SM activity by NVML (GPM)", facts=facts)
    if dcgm is Dcgm.TELLS:
        text = f"{model}, {mig}, SM activity by dcgm-exporter (NVML has none: no GPM)"
        return Finding(f"gpu:{gpu}", name, Verdict.OK, text, facts=facts)
    text = f"{model}, {mig}, no SM activity by NVML (no GPM)"
    return Finding(f"gpu:{gpu}", name, Verdict.WARN, text, _NO_ACTIVITY_FIX[dcgm], facts)


def _entities(answer: Answer, gpu: str) -> tuple[Message, list[Message]]:
    """The attributes of the whole GPU and of its MIG instances, each once."""
    whole: Message = {}
    instances: dict[str, Message] = {}
    for (of, _), shape in answer.shapes.items():
        entities = shape.get("entities")
        for each in entities if of == gpu and isinstance(entities, list) else ():
            if not isinstance(each, dict):
                continue
            if each.get("hw.parent") or each.get("gpu.mig.profile"):
                instances.setdefault(str(each.get("hw.id")), {}).update(each)
            else:
                whole.update(each)
    return whole, list(instances.values())


def _gpm(answer: Answer, gpu: str, metric_of: Mapping[str, str]) -> bool | None:
    """Whether a series of SM activity is told for the GPU or an instance of it; None when nothing was told."""
    shape = answer.shapes.get((gpu, Tier.FAST.value))
    series = shape.get("series") if shape else None
    if not isinstance(series, list) or not series:
        return None
    keys = (each[1] for each in series if isinstance(each, list) and len(each) > 1)
    return any(metric_of.get(str(key)) == SM_ACTIVE for key in keys)
