"""The KV manager: a Ray actor around the ledger and the queue of those who wait for blocks. It decides nothing.

    admit ──▶ queue ──pump──▶ ledger.admit ──▶ the waiter's future            group "wait": one slot per waiter
    register, heartbeat, release, revoke, … ──▶ ledger, then pump             default group: never behind them
    a thread, every heartbeat_s ──▶ expire, then pump

Ray runs each concurrency group of an async actor in an event loop, hence a thread, of its own. So one lock
guards ledger and queue, and a waiter is woken through a `concurrent.futures.Future`, which any thread may set.

A restarted actor begins with an empty ledger and a later epoch: it answers each replica's first heartbeat with
"register again", and the leases come back with the reports. Requests that waited are gone with it: their calls
fail with Ray's `ActorDiedError` or `ActorUnavailableError`, and asking again is safe.

Our errors reach a caller as Ray's `RayTaskError` that is also an instance of our class and has its attributes;
the error itself is its `cause`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, cast

import ray

from bifolio.protos.messages import (
    Ask,
    Generation,
    Placement,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
)

from .admission import AdmissionQueue, Outcome
from .config import KvConfig
from .ledger import Ledger

logger = logging.getLogger(__name__)

# Calls over the bound must get in, so that the queue refuses the latest arrival: else Ray would hold them back.
SPARE_WAITERS = 256

F = TypeVar("F", bound=Callable[..., Any])


def _in_group(group: str) -> Callable[[F], F]:
    """`ray.method`, typed: it only notes the group on the function."""
    return cast("Callable[[F], F]", ray.method(concurrency_group=group))


class KvManager:
    def __init__(self, config: KvConfig) -> None:
        self._lock = threading.Lock()
        self._ledger = Ledger(time.time_ns(), config)
        self._queue = AdmissionQueue(config)
        self._waiters: dict[RequestId, Future[Placement]] = {}
        threading.Thread(target=self._tick, args=(config.heartbeat_s,), name="expiry", daemon=True).start()

    @_in_group("wait")
    async def admit(self, ask: Ask) -> Placement:
        """Waits for blocks. Raises DoesNotFit, Overloaded, or Revoked."""
        future: Future[Placement] = Future()
        with self._lock:
            now = time.monotonic()
            self._settle(self._queue.revoke(ask.request, "it was admitted again"))
            self._waiters[ask.request] = future
            self._settle(self._queue.push(ask, now))
            self._pump(now)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await self.revoke(ask.request)
            raise

    async def revoke(self, request: RequestId) -> None:
        with self._lock:
            now = time.monotonic()
            self._settle(self._queue.revoke(request, "it was cancelled"))
            self._ledger.revoke(request, now)
            self._pump(now)

    async def register(self, info: ReplicaInfo, report: Report) -> None:
        with self._lock:
            now = time.monotonic()
            self._ledger.register(info, report, now)
            self._pump(now)

    async def heartbeat(self, report: Report) -> Reply:
        with self._lock:
            now = time.monotonic()
            reply = self._ledger.heartbeat(report, now)
            self._pump(now)
            return reply

    async def activate(self, generation: Generation) -> None:
        with self._lock:
            self._ledger.activate(generation)

    async def release(self, replica: ReplicaId, generation: Generation, beat: int) -> None:
        with self._lock:
            self._ledger.release(replica, generation, beat)
            self._pump(time.monotonic())

    async def report_state(self, replica: ReplicaId, state: Literal["dead", "draining"]) -> None:
        with self._lock:
            now = time.monotonic()
            self._ledger.report_state(replica, state, now)
            self._pump(now)

    async def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {**self._ledger.snapshot(), "waiting": len(self._queue)}

    # -- with the lock held

    def _pump(self, now: float) -> None:
        self._settle(self._queue.pump(lambda ask: self._ledger.admit(ask, now)))

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        for request, outcome in outcomes:
            future = self._waiters.pop(request)
            if not future.set_running_or_notify_cancel():
                continue  # the caller left; its `admit` is about to revoke what it was given
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _tick(self, every: float) -> None:
        while True:
            time.sleep(every)
            try:
                self._expire()
            except Exception:  # a bug of ours: without this thread nothing would ever expire again
                logger.exception("expiry failed, going on")

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._ledger.expire(now)
            self._settle(self._queue.expire(now, any_decode=self._ledger.has_decode()))
            self._pump(now)


def start(name: str, namespace: str, config: KvConfig) -> Any:
    """The handle of the cell's KV manager, started unless it runs. Detached: it lives until it is killed.

    Lost calls are not repeated by Ray (`max_task_retries`): the caller knows whether it still wants an answer.
    """
    groups = {"wait": config.admission_queue + SPARE_WAITERS}
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups=groups)(KvManager)
    named = actor.options(name=name, namespace=namespace, lifetime="detached", get_if_exists=True)
    return named.remote(config)


def connect(name: str, namespace: str) -> Any:
    """The handle of a running KV manager. Raises ValueError when there is none."""
    return ray.get_actor(name, namespace=namespace)
