"""A process that speaks the frames, in several bad ways. Run as `python scripted.py MODE`.

good: answers one GPU. garbage: answers a read with text. torn: writes half a frame and exits. dies: exits at the first
read. deaf: is good, and neither `stop` nor the end of its input makes it go. chatty: is good and floods its stderr.
huge: announces a frame of 4 GiB. still: takes its messages and says nothing.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
import time
from typing import BinaryIO

GPU = "GPU-aaaaaaaa-0000-0000-0000-000000000000"


def say(out: BinaryIO, **message: object) -> None:
    """One frame."""
    body = json.dumps(message).encode()
    out.write(struct.pack("<I", len(body)) + body)
    out.flush()


def answer(out: BinaryIO, tick: int, tier: str) -> None:
    """One GPU with one number in each tier."""
    key = {"fast": "sm", "errors": "pcie.replays", "inventory": "device.info", "processes": "process.count.compute"}
    say(out, say="asked", tick=tick, tier=tier, gpus=[GPU], up=True)
    number = list(key).index(tier)
    say(
        out, say="shape", shape=number, gpu=GPU, tier=tier, entities=[{"hw.id": GPU}], series=[[0, key[tier], {}, None]]
    )
    say(out, say="readings", tick=tick, tier=tier, gpu=GPU, shape=number, values=[1], epoch=1, failures=[])


def misbehave(out: BinaryIO, mode: str) -> None:
    """What a bad process does when it is asked for readings."""
    if mode == "garbage":
        out.write(b"Segmentation fault\n" * 100)
    elif mode == "huge":
        out.write(b"\xff\xff\xff\xff")
    elif mode == "torn":
        out.write(struct.pack("<I", 100) + b'{"say":')
        out.flush()
        sys.exit(0)
    elif mode == "dies":
        sys.exit(7)
    elif mode == "chatty":
        sys.stderr.write("oh no\n" * 2000 + "x" * 200_000)
        sys.stderr.flush()
    out.flush()


def main(mode: str) -> None:
    """Serves until the end of its input."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while header := source.read(4):
        message = json.loads(source.read(struct.unpack("<I", header)[0]))
        if message["do"] == "stop" and mode != "deaf":
            say(out, say="gone")
            return
        if mode == "still":
            continue
        if message["do"] == "configure":
            say(out, say="driver", up=True, driver="1", nvml="1", epoch=1, pids=True)
        elif message["do"] == "read":
            misbehave(out, mode)
            if mode in {"good", "deaf", "chatty"}:
                answer(out, message["tick"], message["tier"])
    while mode == "deaf":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
