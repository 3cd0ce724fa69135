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
from bifolio.kv_manager.keys import chain, root
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.messages import (
    Ask,
    Delta,
    Generation,
    Key,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Sampling,
    choice_id,
)
from bifolio.replicas.batch import Row
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import Core, ReplicaSpec, load_model
from bifolio.replicas.device import Device
from bifolio.replicas.jobs import Jobs
from bifolio.replicas.runner import Output
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
    cached: dict[RequestId, int] = field(default_factory=dict)  # tokens that nobody computed, in the last attempt

    @property
    def cores(self) -> list[Core]:
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]

    def request(
        self,
        prompt: Sequence[int],
        *,
        prompt_logprobs: int | None = None,
        n: int = 1,
        salt: str = "",
        **sampling: object,
    ) -> Request:
        self.count += 1
        return Request(
            RequestId(f"r{self.count}"),
            tuple(prompt),
            Sampling(**sampling),  # type: ignore[arg-type]
            time.time(),
            prompt_logprobs=prompt_logprobs,
            n=n,
            salt=salt,
        )

    def keys(self, request: Request) -> tuple[Key, ...]:
        geometry = self.decode.geometry
        return chain(root(geometry, request.salt), request.history, geometry.block_size)

    async def place(self, request: Request) -> Placement:
        """Waits for blocks, as the manager's queue does."""
        model = self.decode.geometry.fingerprint
        uncached = request.prompt_logprobs is not None and not request.generated
        ask = Ask(
            request.id,
            len(request.history),
            request.most_tokens,
            request.arrival,
            n=request.n,
            keys={} if uncached else {model: self.keys(request)},
            model=model if request.generated else None,
        )
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
        """With a heartbeat at each: answers grow."""
        async with aclosing(self.streams.generate(placement or await self.place(request), request)) as deltas:
            async for delta in deltas:
                self.beat()
                if delta.moved is not None:
                    self.cached[request.id] = delta.moved.cached
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

    async def choices(self, request: Request, placement: Placement | None = None) -> list[Delta]:
        """All deltas of each of a request's choices in one. A choice that ends early is placed again by itself, as the
        ingress does."""
        whole = [Delta(choice=k) for k in range(request.n)]
        async with aclosing(self.deltas(request, placement)) as deltas:
            async for delta in deltas:
                assert delta.choice is not None, delta.resumable
                before = whole[delta.choice]
                whole[delta.choice] = replace(
                    delta, tokens=before.tokens + delta.tokens, logprobs=before.logprobs + delta.logprobs
                )
        return list(await asyncio.gather(*(self._ended(request, choice) for choice in whole)))

    async def _ended(self, request: Request, choice: Delta) -> Delta:
        if choice.finish is not None:
            return choice
        assert choice.choice is not None
        again = replace(
            request,
            id=choice_id(request.id, choice.choice),
            sampling=replace(request.sampling, choice=choice.choice),
            generated=choice.tokens,
            n=1,
        )
        rest = await self.answer(again)
        return replace(
            choice,
            tokens=choice.tokens + rest.tokens,
            logprobs=choice.logprobs + rest.logprobs,
            finish=rest.finish,
            resumable=None,
        )

    async def settled(self) -> None:
        """Until every lease is closed at the replicas; then the ledger must agree, and what is cached is whole."""
        while any(core.tags.report(time.monotonic()).leases for core in self.cores):
            await asyncio.sleep(0.01)
        for _ in range(100):  # the last release may be on its way
            self.beat()
            self.beat()
            if not any(self.ledger.counts(core.replica).leased for core in self.cores):
                break
            await asyncio.sleep(0.01)
        self.ledger.check_integrity()
        assert [core.tags.held for core in self.cores] == [0] * len(self.cores)
        for core in self.cores:
            counts = self.ledger.counts(core.replica)
            assert (counts.free + counts.cached, counts.leased) == (counts.total, 0)


class Held:
    """Answers get no further block until they may `go`: so none ends before something else has happened. To be used
    with a `starve_s` that is long."""

    def __init__(self, it: Pair) -> None:
        self._scheduler = it.decode._engine.scheduler
        self._draw, self._scheduler.draw = self._scheduler.draw, lambda generation, n: None

    def go(self) -> None:
        self._scheduler.draw = self._draw


def config(on_two: bool, **kv: Any) -> KvConfig:
    """Nothing expires by itself, and a prompt is prefilled where it is said."""
    return KvConfig(**{"split": "always" if on_two else "never", "silence_s": 60, "confirm_s": 600, **kv})


class Watch:
    """What a replica computes from now on: how many positions, and the logits after a position, as bytes."""

    def __init__(self, core: Core) -> None:
        self.positions = 0
        self.logits: dict[int, bytes] = {}
        self._core, self._compute = core, core.runner.compute
        core.runner.compute = self._watched  # type: ignore[method-assign]

    def stop(self) -> None:
        self._core.runner.compute = self._compute  # type: ignore[method-assign]

    def _watched(self, rows: Sequence[Row]) -> Output:
        output = self._compute(rows)
        self.positions += sum(len(row.tokens) for row in rows)
        lasts = [(row.start + len(row.tokens), row.drafted) for row in rows if row.want_logits]
        ends = [end - behind for end, drafted in lasts for behind in range(drafted, -1, -1)]
        self.logits.update((end, line.numpy().tobytes()) for end, line in zip(ends, output.logits, strict=True))
        return output


@contextlib.asynccontextmanager
async def pair(
    model: Path,
    *,
    split: bool = True,
    kv: KvConfig | None = None,
    dtype: str = "float32",
    on: Device | None = None,
    **engine: Any,
) -> AsyncIterator[Pair]:
    """Every prompt is prefilled on a replica of its own, unless `kv` says otherwise, or not `split`: there is none.

    `on` another device than the CPU: both replicas start, and move their blocks, as on a GPU of that name. There are no
    drafts unless asked for, so that each token is one position computed.
    """
    kv = kv or config(split)
    spec = ReplicaSpec(
        model, dtype, None, EngineConfig(device="cpu", **{"speculate": 0, **engine}), kv, ("none", "none")
    )
    loaded = load_model(spec) if on is None else replace(load_model(spec), device=on)
    ledger, loop = Ledger(1, kv), asyncio.get_running_loop()

    def close(core: Core, generation: Generation) -> None:
        if (release := core.tags.close(generation)) is not None:
            ledger.release(release)

    def close_in_thread(core: Core, generation: Generation) -> None:
        if (release := core.tags.close(generation)) is not None:
            loop.call_soon_threadsafe(ledger.release, release)  # nobody else uses the ledger meanwhile

    decode = Core(spec, ReplicaId("decode#1"), "decode", loaded)
    streams = Streams(decode, spec.engine.max_sequences, lambda g: close(decode, g), lambda: None)
    decode.start(streams.deliver)
    made = Pair(ledger, decode, streams)
    ledger.register(decode.info(), decode.tags.report(0.0, complete=True), time.monotonic())
    if split:
        prefill = made.prefill = Core(spec, ReplicaId("prefill#1"), "prefill", loaded)
        jobs = made.jobs = Jobs(prefill, lambda g: close_in_thread(prefill, g))
        prefill.start(jobs.deliver)
        made.server = PrefillServer(jobs, spec.engine.max_sequences)
        address = f"127.0.0.1:{made.server.start()}"
        ledger.register(prefill.info(address), prefill.tags.report(0.0, complete=True), time.monotonic())
    try:
        yield made
    finally:
        await streams.stop()
        if made.server is not None:
            await asyncio.to_thread(made.server.stop, 0.1)
        for core in made.cores:
            await asyncio.to_thread(core.stop)
