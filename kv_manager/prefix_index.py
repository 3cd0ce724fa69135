"""Which replicas have which full blocks, by key. Pure; knows nothing about leases, or about which block may be evicted.

Each replica has a shelf: key ─▶ block. Over all shelves stands one map, key ─▶ the replicas that have it, a bit for
each. So the longest prefix that each of many replicas has is found in one walk along a request's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bifolio.protos.messages import BlockId, Key


class Shelf:
    """One replica's full blocks. A key stands for one block, the first that had it."""

    def __init__(self, holders: dict[Key, int], bit: int) -> None:
        self.bit = bit
        self._holders = holders
        self._blocks: dict[Key, BlockId] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._blocks)

    def add(self, key: Key, block: BlockId) -> bool:
        """Whether the key stands for this block now: not if it stands for another."""
        if self._blocks.setdefault(key, block) != block:
            return False
        self._holders[key] = self._holders.get(key, 0) | self.bit
        return True

    def drop(self, keys: Iterable[Key]) -> None:
        blocks, holders, bit = self._blocks, self._holders, self.bit
        for key in keys:
            del blocks[key]
            held = holders[key]
            if held == bit:
                del holders[key]
            else:
                holders[key] = held ^ bit

    def blocks(self, keys: Sequence[Key]) -> tuple[BlockId, ...]:
        """All of them must be here."""
        return tuple(map(self._blocks.__getitem__, keys))

    def check_integrity(self) -> None:
        assert all(self._holders.get(key, 0) & self.bit for key in self._blocks), "a shelf holds what the index lacks"


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}
        self._free_bits: list[int] = []  # of replicas that have gone
        self._bits = 0

    def __len__(self) -> int:
        """Keys that any replica has."""
        return len(self._holders)

    def add(self) -> Shelf:
        """The shelf of a replica that comes."""
        if not self._free_bits:
            self._free_bits.append(1 << self._bits)
            self._bits += 1
        return Shelf(self._holders, self._free_bits.pop())

    def remove(self, shelf: Shelf) -> None:
        shelf.drop(list(shelf))
        self._free_bits.append(shelf.bit)

    def match(self, keys: Sequence[Key]) -> dict[int, int]:
        """By shelf's bit: how many leading keys it has. A bit that is not there has none."""
        depths: dict[int, int] = {}
        holding, depth = -1, 0  # bits of those that have all keys so far: at first, everybody
        for key in keys:
            still = holding & self._holders.get(key, 0)
            if still != holding:
                if depth:
                    _enter(depths, holding & ~still, depth)
                if not still:
                    return depths
                holding = still
            depth += 1
        if depth:
            _enter(depths, holding, depth)
        return depths

    def check_integrity(self, shelves: Sequence[Shelf]) -> None:
        for shelf in shelves:
            shelf.check_integrity()
        assert sum(map(len, shelves)) == sum(h.bit_count() for h in self._holders.values()), "a key of nobody's shelf"


def _enter(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        bit = bits & -bits
        depths[bit] = depth
        bits ^= bit
