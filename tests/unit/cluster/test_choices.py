"""Requests with several answers: one admission, one stream, and each choice to its own end, whatever happens."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from dataclasses import replace

import pytest
from frontend_kit import REQUEST, STALE, Decode, Manager, collect, deltas_of, front
from ray.exceptions import ActorDiedError

from bifolio.cluster.account import Account
from bifolio.cluster.choices import Choices, Merged
from bifolio.protos.errors import Revoked, Unavailable
from bifolio.protos.measures import Moved, Timings
from bifolio.protos.messages import Delta, Sampling, TokenLogprobs

THREE = replace(REQUEST, n=3, sampling=Sampling(10, seed=4))


def brings(choice: int, *tokens: int, finish=None) -> Delta:
    return Delta(tokens, finish, choice=choice)


def ends_early(choice: int | None, name: str = "Preempted", replica: str | None = None) -> Delta:
    return Delta(resumable=(name, "out of blocks", replica), choice=choice)


def test_choices_share_one_admission_and_one_stream():
    manager, account = Manager(), Account()
    first = replace(brings(0, 7), timings=Timings(), moved=Moved(2, 32, 1))
    script = [first, brings(2, 5), brings(1, 3, 4, finish="stop"), brings(2, 6, finish="length"), brings(0, 8)]
    decode = Decode([*script, brings(0, 9, finish="stop")])
    assert collect(manager, decode, THREE, account) == {0: [7, 8, 9], 1: [3, 4], 2: [5, 6]}
    assert [(ask.request, ask.n) for ask in manager.asks] == [("r", 3)]
    assert (account.moved, account.cached, account.resumes) == (Moved(2, 32, 1), 1, 0)
    assert decode.cancelled == 0
    assert manager.calls == []


def test_a_choice_that_ends_early_goes_on_as_a_request_of_its_own():
    async def run() -> list[Delta]:
        group_goes_on = asyncio.Event()
        decode.streams = [
            [brings(0, 7), brings(1, 3), ends_early(1), brings(2, 5), group_goes_on, brings(0, 8, finish="stop"),
             brings(2, 6, finish="stop")],
            [Delta((4,)), Delta((5,), "length")],
        ]  # fmt: skip
        return await deltas_of(manager, decode, THREE, account, lambda _, d: d.finish and group_goes_on.set())

    manager, decode, account = Manager(), Decode(), Account()
    deltas = asyncio.run(run())
    assert [(d.choice, d.tokens) for d in deltas if d.choice == 1] == [(1, (3,)), (1, (4,)), (1, (5,))]
    assert {d.choice for d in deltas if d.finish} == {0, 1, 2}
    alone = decode.requests[1]
    assert (alone.id, alone.n, alone.generated) == ("r#1", 1, (3,))
    assert alone.sampling == replace(THREE.sampling, choice=1)
    assert [(ask.request, ask.n, ask.tokens, ask.model) for ask in manager.asks] == [
        ("r", 3, 3, None),
        ("r#1", 1, 4, "m"),
    ]
    assert account.resumes == 1
    assert manager.calls == []


def test_a_group_without_a_token_is_placed_again_as_a_group():
    manager = Manager()
    done = [brings(choice, 7, finish="stop") for choice in range(3)]
    decode = Decode([ends_early(None, "StalePlacement")], [ActorDiedError()], done)
    assert collect(manager, decode, THREE) == {0: [7], 1: [7], 2: [7]}
    assert [(ask.request, ask.n) for ask in manager.asks] == [("r", 3)] * 3
    assert manager.asks[2].exclude[0] == "d#2"


def test_three_attempts_of_a_group_without_a_token_are_an_error():
    manager = Manager()
    with pytest.raises(Unavailable, match="3 attempts"):
        collect(manager, Decode(*[[ends_early(None, "StalePlacement")]] * 3), THREE)
    assert manager.calls == [("revoke", "r", "known")]


@pytest.mark.parametrize("end", [ends_early(None, "Draining", "d#1"), ActorDiedError(), OSError("broken"), None])
def test_when_a_stream_breaks_all_that_are_left_go_on_with_or_without_tokens(end):
    manager, account = Manager(), Account()
    script = [brings(2, 5, finish="stop"), brings(0, 7), *([] if end is None else [end])]
    decode = Decode(script, [Delta((8,), "stop")], [Delta((9,), "stop")])
    assert collect(manager, decode, THREE, account) == {2: [5], 0: [7, 8], 1: [9]}
    assert sorted((r.id, r.generated, r.sampling.choice) for r in decode.requests[1:]) == [
        ("r#0", (7,), 0),
        ("r#1", (), 1),
    ]
    assert [ask.exclude for ask in manager.asks[1:]] == [("d#1",), ("d#1",)]
    assert {ask.model for ask in manager.asks[1:]} == {"m"}, "answers of one request are of one model"
    assert account.resumes == 2


@pytest.mark.parametrize("tokens", [(), (7,)])
def test_when_a_stream_breaks_after_a_choice_has_left_it_only_the_others_go_on(tokens):
    begun = [brings(0, *tokens)] if tokens else []
    decode = Decode([*begun, ends_early(1), ends_early(None, "Draining")], *[[Delta((8,), "stop")]] * 3)
    manager = Manager()
    assert collect(manager, decode, THREE) == {0: [*tokens, 8], 1: [8], 2: [8]}
    assert sorted(ask.request for ask in manager.asks) == ["r", "r#0", "r#1", "r#2"]


def test_last_tokens_may_come_with_the_end():
    def seen(choices: Choices, delta: Delta) -> None:
        if delta.choice == 2:
            choices.give_up(2)

    both = [replace(ends_early(choice), tokens=(choice,)) for choice in (1, 2)]
    decode = Decode([*both, brings(0, 7, finish="stop")], [Delta((9,), "stop")])
    deltas = asyncio.run(deltas_of(Manager(), decode, THREE, seen=seen))
    assert sorted((d.choice, d.tokens) for d in deltas) == [(0, (7,)), (1, (1,)), (1, (9,)), (2, (2,))]
    assert decode.requests[1].generated == (1,)


def test_a_choice_alone_takes_the_resume_path_too():
    manager = Manager()
    decode = Decode(
        [brings(0, 7, finish="stop"), brings(1, 3), ends_early(1), brings(2, 5, finish="stop")],
        [STALE],
        [Delta((4,)), STALE],
        [Delta((5,), "stop")],
    )
    assert collect(manager, decode, THREE)[1] == [3, 4, 5]
    assert [request.generated for request in decode.requests[1:]] == [(3,), (3,), (3, 4)]


def test_one_choice_that_cannot_go_on_ends_the_answer():
    manager = Manager()
    script = [brings(0, 7), brings(2, 5), ends_early(1, "TransferFailed"), asyncio.Event()]
    decode = Decode(script, [STALE], [STALE])
    with pytest.raises(Unavailable, match="3 attempts"):
        collect(manager, decode, THREE)
    assert manager.calls == [("revoke", "r", "known")]
    assert decode.cancelled == 1


def test_a_choice_that_its_reader_gives_up_is_revoked_and_brings_nothing_more():
    def seen(choices: Choices, delta: Delta) -> None:
        if delta.choice == 1:
            choices.give_up(1)

    manager = Manager()
    revoked = ends_early(1, "Resumable")
    script = [brings(1, 3), brings(0, 7), brings(1, 4), revoked, brings(2, 5, finish="stop"), brings(0, finish=None)]
    decode = Decode([*script, brings(0, 8, finish="stop")])
    deltas = asyncio.run(deltas_of(manager, decode, THREE, seen=seen))
    assert [(d.choice, d.tokens) for d in deltas] == [(1, (3,)), (0, (7,)), (2, (5,)), (0, (8,))]
    assert manager.calls == [("revoke", "r#1")]
    assert len(decode.requests) == 1


def test_a_choice_alone_that_is_given_up_is_closed():
    async def run() -> None:
        never, goes_on = asyncio.Event(), asyncio.Event()

        def seen(choices: Choices, delta: Delta) -> None:
            if delta.tokens == (4,):
                choices.give_up(1)
                goes_on.set()
            if delta.tokens == (7,):
                assert decode.cancelled == 1, "while others go on"

        script = [brings(1, 3), ends_early(1), brings(2, 5, finish="stop"), goes_on, brings(0, 7, finish="stop")]
        decode.streams = [script, [Delta((4,)), never]]
        await deltas_of(manager, decode, THREE, seen=seen)

    manager, decode = Manager(), Decode()
    asyncio.run(run())
    assert manager.calls == [("revoke", "r#1")]
    assert decode.cancelled == 1


def test_the_prompts_logprobs_are_not_asked_for_twice():
    prompt = (TokenLogprobs(2, -0.5),)
    first = replace(brings(0, 7), prompt_logprobs=prompt)
    decode = Decode([first, ActorDiedError()], *[[Delta((8,), "stop")]] * 3)
    deltas = asyncio.run(deltas_of(Manager(), decode, replace(THREE, prompt_logprobs=2)))
    assert [d.prompt_logprobs for d in deltas] == [prompt, (), (), ()]
    assert [r.prompt_logprobs for r in decode.requests] == [2, None, None, None]


@pytest.mark.parametrize("cancelled", [True, False])
def test_cancelled_or_left_every_stream_is_closed(cancelled: bool):
    async def run() -> None:
        never = asyncio.Event()
        decode.streams = [[brings(1, 3), brings(0, 7), ends_early(1), never], [Delta((4,)), never]]
        ingress = front(manager, decode)
        async with aclosing(ingress.generate(Choices(THREE), Account())) as stream:
            assert [(await anext(stream)).tokens for _ in range(3)] == [(3,), (7,), (4,)]
            if cancelled:
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                await ingress.cancel(THREE.id)
                with pytest.raises(Revoked):
                    await waiting

    manager, decode = Manager(), Decode()
    asyncio.run(run())
    assert decode.cancelled == 2
    assert any(call[:2] == ("revoke", "r") for call in manager.calls)


def test_merged_streams_lose_nothing_and_keep_the_order_of_each():
    async def run() -> None:
        async def counted(choice: int, count: int):
            for number in range(count):
                for _ in range(number % (choice + 2)):
                    await asyncio.sleep(0)
                yield brings(choice, number)

        merged = Merged(0, counted(0, 5))
        taken = [await anext(merged)]
        for choice in (1, 2):
            merged.add(choice, counted(choice, 20))
        taken += [delta async for delta in merged]
        for choice, count in ((0, 5), (1, 20), (2, 20)):
            assert [d.tokens[0] for d in taken if d.choice == choice] == list(range(count))

    asyncio.run(run())


def test_the_prompts_logprobs_are_asked_of_one_choice_alone():
    choices = Choices(replace(THREE, prompt_logprobs=0))
    assert [choices.alone(choice).prompt_logprobs for choice in (1, 0, 2)] == [0, None, None]


def test_a_delta_travels_whole():
    full = Delta(
        (7, 8),
        "stop",
        ("Preempted", "out of blocks", None),
        Timings(1.0),
        Moved(2, 32, 1),
        (TokenLogprobs(7, -0.5, ((7, -0.5),)),),
        (TokenLogprobs(3, -1.0),),
        2,
    )
    for delta in (full, Delta((7,)), Delta(resumable=("Preempted", "out of blocks", "d#1"), choice=None)):
        assert pickle.loads(pickle.dumps(delta)) == delta
