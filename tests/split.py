"""Both sides of a hand-over without Ray: cores, jobs and streams, joined by a real ledger and a real Prefill stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.messages import (
    Ask,
    Delta,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Sampling,
)
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import Core, ReplicaSpec, load_model
from bifolio.replicas.device import Device
from bifolio.replicas.jobs import Jobs
from bifolio.replicas.streams import Streams


@dataclass
class Pair:
    """A decode replica and, unless it serves alone, a prefill replica."""

    ledger: Ledger
    decode: Core
    streams: Streams
    prefill: Core | None = None
    jobs: Jobs | None = None
    server: PrefillServer | None = None
    count: int = field(default=0)
    preemptions: int = field(default=0)

    @property
    def cores(self) -> list[Core]:
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]

    def request(self, prompt: Sequence[int], *, prompt_logprobs: int | None = None, **sampling: object) -> Request:
        self.count += 1
        return Request(
            RequestId(f"r{self.count}"),
            tuple(prompt),
            Sampling(**sampling),  # type: ignore[arg-type]
            time.time(),
            prompt_logprobs=prompt_logprobs,
        )

    async def place(self, request: Request) -> Placement:
        """Waits for blocks, as the manager's queue does."""
        ask = Ask(request.id, len(request.history), request.most_tokens, request.arrival)
        while (placement := self.ledger.admit(ask, time.monotonic())) is None:
            await asyncio.sleep(0.005)
            self.beat()
        return placement

    def beat(self) -> None:
        """One heartbeat of every replica, as the manager would answer it."""
        for core in self.cores:
            answer = self.ledger.heartbeat(core.tags.report(time.monotonic()), time.monotonic())
            core.tags.apply(answer)

    async def deltas(self, request: Request, placement: Placement | None = None) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.streams.generate(placement or await self.place(request), request)) as deltas:
            async for delta in deltas:
                yield delta

    async def tokens(self, request: Request) -> list[int]:
        before = self.preemptions
        answer = await self.answer(request)
        assert self.preemptions == before
        return list(answer.tokens)

    async def answer(self, request: Request) -> Delta:
        """All deltas of a request in one. What is preempted is placed again with the tokens it has, as the ingress
        does; prompt logprobs that came twice would be seen twice."""
        whole = Delta()
        while whole.finish is None:
            async with aclosing(self.deltas(request)) as deltas:
                async for delta in deltas:
                    self.beat()
                    if delta.resumable is not None:
                        assert delta.resumable[0] == "Preempted", delta.resumable
                        self.preemptions += 1
                    request = replace(request, generated=request.generated + delta.tokens)
                    whole = Delta(
                        whole.tokens + delta.tokens,
                        delta.finish,
                        logprobs=whole.logprobs + delta.logprobs,
                        prompt_logprobs=whole.prompt_logprobs + delta.prompt_logprobs,
                    )
        return whole

    async def settled(self) -> None:
        """Until every lease is closed at the replicas; then the ledger must agree."""
        while any(core.tags.report(time.monotonic()).leases for core in self.cores):
            await asyncio.sleep(0.01)
        self.beat()
        self.beat()
        self.ledger.check_integrity()
        assert [core.tags.held for core in self.cores] == [0] * len(self.cores)
        for core in self.cores:
            counts = self.ledger.counts(core.replica)
            assert (counts.free, counts.leased) == (counts.total, 0)


@contextlib.asynccontextmanager
async def pair(
    model: Path, *, split: bool = True, dtype: str = "float32", on: Device | None = None, **engine: Any
) -> AsyncIterator[Pair]:
    """`on` another device than the CPU: both replicas start, and move their blocks, as on a GPU of that name."""
    spec = ReplicaSpec(model, dtype, None, EngineConfig(device="cpu", **engine), KvConfig(), ("none", "none"))
    loaded = load_model(spec) if on is None else replace(load_model(spec), device=on)
    ledger = Ledger(1, KvConfig(silence_s=60))
    decode = Core(spec, ReplicaId("decode#1"), "decode", loaded)
    streams = Streams(decode, spec.engine.max_sequences, lambda g: _close(ledger, decode, g), lambda: None)
    decode.start(streams.deliver)
    made = Pair(ledger, decode, streams)
    ledger.register(decode.info(), decode.tags.report(0.0), time.monotonic())
    if split:
        prefill = made.prefill = Core(spec, ReplicaId("prefill#1"), "prefill", loaded)
        jobs = made.jobs = Jobs(prefill, lambda g: _close(ledger, prefill, g))
        prefill.start(jobs.deliver)
        made.server = PrefillServer(jobs, spec.engine.max_sequences)
        address = f"127.0.0.1:{made.server.start()}"
        ledger.register(prefill.info(address), prefill.tags.report(0.0), time.monotonic())
    try:
        yield made
    finally:
        await streams.stop()
        if made.server is not None:
            await asyncio.to_thread(made.server.stop, 0.1)
        for core in made.cores:
            await asyncio.to_thread(core.stop)


def _close(ledger: Ledger, core: Core, generation: object) -> None:
    beat = core.tags.close(generation)  # type: ignore[arg-type]
    if beat is not None:
        ledger.release(core.replica, generation, beat)  # type: ignore[arg-type]
