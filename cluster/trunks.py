"""Streams of decode replicas, of which all that one replica says comes by one trunk.

A call begins and ends a stream; its deltas come by the trunk that is open to its replica, under the number that the
stream has there (`replicas/trunk.py` is the other end). A trunk is opened with the first stream and closed when there
has been none for a while: a replica that is to leave has to wait for it.

Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from bifolio.protos.errors import ReplicaGone
from bifolio.protos.messages import Batch, Delta, Placement, ReplicaId, Request

IDLE_S = 1.0  # that a trunk stays open without streams


class Trunks:
    """What the decode pool's handle says, by `remote` as that has it."""

    def __init__(self, decode: Any) -> None:
        # What comes is ours alone: plain pickle writes it in a third of the time
        options = {"stream": True, "response_serialization": "pickle"}
        self._generate = decode.options(method_name="generate", **options)
        self._said = decode.options(method_name="said", **options)
        self._trunks: dict[ReplicaId, _Trunk] = {}

    def remote(self, placement: Placement, request: Request) -> Call:
        replica = placement.decode.replica
        if (trunk := self._trunks.get(replica)) is None or not trunk.open:
            self._trunks = {id: each for id, each in self._trunks.items() if each.open}
            name = uuid.uuid4().hex
            trunk = self._trunks[replica] = _Trunk(name, replica, self._said.remote(placement, name))
        number = next(trunk.numbers)
        call = Call(trunk, number, self._generate.remote(placement, request, trunk.name, number))
        trunk.join(number, call)
        return call


class Call(AsyncIterator[Delta]):
    """The deltas of one stream. Raises what its call or its trunk breaks of."""

    def __init__(self, trunk: _Trunk, number: int, stream: Any) -> None:
        self._trunk, self._number, self._stream = trunk, number, stream
        self._came: deque[Delta | Exception | None] = deque()
        self._wake = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    async def __anext__(self) -> Delta:
        while not self._came:
            self._wake.clear()
            await self._wake.wait()
        came = self._came.popleft()
        if isinstance(came, Delta):
            return came
        self._came.append(came)  # whoever asks again hears the same
        if came is None:
            raise StopAsyncIteration
        raise came

    def put(self, came: Delta | Exception | None) -> None:
        """A delta, the end, or why there is none."""
        self._came.append(came)
        self._wake.set()
        if not isinstance(came, Delta):
            self._trunk.leave(self._number)

    def cancel(self) -> None:
        """Gives the stream up. Harmless twice."""
        self._trunk.leave(self._number)
        self._stream.cancel()

    async def _watch(self) -> None:
        try:
            async for _ in self._stream:
                raise AssertionError("what a stream says comes by its trunk")
        except Exception as error:
            self.put(error)


class _Trunk:
    def __init__(self, name: str, replica: ReplicaId, stream: AsyncIterator[Batch]) -> None:
        self.name, self.open = name, True
        self.numbers = itertools.count()
        self._replica, self._stream = replica, stream
        self._calls: dict[int, Call] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read())

    def join(self, number: int, call: Call) -> None:
        self._calls[number] = call
        if self._idle is not None:
            self._idle.cancel()

    def leave(self, number: int) -> None:
        """Harmless twice."""
        if self._calls.pop(number, None) is not None and not self._calls:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._close)

    def _close(self) -> None:
        self.open = False
        self._reading.cancel()
        self._stream.cancel()  # type: ignore[attr-defined]  # of Serve's responses

    async def _read(self) -> None:
        error: Exception = ReplicaGone(f"decode replica {self._replica} has ended its trunk", self._replica)
        try:
            async for batch in self._stream:
                for number, delta in batch:
                    if (call := self._calls.get(number)) is not None:
                        call.put(delta)
        except Exception as broken:
            error = broken
        finally:
            self.open = False
            for call in list(self._calls.values()):
                call.put(error)
