"""One request through a real cluster: the doors agree, and the answer says truly where it was computed."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import Answer, fresh, over_grpc, replicas, streamed, whole

from bifolio.cluster.spawn import SpawnedCluster
from bifolio.cluster.tokenizer import Tokenizer

pytestmark = pytest.mark.cluster

PROMPT = "Once upon a time, in a small village by the sea, there lived"
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
SEEDED: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7}
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 30 * 3 * 64 * 2 * BLOCK_SIZE  # K and V, layers, KV heads, head size, bytes of bfloat16, positions
DOORS = [whole, streamed, over_grpc]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_whole_streamed_and_grpc_give_one_answer(
    smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer, sampling: dict[str, Any]
) -> None:
    answers = [door(smollm2, PROMPT, **sampling) for door in DOORS]
    texts = [answer.text for answer in answers]
    assert texts == texts[:1] * 3
    assert texts[0].strip()
    for answer in answers:
        assert answer.finish == "length"
        assert answer.usage["prompt_tokens"] == len(smollm2_tokenizer.encode(PROMPT))
        assert answer.usage["completion_tokens"] == 24
        assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + 24
    assert len(answers[1].pieces) > 3, "it came as it was produced"
    assert len(answers[2].ids) == 24
    assert smollm2_tokenizer.decode(answers[2].ids) == texts[0]


def test_another_seed_gives_another_answer_and_a_drawn_one_can_be_repeated(smollm2: SpawnedCluster) -> None:
    first = whole(smollm2, PROMPT, max_tokens=24)
    again = over_grpc(smollm2, PROMPT, max_tokens=24, seed=first.usage["seed"])
    other = over_grpc(smollm2, PROMPT, max_tokens=24, seed=first.usage["seed"] ^ 1)
    assert again.text == first.text != other.text


@pytest.mark.parametrize("door", DOORS)
def test_a_prompt_of_token_ids_is_the_text_it_encodes(
    smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer, door: Any
) -> None:
    ids = smollm2_tokenizer.encode(PROMPT)
    assert door(smollm2, ids, **GREEDY).text == whole(smollm2, PROMPT, **GREEDY).text


@pytest.mark.parametrize("door", DOORS)
def test_one_token(smollm2: SpawnedCluster, door: Any) -> None:
    answer = door(smollm2, PROMPT, max_tokens=1, temperature=0.0)
    assert answer.finish == "length"
    assert answer.usage["completion_tokens"] == 1
    assert answer.usage["timings"]["total"] >= answer.usage["timings"]["ttft"] > 0


@pytest.mark.parametrize("tokens", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 300])
def test_every_block_of_the_prompt_moves_from_prefill_to_decode(smollm2: SpawnedCluster, tokens: int) -> None:
    answer = over_grpc(smollm2, [1000 + i % 700 for i in range(tokens)], max_tokens=2, cache_salt=fresh())
    roles = {replica["id"]: replica["role"] for replica in replicas(smollm2)}
    assert roles[answer.route["prefill_replica"]] == "prefill"
    assert roles[answer.route["decode_replica"]] == "decode"
    assert answer.route["blocks"] == -(-tokens // BLOCK_SIZE)
    assert answer.route["bytes"] == answer.route["blocks"] * BLOCK_BYTES
    assert (answer.route["resumes"], answer.route["reason"], answer.cached) == (0, "always", 0)


@pytest.mark.parametrize("door", DOORS)
def test_the_parts_of_the_time_to_the_first_token_add_up(smollm2: SpawnedCluster, door: Any) -> None:
    _assert_parts(door(smollm2, PROMPT * 8, max_tokens=3))


def test_a_longer_prompt_spends_longer_in_prefill(smollm2: SpawnedCluster) -> None:
    short, long = (over_grpc(smollm2, [1000] * n, max_tokens=1, cache_salt=fresh()) for n in (60, 600))
    for answer in (short, long):
        _assert_parts(answer)
    assert long.usage["timings"]["prefill"] > short.usage["timings"]["prefill"]


def _assert_parts(answer: Answer) -> None:
    timings = dict(answer.usage["timings"])
    total, ttft = timings.pop("total"), timings.pop("ttft")
    assert set(timings) == {"queue", "prefill", "transfer", "first_decode", "overhead"}
    assert sum(timings.values()) == pytest.approx(ttft)
    assert min(timings.values()) >= 0, timings
    assert timings["prefill"] > 0
    assert total >= ttft
