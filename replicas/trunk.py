"""What a decode replica says to an ingress: the deltas of all its streams there, those of a step in one message.

A message costs much, whatever is in it: with one for each stream, eight streams cost eight times as much as one. So the
calls that begin and end streams bring nothing themselves. What they have to say goes into the trunk that the ingress
has opened, each delta with the number that the ingress gave its stream, and None at its end.

    streams.generate  ──▶ carry(trunk, 1) ─┐
    streams.generate  ──▶ carry(trunk, 2) ─┼──▶ said(trunk) ──▶ ((1, delta), (2, delta), (2, None))
    streams.generate  ──▶ carry(trunk, 3) ─┘

Which of the calls comes first does not matter. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from bifolio.protos.messages import Batch, Delta


class _Trunk:
    def __init__(self) -> None:
        self.users = 0
        self.cut = False  # nobody hears it any more
        self._said: list[tuple[int, Delta | None]] = []
        self._wake = asyncio.Event()

    def put(self, number: int, delta: Delta | None) -> None:
        self._said.append((number, delta))
        self._wake.set()

    @property
    def told(self) -> bool:
        """Nobody is still to hear something: a stream may have ended before the trunk is asked for."""
        return self.cut or not self._said

    async def next(self) -> Batch:
        await self._wake.wait()
        self._wake.clear()
        said, self._said = self._said, []
        return tuple(said)


class Trunks:
    """By names that are never used again."""

    def __init__(self) -> None:
        self._trunks: dict[str, _Trunk] = {}

    async def said(self, name: str) -> AsyncGenerator[Batch, None]:
        """All that is carried, until the iterator is closed: then so are the streams."""
        with self._used(name) as trunk:
            try:
                while True:
                    yield await trunk.next()
            finally:
                trunk.cut = True

    async def carry(self, name: str, number: int, deltas: AsyncGenerator[Delta, None]) -> None:
        """One stream, to its end. Raises what it raises."""
        with self._used(name) as trunk:
            async with aclosing(deltas):
                async for delta in deltas:
                    trunk.put(number, delta)
                    if trunk.cut:
                        return
            trunk.put(number, None)

    @contextmanager
    def _used(self, name: str) -> Iterator[_Trunk]:
        trunk = self._trunks.setdefault(name, _Trunk())
        trunk.users += 1
        try:
            yield trunk
        finally:
            trunk.users -= 1
            if not trunk.users and trunk.told:
                del self._trunks[name]
