"""One replica's book: its leases and what its reports change of them. `blocks.py` has where each of its blocks is.

Pure and synchronous. Knows nothing about requests' placement, other replicas, Ray or the clock.

    offered ──a report lists it──▶ active ──release, or absence from a report──▶ closed
       └── its time passes, or release, or revoked and absent from a report ──────▶ closed

The replica is the last word on its blocks, so a report newer than the last decides alone. Its leases and its reserve
are complete: what it lists is held, what it does not list is not. In particular reserve blocks granted in a reply are
free again if the next report lacks them: the replica ignores every reply but the one to its newest report. Of keys a
report tells what changed since a version that this book has seen.

When a lease is closed its last blocks come first in the order of forgetting: a prefix is no use without its beginning.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bifolio.protos.measures import Speeds, Traffic
from bifolio.protos.messages import BlockId, Generation, Lease, Release, ReplicaInfo, Report, RequestId, Stage, family

from .blocks import Blocks
from .prefix_index import Shelf

State = Literal["alive", "draining", "stalled"]


@dataclass(slots=True)
class Held:
    """A lease, as the ledger sees it."""

    request: RequestId
    blocks: tuple[BlockId, ...]
    since: float
    until: float  # the end of the offer
    fresh: tuple[BlockId, ...] = ()  # of an offer: to be written by it, hence nobody else's
    tokens: int = 0  # to be computed under it
    listed: bool = False  # by a report: from then on a report without it closes it
    revoked: bool = False  # named in every reply until it is gone


class Book:
    def __init__(self, info: ReplicaInfo, shelf: Shelf) -> None:
        self.info = info
        self.model = info.geometry.fingerprint
        self.block_size = info.geometry.block_size
        self.blocks = Blocks(info.blocks, shelf)
        self.shelf, self.bit = shelf, shelf.bit
        self.draining = False  # in its own words
        self.leaving = False  # it is asked to leave, in every reply
        self.stalled: Mapping[Stage, float] = {}  # in its own words
        self.shunned_until = 0.0  # a peer says it is leaving; that holds for a while, in case the peer was wrong
        self.leases: dict[Generation, Held] = {}
        self.beat = -1  # of the newest report
        self.version = 0  # of the keys it told of
        self.heard = 0.0  # when it came
        self.reported = 0  # leases it lists
        self.held = 0  # blocks they and the reserve hold, in the replica's words
        self.speeds = Speeds()
        self.traffic = Traffic()
        self.queued = 0  # tokens to be computed under its leases
        self.families: dict[RequestId, set[Generation]] = {}  # leases that are not revoked
        self._released: dict[Generation, int] = {}  # closed at this beat; reports up to it may still list it

    # -- what policies ask

    @property
    def state(self) -> State:
        return "stalled" if self.stalled else "alive" if self.alive else "draining"

    @property
    def alive(self) -> bool:
        """Takes new work."""
        return not (self.draining or self.leaving or self.shunned_until or self.stalled)

    def has_room(self, leases: int, fresh: int = 0) -> bool:
        """For so many leases, which write `fresh` blocks; what they read has to be looked at besides."""
        return len(self.leases) + leases <= self.info.max_sequences and self.blocks.has_room(fresh, ())

    # -- leases

    def offer(
        self,
        request: RequestId,
        generation: Generation,
        shared: Sequence[BlockId],
        fresh: int,
        now: float,
        until: float,
        tokens: int = 0,
    ) -> Lease:
        """A lease that reads `shared`, of the shelf or of another lease, and writes `fresh` blocks after them."""
        self.blocks.use(shared)
        taken = self.blocks.take(fresh)
        blocks = (*shared, *taken)
        self._enter(generation, Held(request, blocks, now, until, taken, tokens))
        return Lease(self.info.id, generation, blocks, request, len(shared))

    def release(self, release: Release) -> None:
        generation = release.generation
        if release.beat >= self.beat:
            self._released[generation] = release.beat
        # As long as the lease is here nobody else was given its blocks: what it says of them is true, however late
        if release.keys and (lease := self.leases.get(generation)):
            own = set(lease.blocks)
            told = {block: key for block, key in release.keys if block in own}
            self._are_written(lease.request, told)
            self.blocks.learn(told.items())
        self._close(generation)

    def revoke(self, request: RequestId) -> None:
        """Its leases, and those of all its choices unless it is one itself."""
        for generation in list(self.families.get(family(request), ())):
            lease = self.leases[generation]
            if request in (lease.request, family(lease.request)):
                self._revoke(generation)

    def revoke_unconfirmed(self, confirmed: dict[RequestId, float], before: float) -> list[RequestId]:
        """Leases of requests that nobody has said to be open since; whose they were."""
        names = []
        for request, generations in list(self.families.items()):
            if confirmed.get(request, before) <= before:
                for generation in [g for g in generations if self.leases[g].since <= before]:
                    names.append(self.leases[generation].request)
                    self._revoke(generation)
        return names

    def revoke_overtaken(self, newest: Mapping[RequestId, Generation]) -> None:
        """Leases of requests that were placed elsewhere while nobody knew of this replica."""
        for generation, lease in list(self.leases.items()):
            if not lease.revoked and newest.get(lease.request, generation) > generation:
                self._revoke(generation)

    def expire(self, now: float) -> None:
        if now >= self.shunned_until:
            self.shunned_until = 0.0
        for generation in [g for g, lease in self.leases.items() if not lease.listed and now >= lease.until]:
            self._close(generation)

    # -- reports

    def reconcile(self, report: Report, now: float, epoch: int | None) -> None:
        """Makes the book agree with a report newer than the last.

        A listed lease the book does not know is adopted. Of `epoch` it was given up here (an expired offer,
        opened late), so it is revoked as well; leases of other epochs, and all of them at registration
        (`epoch` None), live on.
        """
        assert report.beat > self.beat, "the ledger drops reports that are not newer"
        assert report.since <= self.version, "changes between the two are not known"
        self.beat, self.heard, self.draining = report.beat, now, report.draining
        self.reported, self.held = len(report.leases), report.held
        self.speeds, self.traffic, self.stalled = report.speeds, report.traffic, report.stalled
        listed = {x.generation: x for x in report.leases if self._released.get(x.generation, -1) < report.beat}
        self._released = {g: beat for g, beat in self._released.items() if beat >= report.beat}
        for generation, lease in [(g, lease) for g, lease in self.leases.items() if g not in listed]:
            if lease.listed or lease.revoked:  # one that was never listed may be unopened yet
                self._close(generation)
        # Still to be written by an offer. If a report shows otherwise, the replica has refused it, or will
        promised = {block for g, lease in self.leases.items() if g not in listed for block in lease.fresh}
        for generation, theirs in listed.items():
            if generation not in self.leases:
                self._adopt(theirs, now, revoked=generation.epoch == epoch)
            lease = self.leases[generation]
            lease.listed, lease.fresh = True, ()
            if lease.blocks != theirs.blocks:
                self._set_blocks(lease, tuple(b for b in theirs.blocks if b not in promised))
        self.blocks.set_reserve({b for b in report.reserve if b not in promised and not self.blocks.in_use(b)})
        untold = promised | self.blocks.reserve
        # oldest first: so those that were used last are forgotten last
        self.blocks.learn(change for change in reversed(report.keys) if change[0] not in untold)
        self.version = max(self.version, report.version)

    def refill(self, wanted: int, generation: Generation) -> Lease | None:
        """Grants the replica's reserve what it wants, as far as there is."""
        granted = self.blocks.refill(wanted)
        return Lease(self.info.id, generation, granted) if granted else None

    def revoked(self) -> tuple[Generation, ...]:
        return tuple(g for g, lease in self.leases.items() if lease.revoked)

    def check_integrity(self) -> None:
        name, leases = self.info.id, self.leases.values()
        assert all(len(set(lease.blocks)) == len(lease.blocks) for lease in leases), f"{name}: a block twice in a lease"
        self.blocks.check_integrity(
            [block for lease in leases for block in lease.blocks],
            [block for lease in leases for block in lease.fresh],
            name,
        )
        assert self.queued == sum(lease.tokens for lease in leases), f"{name}: tokens are miscounted"
        indexed = {g for generations in self.families.values() for g in generations}
        named = {g for g, lease in self.leases.items() if lease.request and not lease.revoked}
        assert indexed == named, f"{name}: requests and leases are mixed up"

    # -- inside

    def _enter(self, generation: Generation, lease: Held) -> None:
        self.leases[generation] = lease
        self.queued += lease.tokens
        if lease.request and not lease.revoked:
            self.families.setdefault(family(lease.request), set()).add(generation)

    def _adopt(self, lease: Lease, now: float, *, revoked: bool) -> None:
        tokens = (len(lease.blocks) - lease.cached) * self.block_size if self.info.role == "prefill" else 0
        self._enter(lease.generation, Held(lease.request, (), now, now, tokens=tokens, revoked=revoked))

    def _set_blocks(self, lease: Held, blocks: tuple[BlockId, ...]) -> None:
        before, after = set(lease.blocks), set(blocks)
        self.blocks.use(block for block in blocks if block not in before)
        self.blocks.unuse(block for block in reversed(lease.blocks) if block not in after)
        lease.blocks = blocks

    def _are_written(self, request: RequestId, blocks: Container[BlockId]) -> None:
        """What a choice has in common with the others of its request, which may still be offers here."""
        if family(request) != request:
            for other in self.leases.values():
                if other.fresh and family(other.request) == family(request):
                    other.fresh = tuple(block for block in other.fresh if block not in blocks)

    def _revoke(self, generation: Generation) -> None:
        lease = self.leases[generation]
        lease.revoked = True
        self._unname(generation, lease)

    def _unname(self, generation: Generation, lease: Held) -> None:
        name = family(lease.request)
        if (generations := self.families.get(name)) is not None:
            generations.discard(generation)
            if not generations:
                del self.families[name]

    def _close(self, generation: Generation) -> None:
        if lease := self.leases.pop(generation, None):
            self._unname(generation, lease)
            self.queued -= lease.tokens
            self.blocks.unuse(reversed(lease.blocks))
