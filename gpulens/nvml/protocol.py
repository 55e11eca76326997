"""What the receiver and the child process that owns NVML say to each other.

Invariant: every message is one frame: four bytes of length (little-endian), then a JSON object. Identity is told once
(a shape), values flow: the readings of a tick are a list of numbers in the order of a shape, null where there is none.

The child reads frames on its standard input and writes frames to its standard output; the end of its input tells it to
stop. Times on the wire are lengths in seconds, never moments: the receiver stamps readings with its own clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from struct import Struct
from typing import Final, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Message: TypeAlias = dict[str, Json]

HEADER: Final = Struct("<I")
MAX_FRAME_BYTES: Final = 16 * 2**20


class Tier(StrEnum):
    """What is read together. Each is a stream of its own with an interval of its own."""

    FAST = "fast"  # activity, memory, power, clocks, temperatures
    PROCESSES = "processes"  # processes with a context, their memory and utilisation
    ERRORS = "errors"  # error counters, rows, links
    INVENTORY = "inventory"  # who is there: GPUs, MIG instances, driver


class Do(StrEnum):
    """What the receiver asks for (`do`).

    - configure: first of all. `call_timeout_s`; `hung`: [[uuid, call], ...] that hung in the child before this one;
      `proc`: where the host's /proc is; `host_pid`: "auto", "true" or "false" (whether every process of the node can
      be seen); `processes`: whether processes are read at all. May be left out: `retry_s`: [first, longest] pause
      before a call that hung is made again (30, 600); `gpm_window_s`: the shortest GPM window (1); `quiet_s`: how long
      a flag or gauge that is told only after it was other than 0 is told at 0 (600).
    - read: `tick` (a number that comes back), `tier`.
    - stop: shut NVML down and exit.
    """

    CONFIGURE = "configure"
    READ = "read"
    STOP = "stop"


class Say(StrEnum):
    """What the child tells (`say`).

    - driver: at every change of its state. `up`; while down `reason`, `code`, `text`; while up `driver`, `nvml`
      (versions), `epoch`: rises each time the driver was loaded anew; `pids`: whether every process is visible;
      `unreachable`: [[index, reason, code], ...] of GPUs that are listed and were never seen.
    - asked: the answer to a read, at once: `tick`, `tier`, `gpus` (UUIDs that will answer this tick), and `up`.
    - shape: before the readings that need it: `shape` (a number), `gpu`, `tier`, `entities` (device attributes, one
      map each), `series`: [[entity, row key, more attributes, owner], ...]; owner is null or
      {"k8s.pod.uid": ..., "container.id": ...}, either of them left out where it is unknown.
    - readings: `tick`, `tier`, `gpu`, `shape`, `values`, `epoch` (of this GPU's counters: another one says that they
      began anew), `failures`: [[call, reason, code], ...].
    - silent: instead of readings: `tick`, `tier`, `gpu`, `call`, `reason`, `code`: this GPU can't answer now ("empty":
      it was still busy when the same tier was asked for again). Who is asked answers by one of the two.
    - changed: the inventory changed (`gpu`, or null for the list of GPUs): read that tier now.
    - event: `gpu`, `kind` ("xid"), `code`, `gi`, `ci` (null where it is not an instance's).
    - hung: `gpu`, `call`: a call passed its deadline. `gpu` is "" for calls that are no GPU's.
    - back: `gpu`: a GPU that hung or was lost answers again.
    - calls: with each inventory: `calls`: {name: [count, total seconds, longest seconds]} since the last time.
    - gone: the last frame before a polite end. Unasked where only another process can go on: the library that is
      loaded does not fit the driver any more (code 18).
    """

    DRIVER = "driver"
    ASKED = "asked"
    SHAPE = "shape"
    READINGS = "readings"
    SILENT = "silent"
    CHANGED = "changed"
    EVENT = "event"
    HUNG = "hung"
    BACK = "back"
    CALLS = "calls"
    GONE = "gone"


class ProtocolError(Exception):
    """What came is no frame."""


def frame(message: Mapping[str, Json]) -> bytes:
    """A message as bytes. Raises ValueError for NaN and infinities, which JSON has no word for."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return HEADER.pack(len(body)) + body


def size(header: bytes) -> int:
    """The length of a frame's body. Raises ProtocolError."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes; the peer is no NVML agent")
    return int(length)


def message(body: bytes) -> Message:
    """A frame's body as a message. Raises ProtocolError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError("a frame that is no object")
    return found
