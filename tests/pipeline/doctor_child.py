"""A scripted child in place of `python -m gpulens.nvml`: it speaks the frames, or misbehaves, as its argument says."""

from __future__ import annotations

import signal
import sys
import time

from gpulens.nvml.protocol import HEADER, Json, Message, Say, frame, message, size

A100 = "GPU-a"
H100 = "GPU-h"
ENTITIES: dict[str, list[Message]] = {
    A100: [
        {"hw.id": A100, "hw.name": "nvidia0", "hw.model": "NVIDIA A100"},
        {"hw.id": "MIG-1", "hw.parent": A100, "gpu.mig.profile": "1g.5gb"},
        {"hw.id": "MIG-2", "hw.parent": A100, "gpu.mig.profile": "1g.5gb"},
        {"hw.id": "MIG-3", "hw.parent": A100, "gpu.mig.profile": "3g.20gb"},
    ],
    H100: [{"hw.id": H100, "hw.name": "nvidia1", "hw.model": "NVIDIA H100"}],
}


def say(told: Message) -> None:
    """One frame to whoever asked."""
    sys.stdout.buffer.write(frame(told))
    sys.stdout.buffer.flush()


def heard() -> Message | None:
    """The next frame; None at the end."""
    header = sys.stdin.buffer.read(HEADER.size)
    return message(sys.stdin.buffer.read(size(header))) if len(header) == HEADER.size else None


def answer(mode: str, asked: Message, sm_active: str) -> None:
    """Answers one read."""
    tick, tier = asked["tick"], asked["tier"]
    say({"say": Say.ASKED, "tick": tick, "tier": tier, "gpus": [] if mode == "empty" else [A100, H100], "up": True})
    if mode == "empty":
        return
    for gpu, entities in ENTITIES.items():
        if mode == "lost" and gpu == H100:
            say({"say": Say.SILENT, "tick": tick, "tier": tier, "gpu": gpu, "call": "x", "reason": "lost", "code": 15})
            continue
        if mode == "hangs" and gpu == H100 and tier == "fast":
            say({"say": Say.HUNG, "gpu": gpu, "call": "nvmlDeviceGetPowerUsage"})
            continue
        keys = ["power", sm_active] if gpu == H100 else ["power"]
        series: list[Json] = [[0, key, {}, None] for key in keys if tier == "fast"]
        say({"say": Say.SHAPE, "shape": 1, "gpu": gpu, "tier": tier, "entities": [*entities], "series": series})
        values: Message = {"values": [1 for _ in series], "epoch": 1, "failures": []}
        say({"say": Say.READINGS, "tick": tick, "tier": tier, "gpu": gpu, "shape": 1, **values})


def main(mode: str, sm_active: str) -> None:
    """Runs until it is told to stop."""
    if mode == "garbage":
        print("Hello, I am no child of yours, and this is no frame.", flush=True)
    if mode == "dies":
        sys.exit("boom: the library broke")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    while (asked := heard()) is not None:
        match asked["do"]:
            case "configure" if mode == "down":
                say({"say": Say.DRIVER, "up": False, "reason": "driver", "code": 9, "text": "the driver is not loaded"})
            case "configure":
                versions: Message = {"driver": "590.48.01", "nvml": "13.590.48.01", "epoch": 1, "pids": False}
                say({"say": Say.DRIVER, "up": True, **versions})
            case "read":
                answer(mode, asked, sm_active)
            case "stop":
                say({"say": Say.GONE})
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
