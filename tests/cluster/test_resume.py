"""Replicas that are killed under running requests: every client's stream goes on, with the ids of an undisturbed run.

Every resume is a second call under the same parent request: with Ray's own router the ingress would spin here.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_kit import all_collected, collected, frozen, replicas, settle, wait_until

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

PROMPT = [4 + 11 * i % 1000 for i in range(60)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_tokens": 60, "ignore_eos": True},
}


@pytest.mark.parametrize(("role", "sampling"), [("prefill", "greedy"), ("decode", "seeded")])
def test_both_replicas_of_a_pool_die_under_one_request(two_and_two: SpawnedCluster, role: str, sampling: str) -> None:
    settle(two_and_two, 2, 2)
    with Client(two_and_two.grpc_address) as client, ThreadPoolExecutor(1) as pool:
        undisturbed = collected(client, PROMPT, **SAMPLINGS[sampling])
        assert undisturbed.route["resumes"] == 0
        settle(two_and_two, 2, 2)
        pids = [replica["pid"] for replica in replicas(two_and_two, role)]
        with frozen(pids):  # so the request is there when they die, and has not left
            answer = pool.submit(collected, client, PROMPT, **SAMPLINGS[sampling])
            for _ in range(2):
                os.kill(_holder(two_and_two, role, pids), signal.SIGKILL)
        resumed = answer.result(60)
    assert resumed.ids == undisturbed.ids
    assert resumed.text == undisturbed.text
    assert resumed.route["resumes"] == 2
    assert bool(resumed.route["prefill_replica"]) == (role == "decode")  # without prefill replicas decode does it all
    settle(two_and_two, 2, 2)


def _holder(cluster: SpawnedCluster, role: str, pids: list[int]) -> int:
    """The next of `pids` that holds a lease; it is taken off them."""

    def holding() -> list[int]:
        return [r["pid"] for r in replicas(cluster, role) if r["pid"] in pids and r["offered"] + r["active"]]

    (pid,) = wait_until(holding, "no replica was given the request")
    pids.remove(pid)
    return int(pid)


def test_several_answers_go_on_when_their_replica_dies(two_and_two: SpawnedCluster) -> None:
    settle(two_and_two, 2, 2)
    sampling: dict[str, Any] = {**SAMPLINGS["seeded"], "n": 3}
    with Client(two_and_two.grpc_address) as client, ThreadPoolExecutor(1) as pool:
        undisturbed = all_collected(client, PROMPT, **sampling)
        settle(two_and_two, 2, 2)
        answers = pool.submit(all_collected, client, PROMPT, **sampling)
        os.kill(wait_until(lambda: _stopped_at_work(two_and_two), "none works"), signal.SIGKILL)
        resumed = answers.result(60)
    assert [answer.ids for answer in resumed] == [answer.ids for answer in undisturbed]
    assert [answer.text for answer in resumed] == [answer.text for answer in undisturbed]
    assert resumed[0].route["resumes"] >= 1
    settle(two_and_two, 2, 2)


def _stopped_at_work(cluster: SpawnedCluster) -> int | None:
    """The pid of a decode replica that is stopped, and holds requests that have begun: they cannot leave it now."""
    for pid in [replica["pid"] for replica in replicas(cluster, "decode") if replica["active"]]:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)  # what it said before has arrived: if it still holds any, it did not end
        if any(replica["active"] for replica in replicas(cluster, "decode") if replica["pid"] == pid):
            return int(pid)
        os.kill(pid, signal.SIGCONT)
    return None
