"""Several answers from one prefill: each is what a request of its own would have got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fork_kit import GREEDY, SAMPLED, SPLIT_OR_LOCAL, TOKENS, P, apart, run, told, used, wanted
from split import Pair, Watch

from bifolio.protos.messages import Delta
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.sequence import Add


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [4 * P - 1, 4 * P, 4 * P + 1, 3])
def test_choices_are_separate_requests_with_one_prefill(
    glassllm_dir: Path, split: bool, sampling: dict[str, Any], length: int
) -> None:
    async def work(it: Pair) -> list[Delta]:
        watches = [Watch(core) for core in it.cores]
        out = await it.choices(it.request(TOKENS[:length], n=4, **sampling))
        decoded = sum(len(choice.tokens) - 1 for choice in out)
        assert [w.positions for w in watches] == ([decoded, length] if split else [decoded + length])
        return out

    got = run(glassllm_dir, work, split=split)
    assert [choice.choice for choice in got] == [0, 1, 2, 3]
    assert told(got) == told(wanted(glassllm_dir, length, sampling))
    assert len({choice.tokens for choice in got}) == (1 if sampling is GREEDY else 4)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [4 * P, 4 * P + 3])
def test_choices_on_a_device_that_is_late(glassllm_dir: Path, split: bool, length: int, seed: int) -> None:
    got = run(
        glassllm_dir,
        lambda it: it.choices(it.request(TOKENS[:length], n=4, **SAMPLED)),
        split=split,
        on=DelayedDevice(seed),
    )
    alone = run(glassllm_dir, lambda it: apart(it, it.request(TOKENS[:length], **SAMPLED), 4), split=False)
    assert told(got) == told(alone)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize(("length", "copies"), [(4 * P, 0), (4 * P + 3, 2)])
def test_the_engine_gets_the_first_choice_last(glassllm_dir: Path, split: bool, length: int, copies: int) -> None:
    """It may end, and its block go to another request, as soon as it is there; then the others have their copies."""

    async def work(it: Pair) -> None:
        adds, submit = [], it.decode.submit

        def submitted(command: Any) -> None:
            submit(command)
            if isinstance(command, Add) and command.sampling is not None:
                adds.append(command)

        it.decode.submit = submitted  # type: ignore[method-assign]
        request = it.request(TOKENS[:length], n=3, **SAMPLED)
        placement = await it.place(request)
        async for delta in it.deltas(request, placement):
            assert delta.resumable is None
        first = placement.decode.blocks
        assert [add.copy for add in adds if add.copy] == [
            (first[4], fork.blocks[4]) for fork in placement.forks[::-1][:copies]
        ]
        assert [add.generation for add in adds] == [x.generation for x in (*placement.forks[::-1], placement.decode)]

    run(glassllm_dir, work, split=split)


@SPLIT_OR_LOCAL
@pytest.mark.parametrize("length", [4 * P - 1, 4 * P, 4 * P + 1])
def test_one_prompt_and_a_tail_for_each_is_all_they_hold(glassllm_dir: Path, split: bool, length: int) -> None:
    async def work(it: Pair) -> None:
        request = it.request(TOKENS[:length], n=4, **{**SAMPLED, "max_tokens": 5})
        async for delta in it.deltas(request):
            assert delta.resumable is None
            # a tail is the rest of the prompt and 4 tokens more: two blocks at most
            assert used(it.decode) <= length // P + 4 * 2

    run(glassllm_dir, work, split=split)


@SPLIT_OR_LOCAL
def test_what_came_with_the_prompt_is_told_once(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> list[Delta]:
        request = it.request(TOKENS[:33], n=3, prompt_logprobs=2, **SAMPLED)
        return [delta async for delta in it.deltas(request)]

    first, *later = run(glassllm_dir, work, split=split)
    assert [one.token for one in first.prompt_logprobs] == TOKENS[1:33]
    assert first.moved.blocks == (5 if split else 0)
    assert min(first.timings.queue, first.timings.prefill, first.timings.transfer, first.timings.first_decode) >= 0
    t = first.timings
    assert t.elapsed == pytest.approx(t.queue + t.prefill + t.transfer + t.first_decode)
    assert not any(delta.prompt_logprobs or delta.timings or delta.moved for delta in later)


@SPLIT_OR_LOCAL
def test_choices_hit_the_cache_and_leave_their_answers_there(glassllm_dir: Path, split: bool) -> None:
    async def work(it: Pair) -> tuple[list[Delta], list[Delta], list[int]]:
        first = await it.choices(request := it.request(TOKENS[:33], n=3, **SAMPLED))
        await it.settled()
        again = await it.choices(other := it.request(TOKENS[:33], n=3, **SAMPLED))
        hits = [it.cached[request.id], it.cached[other.id]]
        for choice in first:
            turn = it.request([*TOKENS[:33], *choice.tokens, 7], max_tokens=1)
            await it.answer(turn)
            hits.append(it.cached[turn.id])
        return first, again, hits

    first, again, hits = run(glassllm_dir, work, split=split)
    assert told(again) == told(first)
    assert hits == [0, 32, *([32] * 3 if split else [40] * 3)]  # 33 + 13 positions of each were computed
