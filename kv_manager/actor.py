"""The KV manager: a Ray actor around the ledger and the queue of those who wait for blocks. It decides nothing.

    admit ──▶ queue ──pump──▶ ledger.admit ──▶ the waiter's future            group "wait": one slot per waiter
    register, heartbeat, release, revoke, … ──▶ ledger, then pump             default group: never behind them
    a thread, every heartbeat_s ──▶ expire, then pump
    a thread with an event loop ──▶ keeper: what must be remembered, in Redis

Ray runs each concurrency group of an async actor in an event loop, hence a thread, of its own. So one lock
guards ledger and queue, and a waiter is woken through a `concurrent.futures.Future`, which any thread may set.
Nobody waits for Redis while holding it, and but for a moment at the beginning nobody waits for Redis at all.

A restarted actor begins with an empty ledger and a later epoch: it answers each replica's first heartbeat with
"register again", and the leases come back with the reports. Requests that waited are gone with it: their calls
fail with Ray's `ActorDiedError` or `ActorUnavailableError`, and asking again is safe.

Our errors reach a caller as Ray's `RayTaskError` that is also an instance of our class and has its attributes;
the error itself is its `cause`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import ray

from bifolio.protos.messages import (
    Ask,
    Confirmed,
    Placement,
    Release,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
)

from . import drill
from .admission import AdmissionQueue, Outcome
from .config import KvConfig
from .keeper import Keeper
from .ledger import Ledger, ReportedState
from .logs import log_to_stderr
from .snapshot import snapshot
from .store import MemoryStore, RedisStore, cell_of

logger = logging.getLogger(__name__)

# Calls over the bound must get in, so that the queue refuses the last in order: else Ray would hold them back.
SPARE_WAITERS = 256
LATE_S = 1.0  # a look at what has expired that is so late is left out

F = TypeVar("F", bound=Callable[..., Any])


def _in_group(group: str) -> Callable[[F], F]:
    """`ray.method`, typed: it only notes the group on the function."""
    return cast("Callable[[F], F]", ray.method(concurrency_group=group))


class KvManager:
    """`cell` names what it keeps in Redis. Without a Redis it remembers nothing beyond its own life."""

    def __init__(self, config: KvConfig, cell: str = "", redis_url: str | None = None) -> None:
        log_to_stderr()
        self._config = config
        self._lock = threading.Lock()
        self._went_on = time.monotonic()  # when somebody was placed, or blocks came back, or last nobody waited
        self._queue = AdmissionQueue(config)
        self._waiters: dict[RequestId, Future[Placement]] = {}
        self._keeper = Keeper(RedisStore(redis_url, cell) if redis_url else MemoryStore(), config.tombstone_s)
        self._loop = asyncio.new_event_loop()  # the keeper's
        began: Future[Ledger] = Future()
        keep = self._keep(began)
        threading.Thread(target=self._loop.run_until_complete, args=(keep,), name="keeper", daemon=True).start()
        self._ledger = began.result()  # within seconds: every question to the store has an end
        gc.freeze()  # what Python has loaded stays: looking through it again would hold up a call for milliseconds
        threading.Thread(target=self._tick, args=(config.heartbeat_s,), name="expiry", daemon=True).start()

    @_in_group("wait")
    async def admit(self, ask: Ask) -> Placement:
        """Waits for blocks. Raises DoesNotFit, Overloaded, Unavailable, or Revoked."""
        future: Future[Placement] = Future()
        with self._lock:
            now = time.monotonic()
            self._ledger.check(ask, now)
            self._settle(self._queue.revoke(ask.request, "it was admitted again", choices=False))
            self._waiters[ask.request] = future
            self._settle(self._queue.push(ask, now))
            self._pump(now, changed=False)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await self.revoke(ask.request)
            raise

    async def revoke(self, request: RequestId, known: bool = False) -> None:
        """Gives up all of a request, or one of its choices; `known` as in the ledger."""
        with self._lock:
            now = time.monotonic()
            waited = self._drop(request)
            self._ledger.revoke(request, now, known=known or waited)
            self._pump(now)

    async def cancel(self, request: RequestId) -> None:
        """The same by its user's wish: it is refused for `tombstone_s`, also by the next manager."""
        with self._lock:
            now = time.monotonic()
            self._drop(request)
            self._ledger.cancel(request, now)
            self._pump(now)
        self._loop.call_soon_threadsafe(self._keeper.bury, request)

    async def confirm(self, requests: tuple[RequestId, ...]) -> Confirmed:
        """All that are open at an ingress."""
        with self._lock:
            return self._ledger.confirm(requests, time.monotonic())

    async def register(self, info: ReplicaInfo, report: Report) -> None:
        with self._lock:
            now = time.monotonic()
            self._ledger.register(info, report, now)
            self._pump(now)
        logger.info("%s replica %s is here, with %d leases", info.role, info.id, len(report.leases))

    async def drain(self, replica: ReplicaId) -> None:
        """Asks a replica to leave. InvalidRequest if there is none of this name."""
        with self._lock:
            self._ledger.drain(replica)
        logger.info("replica %s is asked to leave", replica)

    async def heartbeat(self, report: Report) -> Reply:
        with self._lock:
            drill.point("manager")
            now = time.monotonic()
            reply = self._ledger.heartbeat(report, now)
            self._pump(now)
            return reply

    async def release(self, releases: tuple[Release, ...]) -> None:
        with self._lock:
            for each in releases:
                self._ledger.release(each)
            self._went_on = time.monotonic()
            self._pump(self._went_on)

    async def report_state(self, replica: ReplicaId, state: ReportedState) -> None:
        with self._lock:
            now = time.monotonic()
            self._ledger.report_state(replica, state, now)
            self._pump(now)
        logger.info("replica %s is said to be %s", replica, state)

    async def snapshot(self) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            idle_s = now - self._went_on if len(self._queue) else 0.0
            queue = {**self._queue.snapshot(now), "idle_s": round(idle_s, 1)}
            store = {"where": self._keeper.where, "answers": self._keeper.answers}
            return {**snapshot(self._ledger, now), "waiting": len(self._queue), "queue": queue, "store": store}

    # -- with the lock held

    def _drop(self, request: RequestId) -> bool:
        """Whether it waited."""
        outcomes = self._queue.revoke(request, "it was cancelled")
        self._settle(outcomes)
        return bool(outcomes)

    def _pump(self, now: float, *, changed: bool = True) -> None:
        if len(self._queue):
            models = self._models()
            self._settle(
                self._queue.pump(
                    lambda ask, kept: self._ledger.admit(ask, now, kept),
                    now,
                    waits_for=self._ledger.waits_for,
                    models=models,
                    changed=changed,
                )
            )

    def _models(self) -> set[str]:
        """Those that are served now."""
        return {b.model for b in self._ledger.books() if b.info.role == "decode" and b.alive}

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        for request, outcome in outcomes:
            if isinstance(outcome, Placement):
                self._went_on = time.monotonic()
            future = self._waiters.pop(request)
            if not future.set_running_or_notify_cancel():
                continue  # the caller left; its `admit` is about to revoke what it was given
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    # -- in threads of their own

    def _tick(self, every: float) -> None:
        while True:
            began = time.monotonic()
            time.sleep(every)
            if time.monotonic() - began > every + LATE_S:
                continue  # we were held up: what confirms and reports goes first, or we would miss what is waiting here
            try:
                self._expire()
            except Exception:  # a bug of ours: without this thread nothing would ever expire again
                logger.exception("expiry failed, going on")

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            said = self._ledger.expire(now)
            if not len(self._queue):
                self._went_on = now
            self._settle(self._queue.expire(now, models=self._models()))
            self._pump(now)
        for sentence in said:
            logger.warning("%s", sentence)

    async def _keep(self, began: Future[Ledger]) -> None:
        """Remember, for as long as the actor lives. `began` is given a ledger with the tombstones of earlier ones."""
        try:
            ledger = Ledger(await self._keeper.begin(time.time_ns()), self._config)
            if self._keeper.answers:
                self._cancelled_before(ledger, await self._keeper.round())
            began.set_result(ledger)
        except BaseException as error:
            began.set_exception(error)
            raise
        while True:
            await self._keeper.due()
            try:
                found = await self._keeper.round()
                with self._lock:
                    self._cancelled_before(ledger, found)
            except Exception:  # a bug of ours, as above
                logger.exception("what must be remembered was not stored, going on")
            if self._keeper.outdated:
                # Replicas know later generations than ours, and refuse our placements: Ray starts us again
                logger.critical("epoch %d is not the newest of this cell: beginning again", self._keeper.epoch)
                os._exit(1)

    def _cancelled_before(self, ledger: Ledger, tombstones: Mapping[RequestId, float]) -> None:
        """By an earlier manager: each request, and for how many more seconds it is refused."""
        now = time.monotonic()
        for request, left in tombstones.items():
            self._drop(request)
            ledger.cancel(request, now + left - self._config.tombstone_s)  # when that was


def start(name: str, namespace: str, config: KvConfig, redis_url: str | None = None) -> Any:
    """The handle of the cell's KV manager, started unless it runs. Detached: it lives until it is killed.

    Lost calls are not repeated by Ray (`max_task_retries`): the caller knows whether it still wants an answer.
    """
    groups = {"wait": config.admission_queue + SPARE_WAITERS}
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups=groups)(KvManager)
    named = actor.options(name=name, namespace=namespace, lifetime="detached", get_if_exists=True)
    return named.remote(config, cell_of(name, namespace), redis_url)


def connect(name: str, namespace: str) -> Any:
    """The handle of a running KV manager. Raises ValueError when there is none."""
    return ray.get_actor(name, namespace=namespace)
