"""The order of those who wait: by priority, fair between tenants, then by arrival. Pure; knows nothing about
placements, deadlines or the clock.

    priority        the lower first
    tokens          of equal priority, who has some of its answer already goes before who has none
    tenant          the one with the least clock
    arrival         of one tenant, the earliest; a request placed again has kept its arrival

Start-time fair queueing: what is placed moves its tenant's clock on by its cost, the tokens of its history for each of
its choices. So of tenants that always wait, none is ever ahead of another by more than one request of each. Each
priority has clocks of its own, since the lower waits for the higher anyway, and a time by which tenants come in: it
moves on by the cost of what is placed, divided by the tenants that wait, and is never behind the least clock. Who comes
while others wait starts there. So being idle earns nothing, and new tenants without end starve nobody. Nor does being
idle pay debts: a tenant's clock is kept until the time has caught up, and forgotten then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from bifolio.protos.messages import Ask


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. What the queue notes about it is here too."""

    ask: Ask
    number: int  # of its push: a tie goes to who came first
    since: float
    blocked: float | None = None  # when it was first in order and did not fit, for the first time
    tried: int = -1  # the last state of the cell in which it did not fit
    cost: int = field(init=False)
    rank: tuple[int, bool] = field(init=False)
    age: tuple[float, int] = field(init=False)

    def __post_init__(self) -> None:
        self.cost = max(1, self.ask.tokens * self.ask.n)
        self.rank = (self.ask.priority, not self.ask.resumed)
        self.age = (self.ask.arrival, self.number)


@dataclass(slots=True)
class _Clocks:
    """Of one priority."""

    waiting: Counter[str] = field(default_factory=Counter)  # how many requests of each tenant
    of: dict[str, float] = field(default_factory=dict)  # of the tenants that wait, and of those in debt
    time: float = 0.0

    def catch_up(self) -> None:
        self.time = max(self.time, min((self.of[tenant] for tenant in self.waiting), default=0.0))


class FairOrder:
    """Iterates in order; nothing may be added or removed meanwhile, `charge` may be called."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, bool], dict[str, list[Waiting]]] = {}  # by rank and tenant, by age
        self._clocks: dict[int, _Clocks] = {}  # by priority

    def __iter__(self) -> Iterator[Waiting]:
        for rank in sorted(self._lines):
            clocks = self._clocks[rank[0]].of
            heap = [(clocks[tenant], line[0].age, 0, line) for tenant, line in self._lines[rank].items()]
            heapify(heap)
            while heap:
                clock, _, at, line = heap[0]
                yield line[at]
                if at + 1 < len(line):
                    heapreplace(heap, (clock + line[at].cost, line[at + 1].age, at + 1, line))
                else:
                    heappop(heap)

    def last(self) -> Waiting:
        """Who is refused when there are too many: the last in order of those without tokens, if there are any."""
        rank = max(self._lines, key=lambda rank: (rank[1], rank[0]))
        clocks = self._clocks[rank[0]].of

        def place(tenant_line: tuple[str, list[Waiting]]) -> tuple[float, tuple[float, int]]:
            tenant, line = tenant_line
            return clocks[tenant] + sum(each.cost for each in line[:-1]), line[-1].age

        return max(self._lines[rank].items(), key=place)[1][-1]

    def add(self, waiting: Waiting) -> None:
        tenant, clocks = waiting.ask.tenant, self._clocks.setdefault(waiting.ask.priority, _Clocks())
        if tenant not in clocks.waiting:
            clocks.catch_up()
            clocks.of[tenant] = max(clocks.of.get(tenant, 0.0), clocks.time)
        clocks.waiting[tenant] += 1
        insort(self._lines.setdefault(waiting.rank, {}).setdefault(tenant, []), waiting, key=_age)

    def charge(self, waiting: Waiting) -> None:
        """It is being placed."""
        clocks = self._clocks[waiting.ask.priority]
        clocks.of[waiting.ask.tenant] += waiting.cost
        clocks.time += waiting.cost / len(clocks.waiting)

    def remove(self, *leaving: Waiting) -> None:
        for each in leaving:
            tenant, waiting = each.ask.tenant, self._clocks[each.ask.priority].waiting
            line = self._lines[each.rank][tenant]
            del line[bisect_left(line, each.age, key=_age)]
            if not line:
                del self._lines[each.rank][tenant]
                if not self._lines[each.rank]:
                    del self._lines[each.rank]
            waiting[tenant] -= 1
            if not waiting[tenant]:
                del waiting[tenant]
        for priority in {each.ask.priority for each in leaving}:
            self._forget(priority)

    def _forget(self, priority: int) -> None:
        clocks = self._clocks[priority]
        if not clocks.waiting:
            del self._clocks[priority]
            return
        clocks.catch_up()
        for tenant in [t for t, clock in clocks.of.items() if t not in clocks.waiting and clock <= clocks.time]:
            del clocks.of[tenant]


def _age(waiting: Waiting) -> tuple[float, int]:
    return waiting.age
