"""One answer in pieces, over a scripted frontend: the log-probabilities of a piece are those of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from bifolio.cluster.answer import Piece, answer
from bifolio.cluster.frontend import Account
from bifolio.cluster.query import Query, Served
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.messages import Delta, Generation, Lease, Placement, ReplicaId, Request, RequestId, TokenLogprobs


@pytest.fixture(scope="module")
def served(smollm2_gguf: Path) -> Served:
    tokenizer = Tokenizer.load(smollm2_gguf)
    return Served("smollm2", tokenizer, None, 128, tokenizer.vocab_size)


class Frontend:
    def __init__(self, *deltas: Delta) -> None:
        self.deltas = deltas
        self.requests: list[Request] = []

    async def generate(self, request: Request, account: Account) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        account.placement = Placement(request.id, Lease(ReplicaId("d"), Generation(1, 1), ()))
        for delta in self.deltas:
            yield delta


def pieces(served: Served, frontend: Any, **fields: Any) -> list[Piece]:
    async def run() -> list[Piece]:
        return [piece async for piece in answer(Query(RequestId("r"), "Hi", **fields), served, frontend)]

    return asyncio.run(run())


def delta(ids: list[int], finish: Any = None, prompt: tuple[TokenLogprobs, ...] = ()) -> Delta:
    entries = tuple(TokenLogprobs(id, -id / 8) for id in ids)
    return Delta(tuple(ids), finish, logprobs=entries, prompt_logprobs=prompt)


def test_each_piece_has_the_logprobs_of_its_tokens(served: Served) -> None:
    ids = served.tokenizer.encode("one two three four")
    frontend = Frontend(delta(ids[:1], prompt=(TokenLogprobs(5, -1.0),)), delta(ids[1:3]), delta(ids[3:], "length"))
    taken = pieces(served, frontend, logprobs=0, prompt_logprobs=2)
    assert [tuple(entry.token for entry in piece.logprobs) for piece in taken] == [piece.tokens for piece in taken]
    assert [len(piece.prompt_logprobs) for piece in taken] == [1, 0, 0]
    assert (frontend.requests[0].sampling.logprobs, frontend.requests[0].prompt_logprobs) == (0, 2)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_cuts_tokens_and_logprobs_alike(served: Served, size: int) -> None:
    ids = served.tokenizer.encode("one two three four five six")
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    taken = pieces(
        served, Frontend(*map(delta, groups[:-1]), delta(groups[-1], "length")), stop=(" three f",), logprobs=0
    )
    assert "".join(piece.text for piece in taken) == "one two"
    tokens = [token for piece in taken for token in piece.tokens]
    assert served.tokenizer.decode(tokens).startswith("one two three f")
    assert len(tokens) < len(ids)
    assert [entry.token for piece in taken for entry in piece.logprobs] == tokens
    assert taken[-1].finish == "stop"
    assert taken[-1].usage is not None
    assert taken[-1].usage.completion_tokens == len(tokens)


def test_no_stop_string_ends_an_answer_before_its_least_length(served: Served) -> None:
    ids = served.tokenizer.encode("one two one two one two")
    for least, text in ((0, "one "), (4, "one two one ")):
        taken = pieces(
            served,
            Frontend(*[delta([id]) for id in ids[:-1]], delta(ids[-1:], "length")),
            stop=("two",),
            min_tokens=least,
        )
        assert "".join(piece.text for piece in taken) == text
