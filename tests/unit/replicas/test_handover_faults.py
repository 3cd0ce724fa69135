"""Broken transfers between two engines: the attempt ends, the next one goes on, and no token is another."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from fault_kit import OF_A_MODEL, Fault, Faults, Plan, break_streams, random_faults
from split import Pair, config, pair
from world_kit import WAYS

from bifolio.kv_manager.patience import Patience
from bifolio.kv_manager.wire import Kind
from bifolio.protos.messages import Delta, Request

SOON = 0.1
SMALL: dict[str, Any] = {
    "block_size": 8,
    "max_batched_tokens": 32,
    "max_sequences": 8,
    "kv_memory": "2048 tokens",
    "exact": True,
}
TOKENS = [random.Random(5).randrange(4, 1000) for _ in range(200)]
SAMPLED: dict[str, Any] = {"max_tokens": 8, "temperature": 1.1, "logprobs": 2}
RESUMED = {"TransferFailed", "StalePlacement", "ReplicaGone"}


def hurry(it: Pair) -> None:
    """Frames of about a block, few of them unacknowledged, and an end to waiting soon."""
    assert it.server is not None
    it.server._patience.close()
    it.server._patience = Patience(SOON, SOON)
    it.server._window, it.server._max_frame = 2, it.decode.cache.block_bytes + 100


async def attempt(it: Pair, request: Request, plan: Plan, faults: Faults) -> Delta:
    """All that one placement brings in one delta."""
    placement = await it.place(request)
    assert placement.prefill is not None
    faults.plans[placement.prefill.generation] = plan
    whole = Delta()
    async with aclosing(it.deltas(request, placement)) as deltas:
        async for delta in deltas:
            whole = replace(
                delta,
                tokens=whole.tokens + delta.tokens,
                logprobs=whole.logprobs + delta.logprobs,
                prompt_logprobs=whole.prompt_logprobs + delta.prompt_logprobs,
                timings=None,
                moved=None,
            )
    return whole


async def answered(it: Pair, request: Request, plan: Plan, faults: Faults) -> Delta:
    """Placed again when its transfer has been broken, as the ingress does: by the plan at first, and later perhaps by a
    machine so busy that who is waited for seems to have gone."""
    while (end := await attempt(it, request, plan, faults)).resumable is not None:
        assert end.resumable[0] in RESUMED, end.resumable
        assert (end.tokens, end.logprobs) == ((), ()), "of a prompt that did not come"
        it.ledger.revoke(request.id, monotonic())
        plan = Plan()
    return end


def run(model: Path, way: str, work: Any) -> None:
    async def go() -> None:
        async with pair(model, kv=config(True, copies=way == "copied"), **SMALL) as it:
            hurry(it)
            await work(it, break_streams(it.streams._client))
            await it.settled()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_broken_by_chance_is_answered_as_if_nothing_had_happened(glassllm_dir: Path, way: str) -> None:
    """Prompts of many lengths that share their beginnings: some blocks are there already, on one side or on both."""

    async def broken(it: Pair, faults: Faults) -> None:
        async def one(seed: int) -> str:
            rng = random.Random(seed)
            prompt = TOKENS[: rng.randint(1, 90)] if seed % 3 else TOKENS[rng.randint(0, 90) :][: rng.randint(1, 90)]
            how = {"prompt_logprobs": None if seed % 5 else 1, "salt": str(seed % 4), "seed": seed, **SAMPLED}
            plan = Plan(random_faults(rng, WAYS[way], 5), seed)
            got = await answered(it, it.request(prompt, **how), plan, faults)
            wanted = await answered(it, it.request(prompt, **how), Plan(), faults)
            return "" if got == wanted else f"seed {seed}, {plan.faults}: {got}, and was to be {wanted}"

        for first in range(0, 48, 6):
            wrong = "\n".join(await asyncio.gather(*map(one, range(first, first + 6))))
            assert not wrong.strip(), wrong
        assert way in {name.partition(":")[0] for name in it.decode.meter.read().ways}

    run(glassllm_dir, way, broken)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", OF_A_MODEL)
def test_logits_of_another_vocabulary_give_no_token(glassllm_dir: Path, way: str, how: str) -> None:
    async def broken(it: Pair, faults: Faults) -> None:
        request = it.request(TOKENS[:20], seed=1, **SAMPLED)
        end = await attempt(it, request, Plan([Fault(Kind.COMMIT, 0, how)]), faults)
        assert end.resumable is not None, end
        assert end.resumable[0] in RESUMED, end.resumable

    run(glassllm_dir, way, broken)
