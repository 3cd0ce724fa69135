"""With `split: auto`, which is the default, each prompt goes where it makes others wait least; the status says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_kit import frozen, over_grpc, replicas, settle, snapshot, wait_until

from bifolio.cluster.spawn import SpawnedCluster, spawned

pytestmark = pytest.mark.cluster

LONG = [4 + 7 * i % 1000 for i in range(100)]  # more than kv.local_blocks blocks of 16
SHORT = [5, 6, 7]


@pytest.fixture(scope="module")
def auto(glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpawnedCluster]:
    with (tmp_path_factory.mktemp("auto") / "output.txt").open("wb") as output:
        arguments = ["--model", str(glassllm_dir), "--served-model-name", "glassllm", "--exact"]
        with spawned(arguments, output) as cluster:
            settle(cluster, 1, 1)
            yield cluster


def test_a_short_prompt_does_not_wait_for_a_busy_prefill_replica(auto: SpawnedCluster) -> None:
    with ThreadPoolExecutor(1) as pool, frozen([replica["pid"] for replica in replicas(auto, "prefill")]):
        long = pool.submit(over_grpc, auto, LONG, max_tokens=2)
        wait_until(lambda: any(replica["offered"] + replica["active"] for replica in replicas(auto, "prefill")), "idle")
        short = over_grpc(auto, SHORT, max_tokens=2)
        assert (short.route["reason"], short.route["prefill_replica"], short.route["blocks"]) == ("short", "", 0)
    answer = long.result(60)
    assert (answer.route["reason"], answer.route["blocks"]) == ("long", 7)
    settle(auto, 1, 1)
    assert {reason: count for reason, count in snapshot(auto)["splits"].items() if count} == {"long": 1, "short": 1}


def test_what_is_cached_does_not_make_a_prompt_long(auto: SpawnedCluster) -> None:
    over_grpc(auto, LONG, max_tokens=2)
    settle(auto, 1, 1)
    assert over_grpc(auto, [*LONG, 8, 9], max_tokens=2).route["reason"] in ("short", "quick")
