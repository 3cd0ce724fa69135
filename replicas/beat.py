"""The line between a replica and the KV manager: its registration, its heartbeat, its releases.

Between two beats it looks whether the replica's engine and its transfers go on: what stands still is reported at once.

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
from typing import Any, Protocol

from bifolio.kv_manager import drill
from bifolio.kv_manager.actor import connect
from bifolio.protos.messages import Generation, Release, ReplicaInfo, Reply, Report, Stage

from .core import Core, ReplicaSpec

logger = logging.getLogger(__name__)

GOODBYE_S = 2.0  # for the manager to hear that the replica leaves
QUICKEST_S = 0.05  # between two beats, however often one is asked for
LOOK_S = 0.25  # between two looks at what may stand still
LATE_S = 1.0  # one that is so late is left out


class Work(Protocol):
    """What a replica does under its leases. Called on the event loop."""

    def revoke(self, generation: Generation) -> None:
        """The KV manager takes an open lease back."""

    def give_up(self, why: str) -> None:
        """The engine stands still: nobody should wait for what is begun here. Called again while that lasts."""

    def stalled_s(self) -> float:
        """For how long a transfer has not ended that should have; 0 is none."""


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
        self._stalled: dict[Stage, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, info: ReplicaInfo, work: Work, leave: Callable[[], None]) -> None:
        """Introduce the replica; from now on it is given work. `leave` is called when the manager asks it to leave.

        Raises GeometryMismatch when another replica of this model holds other blocks.
        """
        self._info, self._work, self._leave = info, work, leave
        await self._manager.register.remote(info, self._take_report(complete=True))
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]

    @property
    def stalled(self) -> bool:
        """Whether something here stands still."""
        return bool(self._stalled)

    def check(self) -> None:
        """Raise if something here stands still."""
        if self._stalled:
            raise RuntimeError(f"{self._core.replica} stands still: {', '.join(self._stalled)}")

    def drain(self) -> None:
        """Ask for no new work: the next report, at once, says so. From any thread."""
        self._draining = True
        self._loop.call_soon_threadsafe(self._now.set)

    async def stop(self) -> None:
        """The manager forgets the replica and its leases; if it is away, the replica's silence says the same."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._manager.report_state.remote(self._core.replica, "gone"), GOODBYE_S)

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

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - began > LOOK_S + LATE_S:
                continue  # the whole process was held up: what stood still may go on
            drill.point("loop")
            self._core.cores.place_loops()
            before, self._stalled = self._stalled, {}
            if engine := self._core.stalled_s():
                self._stalled["engine"] = engine
                self._work.give_up(f"it has ended no step for {engine:.1f} s")
            if transfer := self._work.stalled_s():
                self._stalled["transfer"] = transfer
            if self._stalled.keys() != before.keys():
                what = ", ".join(f"its {stage} for {s:.1f} s" for stage, s in self._stalled.items()) or "nothing more"
                logger.warning("%s: stands still: %s", self._core.replica, what)
                self._now.set()

    async def _report(self) -> None:
        reply: Reply = await self._manager.heartbeat.remote(self._take_report())
        if not reply.known:
            await self._manager.register.remote(self._info, self._take_report(complete=True))
        for generation in self._core.tags.apply(reply):
            logger.warning("%s: the KV manager revoked lease %s", self._core.replica, generation)
            self._work.revoke(generation)
        if reply.leave:
            self._leave()

    def _take_report(self, complete: bool = False) -> Report:
        report = self._core.tags.report(time.monotonic(), complete=complete)
        return replace(
            report,
            draining=self._draining,
            speeds=self._core.speeds,
            traffic=self._core.meter.read(),
            stalled=dict(self._stalled),
        )
