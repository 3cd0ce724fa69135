"""A decode replica and perhaps a prefill replica in this process, joined as a cell joins them: by leases of a ledger
and a Prefill stream over loopback. No Ray, no HTTP, no text; both compute on one device and share the weights.

In one process they also share Python's lock and, on a GPU, the stream that kernels are launched on: replicas that are
processes of their own share less.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.messages import Ask, Delta, Generation, Placement, ReplicaId, Request, RequestId, Sampling
from bifolio.replicas.core import Core, LoadedModel, ReplicaSpec
from bifolio.replicas.jobs import Jobs
from bifolio.replicas.sequence import Event, Sampled
from bifolio.replicas.streams import Streams

BEAT = 0.02  # seconds
names = (RequestId(f"r{n}") for n in count(1))


class Cell:
    """Made, used and closed on one event loop. `sampled` has the times of each sequence's tokens, as the engine gave
    them away."""

    def __init__(self, spec: ReplicaSpec, model: LoadedModel, split: bool) -> None:
        self.sampled: dict[Generation, list[float]] = defaultdict(list)
        self._loop = asyncio.get_running_loop()
        self._ledger = Ledger(1, KvConfig(split="always" if split else "never", silence_s=600, confirm_s=600))
        self._decode = Core(spec, ReplicaId("decode#1"), "decode", model)
        self._streams = Streams(
            self._decode, spec.engine.max_sequences, lambda g: self._release(self._decode, g), lambda: None
        )
        self._decode.start(self._deliver)
        self._register(self._decode, "")
        self._cores, self._server = [self._decode], None
        if split:
            prefill = Core(spec, ReplicaId("prefill#1"), "prefill", model)
            jobs = Jobs(prefill, lambda g: self._release(prefill, g))
            prefill.start(jobs.deliver)
            self._server = PrefillServer(jobs, spec.engine.max_sequences)
            self._register(prefill, f"127.0.0.1:{self._server.start()}")
            self._cores.append(prefill)
        self._beats = asyncio.create_task(self._beat())

    async def close(self) -> None:
        self._beats.cancel()
        await self._streams.stop()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop, 0.1)
        for core in self._cores:
            await asyncio.to_thread(core.stop)

    def request(self, prompt: Sequence[int], most: int) -> Request:
        return Request(next(names), tuple(prompt), Sampling(max_tokens=most, temperature=0.0), time.time())

    async def place(self, request: Request) -> Placement:
        """Without keys: nothing of a prompt is taken from a cache."""
        ask = Ask(request.id, len(request.history), request.most_tokens, request.arrival)
        while (placement := self._ledger.admit(ask, time.monotonic())) is None:
            for core in self._cores:
                core.check()
            await asyncio.sleep(0.005)
        return placement

    async def deltas(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        """RuntimeError when the attempt ends early: there is room for all that is asked here."""
        async with aclosing(self._streams.generate(placement, request)) as deltas:
            async for delta in deltas:
                if delta.resumable is not None:
                    raise RuntimeError(f"an attempt ended early: {delta.resumable}")
                yield delta

    async def settled(self) -> None:
        """Until every lease is closed."""
        while any(core.tags.report(time.monotonic()).leases for core in self._cores):
            await asyncio.sleep(BEAT)

    def _deliver(self, events: list[Event]) -> None:
        """In the engine's thread."""
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Sampled):
                self.sampled[event.generation].append(now)
        self._streams.deliver(events)

    def _register(self, core: Core, address: str) -> None:
        now = time.monotonic()
        self._ledger.register(core.info(address), core.tags.report(now, complete=True), now)

    def _release(self, core: Core, generation: Generation) -> None:
        """From any thread; the ledger is used on the loop alone."""
        if (release := core.tags.close(generation)) is not None:
            self._loop.call_soon_threadsafe(self._ledger.release, release)

    async def _beat(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                now = time.monotonic()
                for core in self._cores:
                    core.tags.apply(self._ledger.heartbeat(core.tags.report(now), now))
                await asyncio.sleep(BEAT)
