"""The exporter `prometheus`: keeps the latest batches and serves them as a page.

Invariant: `consume` only puts the batch aside; the page is written when somebody asks for it, at most once
for each state of the data, and whatever the data is, the page is well-formed.
"""

from __future__ import annotations

import errno
import gzip
import ssl
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gpulens.exporters.prometheus.config import PAGE_PATH, PrometheusConfig, ServerTLS, split_endpoint
from gpulens.exporters.prometheus.latest import Latest
from gpulens.exporters.prometheus.negotiation import OPEN_METRICS, TEXT, wants_gzip, wants_open_metrics
from gpulens.exporters.prometheus.opaque import points_by_type
from gpulens.exporters.prometheus.page import PageWriter, Plan
from gpulens.pipeline.ack import Ack
from gpulens.pipeline.component import Exporter, Host, Settings
from gpulens.pipeline.data import Batch
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.prometheus_names import LabelRules
from gpulens.pipeline.status import Status

_GZIP_LEVEL = 1  # a page shrinks 20-fold at level 1 already; higher levels cost more than the network saves
_GRACE_S = 2.0  # for answers that are on their way when the exporter stops


@dataclass(slots=True)
class _Written:
    """A page as bytes, good while no batch arrives and nothing expires."""

    version: int
    until_s: float
    plain: bytes
    packed: bytes | None = None


class PrometheusExporter:
    """Serves `/metrics`."""

    def __init__(self, settings: Settings, config: PrometheusConfig) -> None:
        self._settings = settings
        self._config = config
        self._latest = Latest(config.metric_expiration)
        self._writer = PageWriter(
            config.namespace, LabelRules(config.promote, config.const_labels), config.send_timestamps
        )
        self._version = 0
        self._written: dict[bool, _Written] = {}
        self._runner: web.AppRunner | None = None
        self._clashing = False
        self._name = str(settings.id)
        self._watch_caches()

    @property
    def port(self) -> int:
        """The port that is listened on, 0 while there is none; differs from the config's when that says 0."""
        addresses = self._runner.addresses if self._runner is not None else []
        return int(addresses[0][1]) if addresses else 0

    async def start(self, host: Host) -> None:
        """Listens. Raises StartError naming the address when that is not possible."""
        config = self._config
        address, port = split_endpoint(config.endpoint)
        tls = None if config.tls is None else _server_tls(self._name, config.tls)
        app = web.Application()
        app.router.add_get(PAGE_PATH, self._serve)
        app.router.add_route("*", "/{path:.*}", _elsewhere)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_GRACE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address or None, port, ssl_context=tls, reuse_address=True).start()
        except OSError as error:
            await self.shutdown()
            raise StartError(_bind_problem(self._name, config.endpoint, port, error)) from error
        self._settings.report(Status.OK, "")
        self._settings.log.info("Started to serve metrics.", endpoint=config.endpoint, path=PAGE_PATH)

    async def shutdown(self) -> None:
        """Stops listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def consume(self, data: Batch, ack: Ack) -> None:
        """Puts the batch aside for the next page. Nothing is kept for later sending, so no share is taken."""
        self._latest.keep(data, self._settings.clock.monotonic())
        self._version += 1
        telemetry = self._settings.telemetry
        shown = data.layout.size - int.from_bytes(data.absent, "little").bit_count()
        telemetry.count("otelcol_exporter_sent_metric_points", shown, exporter=self._name)
        if data.opaque:
            for reason, points in points_by_type(data.opaque).items():
                telemetry.count("gpulens_exporter_not_shown", points, exporter=self._name, reason=reason)

    def page(self, open_metrics: bool = False) -> bytes:
        """The page as it is now, UTF-8."""
        return self._current(open_metrics).plain

    def _current(self, open_metrics: bool) -> _Written:
        now_s = self._settings.clock.monotonic()
        known = self._written.get(open_metrics)
        if known is not None and known.version == self._version and now_s < known.until_s:
            return known
        held, until_s = self._latest.current(now_s)
        page = self._writer.write(held, open_metrics)
        written = _Written(self._version, until_s, page.text.encode("utf-8", "replace"))
        self._written[open_metrics] = written
        self._count(page.plan)
        return written

    def _count(self, plan: Plan) -> None:
        """Counts what a page had to leave off, and says so when that begins."""
        telemetry, name = self._settings.telemetry, self._name
        for reason, series in plan.hidden.items():
            telemetry.count("gpulens_exporter_not_shown", series, exporter=name, reason=reason)
        if plan.cut:
            telemetry.count("gpulens_exporter_labels_left_off", plan.cut, exporter=name)
        if plan.duplicates:
            telemetry.count("gpulens_exporter_duplicate_series", plan.duplicates, exporter=name)
            if not self._clashing:
                self._settings.log.warning(
                    "Left series off the page: others have the same name and labels.",
                    series=plan.duplicates,
                    example=plan.example,
                )
        self._clashing = plan.duplicates > 0

    async def _serve(self, request: web.Request) -> web.Response:
        open_metrics = wants_open_metrics(",".join(request.headers.getall("Accept", [])))
        written = self._current(open_metrics)
        headers = {"Content-Type": OPEN_METRICS if open_metrics else TEXT, "Vary": "Accept, Accept-Encoding"}
        body = written.plain
        if wants_gzip(",".join(request.headers.getall("Accept-Encoding", []))):
            if written.packed is None:
                written.packed = gzip.compress(written.plain, _GZIP_LEVEL, mtime=0)
            body = written.packed
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    def _watch_caches(self) -> None:
        telemetry, name = self._settings.telemetry, self._name
        for cache in (self._writer.sections, self._writer.plans):
            for figure in ("bytes", "hits", "misses", "evictions"):
                read = partial(getattr, cache, figure)
                telemetry.watch(f"gpulens_cache_{figure}", read, cache=cache.name, component=name)


def create(settings: Settings, config: PrometheusConfig) -> Exporter[Batch]:
    """Makes the exporter."""
    return PrometheusExporter(settings, config)


async def _elsewhere(request: web.Request) -> web.Response:
    if request.path == PAGE_PATH:
        return web.Response(status=405, text="use GET or HEAD\n", headers={"Allow": "GET, HEAD"})
    return web.Response(status=404, text=f"nothing here: the metrics are at {PAGE_PATH}\n")


def _bind_problem(name: str, endpoint: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f'exporter "{name}" can\'t listen on {endpoint}: port {port} is in use; '
            "stop the other program or set another endpoint"
        )
    return f'exporter "{name}" can\'t listen on {endpoint} (port {port}): {error.strerror or error}'


def _server_tls(name: str, tls: ServerTLS) -> ssl.SSLContext:
    """The server's TLS settings, 1.2 or later. Raises StartError when a file can't be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file:
            context.load_verify_locations(tls.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)))
        raise StartError(f'exporter "{name}" can\'t use the TLS files {files}: {error}') from error
    return context
