"""One replica's book: which of its blocks are free, in its reserve, or under which lease, and what its
reports change.

Pure and synchronous. Knows nothing about requests' placement, other replicas, Ray or the clock.

    free ──offer──▶ a lease ──close──▶ free         every block is in exactly one of: free, reserve, one lease
    free ──refill─▶ reserve ──the report lists it under a lease: drawn──▶ that lease

A lease of the book:

    offered ──activate, or a report lists it──▶ active ──release, or absence from a report──▶ closed
       └── its time passes, or release, or revoked and absent from a report ──────────────────▶ closed

The replica is the last word on its blocks and its report is complete, so a report newer than the last decides
alone: what it lists is held, what it does not list is not. In particular reserve blocks granted in a reply
are free again if the next report lacks them: the replica ignores every reply but the one to its newest
report.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bifolio.protos.messages import BlockId, Generation, Lease, ReplicaInfo, Report, RequestId

State = Literal["alive", "draining"]


@dataclass(frozen=True, slots=True)
class Counts:
    """free + cached + leased = total. The reserve counts as leased."""

    free: int
    cached: int
    leased: int
    reserve: int
    total: int


@dataclass(slots=True)
class Held:
    """A lease, as the ledger sees it. `request` is None when only a report told of it."""

    request: RequestId | None
    blocks: set[BlockId]
    until: float  # the end of the offer
    active: bool = False
    listed: bool = False  # by a report: from then on a report without it closes it
    revoked: bool = False  # named in every reply until it is gone


class Book:
    def __init__(self, info: ReplicaInfo) -> None:
        self.info = info
        self.draining = False  # in its own words
        self.shunned_until = 0.0  # a peer says it is leaving; that holds for a while, in case the peer was wrong
        self.leases: dict[Generation, Held] = {}
        self.beat = -1  # of the newest report
        self.heard = 0.0  # when it came
        self.reported = 0  # leases it lists
        self.held = 0  # blocks it lists: of these leases, and of the reserve
        self.shortage = 0  # blocks the reserve should have and could not get; kept back from offers
        self._free = OrderedDict.fromkeys(BlockId(b) for b in range(1, info.blocks + 1))  # longest free first
        self._reserve: set[BlockId] = set()
        self._of_request: dict[RequestId, Generation] = {}  # the one lease of a request that is not revoked
        self._released: dict[Generation, int] = {}  # closed at this beat; reports up to it may still list it

    # -- what policies ask

    @property
    def state(self) -> State:
        return "draining" if self.draining or self.shunned_until else "alive"

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.info.geometry.block_size)

    def has_room(self, blocks: int) -> bool:
        return len(self.leases) < self.info.max_sequences and blocks + self.shortage <= self.free

    # -- leases

    def offer(self, request: RequestId, generation: Generation, blocks: int, until: float) -> Lease:
        taken = self._take(blocks)
        self.leases[generation] = Held(request, set(taken), until)
        self._of_request[request] = generation
        return Lease(self.info.id, generation, taken)

    def activate(self, generation: Generation) -> None:
        if lease := self.leases.get(generation):
            lease.active = True

    def release(self, generation: Generation, beat: int) -> None:
        if beat >= self.beat:
            self._released[generation] = beat
        self._close(generation)

    def revoke(self, request: RequestId) -> None:
        if generation := self._of_request.pop(request, None):
            self.leases[generation].revoked = True

    def expire(self, now: float) -> None:
        if now >= self.shunned_until:
            self.shunned_until = 0.0
        for generation in [g for g, lease in self.leases.items() if not lease.active and now >= lease.until]:
            self._close(generation)

    # -- reports

    def reconcile(self, report: Report, now: float, epoch: int | None) -> None:
        """Makes the book agree with a report newer than the last.

        A listed lease the book does not know is adopted. Of `epoch` it was given up here (an expired offer,
        opened late), so it is revoked as well; leases of other epochs, and all of them at registration
        (`epoch` None), live on.
        """
        assert report.beat > self.beat, "the ledger drops reports that are not newer"
        self.beat, self.heard, self.draining = report.beat, now, report.draining
        self.reported = len(report.leases)
        self.held = len(report.reserve) + sum(map(len, report.leases.values()))
        listed = {g: set(b) for g, b in report.leases.items() if self._released.get(g, -1) < report.beat}
        self._released = {g: beat for g, beat in self._released.items() if beat >= report.beat}
        absent = [(g, lease) for g, lease in self.leases.items() if g not in listed]
        for generation, lease in absent:
            if _absent_is_closed(lease, now):
                self._close(generation)
        for generation, blocks in listed.items():
            if generation not in self.leases:
                self.leases[generation] = Held(None, set(), now, revoked=generation.epoch == epoch)
            lease = self.leases[generation]
            lease.active = lease.listed = True
            self._give_back(lease.blocks - blocks)
            lease.blocks &= blocks
            # what another lease holds stays there: at the replica that one will be refused, or has been
            lease.blocks |= self._claim(blocks - lease.blocks)
        self._give_back(self._reserve - set(report.reserve))
        self._reserve &= set(report.reserve)
        self._reserve |= self._claim(set(report.reserve) - self._reserve)

    def refill(self, wanted: int, generation: Generation) -> Lease | None:
        """Moves free blocks to the reserve, up to `wanted`; what is missing becomes the shortage."""
        missing = max(0, wanted - len(self._reserve))
        taken = self._take(min(missing, self.free))
        self._reserve.update(taken)
        self.shortage = missing - len(taken)
        return Lease(self.info.id, generation, taken) if taken else None

    def revoked(self) -> tuple[Generation, ...]:
        return tuple(g for g, lease in self.leases.items() if lease.revoked)

    def counts(self) -> Counts:
        reserve = len(self._reserve)
        leased = reserve + sum(len(lease.blocks) for lease in self.leases.values())
        return Counts(self.free, 0, leased, reserve, self.info.blocks)

    def check_integrity(self) -> None:
        parts = [set(self._free), self._reserve, *(lease.blocks for lease in self.leases.values())]
        every = set().union(*parts)
        assert sum(map(len, parts)) == len(every), f"{self.info.id}: a block is in two places"
        assert every == set(range(1, self.info.blocks + 1)), f"{self.info.id}: blocks lost or invented"
        for request, generation in self._of_request.items():
            lease = self.leases[generation]
            assert lease.request == request, f"{self.info.id}: {request} is mixed up with {lease.request}"
            assert not lease.revoked, f"{self.info.id}: {request} is revoked, yet indexed as not"

    # -- moving blocks

    def _take(self, blocks: int) -> tuple[BlockId, ...]:
        return tuple(self._free.popitem(last=False)[0] for _ in range(blocks))

    def _give_back(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._free[block] = None

    def _claim(self, blocks: Iterable[BlockId]) -> set[BlockId]:
        """Those of `blocks` that were free or in the reserve; they are neither afterwards."""
        claimed = set()
        for block in blocks:
            if block in self._free:
                del self._free[block]
            elif block in self._reserve:
                self._reserve.remove(block)
            else:
                continue
            claimed.add(block)
        return claimed

    def _close(self, generation: Generation) -> None:
        if lease := self.leases.pop(generation, None):
            self._give_back(lease.blocks)
            if lease.request is not None and self._of_request.get(lease.request) == generation:
                del self._of_request[lease.request]


def _absent_is_closed(lease: Held, now: float) -> bool:
    """Whether a lease that a report does not list is over.

    Not if it may be unopened yet. An active one never listed was opened and closed between two reports, with
    its release lost; since its activation may also have outrun the report, it keeps its offer's time.
    """
    return lease.listed or lease.revoked or (lease.active and now >= lease.until)
