"""Keeps one watch of this node's pods going, whoever tells of them.

Invariant: the start never fails because a server is away; while the watch does not work, what was known stays known
and `problem` says why it may be old.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from typing import TYPE_CHECKING, Final

from gpulens.extensions.k8s_observer.config import EXTRA, K8sObserverConfig
from gpulens.extensions.k8s_observer.known import NOT_SERVED, KnownPods, PodSource, WatchError
from gpulens.extensions.k8s_observer.kubelet import Kubelet
from gpulens.pipeline.component import Extension, Host, Settings
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.pods import PodsSeen
from gpulens.pipeline.status import Status

if TYPE_CHECKING:
    from gpulens.extensions.k8s_observer.kubernetes import ApiServer

FIRST_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0
KUBELET_TRIES: Final = 3
"""Failures in a row after which a kubelet that may be restarting is taken for one that does not serve its pods."""
KUBELET_AGAIN_S: Final = 300.0
"""How long after that the API server is asked instead."""


class Backoff:
    """Growing waits between tries: 1 s to 30 s, spread so that the agents of a cluster do not come back together."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S

    def next_s(self, at_least_s: float = 0.0) -> float:
        """The next wait."""
        delay_s = max(self._delay_s * random.uniform(0.75, 1.25), at_least_s)
        self._delay_s = min(2 * self._delay_s, MAX_DELAY_S)
        return delay_s

    def reset(self) -> None:
        """It worked."""
        self._delay_s = FIRST_DELAY_S


class K8sObserver:
    """The extension: a PodObserver."""

    def __init__(self, settings: Settings, config: K8sObserverConfig) -> None:
        self._settings = settings
        self._config = config
        self._node = config.node or settings.node
        self._known = KnownPods(self._worked)
        self._kubelet: Kubelet | None = None
        self._server: ApiServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._works = False
        self._kubelet_failures = 0
        self._kubelet_again_s = 0.0
        self._last: PodSource | None = None
        self._lacks = ""

    def pods(self) -> PodsSeen:
        """What is known now; the same object while nothing changes."""
        return self._known.seen

    async def start(self, host: Host) -> None:
        """Begins the watch. Raises StartError when what it can't do without is not installed or not said."""
        config, clock = self._config, self._settings.clock
        if config.source != "kubernetes":
            self._kubelet = Kubelet(
                config.socket_paths, clock, config.timeout, config.watch_timeout, self._known, self._unreadable
            )
        if config.source != "kubelet":
            self._server = self._api_server()
        self._task = asyncio.create_task(self._run(), name=f"watch pods {self._settings.id}")

    async def shutdown(self) -> None:
        """Ends the watch."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for source in (self._kubelet, self._server):
            if source is not None:
                await source.close()

    def _api_server(self) -> ApiServer | None:
        """The API server; None where the extra is not installed and the kubelet may tell."""
        if not self._node:
            raise StartError(f"{self._settings.id}: which node's pods? Set 'node', or the environment's NODE_NAME")
        try:
            from gpulens.extensions.k8s_observer.kubernetes import ApiServer
        except ImportError as error:
            if self._kubelet is not None:
                self._lacks = f"; asking the API server instead needs {EXTRA}"
                self._settings.log.info("No way to the API server, only to the kubelet.", error=str(error))
                return None
            raise StartError(f"{self._settings.id}: asking the API server for pods needs {EXTRA}: {error}") from error
        return ApiServer(self._node, self._settings.clock, self._config, self._known, self._unreadable)

    async def _run(self) -> None:
        clock, backoff = self._settings.clock, Backoff()
        while True:
            source, began_s = self._pick(), clock.monotonic()
            problem = await self._follow(source)
            lasted_s = clock.monotonic() - began_s
            if lasted_s >= MAX_DELAY_S:
                backoff.reset()
            if lasted_s >= MAX_DELAY_S or problem is None:  # a list alone is no sign that the watch works
                self._kubelet_failures = 0
            if problem is None:
                if lasted_s < FIRST_DELAY_S:  # a server that ends each watch at once is not asked without a pause
                    await clock.sleep(backoff.next_s())
            elif not self._gives_up(source, problem):
                self._failed(problem)
                await clock.sleep(backoff.next_s(problem.delay_s))

    async def _follow(self, source: PodSource) -> WatchError | None:
        """One round; why it ended, None when in good order."""
        try:
            await source.follow()
        except WatchError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a defect costs one round, not every round after it
            self._settings.log.debug("Watch raised.", error="".join(traceback.format_exception(error)))
            return WatchError(f"defect in the watch of pods: {error!r}", "internal_error")
        return None

    def _worked(self) -> None:
        """The pods are up to date."""
        self._settings.report(Status.OK, "")
        if self._works:
            return
        self._works = True
        pods = len(self._known.seen.pods)
        self._settings.log.info("Pods are watched.", node=self._node, pods=pods)
        if not pods:  # the agent's own pod at least should be there
            self._settings.log.warning("No pod was found on this node. Check its name.", node=self._node)

    def _pick(self) -> PodSource:
        """Who is asked next; a change of source begins with a list."""
        source = self._who()
        if source is not self._last and self._server is not None:
            self._server.forget()
        self._last = source
        return source

    def _who(self) -> PodSource:
        kubelet, server = self._kubelet, self._server
        if kubelet is None or server is None:
            found = kubelet or server
            assert found is not None
            return found
        if kubelet.is_there and self._settings.clock.monotonic() >= self._kubelet_again_s:
            return kubelet
        return server

    def _gives_up(self, source: PodSource, error: WatchError) -> bool:
        """Whether the API server is asked instead from now on."""
        if source is not self._kubelet or self._server is None:
            return False
        self._kubelet_failures += 1
        if error.reason != NOT_SERVED and self._kubelet_failures < KUBELET_TRIES:
            return False
        self._kubelet_failures = 0
        self._kubelet_again_s = self._settings.clock.monotonic() + KUBELET_AGAIN_S
        self._settings.log.info("The kubelet does not serve its pods. Asking the API server.", error=str(error))
        return True

    def _failed(self, error: WatchError) -> None:
        self._works = False
        text = f"{error}{self._lacks}"
        self._known.failing(text)
        if self._settings.report(Status.RECOVERABLE, text):
            self._settings.log.warning("Pods can't be watched.", error=text)

    def _unreadable(self, error: str) -> None:
        self._settings.telemetry.count("gpulens_k8s_observer_unreadable_pods", 1)
        self._settings.log.debug("Pod could not be read.", error=error)


def create(settings: Settings, config: K8sObserverConfig) -> Extension:
    """The extension of one `k8s_observer:` block."""
    return K8sObserver(settings, config)
