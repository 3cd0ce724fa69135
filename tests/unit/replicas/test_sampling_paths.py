"""One answer, whichever way it is computed: alone, in company, split, in chunks of any size, resumed, preempted.

Every option is on. With `engine.exact` the logits are the same to the bit, so the logprobs must be too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from split import Pair, pair

from bifolio.protos.messages import Delta, Request, TokenLogprobs
from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.weights import load

PROMPT = torch.randint(4, 1000, (61,), generator=torch.Generator().manual_seed(8)).tolist()
SMALL = {"block_size": 8, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}
EVERYTHING: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 1.1,
    "top_p": 0.97,
    "top_k": 300,
    "min_p": 0.002,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((40, 4.0), (17, -100.0), (41, 9.0)),
    "min_tokens": 20,
    "stop_token_ids": (*range(100, 300), 40),
    "seed": 2**63 + 5,
    "logprobs": 4,
    "prompt_logprobs": 3,
}
GREEDY = {**EVERYTHING, "temperature": 0.0, "frequency_penalty": 0.6}


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def answers(model: Path, requests: Callable[[Pair], list[Request]], **how: Any) -> list[Delta]:
    async def go() -> list[Delta]:
        async with pair(model, **{**SMALL, **how}) as it:
            out = await asyncio.gather(*(it.answer(request) for request in requests(it)))
            await it.settled()
            return out

    out: list[Delta] = run(go())
    return out


def batch_of_8(it: Pair) -> list[Request]:
    others = [{"temperature": 0.0}, {"logprobs": 20}, {"repetition_penalty": 0.9, "seed": 3}, {"top_k": 1}]
    asked = [it.request(PROMPT, **EVERYTHING), it.request(PROMPT, **GREEDY)]
    for i in range(6):
        asked.append(it.request(PROMPT[i : 50 - 7 * i], max_tokens=24, **others[i % 4]))  # type: ignore[arg-type]
    return asked


@pytest.fixture(scope="module")
def alone(glassllm_dir: Path) -> list[Delta]:
    """What both requests get on a replica of their own, each with the whole prompt in one chunk."""
    how = {"split": False, "max_batched_tokens": 200, "exact": True}
    return [
        answers(glassllm_dir, lambda it, o=options: [it.request(PROMPT, **o)], **how)[0]  # type: ignore[misc]
        for options in (EVERYTHING, GREEDY)
    ]


def assert_same(got: Delta, wanted: Delta, exact: bool = True) -> None:
    assert got.tokens == wanted.tokens
    assert got.finish == wanted.finish
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        if exact:
            assert ours == theirs
        else:
            assert [flat(one)[0] for one in ours] == [flat(one)[0] for one in theirs]
            for a, b in zip(ours, theirs, strict=True):
                assert flat(a)[1] == pytest.approx(flat(b)[1], abs=1e-4)


def flat(one: TokenLogprobs) -> tuple[list[int], list[float]]:
    return [one.token, *(id for id, _ in one.top)], [one.logprob, *(value for _, value in one.top)]


def test_an_answer_does_what_was_asked(alone: list[Delta]) -> None:
    for delta in alone:
        assert 20 < len(delta.tokens) <= 24 or delta.finish == "stop"
        assert not set(delta.tokens[:20]) & set(EVERYTHING["stop_token_ids"])
        assert 17 not in delta.tokens
        assert 41 in delta.tokens
        assert [one.token for one in delta.logprobs] == list(delta.tokens)
        assert [one.token for one in delta.prompt_logprobs] == PROMPT[1:]
        assert {len(one.top) for one in delta.logprobs} == {4}
        assert {len(one.top) for one in delta.prompt_logprobs} == {3}


@pytest.mark.parametrize("how", [{"split": True}, {"split": False}], ids=["split", "whole"])
@pytest.mark.parametrize("budget", [16, 72])
def test_split_or_whole_in_chunks_of_any_size(
    glassllm_dir: Path, alone: list[Delta], budget: int, how: dict[str, bool]
) -> None:
    def both(it: Pair) -> list[Request]:
        return [it.request(PROMPT, **EVERYTHING), it.request(PROMPT, **GREEDY)]

    got = answers(glassllm_dir, both, max_batched_tokens=budget, exact=True, **how, max_sequences=2)
    for ours, theirs in zip(got, alone, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_in_a_batch_of_eight(glassllm_dir: Path, alone: list[Delta], split: bool) -> None:
    got = answers(glassllm_dir, batch_of_8, split=split, exact=True)
    for ours, theirs in zip(got[:2], alone, strict=True):
        assert_same(ours, theirs)


def test_without_exact_the_tokens_are_the_same_and_the_logprobs_nearly(glassllm_dir: Path, alone: list[Delta]) -> None:
    got = answers(glassllm_dir, batch_of_8, exact=False)
    for ours, theirs in zip(got[:2], alone, strict=True):
        assert_same(ours, theirs, exact=False)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_resumed_from_any_cut(glassllm_dir: Path, alone: list[Delta], split: bool) -> None:
    wanted = alone[0]
    cuts = range(1, len(wanted.tokens))

    def resumed(it: Pair) -> list[Request]:
        return [replace(it.request(PROMPT, **EVERYTHING), generated=wanted.tokens[:cut]) for cut in cuts]

    for cut, got in zip(cuts, answers(glassllm_dir, resumed, split=split, exact=True), strict=True):
        rest = replace(wanted, tokens=wanted.tokens[cut:], logprobs=wanted.logprobs[cut:], prompt_logprobs=())
        assert_same(got, rest)


def test_preempted_and_resumed(glassllm_dir: Path) -> None:
    """Four answers of 64 tokens that grow out of a cache which holds two."""
    long = {**EVERYTHING, "max_tokens": 64, "min_tokens": 64}

    def crowd(it: Pair) -> list[Request]:
        return [it.request(PROMPT[i:], **long) for i in range(4)]

    async def crowded() -> tuple[list[Delta], int]:
        async with pair(glassllm_dir, **{**SMALL, "kv_memory": "256 tokens", "exact": True}) as it:
            out = await asyncio.gather(*(it.answer(request) for request in crowd(it)))
            await it.settled()
            return out, it.preemptions

    wanted = answers(glassllm_dir, crowd, exact=True)
    got, preemptions = run(crowded())
    assert preemptions > 0
    for ours, theirs in zip(got, wanted, strict=True):
        assert_same(ours, theirs)


def test_logprobs_are_the_log_softmax_of_a_whole_forward_pass(glassllm_dir: Path, alone: list[Delta]) -> None:
    """Of the model's own logits, whatever penalties, biases and temperature made of them."""
    for delta in alone:
        tokens = [*PROMPT, *delta.tokens]
        reference = whole_pass(glassllm_dir, tokens)
        got = [*delta.prompt_logprobs, *delta.logprobs]
        for place, one in enumerate(got):
            row = reference[place]
            assert one.token == tokens[place + 1]
            assert one.logprob == pytest.approx(row[one.token], abs=1e-4)
            best = np.sort(row)[::-1][: len(one.top)]
            assert [value for _, value in one.top] == pytest.approx(best, abs=1e-4)
            assert [row[id] for id, _ in one.top] == pytest.approx(best, abs=1e-4)


def whole_pass(model: Path, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [positions, vocabulary] log-probabilities, by no code of the engine."""
    config, weights = load(model, torch.float32)
    llama = Llama(config, weights)
    cache = KvCache(16, config.layers, config.kv_heads, 8, config.head_dim, torch.float32)
    hidden = llama.forward(build_batch([Row(tokens, 0, list(range(1, 17)))], 8), cache)
    logits = llama.logits(hidden).numpy().astype(np.float64)
    top = logits.max(1, keepdims=True)
    shares: np.ndarray[Any, np.dtype[np.float64]] = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return shares


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_prompt_logprobs_come_with_the_first_token_and_never_again(glassllm_dir: Path, split: bool) -> None:
    async def deltas() -> list[Delta]:
        async with pair(glassllm_dir, split=split, **SMALL) as it:
            out = []
            async for delta in it.deltas(it.request(PROMPT, **{**EVERYTHING, "max_tokens": 60})):
                out.append(delta)
                it.beat()
            return out

    first, *later = run(deltas())
    assert first.timings is not None
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert later
    assert not any(delta.prompt_logprobs for delta in later)
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in (first, *later))


def test_a_prompt_of_one_token_has_no_prompt_logprobs(glassllm_dir: Path) -> None:
    for split in (True, False):
        (got,) = answers(glassllm_dir, lambda it: [it.request([7], max_tokens=2, prompt_logprobs=5)], split=split)
        assert (len(got.tokens), got.prompt_logprobs, got.logprobs) == (2, (), ())
