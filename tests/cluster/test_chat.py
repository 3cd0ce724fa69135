"""A conversation through a real cluster, over every door; what is sampled and reported as asked; text and tokens."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from cluster_kit import over_grpc, whole

from bifolio.cluster.chat import Chat, ChatTemplate
from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster
from bifolio.cluster.tokenizer import Tokenizer

pytestmark = pytest.mark.cluster

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
CHAT = Chat(tuple(MESSAGES))
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}


def ask(cluster: SpawnedCluster, path: str, **body: Any) -> Any:
    """The answer: its JSON, or of a stream the events."""
    connection = cluster.connect()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            content = response.read()
            assert response.status == 200, content
    finally:
        connection.close()
    if not body.get("stream"):
        return json.loads(content)
    *events, done = filter(None, content.split(b"\n\n"))
    assert done == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def chat(cluster: SpawnedCluster, messages: Any = MESSAGES, **fields: Any) -> Any:
    return ask(cluster, "/v1/chat/completions", messages=messages, **fields)


def prompt_of(tokenizer: Tokenizer, messages: Chat) -> list[int]:
    assert tokenizer.chat_template is not None
    text = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens).render(messages)
    return tokenizer.encode(text, special_tokens=False)


def test_every_door_gives_the_answer_to_the_templates_words(
    smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer
) -> None:
    expected = over_grpc(smollm2, prompt_of(smollm2_tokenizer, CHAT), **GREEDY)
    assert "Paris" in expected.text
    answer = chat(smollm2, **GREEDY)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (choice["finish_reason"], answer["object"]) == (expected.finish, "chat.completion")
    assert answer["usage"]["prompt_tokens"] == expected.usage["prompt_tokens"]
    assert over_grpc(smollm2, CHAT, **GREEDY).text == expected.text  # type: ignore[arg-type]
    parts = [{"type": "text", "text": text} for text in (MESSAGES[0]["content"][:9], MESSAGES[0]["content"][9:])]
    assert chat(smollm2, [{"role": "user", "content": parts}], **GREEDY)["choices"] == answer["choices"]


def test_a_stream_has_openais_chunks(smollm2: SpawnedCluster) -> None:
    expected = chat(smollm2, **GREEDY)["choices"][0]
    first, *chunks, last, usage = chat(smollm2, **GREEDY, stream=True, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == expected["message"]["content"]
    assert len(deltas) > 3, "it came as it was produced"
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, expected["finish_reason"])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert {chunk["usage"] for chunk in (first, *chunks, last)} == {None}


def test_the_model_goes_on_within_the_last_message(smollm2: SpawnedCluster) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    text = chat(smollm2, begun, continue_final_message=True, **GREEDY)["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert "capital of France is" not in text


def test_a_chat_without_a_length_ends_by_itself(smollm2: SpawnedCluster) -> None:
    answer = chat(smollm2, [{"role": "user", "content": "Say yes."}], temperature=0.0)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 1


def test_the_command_asks_as_a_chat(smollm2: SpawnedCluster) -> None:
    expected = over_grpc(smollm2, CHAT, **GREEDY).text  # type: ignore[arg-type]
    words = ["generate", "--chat", MESSAGES[0]["content"], "--temperature", "0", "--max-tokens", "24", "--quiet"]
    command = [sys.executable, "-P", "-m", "bifolio.cluster.cli", *words, "--address", smollm2.grpc_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, expected + "\n")


# --- what is reported ------------------------------------------------------------------------------------


def test_logprobs_are_the_same_over_every_door(smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer) -> None:
    prompt = "One, two, three,"
    with Client(smollm2.grpc_address) as client:
        messages = list(client.generate(prompt, max_tokens=8, temperature=0.0, logprobs=3))
    entries = [entry for message in messages for entry in message.logprobs]
    ids = [id for message in messages for id in message.token_ids]
    assert [entry.token_id for entry in entries] == ids
    for entry in entries:
        assert entry.top[0].token_id == entry.token_id, "greedy takes the most probable"
        assert entry.top[0].logprob == entry.logprob
        assert sum(math.exp(top.logprob) for top in entry.top) <= 1 + 1e-6
        assert [top.logprob for top in entry.top] == sorted((top.logprob for top in entry.top), reverse=True)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "logprobs": 3}
    (choice,) = ask(smollm2, "/v1/completions", **body)["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([entry.logprob for entry in entries], abs=1e-2)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == smollm2_tokenizer.decode(ids)
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"])
    for offset, token in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    events = ask(smollm2, "/v1/completions", **body, stream=True)
    assert [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_chats_logprobs_go_with_its_text_also_when_a_stop_string_cuts_it(smollm2: SpawnedCluster) -> None:
    asked: dict[str, Any] = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    (plain,) = chat(smollm2, **asked)["choices"]
    content = plain["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == plain["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content if entry["bytes"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    stop = plain["message"]["content"][11:17]
    answer = chat(smollm2, **asked, stop=[stop])
    (cut,) = answer["choices"]
    assert cut["message"]["content"] == plain["message"]["content"][:11]
    tokens = [entry["token"] for entry in cut["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in content][: answer["usage"]["completion_tokens"]]
    streamed = chat(smollm2, **asked, stop=[stop], stream=True)
    found = [c["choices"][0]["logprobs"] for c in streamed]
    assert [entry["token"] for logprobs in found if logprobs for entry in logprobs["content"]] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_logprobs_come_once(smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer, stream: bool) -> None:
    ids = smollm2_tokenizer.encode("One, two, three, four,")
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0.0, "prompt_logprobs": 2, "stream": stream}
    answer = ask(smollm2, "/v1/completions", **body)
    choices = [event["choices"][0] for event in answer] if stream else answer["choices"]
    (found,) = [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice]
    first, *others = found
    assert first is None
    assert len(others) == len(ids) - 1
    for id, entry in zip(ids[1:], others, strict=True):
        assert entry[str(id)]["decoded_token"] == smollm2_tokenizer.decode([id])
        assert {each["rank"] for each in entry.values()} >= {1, 2}
    with Client(smollm2.grpc_address) as client:
        messages = list(client.generate(ids, max_tokens=4, temperature=0.0, prompt_logprobs=0))
    assert [entry.token_id for entry in messages[0].prompt_logprobs] == ids[1:]
    assert not [message for message in messages[1:] if message.prompt_logprobs]


# --- how tokens are chosen -------------------------------------------------------------------------------


def test_a_bias_decides(smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer) -> None:
    (banana,) = smollm2_tokenizer.encode(" banana")[:1]
    answer = chat(smollm2, max_tokens=3, temperature=0.0, logit_bias={str(banana): 100})
    assert answer["choices"][0]["message"]["content"] == smollm2_tokenizer.decode([banana] * 3)
    assert over_grpc(smollm2, CHAT, max_tokens=3, logit_bias={banana: 100.0}).ids == [banana] * 3  # type: ignore[arg-type]


def test_nothing_ends_an_answer_before_its_least_length(smollm2: SpawnedCluster) -> None:
    short = chat(smollm2, max_tokens=40, temperature=0.0)
    count = short["usage"]["completion_tokens"]
    assert short["choices"][0]["finish_reason"] == "stop"
    longer = chat(smollm2, max_tokens=40, temperature=0.0, min_tokens=count + 5)
    assert longer["usage"]["completion_tokens"] >= count + 5


def test_every_option_is_drawn_alike_over_every_door(smollm2: SpawnedCluster) -> None:
    options: dict[str, Any] = {
        "max_tokens": 12, "temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.1, "seed": 11,
    }  # fmt: skip
    text = whole(smollm2, "Once upon a time", **options).text
    assert over_grpc(smollm2, "Once upon a time", **options).text == text
    assert text != whole(smollm2, "Once upon a time", **{**options, "repetition_penalty": 1.0}).text


# --- text and tokens -------------------------------------------------------------------------------------


def test_a_text_or_a_conversation_is_tokenized_and_back(smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("Hello, 日本!")
    expected = {"count": len(ids), "max_model_len": 8192, "tokens": ids}
    assert ask(smollm2, "/tokenize", prompt="Hello, 日本!") == expected
    assert ask(smollm2, "/detokenize", tokens=ids) == {"prompt": "Hello, 日本!"}
    assert ask(smollm2, "/tokenize", messages=MESSAGES)["tokens"] == prompt_of(smollm2_tokenizer, CHAT)
