"""What was computed once is not computed again: for whom, how much of it, and with the same answer."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import Answer, fresh, over_grpc, settle, snapshot, streamed, whole

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

PROMPT = [4 + 13 * i % 1000 for i in range(60)]
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 28, "ignore_eos": True}
POOLS = {"two_and_two": (2, 2, 8), "single_pool": (0, 1, 16)}  # prefill and decode replicas, tokens in a block


@pytest.fixture(params=POOLS)
def pools(request: pytest.FixtureRequest) -> tuple[SpawnedCluster, int, int, int]:
    return request.getfixturevalue(request.param), *POOLS[request.param]


def ask(pools: tuple[SpawnedCluster, int, int, int], prompt: Any = PROMPT, **fields: Any) -> Answer:
    """When all that was before has come to the KV manager's knowledge."""
    cluster, prefill, decode, _ = pools
    settle(cluster, prefill, decode)
    return over_grpc(cluster, prompt, **{**SEEDED, **fields})


def test_a_prompt_that_was_asked_before_is_taken_from_the_cache(pools: Any) -> None:
    block_size, salt = pools[-1], fresh()
    first, again, other = (ask(pools, cache_salt=each) for each in (salt, salt, fresh()))
    full = (len(PROMPT) - 1) // block_size * block_size
    assert [answer.cached for answer in (first, again, other)] == [0, full, 0]
    assert first.ids == again.ids == other.ids
    assert first.text == again.text
    assert again.usage["prompt_tokens"] == len(PROMPT)
    if first.route["prefill_replica"]:
        assert (first.route["blocks"], again.route["blocks"]) == (8, 1), "what decode has does not move"


def test_a_prompt_that_begins_alike_takes_what_is_alike(pools: Any) -> None:
    block_size, salt = pools[-1], fresh()
    ask(pools, cache_salt=salt)
    alike = [*PROMPT[:40], *(900 - i for i in range(20))]
    expected = ask(pools, alike, cache_salt=fresh())
    answer = ask(pools, alike, cache_salt=salt)
    assert answer.cached == 40 // block_size * block_size
    assert answer.ids == expected.ids


def test_what_was_generated_is_cached_too(single_pool: SpawnedCluster) -> None:
    pools, salt = (single_pool, *POOLS["single_pool"]), fresh()
    first = ask(pools, cache_salt=salt)
    longer = [*PROMPT, *first.ids, 7, 8, 9, 10]
    answer = ask(pools, longer, cache_salt=salt)
    assert (len(longer), answer.cached) == (92, 80)
    assert answer.ids == ask(pools, longer, cache_salt=fresh()).ids


def test_a_prompt_that_is_reported_on_is_computed(pools: Any) -> None:
    salt = fresh()
    expected = ask(pools, cache_salt=salt)
    settle(*pools[:3])
    with Client(pools[0].grpc_address) as client:
        messages = list(client.generate(PROMPT, prompt_logprobs=0, cache_salt=salt, **SEEDED))
    assert messages[-1].usage.cached_tokens == 0
    assert [entry.token_id for entry in messages[0].prompt_logprobs] == PROMPT[1:]
    assert [id for message in messages for id in message.token_ids] == expected.ids


def test_every_door_tells_what_was_cached_and_the_status_counts_it(pools: Any) -> None:
    cluster, prefill, decode, block_size = pools
    salt, full = fresh(), (len(PROMPT) - 1) // block_size * block_size
    ask(pools, cache_salt=salt)
    settle(cluster, prefill, decode)
    before = snapshot(cluster)["cache"]
    for door in (whole, streamed):
        assert door(cluster, PROMPT, max_tokens=2, cache_salt=salt).cached == full
        settle(cluster, prefill, decode)
    after = snapshot(cluster)["cache"]
    assert after["asked_tokens"] - before["asked_tokens"] == 2 * len(PROMPT)
    assert after["hit_tokens"] - before["hit_tokens"] == 2 * full
    connection = cluster.connect()
    try:
        connection.request("GET", "/metrics")
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/plain")
            assert response.read().startswith(b"# ")
    finally:
        connection.close()
