"""The keys of one sequence's full blocks, as it grows: each token is hashed once.

Knows nothing about leases, tags or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.kv_manager.keys import chain, root
from bifolio.protos.messages import Geometry, Key


class KeyChain:
    def __init__(self, geometry: Geometry, salt: str, tokens: Sequence[int]) -> None:
        self._block_size = geometry.block_size
        self._parent = root(geometry, salt)
        self._keys: list[Key] = []
        self._rest = list(tokens)  # those after the last full block
        self._take_in()

    def append(self, token: int) -> None:
        self._rest.append(token)
        if len(self._rest) == self._block_size:
            self._take_in()

    def upto(self, positions: int, first: int = 0) -> Sequence[Key]:
        """Of the blocks that the first `positions` tokens fill, from the `first` block on."""
        return self._keys[first : positions // self._block_size]

    def fork(self) -> KeyChain:
        """A chain of its own that begins with the same tokens."""
        other = object.__new__(KeyChain)
        other._block_size, other._parent = self._block_size, self._parent
        other._keys, other._rest = self._keys.copy(), self._rest.copy()
        return other

    def _take_in(self) -> None:
        keys = chain(self._parent, self._rest, self._block_size)
        self._keys += keys
        self._parent = keys[-1] if keys else self._parent
        del self._rest[: len(keys) * self._block_size]
