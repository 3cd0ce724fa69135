"""What a cluster refuses: mistakes, each with the field and what is allowed, and whoever is not on this machine."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from cluster_kit import environment_of, over_grpc, post, replicas, whole

from bifolio.cluster.spawn import SpawnedCluster
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.cluster

APPLICATION = (("application", "bifolio"),)

# body, status, param, code, part of the message
OVER_HTTP: list[tuple[Any, int, str | None, str | None, str]] = [
    ({"prompt": ""}, 400, "prompt", None, "prompt is empty"),
    ({"prompt": []}, 400, "prompt", None, "prompt is empty"),
    ({}, 400, "prompt", None, "prompt: is missing"),
    ({"prompt": [5] * 128}, 400, "prompt", "context_length_exceeded", "context holds 128"),
    ({"prompt": [5] * 100, "max_tokens": 29}, 400, "max_tokens", "context_length_exceeded", "129 together"),
    ({"prompt": [5, 4096]}, 400, "prompt", None, "prompt[1] is 4096; token ids are 0 to"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model", "model_not_found", "serves glassllm"),
    ({"prompt": "a", "max_token": 1}, 400, "max_token", None, "did you mean max_tokens?"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None, "allowed: 1 to 128"),
    ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", None, "a whole number"),
    ({"prompt": "a", "temperature": 3}, 400, "temperature", None, "allowed: 0 to 2"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p", None, "above 0 to 1"),
    ({"prompt": "a", "n": 2}, 400, "n", None, "not supported yet"),
    ({"prompt": "a", "stop": [""]}, 400, "stop", None, "1 to 1000"),
    ({"prompt": "\ud83d"}, 400, "prompt", None, "half a surrogate pair"),
    (b'{"prompt": "a"', 400, None, None, "the body is not JSON"),
    (b"[1]", 400, None, None, "an object"),
]
# request, status, part of the details
OVER_GRPC: list[tuple[pb.GenerateRequest, str, str]] = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt is empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 128)), "INVALID_ARGUMENT", "context holds 128"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "INVALID_ARGUMENT", "prompt[0] is -1"),
    (pb.GenerateRequest(text="a", model="gpt-4"), "NOT_FOUND", "serves glassllm"),
    (pb.GenerateRequest(text="a", sampling=pb.Sampling(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens is 0"),
    (pb.GenerateRequest(text="a", sampling=pb.Sampling(top_k=-1)), "INVALID_ARGUMENT", "top_k is -1"),
    (pb.GenerateRequest(text="a", sampling=pb.Sampling(stop=list("abcde"))), "INVALID_ARGUMENT", "at most 4"),
]


@pytest.fixture(autouse=True)
def the_next_good_request_works(single_pool: SpawnedCluster) -> Iterator[None]:
    yield
    assert whole(single_pool, "The old house", max_tokens=2).finish == "length"
    assert over_grpc(single_pool, "The old house", max_tokens=2).finish == "length"


@pytest.mark.parametrize(("body", "status", "param", "code", "message"), OVER_HTTP, ids=lambda value: str(value)[:40])
def test_a_mistake_over_http_is_named(
    single_pool: SpawnedCluster, body: Any, status: int, param: str | None, code: str | None, message: str
) -> None:
    for stream in (False, True):
        asked = {**body, "stream": stream} if isinstance(body, dict) else body
        given, content = post(single_pool, asked)
        error = content["error"]
        assert (given, error["param"], error["code"]) == (status, param, code)
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]


@pytest.mark.parametrize(("request_", "status", "details"), OVER_GRPC, ids=lambda value: str(value)[:40])
def test_a_mistake_over_grpc_is_named(
    single_pool: SpawnedCluster, request_: pb.GenerateRequest, status: str, details: str
) -> None:
    with grpc.insecure_channel(single_pool.grpc_address) as channel:
        stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request_, metadata=APPLICATION))
    error: Any = refused.value
    assert error.code().name == status
    assert details in error.details()


def test_an_unknown_path_is_not_found(single_pool: SpawnedCluster) -> None:
    assert single_pool.get("/v1/nothing")[0] == 404
    status, body = single_pool.get("/v1/models/gpt-4")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


# Nobody from another machine gets an answer. This machine's own outward address stands for one.


@pytest.fixture(scope="module")
def outward() -> str:
    listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    found = [address for address in listed if ":" not in address]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def _ports(cluster: SpawnedCluster) -> list[int]:
    """Every port that the cluster's Serve may listen on, whatever its protocol."""
    environment = environment_of(replicas(cluster)[0]["pid"])
    named = {name: int(value) for name, value in environment.items() if "_PORT" in name and value.isdecimal()}
    ranges = [
        range(
            named[f"RAY_SERVE_DIRECT_INGRESS_MIN_{door}_PORT"], named[f"RAY_SERVE_DIRECT_INGRESS_MAX_{door}_PORT"] + 1
        )
        for door in ("HTTP", "GRPC")
    ]
    return sorted({cluster.http_port, cluster.grpc_port, *named.values(), *ranges[0], *ranges[1]})


def test_no_port_answers_http_from_another_machine(single_pool: SpawnedCluster, outward: str) -> None:
    def ask(port: int) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(outward, port, timeout=10)
        try:
            connection.request("GET", "/v1/models", headers={"X-Forwarded-For": "127.0.0.1"})
            with connection.getresponse() as response:
                return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    ports = _ports(single_pool)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(ports, pool.map(ask, ports), strict=True))
    assert answers[single_pool.http_port] == answers[single_pool.grpc_port] == (0, b"")  # nobody listens there
    served = {port: answer for port, answer in answers.items() if answer[0] == 200 or b"glassllm" in answer[1]}
    assert not served
    for status, body in answers.values():
        if status == 403:
            assert json.loads(body)["error"]["type"] == "permission_error"


def test_no_port_answers_grpc_from_another_machine(single_pool: SpawnedCluster, outward: str) -> None:
    def ask(port: int) -> str:
        with grpc.insecure_channel(f"{outward}:{port}") as channel:
            stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
            codes = []
            for call in (
                lambda: stub.ListModels(pb.ListModelsRequest(), metadata=APPLICATION, timeout=10),
                lambda: list(stub.Generate(pb.GenerateRequest(text="a"), metadata=APPLICATION, timeout=10)),
            ):
                try:
                    call()
                    codes.append("OK")
                except grpc.RpcError as error:
                    refusal: Any = error
                    codes.append(refusal.code().name)
            return " ".join(codes)

    ports = _ports(single_pool)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(ports, pool.map(ask, ports), strict=True))
    assert answers[single_pool.http_port] == answers[single_pool.grpc_port] == "UNAVAILABLE UNAVAILABLE"
    assert "PERMISSION_DENIED PERMISSION_DENIED" in answers.values(), "the replica's own port was not found"
    assert not {port: codes for port, codes in answers.items() if "OK" in codes}
