"""/v1/chat/completions, /tokenize and /detokenize: bodies as OpenAI's and vLLM's clients send them, and the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bifolio.cluster.answer import Piece
from bifolio.cluster.chat import Chat
from bifolio.cluster.chat_schema import ChatRequest
from bifolio.cluster.query import Query, Served, resolve
from bifolio.cluster.schema import parse
from bifolio.cluster.tokenize_schema import DetokenizeRequest, TokenizeRequest
from bifolio.cluster.words import ChatWords
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import InvalidRequest
from bifolio.protos.messages import RequestId, TokenLogprobs

ID = RequestId("r-1")
USER = {"role": "user", "content": "Hello"}


def query(*messages: Any, **fields: Any) -> Query:
    return parse(json.dumps({"messages": messages or [USER], **fields}).encode(), ChatRequest).to_query(ID)


def messages_of(*messages: Any) -> Any:
    prompt = query(*messages).prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


# --- requests: what is wrong with one is in test_bad_input.py ------------------------------------------------


def test_messages_of_every_role() -> None:
    roles = ("system", "developer", "user", "assistant", "tool")
    assert messages_of(*({"role": role, "content": "a"} for role in roles)) == tuple(
        {"role": role, "content": "a"} for role in roles
    )


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert messages_of({"role": "user", "content": parts}) == (USER,)


def test_an_assistants_message_may_come_back_as_it_was_sent() -> None:
    sent = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": [], "audio": None}
    assert messages_of(USER, sent)[1] == {"role": "assistant", "content": ""}


def test_what_a_template_may_know_is_handed_to_it() -> None:
    assert messages_of({**USER, "name": "Bo", "tool_call_id": None}) == ({**USER, "name": "Bo"},)


def test_the_length_has_an_old_and_a_new_name() -> None:
    assert query(max_tokens=5).max_tokens == query(max_completion_tokens=5).max_tokens == 5
    assert query(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(InvalidRequest, match="got 6, and max_tokens is 5; allowed: one of the two") as caught:
        query(max_tokens=5, max_completion_tokens=6)
    assert caught.value.field == "max_completion_tokens"


def test_a_mistake_is_named_as_this_endpoint_names_the_field(served: Served) -> None:
    for fields, field in (
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field} is ") as caught:
            resolve(query(**fields), served, lambda: 1)
        assert caught.value.field == field


def test_logprobs_are_asked_for_in_two_fields() -> None:
    assert query().logprobs is query(logprobs=False).logprobs is None
    assert query(logprobs=True).logprobs == 0
    assert query(logprobs=True, top_logprobs=3).logprobs == 3
    with pytest.raises(InvalidRequest, match="allowed only with logprobs: true"):
        query(top_logprobs=3)


def test_the_last_message_may_be_continued() -> None:
    chat = query(continue_final_message=True, add_generation_prompt=False, chat_template_kwargs={"a": 1}).prompt
    assert chat == Chat((USER,), continue_final_message=True, template_kwargs={"a": 1})
    assert query(add_generation_prompt=True).prompt == query().prompt == Chat((USER,))
    for fields in ({"add_generation_prompt": False}, {"add_generation_prompt": True, "continue_final_message": True}):
        with pytest.raises(InvalidRequest, match="allowed: true, or false with continue_final_message: true"):
            query(**fields)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    query(n=None, tools=[], tool_choice="none", parallel_tool_calls=True, response_format={"type": "text"}, store=False)
    query(modalities=["text"], metadata=None, service_tier="auto", function_call=None, logit_bias=None)


# --- answers -------------------------------------------------------------------------------------------------

USAGE = pb.Usage(prompt_tokens=3, completion_tokens=2)
ENTRIES = (TokenLogprobs(19556, -0.5, ((19556, -0.5), (2, -1.0))), TokenLogprobs(2, -0.25))
PIECES = [
    Piece("Hel", (19556,), logprobs=ENTRIES[:1], prompt_logprobs=(TokenLogprobs(5, -1.0),)),
    Piece("lo", (2,), "stop", USAGE, ENTRIES[1:]),
]


def words(served: Served, **asked: bool) -> ChatWords:
    return ChatWords("chatcmpl-1", "m", 123, served.tokenizer, **asked)


def test_the_whole_answer(served: Served) -> None:
    answer = words(served).whole(PIECES)
    assert answer.pop("usage")["total_tokens"] == 5
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 123,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
    }


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(served: Served) -> None:
    writer = words(served, include_usage=True)
    *chunks, usage = [chunk for piece in PIECES for chunk in writer.chunks(piece)]
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({}, "stop"),
    ]
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)


def test_logprobs_go_with_their_text(served: Served) -> None:
    whole = words(served, logprobs=True).whole(PIECES)["choices"][0]["logprobs"]["content"]
    hello = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    end = {"token": "<|im_end|>", "logprob": -1.0, "bytes": []}  # a special token: written, but no text
    assert whole == [{**hello, "top_logprobs": [hello, end]}, {**end, "logprob": -0.25, "top_logprobs": []}]
    writer = words(served, logprobs=True)
    streamed = [c["choices"][0] for piece in PIECES for c in writer.chunks(piece)]
    assert [entry for c in streamed if c["logprobs"] for entry in c["logprobs"]["content"]] == whole


def test_the_prompts_logprobs_come_with_the_first_chunk(served: Served) -> None:
    expected = [None, {"5": {"logprob": -1.0, "rank": None, "decoded_token": "<file_sep>"}}]
    assert words(served, prompt_logprobs=True).whole(PIECES)["prompt_logprobs"] == expected
    writer = words(served, prompt_logprobs=True)
    first, *others = [chunk for piece in PIECES for chunk in writer.chunks(piece)]
    assert first["prompt_logprobs"] == expected
    assert not [chunk for chunk in others if "prompt_logprobs" in chunk]


def test_each_choice_begins_with_its_role_and_ends_with_its_reason(served: Served) -> None:
    pieces = [
        Piece("a", (1,), choice=1, prompt_logprobs=(TokenLogprobs(5, -1.0),)),
        Piece("b", (1,), choice=0),
        Piece("", (2,), "stop", choice=1),
        Piece("c", (1,), "length", USAGE, choice=0),
    ]
    assert query(n=2).n == 2
    whole = words(served, prompt_logprobs=True).whole(pieces)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in whole["choices"]] == [
        (0, "bc", "length"),
        (1, "a", "stop"),
    ]
    assert len(whole["prompt_logprobs"]) == 2
    writer = words(served, prompt_logprobs=True)
    chunks = [chunk for piece in pieces for chunk in writer.chunks(piece)]
    assert ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    role: dict[str, str] = {"role": "assistant", "content": ""}
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        (1, role, None),
        (1, {"content": "a"}, None),
        (0, role, None),
        (0, {"content": "b"}, None),
        (1, {}, "stop"),
        (0, {"content": "c"}, None),
        (0, {}, "length"),
    ]


# --- tokens --------------------------------------------------------------------------------------------------


def tokenized(served: Served, **body: Any) -> dict[str, Any]:
    return parse(json.dumps(body).encode(), TokenizeRequest).answer(served)


def test_a_text_is_tokenized(served: Served) -> None:
    assert tokenized(served, prompt="Hello") == {"count": 1, "max_model_len": 128, "tokens": (19556,)}
    assert tokenized(served, prompt="Hello " * 500)["count"] > 128, "to be counted a text need not fit"


def test_a_conversation_is_tokenized_as_it_would_be_answered(served: Served) -> None:
    expected = resolve(query(), served, lambda: 1).prompt
    assert tokenized(served, messages=[USER])["tokens"] == expected
    with pytest.raises(InvalidRequest, match="prompt and messages are both given"):
        tokenized(served, messages=[USER], prompt="a")


def test_tokens_have_a_text(served: Served) -> None:
    ids = served.tokenizer.encode("Hello, 日本!")
    asked = parse(json.dumps({"tokens": ids}).encode(), DetokenizeRequest)
    assert asked.answer(served) == {"prompt": "Hello, 日本!"}
