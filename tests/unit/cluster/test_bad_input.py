"""Whatever is wrong with a request is said with the field that is wrong, before a replica could be asked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bad_inputs import CHAT, COMPLETIONS, DETOKENIZE, PATHS, TOKENIZE, BadInput, Model, bad_inputs, encode, good

from bifolio.cluster.chat_schema import ChatRequest
from bifolio.cluster.completion_schema import CompletionRequest
from bifolio.cluster.openai import error_response, event
from bifolio.cluster.query import Served, resolve
from bifolio.cluster.schema import parse
from bifolio.cluster.tokenize_schema import DetokenizeRequest, TokenizeRequest
from bifolio.protos.errors import InvalidRequest
from bifolio.protos.messages import RequestId

CONTEXT = 128


@pytest.fixture(scope="module")
def served(served: Served) -> Served:
    return replace(served, context_length=CONTEXT)


def take(path: str, body: bytes, served: Served) -> object:
    """All that a door does before it asks a replica."""
    if path == TOKENIZE:
        return parse(body, TokenizeRequest).answer(served)
    if path == DETOKENIZE:
        return parse(body, DetokenizeRequest).answer(served)
    query = parse(body, CompletionRequest if path == COMPLETIONS else ChatRequest).to_query(RequestId("r"))
    return resolve(query, served, lambda: 1)


def test_every_mistake_names_its_field(served: Served) -> None:
    inputs = bad_inputs(Model(CONTEXT, served.vocab_size), 1500)
    assert {bad.path for bad in inputs} == set(PATHS)
    assert len({(bad.path, bad.body) for bad in inputs}) > 1000
    wrong = [complaint for bad in inputs if (complaint := _complaint(bad, served))]
    assert not wrong, f"{len(wrong)} of {len(inputs)}:\n" + "\n".join(wrong[:20])


def _complaint(bad: BadInput, served: Served) -> str | None:
    try:
        return f"{bad} is taken: {take(bad.path, bad.body, served)}"
    except InvalidRequest as error:
        status, _, answer = error_response(error)
        if not 400 <= status < 500 or error.field != bad.param or not error.message:
            return f"{bad}: {error.field!r} instead of {bad.param!r}: {error.message}"
        if len(event(answer)) > 2000:
            return f"{bad}: an answer of {len(event(answer))} bytes"
        return None
    except Exception as error:
        return f"{bad} raises {error!r}"


def test_without_the_mistake_each_is_taken(served: Served) -> None:
    draw = random.Random(1)
    for path in PATHS:
        for _ in range(50):
            assert take(path, encode(good(path, draw)), served)


def test_a_misspelt_field_is_told_the_nearest(served: Served) -> None:
    for path, field in ((COMPLETIONS, "max_token"), (CHAT, "mesages"), (TOKENIZE, "promt"), (DETOKENIZE, "token")):
        with pytest.raises(InvalidRequest, match=f"{field}: unknown name; did you mean {field[:2]}"):
            take(path, encode({**good(path, random.Random(1)), field: 1}), served)


def test_of_a_body_full_of_mistakes_one_is_told(served: Served) -> None:
    for field in ("prompt", "stop", "stop_token_ids", "logit_bias"):
        value = {str(i): "x" for i in range(60_000)} if field == "logit_bias" else [True] * 250_000
        with pytest.raises(InvalidRequest) as refused:
            take(COMPLETIONS, encode({"prompt": "a", field: value}), served)
        assert refused.value.field == field
        assert len(refused.value.message) < 500
