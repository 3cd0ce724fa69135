"""Requests that wait for blocks: bounded, in order of arrival. Pure; knows nothing about futures, Ray or the
clock.

Strictly in order: as long as the head does not fit nobody passes it, so a large request cannot starve. A
request placed again keeps its arrival, hence its rank: it goes before all that came after it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from bifolio.protos.errors import Overloaded, Revoked, Unavailable
from bifolio.protos.messages import Ask, Placement, RequestId

from .config import KvConfig

Outcome = tuple[RequestId, Placement | Exception]


@dataclass(order=True, frozen=True, slots=True)
class _Waiting:
    arrival: float
    number: int  # of the push: a tie goes to who came first
    ask: Ask = field(compare=False)
    since: float = field(compare=False)


class AdmissionQueue:
    def __init__(self, config: KvConfig | None = None) -> None:
        self._config = config or KvConfig()
        self._waiting: list[_Waiting] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestId) -> bool:
        return any(w.ask.request == request for w in self._waiting)

    def push(self, ask: Ask, now: float) -> list[Outcome]:
        """Takes a request in. Returns whom that pushed out: over the bound the latest arrival, which need not
        be the new one, because a request that already has tokens must not lose to one that has none."""
        assert ask.request not in self, "revoke it first: one request waits once"
        self._pushes += 1
        insort(self._waiting, _Waiting(ask.arrival, self._pushes, ask, now))
        if len(self._waiting) <= self._config.admission_queue:
            return []
        why = f"{self._config.admission_queue} requests wait for blocks already"
        return [self._refuse(self._waiting.pop(), why, now)]

    def pump(self, place: Callable[[Ask], Placement | None]) -> list[Outcome]:
        """Places requests from the head on until one has to wait. An error belongs to its request alone."""
        outcomes: list[Outcome] = []
        while self._waiting:
            ask = self._waiting[0].ask
            try:
                result: Placement | Exception | None = place(ask)
            except Exception as error:
                result = error
            if result is None:
                break
            del self._waiting[0]
            outcomes.append((ask.request, result))
        return outcomes

    def expire(self, now: float, *, any_decode: bool = True) -> list[Outcome]:
        """Refuses those who waited too long. `any_decode`: whether a decode replica is there to wait for."""
        limit = self._config.admission_wait_s
        late = [w for w in self._waiting if now - w.since >= limit]
        if any_decode:
            outcomes = [self._refuse(w, f"no blocks came free in {limit:g} s", now) for w in late]
        else:
            message = f"no decode replica has been alive for {limit:g} s; see `bifolio status`"
            outcomes = [(w.ask.request, Unavailable(message)) for w in late]
        self._waiting = [w for w in self._waiting if now - w.since < limit]
        return outcomes

    def revoke(self, request: RequestId, why: str) -> list[Outcome]:
        """Takes a request out, if it waits here."""
        if request not in self:
            return []
        self._waiting = [w for w in self._waiting if w.ask.request != request]
        return [(request, Revoked(f"request {request} no longer waits: {why}"))]

    def _refuse(self, waiting: _Waiting, why: str, now: float) -> Outcome:
        # how long the head has waited is the best guess we have of how long a place at the end takes
        head = self._waiting[0].since if self._waiting else now
        retry_after = min(max(1.0, now - head), self._config.admission_wait_s)
        message = f"the cell is full: {why}; retry in {retry_after:.0f} s"
        return waiting.ask.request, Overloaded(message, retry_after)
