"""What OpenAI's clients may send, what they get back, and that both doors resolve a query alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.cluster.convert import query_from_pb, query_to_pb
from bifolio.cluster.openai import CompletionFormat, error_response, event, parse
from bifolio.cluster.query import Query, check_model, resolve
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import (
    ConfigError,
    DoesNotFit,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from bifolio.protos.messages import RequestId, Sampling

ID = RequestId("r-1")
CONTEXT = 128


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hello", **fields}).encode()


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


def resolved(tokenizer: Tokenizer, raw: bytes) -> tuple[tuple[int, ...], Sampling, tuple[str, ...]]:
    return resolve(parse(raw).to_query(ID), tokenizer, CONTEXT, tokenizer.vocab_size, lambda: 77)


# --- requests --------------------------------------------------------------------------------------------


def test_what_is_left_open_is_resolved(tokenizer: Tokenizer) -> None:
    prompt, sampling, stops = resolved(tokenizer, body())
    assert prompt == (19556,)
    assert sampling == Sampling(max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, seed=77, stop_token_ids=(2,))
    assert stops == ()


def test_every_field_arrives(tokenizer: Tokenizer) -> None:
    fields = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": -1,
        "stop": "\n",
        "stop_token_ids": [9, 7],
        "ignore_eos": True,
        "user": "me",
    }
    _, sampling, stops = resolved(tokenizer, body(**fields))
    assert sampling == Sampling(5, 0.5, 0.25, 3, 2**64 - 1, (7, 9))
    assert stops == ("\n",)


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], [19556], [[19556]]])
def test_every_form_of_a_prompt(tokenizer: Tokenizer, prompt: Any) -> None:
    assert resolved(tokenizer, body(prompt=prompt))[0] == (19556,)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": [""]}, "prompt", "prompt is empty"),
        ({"prompt": [[]]}, "prompt", "prompt is empty"),
        ({"prompt": None}, "prompt", "got None; allowed: a text, a list of token ids, or a list with one"),
        ({"prompt": ["a", "b"]}, "prompt", "got 2 prompts; one prompt per request"),
        ({"prompt": [[1], [2]]}, "prompt", "got 2 prompts; one prompt per request"),
        ({"prompt": [1, "a"]}, "prompt", "got [1, 'a']; allowed: a text"),
        ({"prompt": [True]}, "prompt", "got [True]; allowed: a text"),
        ({"prompt": [1, 49152]}, "prompt", "prompt[1] is 49152; token ids are 0 to 49151"),
        ({"prompt": [-1]}, "prompt", "prompt[0] is -1; token ids"),
        ({"prompt": "half \ud800"}, "prompt", "'\\ud800' at character 5, half a surrogate pair"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: 1 to 128"),
        ({"max_tokens": "3"}, "max_tokens", "got '3'; allowed: a whole number"),
        ({"temperature": -0.1}, "temperature", "temperature is -0.1; allowed: 0 to 2"),
        ({"temperature": "hot"}, "temperature", "got 'hot'; allowed: a number"),
        ({"top_p": 0}, "top_p", "top_p is 0.0; allowed: above 0 to 1"),
        ({"top_p": 1.01}, "top_p", "top_p is 1.01; allowed: above 0 to 1"),
        ({"top_k": -1}, "top_k", "top_k is -1; allowed: 0 to"),
        ({"seed": 2**64}, "seed", "seed is 18446744073709551616; allowed"),
        ({"stop": ["a"] * 5}, "stop", "stop has 5 texts; allowed: at most 4"),
        ({"stop": ["a", ""]}, "stop", "stop has a text of 0 characters"),
        ({"stop": ["\udfff"]}, "stop", "half a surrogate pair"),
        ({"stop": 3}, "stop", "got 3; allowed: a text or a list of texts"),
        ({"stop_token_ids": [49152]}, "stop_token_ids", "stop_token_ids[0] is 49152"),
        ({"n": 2}, "n", "got 2; not supported yet, allowed: 1"),
        ({"logprobs": 0}, "logprobs", "got 0; not supported yet, allowed: null"),
        ({"echo": True}, "echo", "not supported yet"),
        ({"suffix": "x"}, "suffix", "not supported yet"),
        ({"presence_penalty": 0.1}, "presence_penalty", "not supported yet, allowed: 0"),
        ({"max_token": 3}, "max_token", "max_token: unknown name; did you mean max_tokens?"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "allowed only with stream: true"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options", "stream_options.include"),
    ],
)
def test_a_mistake_names_its_field(tokenizer: Tokenizer, fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(tokenizer, body(**fields))
    assert caught.value.field == field
    assert says in caught.value.message
    status, _, answer = error_response(caught.value)
    assert (status, answer["error"]["param"]) == (400, field)
    event(answer)  # can be encoded, whatever was sent


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nope",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "' + b"z" * 100_000 + b'": 1}',
        b"{}",
    ],
)
def test_a_body_that_is_none_is_refused_briefly(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw)
    assert len(event(error_response(caught.value)[2])) < 1000


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_any_value_anywhere_is_taken_or_refused(value: Any) -> None:
    for name in ("prompt", "stop", "stop_token_ids", "stream_options", "n", "temperature", "user"):
        try:
            parse(json.dumps({"prompt": "x", name: value}).encode())
        except InvalidRequest as error:
            event(error_response(error)[2])


def test_fields_that_ask_for_nothing_are_taken() -> None:
    parse(body(n=1, best_of=1, echo=False, logprobs=None, presence_penalty=0.0, logit_bias={}, suffix=None))


def test_usage_is_streamed_only_when_asked_for() -> None:
    assert parse(body(stream=True, stream_options={"include_usage": True})).include_usage
    assert not parse(body(stream=True)).include_usage


def test_what_can_never_fit_is_refused_with_the_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(DoesNotFit, match=r"has 120 tokens and max_tokens is 9: 129 together.*holds 128"):
        resolved(tokenizer, body(prompt=[5] * 120, max_tokens=9))
    with pytest.raises(DoesNotFit) as caught:
        resolved(tokenizer, body(prompt=[5] * 128))
    assert caught.value.field == "prompt"
    assert error_response(caught.value)[2]["error"]["code"] == "context_length_exceeded"


def test_a_text_beyond_all_context_is_refused_before_it_is_tokenized(tokenizer: Tokenizer) -> None:
    with pytest.raises(DoesNotFit, match=r"at most 1048576 characters, and 128 tokens"):
        resolved(tokenizer, body(prompt="x" * (2**20 + 1)))


def test_an_open_max_tokens_takes_what_room_there_is(tokenizer: Tokenizer) -> None:
    assert resolved(tokenizer, body(prompt=[5] * 120))[1].max_tokens == 8


def test_a_temperature_that_would_overflow_is_greedy(tokenizer: Tokenizer) -> None:
    assert resolved(tokenizer, body(temperature=1e-30))[1].temperature == 0.0


def test_only_the_served_model_is_found() -> None:
    check_model("", "smollm2-135m")
    check_model("smollm2-135m", "smollm2-135m")
    with pytest.raises(ModelNotFound, match="'gpt-4' is not served here; this cluster serves smollm2-135m"):
        check_model("gpt-4", "smollm2-135m")


# --- gRPC ------------------------------------------------------------------------------------------------


def test_a_query_survives_the_wire() -> None:
    full = Query(ID, (1, 2), "m", 5, 0.5, 0.25, 3, 2**64 - 1, ("a", "b"), (7,), True)
    for query in (Query(ID, "text"), full):
        assert query_from_pb(pb.GenerateRequest.FromString(query_to_pb(query).SerializeToString()), ID) == query


def test_both_doors_draw_with_the_same_numbers(tokenizer: Tokenizer) -> None:
    http = parse(body(temperature=0.7, top_p=0.9)).to_query(ID)
    wire = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(temperature=0.7, top_p=0.9))
    answers = {resolve(q, tokenizer, CONTEXT, 49152, lambda: 1) for q in (http, query_from_pb(wire, ID))}
    assert len(answers) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_no_number_that_is_none_gets_through_grpc(tokenizer: Tokenizer, value: float) -> None:
    for field in ("temperature", "top_p"):
        wire = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(**{field: value}))
        with pytest.raises(InvalidRequest) as caught:
            resolve(query_from_pb(wire, ID), tokenizer, CONTEXT, 49152, lambda: 1)
        assert caught.value.field == field


@pytest.mark.parametrize("request_pb", [pb.GenerateRequest(), pb.GenerateRequest(token_ids=pb.TokenIds())])
def test_a_missing_prompt_is_an_empty_one(tokenizer: Tokenizer, request_pb: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        resolve(query_from_pb(request_pb, ID), tokenizer, CONTEXT, 49152, lambda: 1)


# --- answers ---------------------------------------------------------------------------------------------

USAGE = pb.Usage(
    prompt_tokens=3,
    completion_tokens=2,
    seed=7,
    timings=pb.Timings(ttft=0.5, queue=0.25),
    route=pb.Route(decode_replica="d", blocks=4),
)


def test_the_whole_answer() -> None:
    answer = CompletionFormat("cmpl-1", "m", 123).whole("hi", "stop", USAGE)
    usage = answer.pop("usage")
    assert answer == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 123,
        "model": "m",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
    }
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["seed"] == 7
    assert usage["timings"] == {
        "ttft": 0.5, "queue": 0.25, "prefill": 0, "transfer": 0, "first_decode": 0, "overhead": 0, "total": 0
    }  # fmt: skip
    assert usage["route"]["decode_replica"] == "d"


def test_chunks_carry_usage_only_when_asked_for() -> None:
    plain = CompletionFormat("cmpl-1", "m", 123)
    assert "usage" not in plain.chunk("hi")
    asked = CompletionFormat("cmpl-1", "m", 123, include_usage=True)
    assert asked.chunk("hi")["usage"] is None
    last = asked.usage_chunk(USAGE)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_an_event_is_one_line() -> None:
    raw = event({"text": "a\nb 한"})
    assert raw == 'data: {"text":"a\\nb 한"}\n\n'.encode()


def test_errors_take_openais_form() -> None:
    status, headers, answer = error_response(Overloaded("full, retry later", retry_after=2.6))
    assert (status, headers) == (429, {"Retry-After": "3"})
    assert answer["error"] == {
        "message": "full, retry later", "type": "rate_limit_error", "param": None, "code": None
    }  # fmt: skip
    assert error_response(ModelNotFound("no", "model"))[2]["error"]["code"] == "model_not_found"
    assert error_response(Unavailable("no"))[0] == 503
    assert error_response(ConfigError("no"))[0] == 500


def test_an_error_that_is_not_ours_shows_nothing() -> None:
    status, _, answer = error_response(RuntimeError("password"))
    assert status == 500
    assert "password" not in json.dumps(answer)
