"""A node on which everything changes at every scrape: what is remembered of what is gone stays bounded."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from gpulens.config.ids import ComponentID, Kind
from gpulens.exporters.file.lines import LineEncoder
from gpulens.exporters.prometheus.config import PrometheusConfig
from gpulens.exporters.prometheus.server import PrometheusExporter
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.clock import VirtualClock
from gpulens.pipeline.component import Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.exposition import PageParser
from gpulens.pipeline.journal import ComponentLog
from gpulens.pipeline.otlp_sending import OtlpEncoding, Owner
from gpulens.pipeline.scrape_client import Body, PageReader
from gpulens.pipeline.scraping import ScrapeReceiver
from gpulens.pipeline.telemetry import Telemetry
from gpulens.processors.attribution.config import AttributionConfig
from gpulens.processors.attribution.join import AttributionProcessor
from gpulens.receivers.dcgm.config import DcgmConfig
from gpulens.receivers.dcgm.scraper import DcgmScraper
from gpulens.receivers.pod_resources.allocations import Reader
from gpulens.receivers.pod_resources.client import KubeletClient
from gpulens.receivers.pod_resources.config import PodResourcesConfig
from gpulens.receivers.pod_resources.device_ids import Selection
from gpulens.receivers.pod_resources.scraper import PodResourcesScraper
from tests.receivers.pod_resources.kubelet import allocatable, devices, pod, pod_list

FIELDS = ("DEV_GPU_TEMP", "DEV_GPU_UTIL", "DEV_FB_USED", "DEV_TOTAL_ENERGY_CONSUMPTION", "DEV_MEM_COPY_UTIL")
GPUS = 8
MIB = 2**20


class Churn:
    """What is on the node at a step: pods that changed since the step before and, where asked for, GPUs and names of
    metrics that did."""

    def __init__(self, new_gpus: bool, new_names: bool, lives: int) -> None:
        self.step = 0
        self._new_gpus, self._new_names, self._lives = new_gpus, new_names, lives

    def gpus(self) -> list[str]:
        """The GPUs of now."""
        first = GPUS * self.step if self._new_gpus else 0
        return [f"GPU-{first + n:036d}" for n in range(GPUS)]

    def pods(self) -> list[str]:
        """The holder of each of them; a pod lives for some steps."""
        return [f"job-{(self.step + n) // self._lives}-{n}" for n in range(GPUS)]

    async def fetch(self) -> Body:
        """The page."""
        held = list(zip(self.gpus(), self.pods(), strict=True))
        rows = [
            f'DCGM_FI_{name}{{gpu="{n}",UUID="{gpu}",modelName="A100",pod="{pod}",namespace="team",container="main"}} '
            f"{self.step % 50}\n"
            for name in FIELDS
            for n, (gpu, pod) in enumerate(held)
        ]
        if self._new_names:
            rows += [f'DCGM_FI_NEW_{self.step}_{n}{{gpu="0",UUID="{held[0][0]}"}} 1\n' for n in range(20)]
        return Body("".join(rows).encode())

    async def list(self) -> bytes:
        """The kubelet's answer."""
        held = zip(self.gpus(), self.pods(), strict=True)
        return pod_list(*(pod("team", name, devices("nvidia.com/gpu", gpu)) for gpu, name in held))

    async def allocatable(self) -> bytes:
        """Every GPU."""
        return allocatable(devices("nvidia.com/gpu", *self.gpus()))

    async def close(self) -> None:
        """Nothing is open."""


class Node:
    """Receivers, attribution and what exporters keep, on virtual time and without sockets."""

    def __init__(self, churn: Churn) -> None:
        self.churn = churn
        self.clock = VirtualClock()
        self.telemetry = Telemetry()
        self.prometheus = PrometheusExporter(
            self._settings("prometheus", Kind.EXPORTERS), PrometheusConfig(endpoint="127.0.0.1:0")
        )
        exporter = self._settings("otlp_grpc", Kind.EXPORTERS)
        self._otlp = [OtlpEncoding(exporter, owner) for owner in (Owner.RESOURCE, Owner.ATTRIBUTES)]
        self._lines = LineEncoder()
        join = AttributionProcessor(self._settings("attribution", Kind.PROCESSORS), AttributionConfig(), self)
        kubelet_config = PodResourcesConfig()
        reader = Reader(Selection())
        client = cast(KubeletClient, churn)
        kubelet = PodResourcesScraper(client, reader, self.clock, "node-1", "pod_resources")
        settings = self._settings("pod_resources", Kind.RECEIVERS)
        self._kubelet = ScrapeReceiver(settings, kubelet_config, "pod_resources", kubelet, join)
        page_config = DcgmConfig.model_validate(
            {"endpoint": "http://exporter", "collection_interval": "15s", "refresh": "1s"}
        )
        page = DcgmScraper(PageReader(churn, PageParser()), page_config, "node-1", "dcgm", ComponentLog())
        self._page = ScrapeReceiver(self._settings("dcgm", Kind.RECEIVERS), page_config, "dcgm", page, join)

    def _settings(self, name: str, kind: Kind) -> Settings:
        return Settings(ComponentID(name), kind, "node-1", self.clock, self.telemetry, ComponentLog(), lambda *_: False)

    def consume(self, batch: Batch, ack: Ack) -> None:
        """What the exporters do with a batch."""
        self.prometheus.consume(batch, ack)
        for encoding in self._otlp:
            encoding.encode(batch)
        self._lines.encode(batch)

    async def run(self, steps: int) -> None:
        """Lets the node change and be read so many times, each time with somebody asking for the page."""
        for _ in range(steps):
            await self._kubelet.tick()
            await self.clock.advance(5, turns=0)
            await self._page.tick()
            await self.clock.advance(10, turns=0)
            self.prometheus.page(open_metrics=self.churn.step % 2 == 0)
            self.churn.step += 1


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keeps the log from being captured: it would be the one thing that grows."""
    logger = logging.getLogger("gpulens")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def rss_mib() -> float:
    """Memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc: memory is read from it")
@pytest.mark.parametrize(
    ("churn", "warm", "steps"),
    [
        (lambda: Churn(new_gpus=False, new_names=False, lives=1), 100, 500),
        (lambda: Churn(new_gpus=False, new_names=False, lives=40), 300, 1200),
        (lambda: Churn(new_gpus=True, new_names=True, lives=1), 220, 250),
    ],
    ids=["new pods at every scrape", "pods of ten minutes", "new pods, GPUs and names at every scrape"],
)
async def test_what_is_gone_is_forgotten(churn: Callable[[], Churn], warm: int, steps: int) -> None:
    """After a warm-up, thousands of pods (and GPUs) later the process is not 20 MiB larger."""
    node = Node(churn())
    await node.run(warm)
    before = rss_mib()
    await node.run(steps)
    assert 'pod="job-' in node.prometheus.page().decode()
    assert rss_mib() - before < 20, node_caches(node)


def node_caches(node: Node) -> str:
    """The caches' sizes, for a failure's text."""
    return ", ".join(
        f"{labels['cache']}={value / MIB:.1f}"
        for name, labels, value in node.telemetry.read()
        if name == "gpulens_cache_bytes"
    )
