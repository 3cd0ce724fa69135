"""Split and single-pool serving are one system: the same ids, the one with a hand-over and the other without."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import fresh, over_grpc

from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

PROMPTS: list[str | list[int]] = [
    "The old house stood",
    "She opened the door and saw that the room was empty, and then",
    "It was a dark night. " * 3,
    [7],
    [4 + 7 * i % 1000 for i in range(64)],
    [900 - 5 * i for i in range(100)],
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "seed": 2**64 - 3},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_split_and_single_pool_give_the_same_ids(
    two_and_two: SpawnedCluster, single_pool: SpawnedCluster, sampling: dict[str, Any]
) -> None:
    for prompt in PROMPTS:
        split, single = (
            over_grpc(cluster, prompt, max_tokens=28, ignore_eos=True, cache_salt=fresh(), **sampling)
            for cluster in (two_and_two, single_pool)
        )
        assert split.ids == single.ids
        assert len(split.ids) == 28
        assert split.text == single.text
        assert split.route["blocks"] == -(-split.usage["prompt_tokens"] // 8)
        assert (single.route["prefill_replica"], single.route["blocks"], single.route["bytes"]) == ("", 0, 0)
        assert (split.route["reason"], single.route["reason"]) == ("long", "no_prefill")
