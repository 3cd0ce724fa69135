"""An answer is the same to the bit whatever of its prompt is cached, on the prefill replica, on the decode replica, or
on both; and nothing that is cached is computed or moved again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from split import Pair, Watch, config, pair

from bifolio.kv_manager.secret import sign
from bifolio.protos.errors import InvalidRequest
from bifolio.protos.messages import Delta, Placement, Release, Request, Start
from bifolio.replicas import streams
from bifolio.replicas.delayed_device import DelayedDevice

P = 8
TOKENS: list[int] = torch.randint(4, 1000, (60,), generator=torch.Generator().manual_seed(17)).tolist()
SMALL = {"block_size": P, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.1, "seed": 77, "logprobs": 3}


@dataclass
class Answer:
    delta: Delta
    logits: dict[int, bytes]  # by position
    prefilled: int  # positions computed on the prefill replica
    decoded: int
    cached: int
    moved: int  # blocks


def run(model: Path, work: Callable[[Pair], Awaitable[Any]], **how: Any) -> Any:
    async def go() -> Any:
        async with pair(model, **{"exact": True, **SMALL, **how}) as it:
            out = await work(it)
            await it.settled()
            return out

    return asyncio.run(asyncio.wait_for(go(), 60))


async def ask(it: Pair, request: Request) -> Answer:
    watches = [Watch(core) for core in it.cores]
    deltas = []
    async for delta in it.deltas(request):
        assert delta.resumable is None, delta.resumable
        deltas.append(delta)
    for watch in watches:
        watch.stop()
    whole = replace(
        deltas[-1],
        tokens=sum((d.tokens for d in deltas), ()),
        logprobs=sum((d.logprobs for d in deltas), ()),
        prompt_logprobs=deltas[0].prompt_logprobs,
        timings=None,
        moved=None,
    )
    assert deltas[0].moved is not None
    logits = {position: row for watch in watches for position, row in watch.logits.items()}
    decode, prefill = watches[0].positions, watches[-1].positions if len(watches) > 1 else 0
    return Answer(whole, logits, prefill, decode, deltas[0].moved.cached, deltas[0].moved.blocks)


def given_up(it: Pair, placement: Placement) -> Placement:
    """Without its prefill lease."""
    if placement.prefill is not None:
        it.ledger.release(Release(placement.prefill.replica, placement.prefill.generation, 0))
    return replace(placement, prefill=None)


async def warm_decode(it: Pair, tokens: list[int]) -> None:
    if tokens:
        request = it.request(tokens, max_tokens=1, temperature=0.0)
        async for delta in it.deltas(request, given_up(it, await it.place(request))):
            assert delta.finish == "length"
        await it.settled()


async def warm_prefill(it: Pair, tokens: list[int]) -> None:
    if tokens:
        request = it.request(tokens, max_tokens=1)
        placement = await it.place(request)
        assert it.prefill is not None
        assert it.jobs is not None
        it.ledger.release(Release(placement.decode.replica, placement.decode.generation, 0))
        with it.jobs.begin(start_of(it, request, placement)) as job:
            assert await asyncio.to_thread(lambda: list(job.progress()))
        await it.settled()


def start_of(it: Pair, request: Request, placement: Placement) -> Start:
    lease = placement.prefill
    assert lease is not None
    return Start(
        request.id,
        lease.generation,
        lease.blocks,
        request.history,
        it.decode.geometry,
        request.arrival,
        cached_blocks=lease.cached,
        salt=request.salt,
        secret=placement.prefill_secret,
    )


COLD: dict[tuple[bool, int], Answer] = {}


def cold(model: Path, split: bool, length: int) -> Answer:
    if (split, length) not in COLD:
        COLD[split, length] = run(model, lambda it: ask(it, it.request(TOKENS[:length], **SAMPLED)), split=split)
    return COLD[split, length]


LENGTHS = [5 * P - 1, 5 * P, 5 * P + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_split_and_local_have_the_same_logits_cold(glassllm_dir: Path, length: int) -> None:
    split, local = cold(glassllm_dir, True, length), cold(glassllm_dir, False, length)
    assert split.logits == local.logits
    assert len(split.logits) == 12
    assert (split.delta, split.cached, split.prefilled, split.moved) == (local.delta, 0, length, -(-length // P))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("there", "here"), [(5, 0), (0, 5), (5, 5), (2, 4), (4, 2), (1, 1)])
def test_cached_on_either_side_or_both(glassllm_dir: Path, length: int, there: int, here: int) -> None:
    async def work(it: Pair) -> Answer:
        await warm_prefill(it, TOKENS[: there * P])
        await warm_decode(it, TOKENS[: here * P])
        return await ask(it, it.request(TOKENS[:length], **SAMPLED))

    wanted, got = cold(glassllm_dir, True, length), run(glassllm_dir, work)
    most = (length - 1) // P
    assert got.cached == min(there, most) * P
    assert got.prefilled == length - got.cached
    assert got.moved == -(-length // P) - min(here, most)
    assert got.logits == wanted.logits
    assert got.delta == wanted.delta


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("here", [1, 3, 5])
def test_cached_where_the_decode_replica_prefills_itself(glassllm_dir: Path, length: int, here: int) -> None:
    async def work(it: Pair) -> Answer:
        await warm_decode(it, TOKENS[: here * P])
        return await ask(it, it.request(TOKENS[:length], **SAMPLED))

    wanted, got = cold(glassllm_dir, False, length), run(glassllm_dir, work, split=False)
    assert got.cached == min(here, (length - 1) // P) * P
    assert got.decoded == wanted.decoded - got.cached
    assert got.logits == wanted.logits
    assert got.delta == wanted.delta


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("there", "here"), [(5, 0), (0, 5), (2, 4), (4, 2)])
def test_cached_on_a_device_that_is_late(glassllm_dir: Path, there: int, here: int, seed: int) -> None:
    async def work(it: Pair) -> Answer:
        await warm_prefill(it, TOKENS[: there * P])
        await warm_decode(it, TOKENS[: here * P])
        return await ask(it, it.request(TOKENS[:41], **SAMPLED))

    got = run(glassllm_dir, work, on=DelayedDevice(seed))
    assert (got.cached, got.moved) == (there * P, 6 - here)
    assert got.logits == cold(glassllm_dir, True, 41).logits


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_the_next_turn_of_a_conversation_finds_what_was_generated(glassllm_dir: Path, split: bool) -> None:
    sampling = {**SAMPLED, "max_tokens": 21}

    async def turns(it: Pair) -> tuple[Answer, Answer]:
        one = await ask(it, it.request(TOKENS[:21], **sampling))
        await it.settled()
        return one, await ask(it, it.request(second(one), **SAMPLED))

    def second(one: Answer) -> list[int]:
        return [*TOKENS[:21], *one.delta.tokens, *TOKENS[40:53]]

    one, got = run(glassllm_dir, turns, split=split)
    wanted = run(glassllm_dir, lambda it: ask(it, it.request(second(one), **SAMPLED)), split=split)
    assert got.logits == wanted.logits
    assert got.delta == wanted.delta
    whole = (21 + 21 - 1) // P  # the last token's K and V were never needed
    if split:
        assert got.cached == 21 // P * P  # prefill has seen nothing but the prompt
        assert got.moved == -(-len(second(one)) // P) - whole
    else:
        assert got.cached == whole * P


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_a_request_that_goes_on_from_its_tokens_finds_its_blocks(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> tuple[Answer, Answer]:
        request = it.request(TOKENS[:30], **SAMPLED)
        whole = await ask(it, request)
        await it.settled()
        return whole, await ask(it, replace(request, generated=whole.delta.tokens[:7]))

    whole, rest = run(glassllm_dir, work, split=split)
    assert rest.delta.tokens == whole.delta.tokens[7:]
    assert rest.logits == {position: row for position, row in whole.logits.items() if position >= 37}
    assert rest.cached == (24 if split else 32)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_logprobs_of_a_prompt_are_complete_with_a_warm_cache(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> list[Answer]:
        asked = [it.request(TOKENS[:33], **more, **SAMPLED) for more in ({"prompt_logprobs": 2}, {})]
        return [await ask(it, request) for request in (asked[0], asked[1], asked[0])]

    first, plain, again = run(glassllm_dir, work, split=split)
    assert [one.token for one in again.delta.prompt_logprobs] == TOKENS[1:33]
    assert again.delta == first.delta
    assert (again.cached, plain.cached) == (0, 32)
    assert again.logits == plain.logits == first.logits


def test_a_prompt_so_long_that_its_keys_are_made_in_a_thread(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LONG", 20)

    async def work(it: Pair) -> list[Answer]:
        return [await ask(it, it.request(TOKENS[:41], **SAMPLED)) for _ in range(2)]

    first, again = run(glassllm_dir, work)
    assert (first.cached, again.cached) == (0, 40)
    assert first.logits == again.logits == cold(glassllm_dir, True, 41).logits


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_another_salt_shares_nothing(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> list[int]:
        asked = [it.request(TOKENS[:33], salt=salt, **SAMPLED) for salt in ("", "mine", "mine", "yours", "")]
        return [(await ask(it, request)).cached for request in asked]

    assert run(glassllm_dir, work, split=split) == [0, 0, 32, 0, 32]


def test_what_a_prompt_of_several_chunks_has_in_common_with_one_under_way_is_shared(glassllm_dir: Path) -> None:
    """Both are open at once: blocks are cached when their chunk is computed, not when their lease is closed."""

    async def work(it: Pair) -> tuple[list[int], list[int]]:
        long = it.request(TOKENS[:40], max_tokens=60, temperature=0.0)
        other = it.request(TOKENS[:40], max_tokens=20, temperature=0.0)
        out: tuple[list[int], list[int]] = ([], [])
        async for delta in it.deltas(long):
            if not out[0]:
                answer = await ask(it, other)
                assert (answer.cached, answer.moved, answer.prefilled) == (32, 1, 8)
                out[1].extend(answer.delta.tokens)
            out[0].extend(delta.tokens)
        return out

    first, second = run(glassllm_dir, work)
    assert first[:20] == second


def test_cached_blocks_that_decode_lacks_are_sent_before_anything_is_computed(glassllm_dir: Path) -> None:
    """The chunk waits for a block to arrive: were blocks sent only after it, neither would ever come."""

    async def work(it: Pair) -> Answer:
        await warm_prefill(it, TOKENS[:40])
        assert it.prefill is not None
        arrived = threading.Event()
        writing, compute = it.decode.store.writing, it.prefill.runner.compute

        @contextmanager
        def watched() -> Any:
            with writing() as write:

                def written(*args: Any) -> None:
                    write(*args)
                    arrived.set()

                yield written

        def computed(rows: Any) -> Any:
            assert arrived.wait(20), "no block came before the chunk was to be computed"
            return compute(rows)

        it.decode.store.writing = watched  # type: ignore[method-assign]
        it.prefill.runner.compute = computed  # type: ignore[method-assign]
        return await ask(it, it.request(TOKENS[:45], **SAMPLED))

    assert run(glassllm_dir, work, kv=config(True, copies=False)).cached == 40


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [(40, {"cached_blocks": 5}), (41, {"cached_blocks": 6}), (1, {"cached_blocks": 1}), (41, {"cached_blocks": -1})],
)
def test_a_start_with_more_cached_than_can_be_is_refused(
    glassllm_dir: Path, tokens: int, wrong: dict[str, int]
) -> None:
    assert refused(glassllm_dir, tokens, wrong) == "cached_blocks"


def test_a_start_that_asks_for_logprobs_of_what_is_cached_is_refused(glassllm_dir: Path) -> None:
    assert refused(glassllm_dir, 41, {"cached_blocks": 1, "prompt_logprobs": 0}) == "cached_blocks"


def refused(model: Path, tokens: int, wrong: dict[str, int]) -> str | None:
    async def work(it: Pair) -> str | None:
        await warm_prefill(it, TOKENS[:40])
        assert it.jobs is not None
        request = it.request(TOKENS[:tokens], max_tokens=1)
        placement = await it.place(request)
        assert it.prefill is not None
        assert placement.prefill is not None
        start = replace(start_of(it, request, placement), **wrong)  # type: ignore[arg-type]
        granted = sign(it.prefill.secret, replace(placement.prefill, cached=start.cached_blocks))
        with pytest.raises(InvalidRequest) as error:
            it.jobs.begin(replace(start, secret=granted))
        it.ledger.revoke(request.id, 0.0)
        return error.value.field

    return run(model, work)  # type: ignore[no-any-return]
