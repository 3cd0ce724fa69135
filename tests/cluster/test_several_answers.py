"""Several answers to one request: each as if it were alone, from one prefill."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster_kit import all_over_grpc, all_streamed, all_whole, fresh, over_grpc, post, settle

from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

PROMPT = [4 + 17 * i % 1000 for i in range(61)]  # its last block is begun: each choice writes a copy of its own
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": 30, "ignore_eos": True, "n": 4}
DOORS = [all_whole, all_streamed, all_over_grpc]


def test_every_door_and_both_ways_to_serve_give_the_same_answers(
    two_and_two: SpawnedCluster, single_pool: SpawnedCluster
) -> None:
    expected = all_over_grpc(two_and_two, PROMPT, cache_salt=fresh(), **SEEDED)
    assert len({answer.text for answer in expected}) > 1, "each is drawn for itself"
    assert [len(answer.ids) for answer in expected] == [30] * 4
    for cluster in (two_and_two, single_pool):
        for salt in ("", fresh()):
            answers = all_over_grpc(cluster, PROMPT, cache_salt=salt, **SEEDED)
            assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
        for door in DOORS:
            answers = door(cluster, PROMPT, **SEEDED)
            assert [answer.text for answer in answers] == [answer.text for answer in expected]
            assert {answer.finish for answer in answers} == {"length"}
        assert over_grpc(cluster, PROMPT, **{**SEEDED, "n": 1}).ids == expected[0].ids
    settle(two_and_two, 2, 2)
    settle(single_pool, 0, 1)


def test_the_prompt_is_computed_and_moved_once(two_and_two: SpawnedCluster) -> None:
    answers = all_over_grpc(two_and_two, PROMPT, cache_salt=fresh(), **SEEDED)
    usage = answers[0].usage
    assert usage["route"]["blocks"] == -(-len(PROMPT) // 8)
    assert (usage["prompt_tokens"], usage["completion_tokens"], answers[0].cached) == (len(PROMPT), 4 * 30, 0)
    settle(two_and_two, 2, 2)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16])
def test_prompts_of_every_length_are_shared(two_and_two: SpawnedCluster, tokens: int) -> None:
    alone = over_grpc(two_and_two, PROMPT[:tokens], **{**SEEDED, "n": 1})
    answers = all_over_grpc(two_and_two, PROMPT[:tokens], **SEEDED)
    assert answers[0].ids == alone.ids
    assert [len(answer.ids) for answer in answers] == [30] * 4


def test_a_stop_string_ends_one_answer_and_the_others_go_on(two_and_two: SpawnedCluster) -> None:
    plain = all_over_grpc(two_and_two, PROMPT, **SEEDED)
    stop = next(
        text
        for answer in plain
        for i in range(len(answer.text) - 4)
        if (text := answer.text[i : i + 3]) and sum(text in other.text for other in plain) == 1
    )
    for door in DOORS:
        answers = door(two_and_two, PROMPT, stop=[stop], **SEEDED)
        assert [answer.text for answer in answers] == [answer.text.split(stop)[0] for answer in plain]
        assert sorted(answer.finish or "" for answer in answers) == ["length", "length", "length", "stop"]
        assert answers[0].usage["completion_tokens"] < 4 * 30
    settle(two_and_two, 2, 2)


def test_choices_of_a_chat(smollm2: SpawnedCluster) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    body = {"messages": messages, "n": 3, "max_tokens": 12, "seed": 8, "temperature": 1.2}
    status, answer = post(smollm2, body, "/v1/chat/completions")
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1
    status, alone = post(smollm2, {**body, "n": 1}, "/v1/chat/completions")
    assert alone["choices"][0]["message"]["content"] == texts[0]

    connection = smollm2.connect()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
        with connection.getresponse() as response:
            *events, done = filter(None, response.read().split(b"\n\n"))
    finally:
        connection.close()
    assert done == b"data: [DONE]"
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    for index, text in enumerate(texts):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["delta"].get("content", "") for chunk in mine) == text
        assert [chunk["finish_reason"] for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == answer["choices"][index]["finish_reason"]
