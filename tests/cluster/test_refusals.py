"""What a cluster refuses: mistakes, each with the field and what is allowed, and whoever is not on this machine."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from bad_inputs import Model, bad_inputs
from cluster_kit import environment_of, frozen, over_grpc, post, replicas, whole

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
    ({"prompt": "a", "n": 17}, 400, "n", None, "allowed: 1 to 16"),
    ({"prompt": "a", "n": 2, "best_of": 3}, 400, "best_of", None, "not supported yet, allowed: 2"),
    ({"prompt": "a", "priority": 101}, 400, "priority", None, "allowed: -100 to 100"),
    ({"prompt": "a", "cache_salt": "x" * 257}, 400, "cache_salt", None, "at most 256"),
    ({"prompt": "a", "stop": [""]}, 400, "stop", None, "1 to 1000"),
    ({"prompt": "\ud83d"}, 400, "prompt", None, "half a surrogate pair"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs", None, "allowed: 0 to 20"),
    ({"prompt": "a", "logit_bias": {"4096": 1}}, 400, "logit_bias", None, "names token 4096"),
    ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens", None, "0 to max_tokens, which is 16"),
    (b'{"prompt": "a", "prompt": "b"}', 400, "prompt", None, "given twice"),
    (b'{"prompt": "a", "user": NaN}', 400, "user", None, "a finite number"),
    (b'{"prompt": "a"', 400, "body", None, "the body is not JSON"),
    (b"[1]", 400, "body", None, "an object"),
    (b'{"prompt": "\xff"}', 400, "body", None, "not UTF-8"),
    (b'{"prompt": "' + b"a" * (1 << 20), 400, "body", None, "more than 1048576 bytes"),
]
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])


def sampled(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=pb.Sampling(**fields))


# request, status, field, part of the details
OVER_GRPC: list[tuple[pb.GenerateRequest, str, str, str]] = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt", "prompt is empty"),
    (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt", "prompt is empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 128)), "INVALID_ARGUMENT", "prompt", "context holds 128"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "INVALID_ARGUMENT", "prompt", "prompt[0] is -1"),
    (pb.GenerateRequest(text="a", model="gpt-4"), "NOT_FOUND", "model", "serves glassllm"),
    (pb.GenerateRequest(text="a", prompt_logprobs=-1), "INVALID_ARGUMENT", "prompt_logprobs", "0 to 20"),
    (pb.GenerateRequest(text="a", n=0), "INVALID_ARGUMENT", "n", "allowed: 1 to 16"),
    (pb.GenerateRequest(text="a", request_id="a#1"), "INVALID_ARGUMENT", "request_id", "128 visible ASCII"),
    (pb.GenerateRequest(text="a", priority=-101), "INVALID_ARGUMENT", "priority", "-100 to 100"),
    (pb.GenerateRequest(text="a", user="x" * 257), "INVALID_ARGUMENT", "user", "at most 256"),
    (pb.GenerateRequest(chat=CHAT), "INVALID_ARGUMENT", "messages", "no chat template"),
    (sampled(max_tokens=0), "INVALID_ARGUMENT", "max_tokens", "max_tokens is 0"),
    (sampled(top_k=-2), "INVALID_ARGUMENT", "top_k", "top_k is -2"),
    (sampled(stop=list("abcde")), "INVALID_ARGUMENT", "stop", "at most 4"),
    (sampled(temperature=float("nan")), "INVALID_ARGUMENT", "temperature", "temperature is nan"),
    (sampled(logit_bias={4096: 1.0}), "INVALID_ARGUMENT", "logit_bias", "names token 4096"),
    (sampled(min_tokens=17), "INVALID_ARGUMENT", "min_tokens", "0 to max_tokens"),
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


@pytest.mark.parametrize(("request_", "status", "field", "details"), OVER_GRPC, ids=lambda value: str(value)[:40])
def test_a_mistake_over_grpc_is_named(
    single_pool: SpawnedCluster, request_: pb.GenerateRequest, status: str, field: str, details: str
) -> None:
    with grpc.insecure_channel(single_pool.grpc_address) as channel:
        stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request_, metadata=APPLICATION))
    error: Any = refused.value
    assert error.code().name == status
    assert details in error.details()
    assert dict(error.trailing_metadata())["bifolio-field"] == field


def send_once(cluster: SpawnedCluster, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    with contextlib.closing(cluster.connect()) as connection:
        return send(connection, method, path, body, **headers)


def send(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, Any]:
    connection.request(method, path, body, {"Content-Type": "application/json", **headers})
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


@pytest.mark.parametrize("kind", ["chat", "none"])
def test_a_thousand_mistakes_are_refused_with_the_field_and_no_replica_is_asked(
    smollm2: SpawnedCluster, single_pool: SpawnedCluster, kind: str
) -> None:
    """No replica answers meanwhile: whatever reached one would wait."""
    cluster = smollm2 if kind == "chat" else single_pool
    listed = cluster.get("/v1/models")[1]["data"][0]
    vocab_size = 49152 if kind == "chat" else 1024
    inputs = bad_inputs(Model(listed["max_model_len"], vocab_size, chat=kind == "chat"), 1000)
    before = whole(cluster, "The old house", max_tokens=4, temperature=0.0).text
    connections = [cluster.connect() for _ in range(4)]
    wrong = []
    for begin in range(0, len(inputs), 100):  # no longer at once, or their silence is noticed
        with frozen([replica["pid"] for replica in replicas(cluster)]):
            for number, bad in enumerate(inputs[begin : begin + 100]):
                status, content = send(connections[number % 4], "POST", bad.path, bad.body)
                error = content.get("error", {})
                if status not in (400, 404) or error["param"] != bad.param or not error["message"]:
                    wrong.append(f"{bad}: {status} {content}")
    for connection in connections:
        connection.close()
    assert not wrong, f"{len(wrong)} of {len(inputs)}:\n" + "\n".join(wrong[:20])
    assert whole(cluster, "The old house", max_tokens=4, temperature=0.0).text == before


def test_a_chat_with_a_model_that_has_no_template_is_pointed_to_completions(single_pool: SpawnedCluster) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    for path in ("/v1/chat/completions", "/tokenize"):
        status, content = send_once(single_pool, "POST", path, body)
        assert (status, content["error"]["param"]) == (400, "messages")
        assert "/v1/completions" in content["error"]["message"]


def test_a_name_that_is_none_is_refused(single_pool: SpawnedCluster) -> None:
    for name in ("a b", "a#1", "x" * 129):
        status, content = send_once(
            single_pool, "POST", "/v1/completions", b'{"prompt": "a"}', **{"X-Request-Id": name}
        )
        assert (status, content["error"]["param"]) == (400, "X-Request-Id")
    status, content = send_once(single_pool, "POST", "/v1/requests/a%231/cancel")
    assert (status, content["error"]["param"]) == (400, "id")


def test_an_encoded_body_is_refused(single_pool: SpawnedCluster) -> None:
    headers = {"Content-Encoding": "gzip"}
    status, content = send_once(single_pool, "POST", "/v1/completions", gzip.compress(b"{}"), **headers)
    assert (status, content["error"]["param"]) == (400, "body")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completion", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("PATCH", "/tokenize", 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_an_unknown_path_or_method_says_what_is_served(
    single_pool: SpawnedCluster, method: str, path: str, status: int
) -> None:
    given, content = send_once(single_pool, method, path)
    assert given == status
    assert f"{method} {path} is not served here; allowed: POST /v1/completions" in content["error"]["message"]


def test_an_unknown_model_is_not_found(single_pool: SpawnedCluster) -> None:
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
