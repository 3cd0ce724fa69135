"""Clients that leave a real cluster over real sockets: every block comes back, on both sides, by both accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from cluster_kit import (
    fresh,
    open_stream,
    over_grpc,
    read_events,
    replicas,
    settle,
    wait_until,
)

from bifolio.cluster.spawn import SpawnedCluster
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.cluster

AT_ONCE = 20
# If nothing noticed that the client has left, this would take far longer than settling is given:
LONG_PROMPT = {"tokens": 2000, "max_tokens": 40}  # 20 of them: more than a minute of prefill
LONG_ANSWER = {"tokens": 8, "max_tokens": 2000}
SETTLE_S = 40.0

Leave = Callable[[], None]


def _prompt(number: int, tokens: int) -> list[int]:
    return [1000 + (number * 37 + i) % 900 for i in range(tokens)]


@contextlib.contextmanager
def _over_http(cluster: SpawnedCluster, tokens: int, max_tokens: int, events: int) -> Iterator[Leave]:
    with contextlib.ExitStack() as stack:
        salt = fresh()  # or the prompts of the test before are cached, and none is long in prefill
        bodies = ({"prompt": _prompt(i, tokens), "max_tokens": max_tokens, "cache_salt": salt} for i in range(AT_ONCE))
        sockets = [stack.enter_context(open_stream(cluster, stream=True, ignore_eos=True, **body)) for body in bodies]
        for each in sockets:
            read_events(each, events)

        def leave() -> None:
            for each in sockets:
                each.close()

        yield leave


@contextlib.contextmanager
def _over_grpc(cluster: SpawnedCluster, tokens: int, max_tokens: int, events: int) -> Iterator[Leave]:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        sampling, salt = pb.Sampling(max_tokens=max_tokens, ignore_eos=True), fresh()
        generate: Any = InferenceStub(channel).Generate  # type: ignore[no-untyped-call]
        calls = [
            generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=_prompt(i, tokens)), sampling=sampling, cache_salt=salt),
                metadata=(("application", "bifolio"),),
            )
            for i in range(AT_ONCE)
        ]
        for call in calls:
            for _ in range(events):
                next(call)

        def leave() -> None:
            for call in calls:
                assert call.is_active(), "it ended by itself"
                call.cancel()

        yield leave


@pytest.mark.parametrize("door", [_over_http, _over_grpc])
def test_leaving_during_prefill_returns_every_block(smollm2: SpawnedCluster, door: Any) -> None:
    settle(smollm2, 1, 1)
    with door(smollm2, **LONG_PROMPT, events=0) as leave:
        wait_until(lambda: _reported(smollm2, "prefill") == AT_ONCE, "not all are in prefill")
        leave()
        settle(smollm2, 1, 1, SETTLE_S)
    _answers(smollm2)


@pytest.mark.parametrize("door", [_over_http, _over_grpc])
def test_leaving_during_decode_returns_every_block(smollm2: SpawnedCluster, door: Any) -> None:
    settle(smollm2, 1, 1)
    with door(smollm2, **LONG_ANSWER, events=2) as leave:
        wait_until(lambda: _reported(smollm2, "decode") == AT_ONCE, "not all are decoding")
        leave()
        settle(smollm2, 1, 1, SETTLE_S)
    _answers(smollm2)


def test_leaving_before_an_answer_in_one_piece_returns_every_block(smollm2: SpawnedCluster) -> None:
    settle(smollm2, 1, 1)
    with open_stream(smollm2, prompt=_prompt(0, 8), max_tokens=2000, ignore_eos=True):
        wait_until(lambda: _reported(smollm2, "decode") == 1, "it is not decoding")
    settle(smollm2, 1, 1, SETTLE_S)
    _answers(smollm2)


def _reported(cluster: SpawnedCluster, role: str) -> int:
    """Open leases of the pool, as its replica reports them."""
    return sum(replica["reported"] for replica in replicas(cluster, role))


def _answers(cluster: SpawnedCluster) -> None:
    answer = over_grpc(cluster, "The capital of France is", max_tokens=4, temperature=0.0)
    assert "Paris" in answer.text
    assert answer.route["resumes"] == 0
