"""The replica's own side of the ledger: who uses each of its blocks, and what is in it. The last word, whatever the
manager believes.

Thread-safe under one lock; knows nothing about torch, Ray, the network or the clock.

    unused ──open──▶ used by leases ──the last one closes──▶ unused      a block's tag is the generation it was last
    unused ──apply─▶ reserve ──draw──▶ used by a lease                   granted under, to be written; tags only grow,
                     reserve ──report: too much──▶ unused                and they outlive leases

    no key ──fill: it is whole──▶ key ──granted to be written──▶ no key  a key outlives leases too: that is the cache

A placement is opened only if every block that it may write is unused here and has a tag older than the placement,
and every block that it takes from the cache has the key that belongs to its position. So a generation opens at most
once, and never after its blocks were granted again; and the ledger may be wrong, a block that is written has one
lease, a block that is shared is never written.

The caller sends one report at a time and applies its reply before the next: only the reply to the newest
report counts, which is what lets the ledger take back grants that this side never saw.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Generation, Key, Lease, Release, ReplicaId, Reply, Report

NEVER = Generation(0, 0)
FIRST_S = 1.0  # before the report that tells of it, the first draw was about so long ago


class BlockTags:
    """Blocks 1 .. `blocks`. `grows`: leases draw from a reserve (decode); `growth_s`: how much of it is kept
    at hand."""

    def __init__(self, replica: ReplicaId, blocks: int, *, grows: bool = True, growth_s: float = 5.0) -> None:
        self.replica = replica
        self.blocks = blocks
        self._grows = grows
        self._growth_s = growth_s
        self._lock = threading.Lock()
        self._tags = [NEVER] * (blocks + 1)
        self._users = [0] * (blocks + 1)  # open leases that a block belongs to
        self._keys: list[Key | None] = [None] * (blocks + 1)
        self._leases: dict[Generation, Lease] = {}
        self._reserve: deque[BlockId] = deque()
        self._in_reserve: set[BlockId] = set()
        self._used = 0  # blocks with users
        self._beat = self._seen = 0
        self._version = 0  # changes of keys
        self._changed: OrderedDict[BlockId, int] = OrderedDict()  # the version of a block's last change, in its order
        self._confirmed = 0  # the version that the manager has heard of
        self._said = 0  # the version in the newest report
        self._draws: deque[tuple[float, int]] = deque()  # (time of a report, blocks drawn before it)
        self._drawn = 0  # since the last report
        self._span = growth_s  # seconds in which all these were drawn
        self._unmet = 0  # the largest draw since the last report that the reserve could not serve
        self._news = False  # since the last report, something that may call for one at once
        self._refused = False  # since the last report, a placement: the ledger is wrong about these blocks

    @property
    def beat(self) -> int:
        """Reports so far."""
        with self._lock:
            return self._beat

    @property
    def held(self) -> int:
        """Blocks under leases, each counted once, or in the reserve."""
        with self._lock:
            return self._used + len(self._reserve)

    @property
    def due(self) -> bool:
        """Send a report at once: the ledger was wrong, or the reserve is far from what is wanted and the last report
        did not say so.

        Too small, and sequences starve; too large, and blocks are missed where requests wait for admission.
        """
        with self._lock:
            wanted, have = self._wanted(), len(self._reserve)
            return self._refused or (self._news and (2 * have < wanted or have > 2 * wanted))

    def key(self, block: BlockId) -> Key | None:
        """Of what the block holds, if it is whole."""
        with self._lock:
            return self._keys[block]

    def tag(self, block: BlockId) -> Generation:
        """The grant under which the block may be, or was last, written."""
        with self._lock:
            return self._tags[block]

    def users(self, block: BlockId) -> tuple[Generation, ...]:
        """The open leases that a block belongs to."""
        with self._lock:
            return tuple(g for g, lease in self._leases.items() if block in lease.blocks)

    def open(self, lease: Lease, keys: Sequence[Key] = ()) -> None:
        """`keys` are those of the lease's tokens: at least one for each block taken from the cache. StalePlacement if
        the ledger was wrong about a block."""
        with self._lock:
            self._check_new(lease.generation)
            cached, own = lease.blocks[: lease.cached], lease.blocks[lease.cached :]
            if len(keys) < len(cached):
                self._refuse(f"{len(cached)} blocks are to come from the cache, its tokens fill {len(keys)}", lease)
            for block, key in zip(cached, keys, strict=False):
                if self._keys[block] != key:
                    self._refuse(f"block {block} of {self.replica} no longer holds what was cached there", lease)
            self._check_own(own, lease)
            self._enter(lease, own)

    def fork(self, lease: Lease, parent: Generation) -> None:
        """Opens a lease that begins with blocks of an open one, which are shared from now on, whatever is in them: the
        caller vouches that nobody writes them again. StalePlacement as in `open`."""
        with self._lock:
            self._check_new(lease.generation)
            shared, own = lease.blocks[: lease.cached], lease.blocks[lease.cached :]
            if (theirs := self._leases.get(parent)) is None or theirs.blocks[: lease.cached] != shared:
                self._refuse(f"lease {parent}, to be forked, is not open or has other blocks", lease)
            self._check_own(own, lease)
            self._enter(lease, own)

    def fill(self, generation: Generation, keys: Sequence[Key], first: int = 0) -> None:
        """The blocks of a lease from its `first` one on, as many as there are keys, are whole from now on. Nothing, if
        it is closed."""
        with self._lock:
            if lease := self._leases.get(generation):
                for block, key in zip(lease.blocks[first : first + len(keys)], keys, strict=True):
                    if self._keys[block] is None:
                        self._set_key(block, key)

    def draw(self, generation: Generation, n: int) -> tuple[BlockId, ...] | None:
        """Moves n blocks from the reserve to an open lease; None, and nothing moves, when it has fewer."""
        with self._lock:
            lease = self._leases[generation]
            if len(self._reserve) < n:
                self._unmet = max(self._unmet, n)
                return None
            drawn = tuple(self._reserve.popleft() for _ in range(n))
            self._in_reserve.difference_update(drawn)
            for block in drawn:
                self._users[block] = 1  # the tag stays that of the grant: it is the newer one
            self._used += n
            self._leases[generation] = _longer(lease, drawn)
            self._drawn += n
            self._news = True
            return drawn

    def close(self, generation: Generation) -> Release | None:
        """Ends a lease's use of its blocks; None when it is not open."""
        with self._lock:
            lease = self._leases.pop(generation, None)
            if lease is None:
                return None
            for block in lease.blocks:
                self._users[block] -= 1
                self._used -= not self._users[block]
            self._news = True  # the freed blocks may be what the reserve lacks
            new = tuple(
                (block, key)
                for block in lease.blocks
                if (key := self._keys[block]) is not None and self._changed[block] > self._confirmed
            )
            return Release(self.replica, generation, self._beat, new)

    def report(self, now: float, *, complete: bool = False) -> Report:
        """The next report; a complete one, with all keys, is for registration. Gives up what the reserve has too
        much."""
        with self._lock:
            self._draws.append((now, self._drawn))
            while self._draws[0][0] <= now - self._growth_s:
                self._draws.popleft()
            self._drawn = 0
            first = next((at for at, n in self._draws if n), now)
            self._span = min(now - first + FIRST_S, self._growth_s)
            wanted = self._wanted()
            while len(self._reserve) > wanted:
                self._in_reserve.remove(self._reserve.pop())
            self._unmet, self._news, self._refused = 0, False, False
            self._beat += 1
            self._said = self._version
            since = 0 if complete else self._confirmed
            return Report(
                self.replica,
                self._beat,
                tuple(self._leases.values()),
                tuple(self._reserve),
                wanted,
                self._used + len(self._reserve),
                since,
                self._version,
                self._changes(since),
            )

    def apply(self, reply: Reply) -> tuple[Generation, ...]:
        """Takes the grant in. Returns the revoked leases that are open: the caller aborts their sequences."""
        with self._lock:
            if reply.beat != self._beat or reply.beat == self._seen:
                return ()
            self._seen = reply.beat
            self._confirmed = self._said if reply.known else 0
            if reply.granted is not None:
                for block in reply.granted.blocks:
                    # an expired offer may have been opened since the report: its blocks are taken
                    if not self._users[block]:
                        self._tags[block] = reply.granted.generation
                        self._set_key(block, None)
                        self._reserve.append(block)
                        self._in_reserve.add(block)
            return tuple(generation for generation in reply.revoked if generation in self._leases)

    # -- with the lock held

    def _check_new(self, generation: Generation) -> None:
        if generation in self._leases:
            raise StalePlacement(f"lease {generation} of {self.replica} is open already", self.replica)

    def _check_own(self, own: Sequence[BlockId], lease: Lease) -> None:
        for block in own:
            if self._users[block] or block in self._in_reserve or self._tags[block] >= lease.generation:
                how = "is used by another lease" if self._users[block] else f"went to generation {self._tags[block]}"
                self._refuse(f"block {block} of {self.replica} {how}", lease)

    def _refuse(self, why: str, lease: Lease) -> None:
        self._refused = True
        raise StalePlacement(f"{why}; the placement under {lease.generation} is stale", self.replica)

    def _enter(self, lease: Lease, own: Sequence[BlockId]) -> None:
        for block in own:
            self._tags[block] = lease.generation
            self._set_key(block, None)
        for block in lease.blocks:
            self._used += not self._users[block]
            self._users[block] += 1
        self._leases[lease.generation] = lease
        self._news = True

    def _set_key(self, block: BlockId, key: Key | None) -> None:
        if self._keys[block] != key:
            self._keys[block] = key
            self._version += 1
            self._changed[block] = self._version
            self._changed.move_to_end(block)

    def _changes(self, since: int) -> tuple[tuple[BlockId, Key | None], ...]:
        changes = []
        for block in reversed(self._changed):
            if self._changed[block] <= since:
                break
            changes.append((block, self._keys[block]))
        return tuple(changes)

    def _wanted(self) -> int:
        """The growth of `growth_s` at the pace of late, up to an eighth of the cache; but a block for each open lease,
        and what one sequence is waiting for."""
        if not self._grows or not self._leases:
            return 0
        growth = math.ceil((self._drawn + sum(n for _, n in self._draws)) * self._growth_s / self._span)
        return max(min(growth, len(self._tags) // 8), len(self._leases), self._unmet)


def _longer(lease: Lease, drawn: tuple[BlockId, ...]) -> Lease:
    return Lease(lease.replica, lease.generation, lease.blocks + drawn, lease.request, lease.cached)
