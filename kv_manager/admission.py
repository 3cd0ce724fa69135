"""Requests that wait for blocks: bounded, in the order of `fair.py`, each with a deadline. Pure: time is an argument;
knows nothing about futures, Ray, or what makes a request fit.

The passing rule. While the first in order does not fit, the next `MOST_PASSING` may pass it if they do, so that blocks
too few for a large request are not idle. But for `passing_s` at most, counted from when a request was first found not
to fit while it was first; from then on the replica that it waits for is kept: nobody behind it is placed there, so what
comes free gathers for it, while all other replicas go on. Hence none waits for ever while others are served. Who has
tokens goes on with the model that they are of, and for a model without a decode replica nothing can gather: such a
request is not first, it only waits.

A try costs the ledger up to a millisecond. So it is not repeated for who did not fit until something has changed in the
cell, and those beyond the few that may pass are not tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from bifolio.protos.errors import Overloaded, Revoked, Unavailable
from bifolio.protos.messages import Ask, Placement, ReplicaId, RequestId, family

from .config import KvConfig
from .fair import FairOrder, Waiting

MOST_PASSING = 8
PACE_S = 30.0  # what was placed so long ago counts a third in what is placed per second

Outcome = tuple[RequestId, Placement | Exception]


class AdmissionQueue:
    def __init__(self, config: KvConfig | None = None) -> None:
        self._config = config or KvConfig()
        self._waiting: dict[RequestId, Waiting] = {}
        self._order = FairOrder()
        self._pace = Pace()
        self._pushes = 0
        self._changes = 0  # of the cell
        self._admitted = 0
        self._refused: Counter[str] = Counter()  # by the error's class

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._waiting

    def push(self, ask: Ask, now: float) -> list[Outcome]:
        """Takes a request in. Returns whom that pushed out: over the bound the last in order, which need not be the
        new one, and never one with tokens while one without is there."""
        assert ask.request not in self, "take it out first: one request waits once"
        self._pushes += 1
        waiting = self._waiting[ask.request] = Waiting(ask, self._pushes, now)
        self._order.add(waiting)
        if len(self) <= self._config.admission_queue:
            return []
        last = self._order.last()
        why = f"{self._config.admission_queue} requests wait for blocks already"
        return self._leave([(last, _overloaded(why, self._retry_after(now)))])

    def pump(
        self,
        place: Callable[[Ask, Collection[ReplicaId]], Placement | None],
        now: float,
        *,
        waits_for: Callable[[Ask], ReplicaId | None] = lambda ask: None,
        models: Collection[str] | None = None,
        changed: bool = True,
    ) -> list[Outcome]:
        """Places who fits, in order and by the passing rule. An error belongs to its request alone.

        `place` is given the replicas that are kept; `waits_for`: the one that who does not fit needs next, None is
        every one.
        `models`: those with a decode replica, None is all. `changed`: since the last pump blocks may have come free,
        or a replica; if not, only who is new is tried.
        """
        self._changes += changed
        leaving: list[tuple[Waiting, Placement | Exception]] = []
        behind = 0  # looked at since the first that did not fit, and it
        kept: set[ReplicaId] = set()
        for waiting in self._order:
            result = self._try(waiting, place, kept)
            if result is None and not _served(waiting, models):
                continue
            if result is not None:
                leaving.append((waiting, result))
                if isinstance(result, Placement):
                    self._order.charge(waiting)
                    self._pace.add(waiting.cost, now)
                    self._admitted += 1
            elif not behind and waiting.blocked is None:
                waiting.blocked = now
            if result is None or behind:
                behind += 1
            if behind > MOST_PASSING:
                break
            if result is None and self._keeps(waiting, now):
                if (replica := waits_for(waiting.ask)) is None:
                    break
                kept.add(replica)
        return self._leave(leaving)

    def expire(self, now: float, *, models: Collection[str] | None = None) -> list[Outcome]:
        """Refuses those who waited too long. `models` as in `pump`. Whose answer has begun is first in the order and
        waits on, as long as there is a replica to wait for: a deadline would cut it in the middle."""
        limit = self._config.admission_wait_s
        late = [w for w in self._waiting.values() if now - w.since >= limit and not (_begun(w) and _served(w, models))]
        if not late:
            return []
        retry_after = self._retry_after(now)

        def error(waiting: Waiting) -> Exception:
            if _served(waiting, models):
                return _overloaded(f"no blocks came free in {limit:g} s", retry_after)
            return Unavailable(f"no decode replica of its model has been alive for {limit:g} s; see `bifolio status`")

        return self._leave([(waiting, error(waiting)) for waiting in late])

    def revoke(self, request: RequestId, why: str, *, choices: bool = True) -> list[Outcome]:
        """Takes a request out, if it waits here, and with it those of its choices that do."""
        found = [self._waiting[request]] if request in self else []
        if choices:
            found += [w for id, w in self._waiting.items() if id != request and family(id) == request]
        return self._leave([(w, Revoked(f"request {w.ask.request} no longer waits: {why}")) for w in found])

    def snapshot(self, now: float) -> dict[str, Any]:
        """For people and tools: plain values."""
        waiting = self._waiting.values()
        return {
            "tenants": dict(Counter(w.ask.tenant for w in waiting)),
            "with_tokens": sum(w.ask.resumed for w in waiting),
            "oldest_s": max((now - w.since for w in waiting), default=0.0),
            "admitted": self._admitted,
            "refused": dict(self._refused),
        }

    # -- inside

    def _try(
        self, waiting: Waiting, place: Callable[[Ask, Collection[ReplicaId]], Placement | None], kept: set[ReplicaId]
    ) -> Placement | Exception | None:
        if waiting.tried == self._changes:
            return None
        try:
            result = place(waiting.ask, kept)
        except Exception as error:
            return error
        if result is None:
            waiting.tried = self._changes
        return result

    def _keeps(self, waiting: Waiting, now: float) -> bool:
        """Whether what comes free for it is kept: nobody behind it may have that."""
        return waiting.blocked is not None and now - waiting.blocked >= self._config.passing_s

    def _leave(self, leaving: Iterable[tuple[Waiting, Placement | Exception]]) -> list[Outcome]:
        leaving = list(leaving)
        self._order.remove(*(waiting for waiting, _ in leaving))
        for waiting, outcome in leaving:
            del self._waiting[waiting.ask.request]
            if isinstance(outcome, Exception):
                self._refused[type(outcome).__name__] += 1
        return [(waiting.ask.request, outcome) for waiting, outcome in leaving]

    def _retry_after(self, now: float) -> float:
        """When, at the pace of late, those that wait will have been placed."""
        cost, pace = sum(w.cost for w in self._waiting.values()), self._pace.per_second(now)
        longest = self._config.admission_wait_s
        return max(1.0, min(cost / pace, longest) if pace else longest)


def _overloaded(why: str, retry_after: float) -> Overloaded:
    return Overloaded(f"the cell is full: {why}; retry in {retry_after:.0f} s", retry_after)


def _begun(waiting: Waiting) -> bool:
    """Whether somebody is reading its answer: it has tokens, or is one of several that began together."""
    return waiting.ask.resumed or family(waiting.ask.request) != waiting.ask.request


def _served(waiting: Waiting, models: Collection[str] | None) -> bool:
    """Whether there is a replica to wait for."""
    if models is None or waiting.ask.model is None:
        return models is None or len(models) > 0
    return waiting.ask.model in models


class Pace:
    """The cost of what was placed per second: what was placed a while ago counts less and less."""

    def __init__(self) -> None:
        self._sum = self._last = 0.0
        self._began: float | None = None

    def add(self, cost: float, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._sum = self._left(now) + cost
        self._last = now

    def per_second(self, now: float) -> float:
        if self._began is None:
            return 0.0
        since = max(1.0, now - self._began)  # of a moment alone no pace can be told
        return self._left(now) / (PACE_S * -math.expm1(-since / PACE_S))

    def _left(self, now: float) -> float:
        return self._sum * math.exp((self._last - now) / PACE_S)
