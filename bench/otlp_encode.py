"""Processor time of a tick of 5,000 series as OTLP protobuf: patched into the compiled form, and built point by point.

Run: python bench/otlp_encode.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parse import best
from gpulens.pipeline.catalogue import CATALOGUE
from gpulens.pipeline.data import Batch, Block, Layout, Resource, Scope, Series
from gpulens.pipeline.otlp import Decoder, encode
from gpulens.pipeline.otlp_compiled import CompiledEncoder

SERIES = 5_000
PODS = 50
START_NS = 1_700_000_000_000_000_000


def tick_layout() -> Layout:
    """5,000 series over 50 pods: every catalogued metric in turn, two devices a pod and more."""
    names = list(CATALOGUE)
    blocks = []
    for pod in range(PODS):
        resource = Resource(
            {
                "k8s.node.name": "gpu-node-1",
                "k8s.namespace.name": "research",
                "k8s.pod.name": f"train-{pod}",
                "k8s.pod.uid": f"0d5bff0e-0000-4000-8000-{pod:012d}",
                "k8s.container.name": "main",
            }
        )
        series = [
            Series(
                CATALOGUE[names[index % len(names)]].metric,
                {
                    "hw.id": f"GPU-{pod:08d}-0000-4000-8000-{index // len(names):012d}",
                    "hw.name": f"nvidia{index // len(names)}",
                    "hw.model": "NVIDIA H100 80GB HBM3",
                },
            )
            for index in range(SERIES // PODS)
        ]
        blocks.append(Block(resource, Scope("gpulens"), sorted(series, key=lambda s: s.metric.name)))
    return Layout(blocks)


def main() -> None:
    """Prints the table."""
    layout = tick_layout()
    readings = [index if is_int else index / 7 for index, is_int in enumerate(layout.is_int)]
    batch = Batch.of(layout, readings, START_NS + 1, "bench", start_ns=START_NS)
    encoder = CompiledEncoder()
    compiled = [encoder.encode(batch) for _ in range(3)][-1]
    assert compiled == encode(batch)
    decoder = Decoder()
    rows = [
        ("built point by point (protobuf, upb)", best(lambda: encode(batch), 10) / 1e3),
        ("patched into the compiled form", best(lambda: encoder.encode(batch), 200) / 1e3),
        ("first sight and compilation", best(lambda: _compile(batch), 5) / 1e3),
        ("decoded (protobuf, upb; same content again)", best(lambda: decoder.decode_bytes(compiled, "bench"), 5) / 1e3),
    ]
    base = rows[0][1]
    print(f"{layout.size} series in {len(layout.blocks)} blocks, {len(compiled)} bytes\n")
    print("| a tick | ms | M points/s | ratio |\n|---|---|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {seconds * 1e3:.2f} | {layout.size / seconds / 1e6:.2f} | {base / seconds:.1f} |")
    print(f"\ncompiled form: {encoder.cache.bytes / 2**20:.1f} MiB by its own estimate")


def _compile(batch: Batch) -> None:
    encoder = CompiledEncoder()
    encoder.encode(batch)
    encoder.encode(batch)


if __name__ == "__main__":
    main()
