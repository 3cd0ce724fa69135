"""The resume loop, against a scripted manager and scripted decode streams: what Ray would carry, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from bifolio.cluster.frontend import Account, Frontend
from bifolio.protos.errors import InvalidRequest, Overloaded, ReplicaGone, Unavailable
from bifolio.protos.messages import (
    Ask,
    Delta,
    Generation,
    Lease,
    Moved,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Sampling,
    Timings,
    TokenLogprobs,
)

REQUEST = Request(RequestId("r"), (1, 2, 3), Sampling(10), 5.0)
STALE = Delta(resumable=("StalePlacement", "block 3 went elsewhere", None))
FAILED = Delta(resumable=("TransferFailed", "a frame is missing", "p#1"))


class Manager:
    """Answers `admit` from the script, or with ever new placements, and notes every call."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asks: list[Ask] = []
        self.calls: list[tuple[object, ...]] = []
        self.admit = SimpleNamespace(remote=self._admit)
        self.revoke = SimpleNamespace(remote=lambda *args: self.calls.append(("revoke", *args)))
        self.report_state = SimpleNamespace(remote=lambda *args: self.calls.append(("report_state", *args)))

    async def _admit(self, ask: Ask) -> Placement:
        self.asks.append(ask)
        if self.answers and isinstance(answer := self.answers.pop(0), Exception):
            raise answer
        number = len(self.asks)
        decode = Lease(ReplicaId(f"d#{number}"), Generation(1, number), ())
        return Placement(ask.request, decode, Lease(ReplicaId(f"p#{number}"), Generation(2, number), ()))


class Decode:
    """The handle: each call plays the next stream of the script."""

    def __init__(self, *streams: list[Delta | Exception]) -> None:
        self.streams = list(streams)
        self.requests: list[Request] = []
        self.cancelled = 0

    def options(self, **_: object) -> Decode:
        return self

    def remote(self, placement: Placement, request: Request) -> Stream:
        self.requests.append(request)
        return Stream(self, self.streams.pop(0))


class Stream:
    def __init__(self, decode: Decode, script: list[Delta | Exception]) -> None:
        self.decode, self.script = decode, script

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for each in self.script:
            if isinstance(each, Exception):
                raise each
            yield each

    def cancel(self) -> None:
        self.decode.cancelled += 1


def collect(manager: Manager, decode: Decode, account: Account | None = None) -> list[int]:
    async def run() -> list[int]:
        frontend = Frontend(manager, decode)
        async with aclosing(frontend.generate(REQUEST, account or Account())) as stream:
            return [token async for delta in stream for token in delta.tokens]

    return asyncio.run(run())


def test_an_attempt_that_ends_early_goes_on_with_the_tokens_it_has():
    decode = Decode([Delta((7, 8), timings=Timings()), STALE], [Delta((9,), "length")])
    manager, account = Manager(), Account()
    assert collect(manager, decode, account) == [7, 8, 9]
    assert decode.requests[1].generated == (7, 8)
    assert [ask.tokens for ask in manager.asks] == [3, 5]
    assert [ask.arrival for ask in manager.asks] == [5.0, 5.0]
    assert account.resumes == 1
    assert manager.calls == []


def test_the_prompts_logprobs_are_asked_for_until_the_first_token():
    async def run() -> None:
        request = replace(REQUEST, prompt_logprobs=3)
        async with aclosing(Frontend(Manager(), decode).generate(request, Account())) as stream:
            assert [delta.prompt_logprobs async for delta in stream] == [prompt, (), ()]

    prompt = (TokenLogprobs(2, -0.5), TokenLogprobs(3, -1.5))
    decode = Decode([STALE], [Delta((7,), prompt_logprobs=prompt), STALE], [Delta((8,)), Delta((9,), "stop")])
    asyncio.run(run())
    assert [request.prompt_logprobs for request in decode.requests] == [3, 3, None]


def test_logprobs_stay_with_their_tokens():
    async def run() -> list[Delta]:
        async with aclosing(Frontend(Manager(), Decode(*streams)).generate(REQUEST, Account())) as stream:
            return [delta async for delta in stream]

    first, last = TokenLogprobs(7, -0.5), TokenLogprobs(9, -0.25)
    streams = [[Delta((7,), logprobs=(first,)), STALE], [Delta((9,), "stop", logprobs=(last,))]]
    assert [(delta.tokens, delta.logprobs) for delta in asyncio.run(run())] == [((7,), (first,)), ((9,), (last,))]


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
        (ReplicaGone("Serve does not offer it any more", "d#1"), "draining"),
        (OSError("the stream broke somehow"), None),
    ],
)
def test_a_lost_decode_replica_is_reported_and_avoided(error, state):
    manager = Manager()
    assert collect(manager, Decode([Delta((7,)), error], [Delta((9,), "stop")])) == [7, 9]
    assert manager.calls == ([("report_state", "d#1", state)] if state else [])
    assert manager.asks[1].exclude == ("d#1",)


def test_a_prefill_replica_that_is_gone_is_reported():
    manager = Manager()
    collect(manager, Decode([Delta(resumable=("ReplicaGone", "UNAVAILABLE", "p#1"))], [Delta((9,), "stop")]))
    assert manager.calls == [("report_state", "p#1", "dead")]


def test_to_be_preempted_is_no_failure():
    preempted = Delta(resumable=("Preempted", "out of blocks", None))
    assert collect(Manager(), Decode(*[[preempted]] * 5, [Delta((9,), "stop")])) == [9]


def test_an_error_of_ours_from_the_replica_is_not_tried_again():
    with pytest.raises(InvalidRequest, match="token ids"):
        collect(Manager(), Decode([InvalidRequest("token ids must be smaller", "prompt")]))


def test_what_failed_attempts_took_counts_as_waiting():
    account = Account()
    streams = [[STALE], [Delta((9,), "stop", timings=Timings(elapsed=0.001), moved=Moved(2, 32))]]
    collect(Manager(), Decode(*streams), account)
    assert 0 < account.waited < account.ttft
    assert account.moved == Moved(2, 32)
    assert account.placement is not None
    assert account.placement.decode.replica == "d#2"


def test_three_attempts_without_a_token_are_an_error_and_the_request_is_given_up():
    manager = Manager()
    with pytest.raises(Unavailable, match=r"3 attempts.*block 3 went elsewhere"):
        collect(manager, Decode([STALE], [STALE], [STALE]))
    assert manager.calls == [("revoke", "r")]


def test_prefill_replicas_do_not_answer_for_lost_decode_replicas():
    manager = Manager()
    collect(manager, Decode([ActorDiedError()], [ActorDiedError()], [Delta((9,), "stop")]))
    assert [ask.exclude for ask in manager.asks] == [(), ("d#1",), ("d#1", "d#2")]


def test_a_token_is_progress_and_attempts_are_counted_anew():
    streams = [[STALE], [STALE], [Delta((7,)), STALE], [STALE], [Delta((8,), "stop")]]
    assert collect(Manager(), Decode(*streams)) == [7, 8]


def test_what_admission_refuses_is_refused():
    manager = Manager(Overloaded("full", 3.0))
    with pytest.raises(Overloaded):
        collect(manager, Decode())
    assert manager.calls == [("revoke", "r")]


def test_leaving_closes_the_stream_and_gives_the_request_up():
    async def leave() -> None:
        async with aclosing(Frontend(manager, decode).generate(REQUEST, Account())) as stream:
            await anext(stream)

    manager, decode = Manager(), Decode([Delta((7,)), Delta((8,), "stop")])
    asyncio.run(leave())
    assert decode.cancelled == 1
    assert manager.calls == [("revoke", "r")]
