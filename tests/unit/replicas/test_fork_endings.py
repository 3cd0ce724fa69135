"""Each of several answers ends by itself, whenever and however it does, and nobody else's with it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from fork_kit import LONG, SAMPLED, SPLIT_OR_LOCAL, TOKENS, P, apart, run, told, used, wanted
from split import Held, Pair, config

from bifolio.protos.messages import BlockId, Delta, Generation, Lease


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_choices_may_be_revoked_in_any_order(glassllm_dir: Path, split: bool, order: tuple[int, ...]) -> None:
    """Each ends alone, as resumable, with the error in its own delta; its blocks come back, those it shares do not."""

    async def work(it: Pair) -> list[tuple[int, int]]:
        request = it.request(TOKENS[:35], n=3, **LONG)
        placement = await it.place(request)
        left, ended, begun = list(order), [], set()
        Held(it)
        async for delta in it.deltas(request, placement):
            begun.add(delta.choice)
            if delta.resumable is not None:
                assert delta.choice is not None
                ended.append(delta.choice)
                if len(ended) < 3:  # what is shared, and a tail for each that is left
                    assert used(it.decode) >= 35 // P + 3 - len(ended)
            if len(begun) == 3 and left and len(ended) == 3 - len(left):
                it.streams.revoke([placement.decode, *placement.forks][left.pop(0)].generation)
        return ended

    assert run(glassllm_dir, work, split=split, kv=config(split, starve_s=60)) == list(order)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_choice_that_is_revoked_goes_on_as_its_own_request(glassllm_dir: Path, split: bool, gone: int) -> None:
    async def work(it: Pair) -> tuple[list[Delta], list[Delta]]:
        request = it.request(TOKENS[:35], n=3, **LONG)
        placement = await it.place(request)
        held, asked = Held(it), asyncio.create_task(it.choices(request, placement))
        while request.id not in it.cached:  # the first token
            await asyncio.sleep(0.001)
        it.streams.revoke([placement.decode, *placement.forks][gone].generation)
        while len(it.decode.tags.report(0.0).leases) == 3:
            await asyncio.sleep(0.001)
        held.go()
        got = await asked
        return got, await apart(it, request, 3)

    got, alone = run(glassllm_dir, work, split=split, kv=config(split, starve_s=60))
    assert told(got) == told(alone)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_choices_that_are_revoked_while_the_prompt_is_computed(
    glassllm_dir: Path, split: bool, gone: tuple[int, ...]
) -> None:
    async def work(it: Pair) -> tuple[list[Delta], list[Delta]]:
        core = it.cores[-1]
        computing, gate, compute = threading.Event(), threading.Event(), core.runner.compute

        def gated(rows: Any) -> Any:
            computing.set()
            assert gate.wait(20)
            return compute(rows)

        core.runner.compute = gated  # type: ignore[method-assign]
        request = it.request(TOKENS[:35], n=3, **SAMPLED)
        placement = await it.place(request)
        deltas: list[Delta] = []

        async def follow() -> None:
            async for delta in it.deltas(request, placement):
                deltas.append(delta)

        following = asyncio.create_task(follow())
        await asyncio.to_thread(computing.wait, 20)
        for k in gone:
            it.streams.revoke([placement.decode, *placement.forks][k].generation)
        open_now = {lease.generation for lease in it.decode.tags.report(0.0).leases}
        gate.set()
        await following
        if len(gone) < 3:  # the first one's blocks are those that the prompt is computed in
            revoked = {placement.forks[k - 1].generation for k in gone if k}
            assert open_now == {lease.generation for lease in (placement.decode, *placement.forks)} - revoked
        return deltas, await apart(it, request, 3)

    deltas, alone = run(glassllm_dir, work, split=split)
    if len(gone) == 3:
        (only,) = deltas
        assert (only.choice, only.tokens) == (None, ())
        assert only.resumable is not None
        return
    for k in range(3):
        mine = [delta for delta in deltas if delta.choice == k]
        tokens = sum((delta.tokens for delta in mine), ())
        if k in gone:
            assert mine[-1].resumable is not None
            assert alone[k].tokens[: len(tokens)] == tokens
        else:
            assert (mine[-1].finish, tokens) == ("length", alone[k].tokens)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("gone", [(), (0,), (2,), (0, 1), (0, 1, 2), (2, 1, 0)])
def test_choices_that_are_revoked_when_the_prompt_has_just_ended(
    glassllm_dir: Path, split: bool, gone: tuple[int, ...]
) -> None:
    async def work(it: Pair) -> list[Delta]:
        sample = it.streams._sample

        def late(attempt: Any, logits: Any) -> None:
            for k in gone:
                it.streams.revoke(attempt.choices[k].generation)
            sample(attempt, logits)

        it.streams._sample = late  # type: ignore[method-assign]
        return [delta async for delta in it.deltas(it.request(TOKENS[:35], n=3, **SAMPLED))]

    deltas = run(glassllm_dir, work, split=split)
    ends = {d.choice: d.finish or d.resumable[0] for d in deltas if d.finish or d.resumable}
    assert ends == {k: "Resumable" if k in gone else "length" for k in range(3)}


@SPLIT_OR_LOCAL
def test_the_first_choice_may_end_first(glassllm_dir: Path, split: bool) -> None:
    """Its lease is closed then; what it shared stays."""
    (first, *_) = wanted(glassllm_dir, 33, SAMPLED)

    async def work(it: Pair) -> list[int]:
        sampling = {**LONG, "stop_token_ids": (first.tokens[4],)}
        request, counts, held = it.request(TOKENS[:33], n=3, **sampling), [], Held(it)
        async for delta in it.deltas(request):
            if delta.choice == 0 and delta.finish == "stop":
                counts.append(len(it.decode.tags.report(0.0).leases))
                held.go()
        return counts

    assert run(glassllm_dir, work, split=split, kv=config(split, starve_s=60)) == [2]


@SPLIT_OR_LOCAL
def test_leaving_returns_the_blocks_of_all_choices(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> None:
        for n in (2, 3, 2):
            request = it.request(TOKENS[:35], n=n, **LONG)
            async with aclosing(it.deltas(request)) as deltas:
                async for _ in deltas:
                    break
            await it.settled()

    run(glassllm_dir, work, split=split)


@SPLIT_OR_LOCAL
def test_leaving_while_the_prompt_is_computed_returns_the_blocks_of_all_choices(
    glassllm_dir: Path, split: bool
) -> None:
    async def work(it: Pair) -> None:
        for _ in range(3):
            request = it.request(TOKENS[:59], n=3, **LONG)
            task = asyncio.create_task(it.choices(request, await it.place(request)))
            while not it.decode.tags.held:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            it.ledger.revoke(request.id, 0.0)
            await it.settled()

    run(glassllm_dir, work, split=split)


def test_a_prefill_that_fails_ends_all_choices_with_one_word(glassllm_dir: Path) -> None:
    async def work(it: Pair) -> list[Delta]:
        assert it.prefill is not None
        it.prefill.runner.compute = lambda rows: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        return [delta async for delta in it.deltas(it.request(TOKENS[:35], n=3, **SAMPLED))]

    (only,) = run(glassllm_dir, work)
    assert only.choice is None
    assert only.resumable[::2] == ("EngineFailed", "prefill#1")


def test_a_prompt_that_fails_here_ends_all_choices_with_one_word(glassllm_dir: Path) -> None:
    async def work(it: Pair) -> list[Delta]:
        it.decode.runner.compute = lambda rows: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        return [delta async for delta in it.deltas(it.request(TOKENS[:35], n=3, **SAMPLED))]

    (only,) = run(glassllm_dir, work, split=False)
    assert only.choice is None
    assert only.resumable[::2] == ("EngineFailed", "decode#1")


@SPLIT_OR_LOCAL
def test_a_choice_whose_step_fails_goes_on_as_its_own_request(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> tuple[list[Delta], list[Delta]]:
        request = it.request(TOKENS[:35], n=3, **SAMPLED)
        placement = await it.place(request)
        compute, own = it.decode.runner.compute, placement.forks[0].blocks[35 // P]

        def faulty(rows: Any) -> Any:
            if any(own in row.blocks and row.start > 38 for row in rows):
                raise RuntimeError("unlucky")
            return compute(rows)

        it.decode.runner.compute = faulty  # type: ignore[method-assign]
        deltas = [delta async for delta in it.deltas(request, placement)]
        it.decode.runner.compute = compute  # type: ignore[method-assign]
        return deltas, await apart(it, request, 3)

    deltas, alone = run(glassllm_dir, work, split=split)
    ends = {d.choice: d.finish or d.resumable[0] for d in deltas if d.finish or d.resumable}
    assert ends == {0: "length", 1: "EngineFailed", 2: "length"}
    for k in (0, 2):
        assert sum((d.tokens for d in deltas if d.choice == k), ()) == alone[k].tokens


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("stale", [0, 1, 2])
def test_a_stale_lease_among_them_refuses_the_whole_placement(glassllm_dir: Path, split: bool, stale: int) -> None:
    async def work(it: Pair) -> Delta:
        stepped = []
        it.streams._stepped = lambda: stepped.append(it.decode.tags.due)  # type: ignore[method-assign]
        request = it.request(TOKENS[:35], n=3, **SAMPLED)
        placement = await it.place(request)
        theirs = [placement.decode, *placement.forks][stale]
        thief = Generation(9, 9)
        it.decode.tags.open(Lease(it.decode.replica, thief, theirs.blocks[-1:]))
        (delta,) = [delta async for delta in it.deltas(request, placement)]
        assert stepped[-1], "the manager is to hear of it at once"
        assert [lease.generation for lease in it.decode.tags.report(0.0).leases] == [thief]
        it.decode.tags.close(thief)
        it.ledger.revoke(request.id, 0.0)
        return delta

    delta = run(glassllm_dir, work, split=split)
    assert delta.choice is None
    assert delta.resumable[::2] == ("StalePlacement", None)


def test_a_placement_of_one_choice_speaks_of_choice_zero_whichever_it_is(glassllm_dir: Path) -> None:
    async def work(it: Pair) -> list[Delta]:
        request = it.request(TOKENS[:35], **SAMPLED, choice=3)
        good = [delta async for delta in it.deltas(request)]
        placement = await it.place(replace(request, generated=good[0].tokens))
        blocks = (*placement.decode.blocks[:-1], BlockId(it.decode.cache.blocks))
        it.decode.tags.open(Lease(it.decode.replica, Generation(9, 9), blocks[-1:]))
        bad = replace(placement, decode=replace(placement.decode, blocks=blocks))
        good += [delta async for delta in it.deltas(request, bad)]
        it.decode.tags.close(Generation(9, 9))
        it.ledger.revoke(request.id, 0.0)
        return good

    deltas = run(glassllm_dir, work)
    assert {delta.choice for delta in deltas} == {0}
    assert deltas[-1].resumable[0] == "StalePlacement"
    assert sum((d.tokens for d in deltas), ()) == wanted(glassllm_dir, 35, SAMPLED)[3].tokens
