"""The replica's own side of the ledger: who owns each of its blocks. The last word, whatever the manager
believes.

Thread-safe under one lock; knows nothing about torch, Ray, the network or the clock.

    free ──open──▶ owned by a lease ──close──▶ free        a block's tag is the generation it was last
    free ──apply─▶ reserve ──draw──▶ owned by a lease      granted under; tags only grow, and they outlive
                   reserve ──report: too much──▶ free      leases

A placement is opened only if every block is free here and its tag is older than the placement. So a
generation opens at most once, and never after its blocks were granted again: the ledger may be wrong, two
leases never share a block.

The caller sends one report at a time and applies its reply before the next: only the reply to the newest
report counts, which is what lets the ledger take back grants that this side never saw.
"""

from __future__ import annotations

import threading
from collections import deque

from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Generation, Lease, ReplicaId, Reply, Report

NEVER = Generation(0, 0)


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
        self._owners: list[Generation | None] = [None] * (blocks + 1)
        self._leases: dict[Generation, list[BlockId]] = {}
        self._reserve: deque[BlockId] = deque()
        self._in_reserve: set[BlockId] = set()
        self._beat = self._seen = 0
        self._draws: deque[tuple[float, int]] = deque()  # (time of a report, blocks drawn before it)
        self._drawn = 0  # since the last report
        self._unmet = 0  # the largest draw since the last report that the reserve could not serve
        self._news = False  # since the last report, something that may call for one at once

    @property
    def beat(self) -> int:
        """Reports so far: goes into the release of a placement that could not be opened."""
        with self._lock:
            return self._beat

    @property
    def held(self) -> int:
        """Blocks under leases or in the reserve."""
        with self._lock:
            return len(self._reserve) + sum(map(len, self._leases.values()))

    @property
    def due(self) -> bool:
        """Send a report at once: the reserve is far from what is wanted, and the last report did not say so.

        Too small, and sequences starve; too large, and blocks are missed where requests wait for admission.
        """
        with self._lock:
            wanted, have = self._wanted(), len(self._reserve)
            return self._news and (2 * have < wanted or have > 2 * wanted)

    def owner(self, block: BlockId) -> Generation | None:
        """The open lease a block belongs to: what a write is checked against."""
        with self._lock:
            return self._owners[block]

    def open(self, lease: Lease) -> None:
        with self._lock:
            if lease.generation in self._leases:
                raise StalePlacement(f"lease {lease.generation} of {self.replica} is open already", self.replica)
            for block in lease.blocks:
                owner, tag = self._owners[block], self._tags[block]
                if owner is not None or block in self._in_reserve or tag >= lease.generation:
                    holder = f"lease {owner}" if owner is not None else f"generation {tag}"
                    raise StalePlacement(
                        f"block {block} of {self.replica} went to {holder}; "
                        f"the placement under {lease.generation} is stale",
                        self.replica,
                    )
            for block in lease.blocks:
                self._owners[block] = self._tags[block] = lease.generation
            self._leases[lease.generation] = list(lease.blocks)
            self._news = True

    def draw(self, generation: Generation, n: int) -> tuple[BlockId, ...] | None:
        """Moves n blocks from the reserve to an open lease; None, and nothing moves, when it has fewer."""
        with self._lock:
            blocks = self._leases[generation]
            if len(self._reserve) < n:
                self._unmet = max(self._unmet, n)
                return None
            drawn = tuple(self._reserve.popleft() for _ in range(n))
            self._in_reserve.difference_update(drawn)
            for block in drawn:
                self._owners[block] = generation  # the tag stays that of the grant: it is the newer one
            blocks.extend(drawn)
            self._drawn += n
            self._news = True
            return drawn

    def close(self, generation: Generation) -> int | None:
        """Frees a lease's blocks. Returns the beat for its release, or None when it is not open."""
        with self._lock:
            blocks = self._leases.pop(generation, None)
            if blocks is None:
                return None
            for block in blocks:
                self._owners[block] = None
            self._news = True  # the freed blocks may be what the reserve lacks
            return self._beat

    def report(self, now: float) -> Report:
        """The next report, complete: it serves for registration too. Gives up what the reserve has too
        much."""
        with self._lock:
            self._draws.append((now, self._drawn))
            while self._draws[0][0] <= now - self._growth_s:
                self._draws.popleft()
            self._drawn = 0
            wanted = self._wanted()
            while len(self._reserve) > wanted:
                self._in_reserve.remove(self._reserve.pop())
            self._unmet, self._news = 0, False
            self._beat += 1
            leases = {generation: tuple(blocks) for generation, blocks in self._leases.items()}
            return Report(self.replica, self._beat, leases, tuple(self._reserve), wanted)

    def apply(self, reply: Reply) -> tuple[Generation, ...]:
        """Takes the grant in. Returns the revoked leases that are open: the caller aborts their sequences."""
        with self._lock:
            if reply.beat != self._beat or reply.beat == self._seen:
                return ()
            self._seen = reply.beat
            if reply.granted is not None:
                for block in reply.granted.blocks:
                    # an expired offer may have been opened since the report: its blocks are taken
                    if self._owners[block] is None:
                        self._tags[block] = reply.granted.generation
                        self._reserve.append(block)
                        self._in_reserve.add(block)
            return tuple(generation for generation in reply.revoked if generation in self._leases)

    def _wanted(self) -> int:
        """The growth of the last seconds, up to an eighth of the cache; but a block for each open lease, and what one
        sequence is waiting for."""
        if not self._grows or not self._leases:
            return 0
        growth = self._drawn + sum(n for _, n in self._draws)
        return max(min(growth, len(self._tags) // 8), len(self._leases), self._unmet)
