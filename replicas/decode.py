"""The decode deployment: a placement and a request in token ids in, tokens out.

A thin shell: `streams.py` and the engine do the work. The ingress calls `generate` and `said` through streaming
handles.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Never

from ray import serve

from bifolio.kv_manager.logs import log_to_stderr
from bifolio.protos.messages import Batch, Placement, ReplicaId, Request

from .beat import Beat
from .core import Core, ReplicaSpec
from .leaving import Leaving, on_sigterm
from .streams import Streams
from .trunk import Trunks


class DecodeReplica:
    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr()
        replica = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        self._core = Core(spec, replica, "decode")
        self._beat = Beat(self._core, spec)
        self._leaving = Leaving(self._beat.drain)
        on_sigterm(self._leaving.leave)
        self._streams = Streams(self._core, spec.engine.max_sequences, self._beat.close, self._beat.if_due)
        self._trunks = Trunks()
        self._core.start(self._streams.deliver)
        await self._beat.start(self._core.info(), self._streams, self._leaving.leave)
        gc.freeze()  # what is loaded stays: looking through it again holds up streams for 200 ms

    async def generate(
        self, placement: Placement, request: Request, trunk: str, number: int
    ) -> AsyncGenerator[Never, None]:
        """Begins a stream, ends with it, and is its cancel. What it says is in `said`."""
        await self._trunks.carry(trunk, number, self._streams.generate(placement, request))
        return
        yield

    async def said(self, placement: Placement, trunk: str) -> AsyncGenerator[Batch, None]:
        """What all streams of a trunk say. `placement` says to Serve which replica this is."""
        async with aclosing(self._trunks.said(trunk)) as batches:
            async for batch in batches:
                yield batch

    async def check_health(self) -> None:
        self._core.check()
        self._beat.check()
        self._leaving.check()

    async def __del__(self) -> None:
        """Serve calls this after the last stream."""
        if self._beat.stalled:  # leases are open that nothing closes any more, but the end of the process
            await self._beat.stop()
            os._exit(1)
        await self._streams.stop()
        await self._beat.stop()
        await asyncio.to_thread(self._core.stop)
