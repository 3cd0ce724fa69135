"""Replicas that leave under running streams, on SIGTERM or because somebody asks for it: nobody's stream feels it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_kit import Answer, collected, post, replicas, settle, streamed, wait_until

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

CLIENTS = 6
PROMPT = [4 + 13 * i % 1000 for i in range(40)]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 60, "ignore_eos": True}


def terminated(cluster: SpawnedCluster, replica: dict[str, Any]) -> None:
    os.kill(replica["pid"], signal.SIGTERM)


def asked(cluster: SpawnedCluster, replica: dict[str, Any]) -> None:
    id = replica["id"]
    assert post(cluster, b"", f"/v1/replicas/{id}/drain") == (200, {"id": id, "leaving": True})


def test_a_replica_of_each_pool_leaves_under_streams(two_and_two: SpawnedCluster) -> None:
    settle(two_and_two, 2, 2)
    undisturbed = [_ask(two_and_two, number) for number in range(CLIENTS)]
    leaving = [replicas(two_and_two, role)[0] for role in ("prefill", "decode")]
    with _asking(two_and_two) as answers:
        wait_until(lambda: len(answers) > CLIENTS, "nobody is answered")
        for replica, leave in zip(leaving, (asked, terminated), strict=True):
            leave(two_and_two, replica)
        gone = {replica["id"] for replica in leaving}
        wait_until(lambda: not gone & {r["id"] for r in replicas(two_and_two)}, "they have not left")
        served = len(answers)
        wait_until(lambda: len(answers) > served + CLIENTS, "nobody is answered any more")
    for number, answer in answers:
        assert (answer.text, answer.finish) == (undisturbed[number].text, "length")
        assert number % 2 or answer.ids == undisturbed[number].ids
    settle(two_and_two, 2, 2)
    assert not gone & {replica["id"] for replica in replicas(two_and_two)}


@contextlib.contextmanager
def _asking(cluster: SpawnedCluster) -> Iterator[list[tuple[int, Answer]]]:
    """Clients that ask again and again; what they got, each answer with its client. Afterwards none has failed."""
    answers: list[tuple[int, Answer]] = []
    stop = threading.Event()

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            answers.append((number, _ask(cluster, number)))

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(keep_asking, number) for number in range(CLIENTS)]
        try:
            yield answers
        finally:
            stop.set()
        for client in clients:
            client.result(60)


def _ask(cluster: SpawnedCluster, number: int) -> Answer:
    """Over HTTP for every other one."""
    prompt, sampling = PROMPT[number:] + PROMPT[:number], {**SAMPLING, "seed": number}
    if number % 2:
        return streamed(cluster, prompt, **sampling)
    with Client(cluster.grpc_address) as client:
        return collected(client, prompt, **sampling)


def test_a_replica_that_there_is_not_is_refused(two_and_two: SpawnedCluster) -> None:
    status, body = post(two_and_two, b"", "/v1/replicas/nobody/drain")
    assert (status, body["error"]["param"]) == (400, "replica")
    assert "there is no replica nobody; there are: " in body["error"]["message"]
    assert all(replica["id"] in body["error"]["message"] for replica in replicas(two_and_two))
