"""An answer in pieces, over a scripted frontend: each choice's own text, and log-probabilities of just its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from bifolio.cluster.account import Account
from bifolio.cluster.answer import Piece, answer
from bifolio.cluster.choices import Choices
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

    async def generate(self, choices: Choices, account: Account) -> AsyncGenerator[Delta, None]:
        self.requests.append(choices.request)
        account.placement = Placement(choices.request.id, Lease(ReplicaId("d"), Generation(1, 1), ()))
        account.cached = 100
        for delta in self.deltas:
            if delta.choice in choices.open:
                choices.take(delta)
                yield delta


def pieces(served: Served, frontend: Any, **fields: Any) -> list[Piece]:
    async def run() -> list[Piece]:
        return [piece async for piece in answer(Query(RequestId("r"), "Hi", **fields), served, frontend)]

    return asyncio.run(run())


def delta(ids: list[int], finish: Any = None, prompt: tuple[TokenLogprobs, ...] = (), choice: int = 0) -> Delta:
    entries = tuple(TokenLogprobs(id, -id / 8) for id in ids)
    return Delta(tuple(ids), finish, logprobs=entries, prompt_logprobs=prompt, choice=choice)


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


def test_choices_have_texts_of_their_own_and_the_last_piece_of_all_has_the_usage(served: Served) -> None:
    texts = ["one é two", "three 日本 four five", "six"]
    ids = [served.tokenizer.encode(text) for text in texts]
    turns = [(k, i) for i in range(max(map(len, ids))) for k in range(3) if i < len(ids[k])]
    deltas = [delta([ids[k][i]], "length" if i + 1 == len(ids[k]) else None, choice=k) for k, i in turns]
    frontend = Frontend(*deltas)
    taken = pieces(served, frontend, n=3)
    assert frontend.requests[0].n == 3
    assert ["".join(p.text for p in taken if p.choice == k) for k in range(3)] == texts
    assert [[t for p in taken if p.choice == k for t in p.tokens] for k in range(3)] == ids
    assert sorted(p.choice for p in taken if p.finish) == [0, 1, 2]
    assert [p.usage is not None for p in taken] == [False] * (len(taken) - 1) + [True]
    assert taken[-1].usage is not None
    assert taken[-1].usage.completion_tokens == sum(map(len, ids))
    assert taken[-1].usage.cached_tokens == taken[-1].usage.prompt_tokens, "no more than the prompt has"


def test_a_stop_string_ends_its_own_choice_alone(served: Served) -> None:
    ids = served.tokenizer.encode("one two three")
    both = [delta([id], choice=k) for id in ids for k in (0, 1)]
    other = served.tokenizer.encode(" four")
    last = delta(served.tokenizer.encode("!"), "length", choice=1)
    taken = pieces(served, Frontend(delta(other), *both, last), n=2, stop=("our", "tree"))
    assert [(p.text, p.finish) for p in taken if p.choice == 0] == [(" f", "stop")]
    assert "".join(p.text for p in taken if p.choice == 1) == "one two three!"
    assert taken[-1].usage is not None
    assert taken[-1].usage.completion_tokens == len(other) + len(ids) + 1


def test_what_changes_no_answer_is_handed_on(served: Served) -> None:
    frontend = Frontend(delta([5], "stop"))
    pieces(served, frontend, cache_salt="s", priority=-100, user="u")
    (request,) = frontend.requests
    assert (request.salt, request.priority, request.tenant, request.n) == ("s", -100, "u", 1)
