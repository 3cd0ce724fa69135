"""Drafts in the engine: an answer is the same to the bit as without them, and what was guessed wrong leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from split import Pair, pair
from test_engine import Runner, add

from bifolio.protos.messages import Delta, Generation
from bifolio.replicas.batch import Row
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.drafts import RowCost
from bifolio.replicas.engine import Engine
from bifolio.replicas.runner import Output
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Abort, Closed, Event, Sampled

CYCLE = (*range(32), 0, 1, 2)  # the toy model goes on 3, 4, 5: every guess is right
G = Generation(1, 1)


class Free(RowCost):
    """Rows cost nothing, so that whatever is foretold is computed."""

    share = 0.0

    def __init__(self) -> None:
        pass

    def add(self, rows: int, seconds: float) -> None:
        pass


def speculating(it: Engine, most: int = 8) -> Engine:
    it.scheduler.speculate, it.scheduler.row_cost, it.scheduler.draft_rows = most, Free(), 64
    return it


def toy(draw: Any = lambda generation, count: None) -> tuple[Engine, Runner]:
    runner = Runner()
    scheduler = Scheduler(max_batched_tokens=48, max_sequences=8, block_size=16, draw=draw)
    return speculating(Engine(runner, scheduler)), runner  # type: ignore[arg-type]


def tokens(events: list[Event]) -> list[int]:
    return [e.token for e in events if isinstance(e, Sampled)]


def test_a_step_brings_as_many_tokens_as_were_guessed_right_and_one_more():
    it, _ = toy()
    it.submit(add(1, CYCLE, most=20))
    assert tokens(it.step()) == [3]
    assert tokens(it.step()) == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_guesses_end_where_the_blocks_of_their_sequence_do():
    """35 tokens in 4 blocks: 64 positions. The reserve is asked for the next decode token, never for a draft."""
    asked: list[int] = []
    it, _ = toy(lambda generation, count: asked.append(count))
    it.submit(add(1, CYCLE, most=100))
    it.scheduler.speculate = 50
    it.step()
    assert len(tokens(it.step())) == 64 - 35
    assert not asked
    assert it.step() == []
    assert asked == [1]


@pytest.mark.parametrize("most", range(1, 13))
def test_an_answer_ends_at_max_tokens(most: int) -> None:
    it, _ = toy()
    it.submit(add(1, CYCLE, most=most))
    events = [event for _ in range(4) for event in it.step()]
    assert tokens(events) == list(range(3, 3 + most))
    assert [e.finish for e in events if isinstance(e, Sampled)] == [None] * (most - 1) + ["length"]
    assert events[-1] == Closed(G, "finished", computed=len(CYCLE) + most - 1)


def test_a_stop_id_that_was_foretold_ends_the_answer():
    it, _ = toy()
    it.submit(add(1, CYCLE, most=20, stop_token_ids=(8,)))
    events = [event for _ in range(3) for event in it.step()]
    assert tokens(events) == [3, 4, 5, 6, 7, 8]
    assert events[-1] == Closed(G, "finished", computed=len(CYCLE) + 5)
    assert [e.finish for e in events if isinstance(e, Sampled)] == [None] * 5 + ["stop"]


def test_a_stop_id_that_may_not_come_yet_is_chosen_as_little_as_without_drafts():
    """In its place comes 0, the first of what is equally likely."""
    it, _ = toy()
    it.submit(add(1, CYCLE, most=20, stop_token_ids=(8,), min_tokens=9))
    said = tokens([event for _ in range(14) for event in it.step()])
    assert said == [3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_what_was_guessed_wrong_is_not_computed():
    """After 0, 1, 2 came 9, 9, 9; the model says 3."""
    it, runner = toy()
    it.submit(add(1, (0, 1, 2, 9, 9, 9, 9, 9, 9, 0, 1), most=9))
    assert tokens(it.step()) == [2]
    it.scheduler.speculate = 4
    assert tokens(it.step()) == [3]
    it.submit(Abort(G))
    assert it.step() == [Closed(G, "aborted", computed=12)]
    assert len(runner.done) == 2


def test_no_draft_is_computed_beside_a_prompt():
    it, _ = toy()
    it.submit(add(1, CYCLE, most=30))
    it.step()
    it.submit(add(2, (5,) * 60, most=1))  # more than a step holds
    assert tokens(it.step()) == [4]
    assert tokens(it.step()) == [5, 6]  # one of each
    assert tokens(it.step()) == [6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_step_that_fails_with_a_draft_is_repeated_without_it():
    it, runner = toy()
    compute = runner.compute

    def only_single_tokens(rows: list[Row]) -> Output:
        if any(row.drafted for row in rows):
            raise RuntimeError("too much")
        return compute(rows)

    runner.compute = only_single_tokens  # type: ignore[method-assign]
    it.submit(add(1, CYCLE, most=4))
    assert tokens([event for _ in range(4) for event in it.step()]) == [3, 4, 5, 6]


def test_the_cost_of_rows_is_learned_from_every_step():
    it, _ = toy()
    seen: list[int] = []
    it.scheduler.row_cost.add = lambda rows, seconds: seen.append(rows)  # type: ignore[method-assign]
    it.submit(add(1, CYCLE, most=12))
    for _ in range(3):
        it.step()
    assert seen == [len(CYCLE), 9, 2]


def test_a_preempted_sequence_has_computed_what_it_has_said():
    """Two sequences in a reserve of nothing."""
    it, _ = toy()
    it.scheduler.starve_s = 0.0
    for counter in (1, 2):
        it.submit(add(counter, CYCLE, most=100))
    events = [event for _ in range(12) for event in it.step()]
    (closed,) = [e for e in events if isinstance(e, Closed)]
    said = tokens([e for e in events if e.generation.counter == 2])
    assert (closed.generation.counter, closed.reason) == (2, "preempted")
    assert closed.computed == len(CYCLE) + len(said) - 1


def test_replicas_on_gpus_have_none_unless_asked_for():
    assert EngineConfig(device="cpu").speculate == 8
    assert EngineConfig(device="cuda").speculate == 0
    assert EngineConfig(device="cuda", speculate=3).speculate == 3


# The same answers from a real model -----------------------------------------------------------------------------------

_WORDS = torch.randint(4, 1000, (12,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPT = [*_WORDS, 40, *_WORDS, 41, *_WORDS[:9]]
SMALL = {"block_size": 8, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens", "exact": True}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.6, "seed": 11, "logprobs": 1},
    "hot": {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "seed": 5, "logprobs": 0},
    "penalties": {"temperature": 0.3, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "biased": {"temperature": 0.0, "logit_bias": ((40, 6.0), (41, 5.0)), "logprobs": 3},
    "stops": {"temperature": 0.0, "min_tokens": 20, "stop_token_ids": tuple(range(4, 700)), "logprobs": 1},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 2, "repetition_penalty": 1.05},
}


class Drafts:
    """Counts those that a replica computes, and how many guesses were right."""

    def __init__(self, it: Pair) -> None:
        self.drafted = self.right = 0
        scheduler = speculating(it.decode._engine).scheduler
        record = scheduler.record

        def counted(step: Any, outcome: Any, now: float) -> list[Event]:
            self.drafted += sum(len(c.draft) for c in step.chunks)
            self.right += sum(len(choices) - 1 for choices in outcome.sampled.values())
            return record(step, outcome, now)

        scheduler.record = counted  # type: ignore[method-assign]


def play(model: Path, work: Callable[[Pair], Awaitable[Any]], drafts: bool, **how: Any) -> Any:
    async def go() -> Any:
        async with pair(model, **{**SMALL, **how}) as it:
            counted = Drafts(it) if drafts else None
            if not drafts:
                it.decode._engine.scheduler.speculate = 0
            out = await work(it)
            await it.settled()
            if counted:
                assert counted.drafted > counted.right > 0
            return out

    return asyncio.run(asyncio.wait_for(go(), 60))


async def everything(it: Pair) -> list[Delta]:
    requests = [it.request(PROMPT, **{"max_tokens": 60, **asked}) for asked in ASKED.values()]
    return list(await asyncio.gather(*(it.answer(request) for request in requests)))


@pytest.fixture(scope="module")
def undrafted(glassllm_dir: Path) -> list[Delta]:
    answers: list[Delta] = play(glassllm_dir, everything, drafts=False, split=False)
    return answers


@pytest.mark.parametrize("split", [True, False], ids=["handed over", "whole"])
def test_answers_and_logprobs_are_the_same_to_the_bit(glassllm_dir: Path, undrafted: list[Delta], split: bool) -> None:
    got = play(glassllm_dir, everything, drafts=True, split=split)
    for asked, ours, theirs in zip(ASKED, got, undrafted, strict=True):
        assert ours == theirs, asked


def test_preempted_in_the_middle(glassllm_dir: Path, undrafted: list[Delta]) -> None:
    async def crowded(it: Pair) -> list[Delta]:
        out = await everything(it)
        assert it.preemptions > 0
        return out

    got = play(glassllm_dir, crowded, drafts=True, split=False, kv_memory="256 tokens")
    for asked, ours, theirs in zip(ASKED, got, undrafted, strict=True):
        if asked != "prompt logprobs":  # they come again with each attempt
            assert ours == theirs, asked


def test_resumed_from_its_tokens(glassllm_dir: Path, undrafted: list[Delta]) -> None:
    whole = undrafted[1]

    async def resumed(it: Pair) -> list[Delta]:
        asked = it.request(PROMPT, **{"max_tokens": 60, **ASKED["seeded"]})
        cuts = (1, 8, 30)
        return list(await asyncio.gather(*(it.answer(replace(asked, generated=whole.tokens[:c])) for c in cuts)))

    for cut, got in zip((1, 8, 30), play(glassllm_dir, resumed, drafts=True), strict=True):
        assert (got.tokens, got.logprobs) == (whole.tokens[cut:], whole.logprobs[cut:])


def test_each_of_several_choices(glassllm_dir: Path) -> None:
    async def choices(it: Pair) -> list[Delta]:
        return await it.choices(it.request(PROMPT, n=3, max_tokens=50, temperature=0.3, seed=4, logprobs=1))

    got, wanted = (play(glassllm_dir, choices, drafts=drafts) for drafts in (True, False))
    assert [(d.tokens, d.logprobs, d.finish) for d in got] == [(d.tokens, d.logprobs, d.finish) for d in wanted]


def test_what_a_drafted_answer_leaves_in_the_cache_is_what_it_says(glassllm_dir: Path) -> None:
    """The next turn finds the answer's blocks; its logprobs are those of one that finds nothing."""

    async def turn(it: Pair, prompt: list[int]) -> Delta:
        return await it.answer(it.request(prompt, max_tokens=8, temperature=0.0, logprobs=3))

    async def two_turns(it: Pair) -> tuple[list[int], Delta, int]:
        answer = await it.answer(it.request(PROMPT, max_tokens=59, temperature=0.3, seed=9))
        await it.settled()
        longer = [*PROMPT, *answer.tokens, 50]
        second = await turn(it, longer)
        return longer, second, max(it.cached.values())

    longer, second, cached = play(glassllm_dir, two_turns, drafts=True, split=False)
    assert cached > len(PROMPT)
    assert play(glassllm_dir, lambda it: turn(it, longer), drafts=False, split=False).logprobs == second.logprobs
