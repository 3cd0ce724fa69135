"""The line between a replica and the KV manager: its registration, its heartbeat, its releases.

Lives on the replica's event loop. Knows nothing about what the leases are for. A silent manager stops nobody: streams
go on from the reserve, and the next reply, or a new registration, puts the ledger right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bifolio.kv_manager.actor import connect
from bifolio.protos.messages import Generation, Release, ReplicaInfo, Reply, Report

from .core import Core, ReplicaSpec

logger = logging.getLogger(__name__)

GOODBYE_S = 2.0  # for the manager to hear that the replica leaves
QUICKEST_S = 0.05  # between two beats, however often one is asked for


class Beat:
    """Made on the event loop."""

    def __init__(self, core: Core, spec: ReplicaSpec) -> None:
        self._core = core
        self._kv = spec.kv
        self._manager: Any = connect(*spec.manager)
        self._loop = asyncio.get_running_loop()
        self._now = asyncio.Event()
        self._lock = threading.Lock()  # of the list
        self._releases: list[Release] = []
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, info: ReplicaInfo, revoked: Callable[[Generation], None]) -> None:
        """Introduce the replica; from now on it is given work.

        `revoked` is called, on the event loop, with each open lease that the manager takes back. Raises
        GeometryMismatch when another replica of this model holds other blocks.
        """
        self._info, self._revoked = info, revoked
        await self._manager.register.remote(info, self._take_report(complete=True))
        self._task = asyncio.create_task(self._beat())

    def drain(self) -> None:
        """Ask for no new work: the next report says so."""
        self._draining = True
        self._now.set()

    async def stop(self) -> None:
        """The manager forgets the replica and its leases; if it is away, the replica's silence says the same."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._manager.report_state.remote(self._core.replica, "dead"), GOODBYE_S)

    def close(self, generation: Generation) -> None:
        """Return a lease whose blocks nothing touches any more. From any thread; twice is harmless."""
        release = self._core.tags.close(generation)
        if release is None:
            return
        with self._lock:
            self._releases.append(release)
            first = len(self._releases) == 1
        if first:
            self._loop.call_soon_threadsafe(self._release)

    def if_due(self) -> None:
        """Beat at once when the reserve is far from what is wanted, or the ledger was wrong. On the event loop."""
        if self._core.tags.due:
            self._now.set()

    def ask_if_due(self) -> None:
        """The same, from any thread."""
        self._loop.call_soon_threadsafe(self.if_due)

    def _release(self) -> None:
        """Say what was closed since the last time, in one call. It is one way: if it is lost, the next report says it
        too."""
        with self._lock:
            releases, self._releases = tuple(self._releases), []
        self._manager.release.remote(releases)

    async def _beat(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._now.wait(), self._kv.heartbeat_s)
                await asyncio.sleep(QUICKEST_S)
            except TimeoutError:
                pass
            self._now.clear()
            try:
                await asyncio.wait_for(self._report(), self._kv.silence_s)
            except Exception as error:
                logger.warning("%s: the KV manager did not take the heartbeat, going on: %r", self._core.replica, error)

    async def _report(self) -> None:
        reply: Reply = await self._manager.heartbeat.remote(self._take_report())
        if not reply.known:
            await self._manager.register.remote(self._info, self._take_report(complete=True))
        for generation in self._core.tags.apply(reply):
            logger.warning("%s: the KV manager revoked lease %s", self._core.replica, generation)
            self._revoked(generation)

    def _take_report(self, complete: bool = False) -> Report:
        report = self._core.tags.report(time.monotonic(), complete=complete)
        return replace(report, draining=self._draining, speeds=self._core.speeds, traffic=self._core.meter.read())
