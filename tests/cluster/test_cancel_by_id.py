"""A request is given up by its name: before it comes, while it runs, after it has ended, over every door."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_kit import fresh, over_grpc, post, replicas, settle, wait_until

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster
from bifolio.protos.errors import InvalidRequest, Revoked

pytestmark = pytest.mark.cluster

LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
PROMPT = [1000 + 7 * i % 900 for i in range(40)]


def over_the_wire(cluster: SpawnedCluster, id: str) -> None:
    with Client(cluster.grpc_address) as client:
        client.cancel(id)


def over_http(cluster: SpawnedCluster, id: str) -> None:
    assert post(cluster, b"", f"/v1/requests/{id}/cancel") == (200, {"id": id, "cancelled": True})


def by_command(cluster: SpawnedCluster, id: str) -> None:
    command = [sys.executable, "-P", "-m", "bifolio.cluster.cli", "cancel", id, "--address", cluster.grpc_address]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == f"{id}: cancelled\n"
    )


Cancel = Callable[[SpawnedCluster, str], None]
CANCELS: list[Cancel] = [over_the_wire, over_http, by_command]


@pytest.mark.parametrize("cancel", CANCELS)
def test_one_that_comes_later_is_refused(smollm2: SpawnedCluster, cancel: Cancel) -> None:
    id = f"req/{fresh()}"
    cancel(smollm2, id)
    with pytest.raises(Revoked, match=f"request {id} was cancelled"):
        over_grpc(smollm2, PROMPT, max_tokens=1, request_id=id)
    for stream in (False, True):
        status, body = post(smollm2, {"prompt": PROMPT, "stream": stream}, **{"X-Request-Id": id})
        assert (status, body["error"]["type"]) == (499, "request_cancelled")
    settle(smollm2, 1, 1)


@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("n", [1, 3])
def test_one_that_is_answered_ends(smollm2: SpawnedCluster, cancel: Cancel, n: int) -> None:
    id = fresh()
    with Client(smollm2.grpc_address) as client:
        stream = client.generate(PROMPT, request_id=id, n=n, **LONG)
        assert next(stream).request_id == id
        cancel(smollm2, id)
        with pytest.raises(Revoked, match=f"request {id} was cancelled"):
            list(stream)
    settle(smollm2, 1, 1)


def test_a_stream_of_events_ends_with_the_error(smollm2: SpawnedCluster) -> None:
    id = fresh()
    with _asked(smollm2, id, stream=True) as connection, connection.getresponse() as response:
        assert json.loads(response.readline().removeprefix(b"data: "))["id"] == id
        over_http(smollm2, id)
        *_, last = filter(None, response.read().split(b"\n"))
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "request_cancelled"
    settle(smollm2, 1, 1)


def test_before_the_first_byte_it_is_a_status(smollm2: SpawnedCluster) -> None:
    id = fresh()
    with _asked(smollm2, id) as connection:
        wait_until(lambda: any(r["active"] for r in replicas(smollm2, "decode")), "it is not decoding")
        over_the_wire(smollm2, id)
        response = connection.getresponse()
        assert response.status == 499
        assert response.headers["X-Request-Id"] == id
        assert json.loads(response.read())["error"]["message"] == f"request {id} was cancelled"
    settle(smollm2, 1, 1)


def test_one_that_has_ended_may_be_cancelled_too(smollm2: SpawnedCluster) -> None:
    id = fresh()
    assert over_grpc(smollm2, PROMPT, max_tokens=2, request_id=id).finish == "length"
    assert over_grpc(smollm2, PROMPT, max_tokens=2, request_id=id).finish == "length", "a name may be used again"
    over_the_wire(smollm2, id)
    with pytest.raises(Revoked):
        over_grpc(smollm2, PROMPT, max_tokens=2, request_id=id)


def test_a_name_in_use_is_refused(smollm2: SpawnedCluster) -> None:
    id = fresh()
    with (
        Client(smollm2.grpc_address) as client,
        contextlib.closing(client.generate(PROMPT, request_id=id, **LONG)) as stream,
    ):
        next(stream)
        with pytest.raises(InvalidRequest, match="belongs to a request that is still open") as refused:
            over_grpc(smollm2, PROMPT, max_tokens=1, request_id=id)
        assert refused.value.field == "request_id"
        assert next(stream).request_id == id, "the first goes on"
    settle(smollm2, 1, 1)


def test_the_name_that_an_answer_tells_can_be_cancelled(smollm2: SpawnedCluster) -> None:
    with Client(smollm2.grpc_address) as client:
        stream = client.generate(PROMPT, **LONG)
        over_http(smollm2, next(stream).request_id)
        with pytest.raises(Revoked):
            list(stream)
    status, body = post(smollm2, {"prompt": PROMPT, "max_tokens": 1})
    assert (status, bool(body["id"])) == (200, True)
    settle(smollm2, 1, 1)


@contextlib.contextmanager
def _asked(cluster: SpawnedCluster, id: str, **fields: Any) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(cluster.connect()) as connection:
        body = json.dumps({"prompt": PROMPT, **LONG, **fields})
        connection.request("POST", "/v1/completions", body, {"X-Request-Id": id})
        yield connection
