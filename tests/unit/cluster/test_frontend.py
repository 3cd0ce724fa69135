"""The resume loop of a request with one answer, against a scripted manager and scripted decode streams."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from frontend_kit import FAILED, GEOMETRY, REQUEST, STALE, Decode, Manager, collect, deltas_of, front
from ray.exceptions import ActorDiedError, ActorUnavailableError

from bifolio.cluster import frontend
from bifolio.cluster.account import Account
from bifolio.cluster.choices import Choices
from bifolio.kv_manager import keys
from bifolio.protos.errors import Draining, InvalidRequest, Overloaded, ReplicaGone, Revoked, Unavailable
from bifolio.protos.measures import Moved, Timings
from bifolio.protos.messages import Delta, RequestId, TokenLogprobs


def test_an_attempt_that_ends_early_goes_on_with_the_tokens_it_has():
    decode = Decode([Delta((7, 8), timings=Timings()), STALE], [Delta((9,), "length")])
    manager, account = Manager(), Account()
    assert collect(manager, decode, account=account) == {0: [7, 8, 9]}
    assert decode.requests[1].generated == (7, 8)
    assert [ask.tokens for ask in manager.asks] == [3, 5]
    assert [ask.arrival for ask in manager.asks] == [5.0, 5.0]
    assert account.resumes == 1
    assert manager.calls == []


def test_the_prompts_logprobs_are_asked_for_until_the_first_token():
    prompt = (TokenLogprobs(2, -0.5), TokenLogprobs(3, -1.5))
    decode = Decode([STALE], [Delta((7,), prompt_logprobs=prompt), STALE], [Delta((8,)), Delta((9,), "stop")])
    deltas = asyncio.run(deltas_of(Manager(), decode, replace(REQUEST, prompt_logprobs=3)))
    assert [delta.prompt_logprobs for delta in deltas] == [prompt, (), ()]
    assert [request.prompt_logprobs for request in decode.requests] == [3, 3, None]


def test_logprobs_stay_with_their_tokens():
    first, last = TokenLogprobs(7, -0.5), TokenLogprobs(9, -0.25)
    streams = [[Delta((7,), logprobs=(first,)), STALE], [Delta((9,), "stop", logprobs=(last,))]]
    deltas = asyncio.run(deltas_of(Manager(), Decode(*streams)))
    assert [(delta.tokens, delta.logprobs) for delta in deltas] == [((7,), (first,)), ((9,), (last,))]


def test_the_replica_that_failed_is_avoided():
    manager = Manager()
    collect(manager, Decode([FAILED], [Delta((9,), "stop")]))
    assert [ask.exclude for ask in manager.asks] == [(), ("p#1",)]


def test_the_last_attempt_avoids_every_prefill_replica_that_was_used():
    manager = Manager()
    collect(manager, Decode([STALE], [STALE], [Delta((9,), "stop")]))
    assert [ask.exclude for ask in manager.asks] == [(), (), ("p#1", "p#2")]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ActorDiedError(), "dead"),
        (ActorUnavailableError("the link is cut", None), "unreachable"),
        (Draining("Serve does not offer it any more", "d#1"), "draining"),
        (ReplicaGone("not known to the router yet", "d#1"), None),
        (OSError("the stream broke somehow"), None),
    ],
)
def test_a_lost_decode_replica_is_reported_and_avoided(error, state):
    manager = Manager()
    assert collect(manager, Decode([Delta((7,)), error], [Delta((9,), "stop")])) == {0: [7, 9]}
    assert manager.calls == ([("report_state", "d#1", state)] if state else [])
    assert manager.asks[1].exclude == ("d#1",)


def test_a_prefill_replica_that_is_gone_is_reported():
    manager = Manager()
    collect(manager, Decode([Delta(resumable=("ReplicaGone", "UNAVAILABLE", "p#1"))], [Delta((9,), "stop")]))
    assert manager.calls == [("report_state", "p#1", "unreachable")]


def test_to_be_preempted_is_no_failure():
    preempted = Delta(resumable=("Preempted", "out of blocks", None))
    assert collect(Manager(), Decode(*[[preempted]] * 5, [Delta((9,), "stop")])) == {0: [9]}


def test_an_error_of_ours_from_the_replica_is_not_tried_again():
    with pytest.raises(InvalidRequest, match="token ids"):
        collect(Manager(), Decode([InvalidRequest("token ids must be smaller", "prompt")]))


def test_what_failed_attempts_took_counts_as_waiting():
    account = Account()
    streams = [[STALE], [Delta((9,), "stop", timings=Timings(elapsed=0.001), moved=Moved(2, 32))]]
    collect(Manager(), Decode(*streams), account=account)
    assert 0 < account.waited < account.ttft
    assert account.moved == Moved(2, 32)
    assert account.placement is not None
    assert account.placement.decode.replica == "d#2"


def test_three_attempts_without_a_token_are_an_error_and_the_request_is_given_up():
    manager = Manager()
    with pytest.raises(Unavailable, match=r"3 attempts.*block 3 went elsewhere"):
        collect(manager, Decode([STALE], [STALE], [STALE]))
    assert manager.calls == [("revoke", "r", "known")]


def test_prefill_replicas_do_not_answer_for_lost_decode_replicas():
    manager = Manager()
    collect(manager, Decode([ActorDiedError()], [ActorDiedError()], [Delta((9,), "stop")]))
    assert [ask.exclude for ask in manager.asks] == [(), ("d#1",), ("d#1", "d#2")]


def test_a_token_is_progress_and_attempts_are_counted_anew():
    streams = [[STALE], [STALE], [Delta((7,)), STALE], [STALE], [Delta((8,), "stop")]]
    assert collect(Manager(), Decode(*streams)) == {0: [7, 8]}


@pytest.mark.parametrize("error", [Overloaded("full", 3.0), Revoked("request r was cancelled")])
def test_what_admission_refuses_is_refused(error):
    manager = Manager(error)
    with pytest.raises(type(error)):
        collect(manager, Decode())
    assert manager.calls == [("revoke", "r", "known")]


def test_a_request_cancelled_elsewhere_ends_where_it_would_be_placed_again():
    gone = Delta(resumable=("Resumable", "the KV manager took the lease back", None))
    with pytest.raises(Revoked):
        collect(Manager(None, Revoked("request r was cancelled")), Decode([Delta((7,)), gone]))


def test_leaving_closes_the_stream_and_gives_the_request_up():
    async def leave() -> None:
        async with aclosing(front(manager, decode).generate(Choices(REQUEST), Account())) as stream:
            await anext(stream)

    manager, decode = Manager(), Decode([Delta((7,)), Delta((8,), "stop")])
    asyncio.run(leave())
    assert decode.cancelled == 1
    assert manager.calls == [("revoke", "r")]


def test_an_answer_that_its_reader_ends_is_closed_and_not_held_against_its_name():
    manager, decode = Manager(), Decode([Delta((7,)), Delta((8,)), Delta((9,), "stop")])
    asyncio.run(deltas_of(manager, decode, seen=lambda choices, delta: choices.give_up(0)))
    assert decode.cancelled == 1
    assert manager.calls == []


# --- what admission is told ----------------------------------------------------------------------------------


def test_admission_is_told_the_keys_of_the_whole_history_for_each_model():
    other = replace(GEOMETRY, fingerprint="other", block_size=1)
    manager = Manager(geometries=(GEOMETRY, other))
    request = replace(REQUEST, salt="s", tenant="t", priority=-3)
    decode = Decode([Delta((7,)), STALE], [Delta((8,), "stop")])
    collect(manager, decode, request)
    first, again = manager.asks
    assert first.keys == {
        "m": keys.chain(keys.root(GEOMETRY, "s"), (1, 2, 3), 2),
        "other": keys.chain(keys.root(other, "s"), (1, 2, 3), 1),
    }
    assert [len(chain) for chain in first.keys.values()] == [1, 3]
    assert (first.model, first.tenant, first.priority, first.n) == (None, "t", -3, 1)
    # with tokens it stays with the model it began with, and what it has generated may be cached too
    assert again.keys == {"m": keys.chain(keys.root(GEOMETRY, "s"), (1, 2, 3, 7), 2)}
    assert again.model == "m"


def test_a_prompt_that_is_reported_on_is_computed_and_what_follows_is_not():
    manager = Manager()
    decode = Decode([Delta((7,)), STALE], [Delta((8,), "stop")])
    collect(manager, decode, replace(REQUEST, prompt_logprobs=0))
    assert [bool(ask.keys) for ask in manager.asks] == [False, True]


def test_keys_of_a_long_prompt_are_the_same(monkeypatch: pytest.MonkeyPatch):
    manager = Manager()
    monkeypatch.setattr(frontend, "LONG", 2)  # then they are computed in a thread
    collect(manager, Decode([Delta((7,), "stop")]))
    assert manager.asks[0].keys == {"m": keys.chain(keys.root(GEOMETRY), (1, 2, 3), 2)}


# --- usage ---------------------------------------------------------------------------------------------------


def test_cached_tokens_are_those_of_the_placement_that_brought_the_first_token():
    account = Account()
    streams = [
        [STALE],
        [Delta((7,), timings=Timings(), moved=Moved(1, 16, 2)), STALE],
        [Delta((8,), "stop", timings=Timings(), moved=Moved(3, 48, 4))],
    ]
    collect(Manager(), Decode(*streams), account=account)
    usage = account.usage(REQUEST, 2)
    assert (usage.cached_tokens, usage.prompt_tokens, usage.completion_tokens) == (2, 3, 2)
    assert (usage.route.blocks, usage.route.resumes, usage.route.reason) == (3, 2, "long")


# --- cancel by id --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["admission", "prefill", "decode"])
def test_a_request_cancelled_by_its_id_ends_at_once(where):
    async def run() -> None:
        never = asyncio.Event()
        manager = Manager(*[never] * (where == "admission"))
        decode = Decode([Delta((7,)), never] if where == "decode" else [never])
        ingress = front(manager, decode)
        async with aclosing(ingress.generate(Choices(REQUEST), Account())) as stream:
            if where == "decode":
                assert (await anext(stream)).tokens == (7,)
            waiting = asyncio.ensure_future(anext(stream))
            while not (manager.asks if where == "admission" else decode.requests):
                await asyncio.sleep(0)
            await asyncio.gather(ingress.cancel(REQUEST.id), ingress.cancel(REQUEST.id))
            with pytest.raises(Revoked, match="request r was cancelled"):
                await waiting
        assert manager.calls.count(("cancel", "r")) == 2
        assert ("revoke", "r", "known") in manager.calls
        assert decode.cancelled == (where != "admission")

    asyncio.run(run())


def test_a_cancel_between_two_deltas_counts():
    async def run() -> None:
        ingress = front(Manager(), Decode([Delta((7,)), Delta((8,), "stop")]))
        async with aclosing(ingress.generate(Choices(REQUEST), Account())) as stream:
            await anext(stream)
            await ingress.cancel(REQUEST.id)
            with pytest.raises(Revoked):
                await anext(stream)

    asyncio.run(run())


def test_what_is_not_open_here_is_cancelled_at_the_manager():
    async def run() -> None:
        await front(manager, Decode()).cancel(RequestId("elsewhere"))

    manager = Manager()
    asyncio.run(run())
    assert manager.calls == [("cancel", "elsewhere")]


def test_an_id_in_use_is_refused_until_its_request_ends():
    async def run() -> None:
        decode = Decode([Delta((7,)), Delta((8,), "stop")], [Delta((9,), "stop")])
        ingress = front(Manager(), decode)
        async with aclosing(ingress.generate(Choices(REQUEST), Account())) as stream:
            await anext(stream)
            with pytest.raises(InvalidRequest, match="the request id r belongs to a request that is still open") as no:
                await anext(ingress.generate(Choices(REQUEST), Account()))
            assert no.value.field == "request_id"
            assert (await anext(stream)).tokens == (8,)
        assert [d.tokens async for d in ingress.generate(Choices(REQUEST), Account())] == [(9,)]

    asyncio.run(run())


def test_the_patience_with_a_manager_begins_when_it_goes_away(monkeypatch):
    """A request may have waited in its queue for long before."""

    async def run() -> None:
        manager = Manager()
        there, admit = iter([True, False, False]), manager.admit.remote

        async def ask(asked):
            if (waits := next(there, None)) is None:
                return await admit(asked)
            await asyncio.sleep(0.05 if waits else 0)
            raise ActorDiedError

        manager.admit.remote = ask
        assert [d.tokens for d in await deltas_of(manager, Decode([Delta((9,), "stop")]))] == [(9,)]

    monkeypatch.setattr(frontend, "MANAGER_S", 0.3)
    monkeypatch.setattr(frontend, "AT_ONCE_S", 0.04)
    asyncio.run(run())


def test_one_choice_of_several_that_breaks_makes_no_living_replica_dead():
    manager = Manager()
    both = replace(REQUEST, n=2)
    script = [Delta((7,)), Delta((8,), choice=1), OSError("the stream broke somehow")]
    collect(manager, Decode(script, *[[Delta((9,), "stop")]] * 2), both)
    assert not [call for call in manager.calls if call[0] == "report_state"]
