"""Requests that share cached blocks: whoever of them ends, the others go on, and each block comes back once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from split import Held, Pair, config, pair

from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Delta, Generation, Key, Lease, Release, Request, Start
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.sequence import Abort

P = 8
TOKENS: list[int] = torch.randint(4, 1000, (100,), generator=torch.Generator().manual_seed(3)).tolist()
SMALL = {"block_size": P, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}
SAMPLED: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 4}
SPLIT_OR_LOCAL = pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
LATE = pytest.mark.parametrize("on", [None, DelayedDevice(1)], ids=["cpu", "late"])


def run(model: Path, work: Callable[[Pair], Awaitable[Any]], **how: Any) -> Any:
    async def go() -> Any:
        async with pair(model, **{**SMALL, **how}) as it:
            out = await work(it)
            await it.settled()
            return out

    return asyncio.run(asyncio.wait_for(go(), 60))


async def cancel(it: Pair, held: Held, generation: Generation, stream: Any) -> None:
    await stream.aclose()
    held.go()


async def revoke(it: Pair, held: Held, generation: Generation, stream: Any) -> None:
    it.streams.revoke(generation)
    assert [delta.resumable is not None async for delta in stream][-1]
    held.go()


async def fail(it: Pair, held: Held, generation: Generation, stream: Any) -> None:
    """Its next step."""
    (lease,) = [lease for lease in it.decode.tags.report(0.0).leases if lease.generation == generation]
    own, compute = lease.blocks[lease.cached], it.decode.runner.compute

    def faulty(rows: Any) -> Any:
        if any(own in row.blocks for row in rows):
            raise RuntimeError("unlucky")
        return compute(rows)

    it.decode.runner.compute = faulty  # type: ignore[method-assign]
    held.go()
    assert [delta.resumable is not None async for delta in stream][-1]
    it.decode.runner.compute = compute  # type: ignore[method-assign]


@SPLIT_OR_LOCAL
@LATE
@pytest.mark.parametrize("end", [cancel, revoke, fail])
@pytest.mark.parametrize("ends", [0, 1, 2])
def test_one_of_three_that_share_a_prompt_ends_early(
    glassllm_dir: Path, split: bool, on: DelayedDevice | None, end: Any, ends: int
) -> None:
    async def three(it: Pair) -> None:
        wanted = (await it.answer(it.request(TOKENS[:37], **SAMPLED))).tokens
        asked = [it.request(TOKENS[:37], **SAMPLED) for _ in range(3)]
        placements = [await it.place(request) for request in asked]
        streams = [it.deltas(r, p) for r, p in zip(asked, placements, strict=True)]
        held = Held(it)
        got = [list((await anext(stream)).tokens) for stream in streams]
        shared = placements[0].decode.blocks[:4]
        assert [len(it.decode.tags.users(block)) for block in shared] == [3] * 4
        await end(it, held, placements[ends].decode.generation, streams[ends])
        for k in {0, 1, 2} - {ends}:
            async for delta in streams[k]:
                got[k].extend(delta.tokens)
            assert tuple(got[k]) == wanted
        again = it.request(TOKENS[:37], **SAMPLED)
        assert (await it.answer(again)).tokens == wanted
        assert it.cached[again.id] == 32

    kv = config(split, starve_s=60)
    run(glassllm_dir, three, split=split, kv=kv, on=on, max_sequences=4)


@SPLIT_OR_LOCAL
def test_the_prefill_of_one_that_shares_cached_blocks_is_cut(glassllm_dir: Path, split: bool) -> None:
    """At its first chunk: what was cached before stays, the chunk is computed, and nothing after it."""

    async def cut(it: Pair) -> None:
        sampling = {**SAMPLED, "max_tokens": 20}
        wanted = (await it.answer(it.request(TOKENS[:90], **sampling))).tokens
        await it.answer(it.request(TOKENS[:24], salt="other", **sampling))
        core = it.cores[-1]
        computing, gate = threading.Event(), threading.Event()
        submit, compute = core.submit, core.runner.compute

        def submitted(command: Any) -> None:
            submit(command)
            if isinstance(command, Abort):
                gate.set()

        def gated(rows: Any) -> Any:
            computing.set()
            assert gate.wait(20)
            return compute(rows)

        core.submit, core.runner.compute = submitted, gated  # type: ignore[method-assign]
        request = it.request(TOKENS[:90], salt="other", **sampling)
        task = asyncio.create_task(it.answer(request))
        await asyncio.to_thread(computing.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await it.settled()
        again = it.request(TOKENS[:90], salt="other", **sampling)
        assert (await it.answer(again)).tokens == wanted
        assert it.cached[again.id] == 24 + 32

    run(glassllm_dir, cut, split=split)


def test_what_an_aborted_prompt_leaves_is_settled_before_its_lease_is_closed(glassllm_dir: Path) -> None:
    """On a GPU its last chunk may be under way: it reads what another lease might write."""

    async def work(it: Pair) -> list[str]:
        happened: list[str] = []
        for core in it.cores:
            settle, close = core.store.settle, core.tags.close

            def settled(blocks: Sequence[BlockId], name: str = core.role, settle: Any = settle) -> None:
                happened.append(f"{name} settles {len(blocks)}")
                settle(blocks)

            def closed(generation: Generation, name: str = core.role, close: Any = close) -> Release | None:
                happened.append(f"{name} closes")
                return close(generation)  # type: ignore[no-any-return]

            core.store.settle, core.tags.close = settled, closed  # type: ignore[method-assign]
        await it.answer(it.request(TOKENS[:20], **{**SAMPLED, "max_tokens": 1}))
        finished, happened[:] = happened.copy(), []
        assert it.prefill is not None
        it.prefill.runner.compute = lambda rows: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        request = it.request(TOKENS[:40], **SAMPLED)
        async for delta in it.deltas(request):
            assert delta.resumable is not None
        await it.settled()
        return [*finished, "then", *sorted(happened[:2]), *sorted(happened[2:])]

    assert run(glassllm_dir, work, kv=config(True, copies=False)) == [
        "prefill closes",
        "decode closes",
        "then",
        "prefill closes",
        "prefill settles 3",  # five blocks, two of them cached
        "decode closes",
        "decode settles 4",  # and one more, for the first token
    ]


@SPLIT_OR_LOCAL
def test_four_long_requests_in_a_small_cache_go_on_from_what_is_left_of_their_blocks(
    glassllm_dir: Path, split: bool
) -> None:
    """They begin together and grow alike, until the last has to go; the first two end soon after, and it comes back."""

    def crowd(it: Pair) -> list[Request]:
        most = (70, 70, 90, 90)
        return [it.request(TOKENS[i : i + 30], max_tokens=most[i], temperature=0.8, seed=i) for i in range(4)]

    async def all_of(it: Pair) -> tuple[list[tuple[int, ...]], int, list[int]]:
        hits: list[int] = []
        there, added, loop = threading.Event(), [], asyncio.get_running_loop()
        placing, submit, compute = it.place, it.decode.submit, it.decode.runner.compute

        async def place(request: Request) -> Any:
            placement = await placing(request)
            if request.generated:
                hits.append(placement.decode.cached)
            return placement

        def submitted(command: Any) -> None:
            submit(command)
            added.append(command)
            if len(added) == 4:
                there.set()

        async def beat() -> None:
            it.beat()

        def together(rows: Any) -> Any:
            assert there.wait(20)
            asyncio.run_coroutine_threadsafe(beat(), loop).result(20)  # so that none starves while there are blocks
            return compute(rows)

        it.place, it.decode.submit, it.decode.runner.compute = place, submitted, together  # type: ignore[method-assign]
        answers = await asyncio.gather(*(it.answer(request) for request in crowd(it)))
        return [answer.tokens for answer in answers], it.preemptions, hits

    kv = config(split, growth_s=0.1)
    roomy, none, _ = run(glassllm_dir, all_of, split=split)
    got, preemptions, hits = run(glassllm_dir, all_of, split=split, kv=kv, kv_memory="384 tokens", max_sequences=4)
    assert (none, len(hits)) == (0, preemptions)
    assert preemptions > 0
    assert got == roomy
    assert max(hits) * P > 30, "blocks of generated tokens were found"


@LATE
@pytest.mark.parametrize("kind", ["always", "never", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_in_a_small_cache(glassllm_dir: Path, seed: int, kind: str, on: DelayedDevice | None) -> None:
    """Prompts that have much in common, choices, cancels: every answer that ends is the one a roomy cache gives."""

    def asked(it: Pair) -> list[tuple[Request, int]]:
        """Requests, each with the number of deltas after which it is left."""
        chance, out = random.Random(seed), []
        for i in range(14):
            begin, length = chance.choice((0, 0, 8, 50)), chance.randint(1, 45)
            n = chance.choice((1, 1, 1, 2, 3))
            most = chance.randint(1, 24)
            request = it.request(TOKENS[begin : begin + length], n=n, max_tokens=most, temperature=0.9, seed=i % 3)
            out.append((request, chance.choice((0, 1, 3, 99, 99, 99))))
        return out

    async def one(it: Pair, request: Request, stays: int) -> list[tuple[int, ...]] | None:
        if stays == 99:
            return [choice.tokens for choice in await it.choices(request)]
        async with aclosing(it.deltas(request)) as deltas:
            async for _ in deltas:
                if not (stays := stays - 1) > 0:
                    break
        it.ledger.revoke(request.id, time.monotonic())
        return None

    async def all_of(it: Pair) -> list[list[tuple[int, ...]] | None]:
        return list(await asyncio.gather(*(one(it, *each) for each in asked(it))))

    kv = config(True, split=kind)
    wanted = run(glassllm_dir, all_of, split=False)
    got = run(glassllm_dir, all_of, kv=kv, on=on, kv_memory="256 tokens", max_sequences=5)
    assert got == wanted


def test_a_prompt_whose_cached_block_holds_something_else_is_refused_on_either_side(glassllm_dir: Path) -> None:
    """The ledger was wrong: it is to hear of it at once."""

    async def work(it: Pair) -> tuple[Delta, Delta]:
        assert it.prefill is not None
        assert it.jobs is not None
        refused: list[bool] = []
        it.jobs._refused = lambda: refused.append(it.prefill.tags.due)  # type: ignore[union-attr]
        it.streams._stepped = lambda: refused.append(it.decode.tags.due)  # type: ignore[method-assign]
        await it.answer(it.request(TOKENS[:33], **SAMPLED))
        out = []
        for core in (it.decode, it.prefill):
            request = it.request(TOKENS[:33], **SAMPLED)
            placement = await it.place(request)
            it.ledger.revoke(request.id, 0.0)
            lease = placement.decode if core is it.decode else placement.prefill
            assert lease is not None
            assert lease.cached == 4
            keys = core.tags._keys
            keys[lease.blocks[1]], before = Key(b"else"), keys[lease.blocks[1]]
            refused.clear()
            (delta,) = [delta async for delta in it.streams.generate(placement, request)]
            assert any(refused)
            keys[lease.blocks[1]] = before
            out.append(delta)
        return out[0], out[1]

    for delta in run(glassllm_dir, work):
        assert delta.resumable[::2] == ("StalePlacement", None)


def test_a_stream_that_names_cached_blocks_of_another_salt_is_refused(glassllm_dir: Path) -> None:
    """Its port takes messages from anyone on this machine: who does not know the salt gets nothing of the blocks."""

    async def work(it: Pair) -> None:
        assert it.prefill is not None
        assert it.jobs is not None
        request = it.request(TOKENS[:33], salt="mine", **SAMPLED)
        await it.answer(request)
        await it.settled()
        placement = await it.place(request)
        lease = placement.prefill
        assert lease is not None
        start = Start(
            request.id,
            lease.generation,
            lease.blocks,
            request.prompt,
            it.prefill.geometry,
            0.0,
            cached_blocks=4,
            secret=placement.prefill_secret,
        )
        with pytest.raises(StalePlacement, match="no longer holds"):
            it.jobs.begin(start)
        it.ledger.revoke(request.id, 0.0)

    run(glassllm_dir, work)


def test_speeds_are_measured(glassllm_dir: Path) -> None:
    async def work(it: Pair) -> None:
        assert it.prefill is not None
        assert it.decode.speeds.prefill == it.decode.speeds.transfer == it.prefill.speeds.prefill == 0
        await it.answer(it.request(TOKENS[:60], **SAMPLED))
        assert it.prefill.speeds.prefill > 0
        assert it.prefill.speeds.transfer == 0
        assert it.decode.speeds.transfer > 0
        assert it.decode.speeds.prefill == 0

    run(glassllm_dir, work)


def test_leases_say_whose_they_are(glassllm_dir: Path) -> None:
    async def work(it: Pair) -> None:
        request = it.request(TOKENS[:33], n=2, **SAMPLED)
        async for _ in it.deltas(request):
            leases: Sequence[Lease] = it.decode.tags.report(0.0).leases
            assert {lease.request for lease in leases} <= {f"{request.id}#0", f"{request.id}#1"}

    run(glassllm_dir, work)
