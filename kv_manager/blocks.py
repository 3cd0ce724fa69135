"""Where each block of one replica is: free, cached, in the reserve, or used by leases; and what the cached ones hold.

Pure. Knows nothing about which leases there are, or about reports: `book.py` does.

    free ◀── no key ── unused ── key ──▶ cached          every block is in exactly one of: free, cached (unused, but
      │                   ▲                 │            whole and known by its key), reserve, or used
      ├──take, to be written──▶ used ◀──use, to be read (by any number of leases)
      └──refill──▶ reserve ──use: drawn──▶ used

Blocks to be written are the free ones, longest free first, then the cached ones, least recently used first: what they
held is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bifolio.protos.messages import BlockId, Key

from .prefix_index import Shelf


@dataclass(frozen=True, slots=True)
class Counts:
    """free + cached + leased = total. The reserve counts as leased."""

    free: int
    cached: int
    leased: int
    reserve: int
    total: int


class Blocks:
    """Blocks 1 .. `count`; `shelf` is where their keys are looked up."""

    def __init__(self, count: int, shelf: Shelf) -> None:
        self.count = count
        self.shelf = shelf
        self.evicted = 0  # cached blocks that were given to someone to write
        self.shortage = 0  # blocks the reserve should have and could not get; kept back from leases
        self._free = OrderedDict.fromkeys(BlockId(b) for b in range(1, count + 1))  # longest free first
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._reserve: set[BlockId] = set()
        self._uses = [0] * (count + 1)  # leases that use a block
        self._used = 0  # blocks with uses
        self._keys: list[Key | None] = [None] * (count + 1)  # of blocks on the shelf

    @property
    def free(self) -> int:
        """Blocks that can be written without forgetting anything."""
        return len(self._free)

    def has_room(self, fresh: int, shared: Sequence[BlockId]) -> bool:
        """For `fresh` blocks to write, while `shared` are read."""
        available = len(self._free) + len(self._cached) - self.shortage - fresh
        if 0 <= available < len(shared):  # those that are cached are not available then
            available -= sum(not self._uses[block] for block in shared)
        return available >= 0

    def in_use(self, block: BlockId) -> bool:
        return self._uses[block] > 0

    def counts(self) -> Counts:
        reserve = len(self._reserve)
        return Counts(len(self._free), len(self._cached), reserve + self._used, reserve, self.count)

    # -- leases

    def take(self, n: int) -> tuple[BlockId, ...]:
        """Uses n blocks that are to be written."""
        taken = self._pick(n)
        for block in taken:
            self._uses[block] = 1
        self._used += n
        return taken

    def use(self, blocks: Iterable[BlockId]) -> None:
        uses = self._uses
        for block in blocks:
            if not uses[block]:
                # None is what a block has there; what is not there is returned as itself
                if self._cached.pop(block, block) is not None and self._free.pop(block, block) is not None:
                    self._reserve.remove(block)
                self._used += 1
            uses[block] += 1

    def unuse(self, blocks: Iterable[BlockId]) -> None:
        """In this order they will be forgotten, if they are cached."""
        uses, keys, free, cached = self._uses, self._keys, self._free, self._cached
        unused = 0
        for block in blocks:
            left = uses[block] = uses[block] - 1
            if not left:
                unused += 1
                (free if keys[block] is None else cached)[block] = None
        self._used -= unused

    # -- what they hold

    def learn(self, changes: Iterable[tuple[BlockId, Key | None]]) -> None:
        """Of two blocks that hold the same the first is known by it: one of them is enough."""
        keys, uses, free, cached, add = self._keys, self._uses, self._free, self._cached, self.shelf.add
        for block, key in changes:
            known = keys[block]
            if key == known:
                continue
            if known is not None:
                self._forget(block)
            if key is not None and add(key, block):
                keys[block] = key
                if not uses[block] and free.pop(block, block) is None:
                    cached[block] = None

    def _forget(self, block: BlockId) -> None:
        key = self._keys[block]
        assert key is not None
        self.shelf.drop((key,))
        self._keys[block] = None
        if self._cached.pop(block, block) is None:
            self._free[block] = None

    # -- the reserve

    @property
    def reserve(self) -> frozenset[BlockId]:
        return frozenset(self._reserve)

    def set_reserve(self, blocks: set[BlockId]) -> None:
        """None of them is in use."""
        for block in self._reserve - blocks:
            self._free[block] = None
        for block in blocks - self._reserve:
            if self._keys[block] is not None:
                self._forget(block)
            del self._free[block]
        self._reserve = blocks

    def refill(self, wanted: int) -> tuple[BlockId, ...]:
        """Moves blocks to the reserve, up to `wanted`, and returns them; what is missing becomes the shortage."""
        missing = max(0, wanted - len(self._reserve))
        picked = self._pick(min(missing, len(self._free) + len(self._cached)))
        self._reserve.update(picked)
        self.shortage = missing - len(picked)
        return picked

    def _pick(self, n: int) -> tuple[BlockId, ...]:
        free, cached, keys = self._free, self._cached, self._keys
        picked = [free.popitem(last=False)[0] for _ in range(min(n, len(free)))]
        evicted = [cached.popitem(last=False)[0] for _ in range(n - len(picked))]
        self.shelf.drop([key for block in evicted if (key := keys[block]) is not None])
        for block in evicted:
            keys[block] = None
        self.evicted += len(evicted)
        return (*picked, *evicted)

    def check_integrity(self, uses: Iterable[BlockId], fresh: Iterable[BlockId], name: str) -> None:
        """`uses`: all blocks of all leases, again and again; `fresh`: those still to be written."""
        counted = [0] * (self.count + 1)
        for block in uses:
            counted[block] += 1
        assert counted == self._uses, f"{name}: uses are miscounted"
        used = {BlockId(block) for block, n in enumerate(counted) if n}
        assert len(used) == self._used, f"{name}: used blocks are miscounted"
        parts = [set(self._free), set(self._cached), self._reserve, used]
        every = set().union(*parts)
        assert sum(map(len, parts)) == len(every), f"{name}: a block is in two places"
        assert every == set(range(1, self.count + 1)), f"{name}: blocks lost or invented"
        assert all(self._keys[block] is None for block in (*fresh, *self._free, *self._reserve)), f"{name}: stale key"
        assert all(self._keys[block] is not None for block in self._cached), f"{name}: cached, but nobody knows what"
        known = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert len(known) == len(self.shelf), f"{name}: the shelf has other keys"
        assert self.shelf.blocks(list(known)) == tuple(known.values()), f"{name}: the shelf has other blocks"
