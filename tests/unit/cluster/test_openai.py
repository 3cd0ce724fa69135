"""The HTTP door in OpenAI's words: bodies of /v1/completions, answers whole and in chunks, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.cluster.answer import Piece
from bifolio.cluster.chat_schema import ChatRequest
from bifolio.cluster.completion_schema import CompletionRequest
from bifolio.cluster.logprob_shapes import CompletionShape
from bifolio.cluster.openai import error_response, event
from bifolio.cluster.query import Query
from bifolio.cluster.schema import parse
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.cluster.words import ChatWords, CompletionWords, Words
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import ConfigError, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from bifolio.protos.messages import RequestId, TokenLogprobs

ID = RequestId("r-1")


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hello", **fields}).encode()


def query(**fields: Any) -> Query:
    return parse(body(**fields), CompletionRequest).to_query(ID)


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


# --- requests: what is wrong with one is in test_bad_input.py ------------------------------------------------


def test_what_is_left_open_stays_open() -> None:
    assert query() == Query(ID, "Hello")


def test_every_field_arrives() -> None:
    sampling = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 2.0, "min_tokens": 2, "seed": -1, "ignore_eos": True,
        "logprobs": 3, "prompt_logprobs": 0, "model": "m", "n": 2, "cache_salt": "s", "priority": -7, "user": "me",
    }  # fmt: skip
    asked = query(**sampling, stop="\n", stop_token_ids=[9, 7], logit_bias={"12": -100, "7": 0.5})
    expected = Query(ID, "Hello", **sampling, stop=("\n",), stop_token_ids=(9, 7), logit_bias=((7, 0.5), (12, -100.0)))
    assert asked == expected


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"]])
def test_a_prompt_may_be_a_text(prompt: Any) -> None:
    assert query(prompt=prompt).prompt == "Hello"


@pytest.mark.parametrize("prompt", [[19556, 5], [[19556, 5]]])
def test_a_prompt_may_be_token_ids(prompt: Any) -> None:
    assert query(prompt=prompt).prompt == (19556, 5)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"prompt": None}, "prompt", "got None; allowed: a text, a list of token ids, or a list with one"),
        ({"prompt": ["a", "b"]}, "prompt", "got 2 prompts; one prompt per request"),
        ({"prompt": [[1], [2]]}, "prompt", "got 2 prompts; one prompt per request"),
        ({"prompt": [1, "a"]}, "prompt", "got [1, 'a']; allowed: a text"),
        ({"prompt": [True]}, "prompt", "got [True]; allowed: a text"),
        ({"prompt": "half \ud800"}, "prompt", "'\\ud800' at character 5, half a surrogate pair"),
        ({"max_tokens": "3"}, "max_tokens", "got '3'; allowed: a whole number"),
        ({"temperature": "hot"}, "temperature", "got 'hot'; allowed: a number"),
        ({"stop": ["\udfff"]}, "stop", "stop[0] holds '\\udfff'"),
        ({"stop": 3}, "stop", "got 3; allowed: a text or a list of texts"),
        ({"n": "2"}, "n", "got '2'; allowed: a whole number or null"),
        ({"best_of": 2}, "best_of", "got 2; not supported yet, allowed: 1, which is n, or null"),
        ({"n": 2, "best_of": 1}, "best_of", "got 1; not supported yet, allowed: 2, which is n, or null"),
        ({"priority": 0.5}, "priority", "got 0.5; allowed: a whole number or null"),
        ({"cache_salt": 5}, "cache_salt", "got 5; allowed: a text or null"),
        ({"echo": True}, "echo", "not supported yet"),
        ({"suffix": "x"}, "suffix", "not supported yet"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"max_token": 3}, "max_token", "max_token: unknown name; did you mean max_tokens?"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "allowed only with stream: true"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options", "stream_options.include"),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        query(**fields)
    assert caught.value.field == field
    assert says in caught.value.message
    status, _, answer = error_response(caught.value)
    assert (status, answer["error"]["param"]) == (400, field)
    event(answer)  # can be encoded, whatever was sent


def test_a_name_that_is_there_twice_is_refused() -> None:
    for raw in (b'{"prompt": "a", "prompt": "a"}', b'{"stream_options": {"a": 1, "a": 1}, "prompt": "a"}'):
        with pytest.raises(InvalidRequest, match="is given twice"):
            parse(raw, CompletionRequest)


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
        parse(raw, CompletionRequest)
    assert len(event(error_response(caught.value)[2])) < 1000


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_any_value_anywhere_is_taken_or_refused(value: Any) -> None:
    for schema, names in (
        (CompletionRequest, ("prompt", "stop", "stop_token_ids", "logit_bias", "stream_options", "n", "temperature")),
        (ChatRequest, ("messages", "user", "tools", "response_format", "chat_template_kwargs", "top_logprobs")),
    ):
        for name in names:
            try:
                parse(json.dumps({"prompt": "x", name: value}).encode(), schema)
            except InvalidRequest as error:
                event(error_response(error)[2])


def test_fields_that_ask_for_nothing_are_taken() -> None:
    query(n=None, best_of=None)
    query(n=3, best_of=3)
    query(n=1, best_of=1, echo=False, logprobs=None, presence_penalty=0, logit_bias={}, suffix=None, user=None)


def test_usage_is_streamed_only_when_asked_for() -> None:
    assert parse(body(stream=True, stream_options={"include_usage": True}), CompletionRequest).include_usage
    assert not parse(body(stream=True), CompletionRequest).include_usage


# --- answers ---------------------------------------------------------------------------------------------

USAGE = pb.Usage(
    prompt_tokens=3,
    completion_tokens=2,
    cached_tokens=1,
    seed=7,
    timings=pb.Timings(ttft=0.5, queue=0.25),
    route=pb.Route(decode_replica="d", blocks=4, reason="short"),
)


def words(tokenizer: Tokenizer, **asked: bool) -> CompletionWords:
    return CompletionWords("cmpl-1", "m", 123, tokenizer, **asked)


def test_the_whole_answer(tokenizer: Tokenizer) -> None:
    answer = words(tokenizer).whole([Piece("h", (1,)), Piece("i", (2,), "stop", USAGE)])
    usage = answer.pop("usage")
    assert answer == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 123,
        "model": "m",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
    }
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["seed"] == 7
    assert usage["timings"] == {
        "ttft": 0.5, "queue": 0.25, "prefill": 0, "transfer": 0, "first_decode": 0, "overhead": 0, "total": 0
    }  # fmt: skip
    assert (usage["route"]["decode_replica"], usage["route"]["reason"]) == ("d", "short")


def test_chunks_carry_usage_only_when_asked_for(tokenizer: Tokenizer) -> None:
    (plain,) = words(tokenizer).chunks(Piece("hi", (1,), "stop", USAGE))
    assert "usage" not in plain
    chunk, last = words(tokenizer, include_usage=True).chunks(Piece("hi", (1,), "stop", USAGE))
    assert chunk["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_a_piece_whose_text_is_held_back_is_no_chunk_unless_it_has_logprobs(tokenizer: Tokenizer) -> None:
    held = Piece("", (19556,), logprobs=(TokenLogprobs(19556, -0.5),))
    assert list(words(tokenizer).chunks(held)) == []
    (chunk,) = words(tokenizer, logprobs=True).chunks(held)
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["Hello"]


def test_logprobs_in_openais_shape_are_the_same_whole_and_in_chunks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello é日 again")  # with parts of characters
    entries = [TokenLogprobs(id, -i / 4, ((700, -0.25), (id, -i / 4))) for i, id in enumerate(ids)]
    pieces = [Piece("x", (e.token,), logprobs=(e,)) for e in entries]
    pieces[-1] = Piece("x", pieces[-1].tokens, "length", USAGE, pieces[-1].logprobs)
    whole = words(tokenizer, logprobs=True).whole(pieces)["choices"][0]["logprobs"]
    streaming = words(tokenizer, logprobs=True)
    chunks = [c["choices"][0]["logprobs"] for piece in pieces for c in streaming.chunks(piece)]
    assert whole == {name: [each for chunk in chunks for each in chunk[name]] for name in whole}
    assert whole["token_logprobs"] == [e.logprob for e in entries]
    assert whole["tokens"][0] == "Hello"
    assert any(name.startswith("bytes:\\x") for name in whole["tokens"])
    assert [list(top) for top in whole["top_logprobs"]] == [[tokenizer.decode([700]), name] for name in whole["tokens"]]
    assert whole["text_offset"] == [len(tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))]


def test_the_prompts_logprobs_are_said_once_and_begin_with_null(tokenizer: Tokenizer) -> None:
    prompt = (TokenLogprobs(5, -1.0, ((7, -0.5), (5, -1.0))), TokenLogprobs(9, -float("inf"), ((7, -0.5),)))
    pieces = [Piece("", (1,), prompt_logprobs=prompt), Piece("b", (2,), "stop", USAGE)]
    expected = [
        None,
        {
            "5": {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer.special_name(5)},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.special_name(7)},
        },
        {
            "9": {"logprob": -9999.0, "rank": None, "decoded_token": tokenizer.special_name(9)},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.special_name(7)},
        },
    ]
    assert words(tokenizer, prompt_logprobs=True).whole(pieces)["choices"][0]["prompt_logprobs"] == expected
    streaming = words(tokenizer, prompt_logprobs=True)
    first, second = (c["choices"][0] for piece in pieces for c in streaming.chunks(piece))
    assert first["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in second


def interleaved(tokenizer: Tokenizer) -> list[Piece]:
    """Three choices; the first to say something is the last, and one says nothing."""
    one, two, three = tokenizer.encode("one two three")
    return [
        Piece("", (one,), logprobs=(TokenLogprobs(one, -1.0),), prompt_logprobs=(TokenLogprobs(9, -0.5),), choice=2),
        Piece("a", (two,), logprobs=(TokenLogprobs(two, -2.0),), choice=0),
        Piece("b", (two,), "stop", logprobs=(TokenLogprobs(two, -3.0),), choice=2),
        Piece("", (2,), "stop", choice=1),
        Piece("c", (three,), "length", USAGE, (TokenLogprobs(three, -4.0),), choice=0),
    ]


def test_choices_are_told_apart_by_their_index(tokenizer: Tokenizer) -> None:
    pieces = interleaved(tokenizer)
    whole = words(tokenizer, logprobs=True, prompt_logprobs=True).whole(pieces)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]] == [
        (0, "ac", "length"),
        (1, "", "stop"),
        (2, "b", "stop"),
    ]
    assert ["prompt_logprobs" in choice for choice in whole["choices"]] == [True, False, False]
    assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [[-2.0, -4.0], [], [-1.0, -3.0]]
    assert [choice["logprobs"]["text_offset"][:1] for choice in whole["choices"]] == [[0], [], [0]]
    streaming = words(tokenizer, logprobs=True, prompt_logprobs=True)
    chunks = [chunk["choices"][0] for piece in pieces for chunk in streaming.chunks(piece)]
    assert [(c["index"], c["text"]) for c in chunks] == [(2, ""), (0, "a"), (2, "b"), (1, ""), (0, "c")]
    assert ["prompt_logprobs" in chunk for chunk in chunks] == [True, False, False, False, False]
    for choice in whole["choices"]:
        parts = [c["logprobs"] for c in chunks if c["index"] == choice["index"]]
        assert choice["logprobs"] == {name: [each for p in parts for each in p[name]] for name in choice["logprobs"]}


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


def test_two_tokens_that_are_written_alike_are_both_there(tokenizer: Tokenizer) -> None:
    class Alike(Tokenizer):
        def piece(self, id: int) -> bytes:
            return b"A"

    alike = object.__new__(Alike)
    alike.__dict__.update(tokenizer.__dict__)
    (top,) = CompletionShape(alike).shape([TokenLogprobs(300, -2.0, ((301, -1.0), (300, -2.0)))])["top_logprobs"]
    assert top == {"A": -1.0, "token_id:300": -2.0}


@pytest.mark.parametrize("words_of", [CompletionWords, ChatWords])
@given(st.lists(st.tuples(st.integers(0, 1), st.text()), max_size=8), st.booleans(), st.text())
def test_events_are_the_chunks_as_json(
    tokenizer: Tokenizer, words_of: type[Words], pieces: list[tuple[int, str]], usage: bool, model: str
) -> None:
    """Also those that are not worded anew."""
    quick, plain = (words_of("r-1", model, 1, tokenizer, include_usage=usage) for _ in range(2))
    taken = [Piece(text, (7,), choice=choice) for choice, text in pieces]
    taken += [Piece("a", (7,), "stop", choice=1), Piece("", (7,), "length", pb.Usage(prompt_tokens=3))]
    for piece in taken:
        assert quick.events(piece) == [
            b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
            for chunk in plain.chunks(piece)
        ]
