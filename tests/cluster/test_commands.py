"""The installed command, and a client that finds the service by reflection."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml
from cluster_kit import all_over_grpc, over_grpc, replicas
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

PROMPT = "The old house stood"


def bifolio(*arguments: object, given: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("bifolio")), *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_reflection_names_the_service_and_its_messages(two_and_two: SpawnedCluster) -> None:
    with grpc.insecure_channel(two_and_two.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "bifolio.v1.Inference" in database.get_services()
        file = database.FindFileContainingSymbol("bifolio.v1.Inference")
        (service,) = file.service
        assert {method.name for method in service.method} == {"Generate", "Cancel", "ListModels"}
        assert "GenerateRequest" in {message.name for message in file.message_type}


def test_both_doors_list_the_model(two_and_two: SpawnedCluster) -> None:
    with Client(two_and_two.grpc_address) as client:
        (model,) = client.models()
    assert (model.id, model.context_length) == ("glassllm", 128)
    status, listed = two_and_two.get("/v1/models")
    assert (status, [each["id"] for each in listed["data"]]) == (200, ["glassllm"])
    assert listed["data"][0]["max_model_len"] == 128
    assert two_and_two.get("/v1/models/glassllm") == (200, listed["data"][0])
    status, health = two_and_two.get("/health")
    assert (status, health["status"]) == (200, "ok")


def test_generate_prints_the_answer_and_what_it_cost(two_and_two: SpawnedCluster) -> None:
    expected = over_grpc(two_and_two, PROMPT, max_tokens=20, temperature=0.0).text
    flags = ["--address", two_and_two.grpc_address, "--max-tokens", 20, "--temperature", 0]
    done = bifolio("generate", PROMPT, *flags)
    assert done.stdout == expected + "\n"
    assert re.search(r"\d+ \+ 20 tokens, length, .*, KV blocks moved: 1 ", done.stderr), done.stderr
    piped = bifolio("generate", "-", *flags, "--quiet", given=PROMPT)
    assert (piped.stdout, piped.stderr) == (expected + "\n", "")


def test_generate_prints_each_choice(two_and_two: SpawnedCluster) -> None:
    flags = ["--address", two_and_two.grpc_address, "--max-tokens", 12, "--seed", 5, "--ignore-eos"]
    expected = all_over_grpc(two_and_two, PROMPT, max_tokens=12, seed=5, ignore_eos=True, n=3)
    done = bifolio("generate", PROMPT, *flags, "-n", 3)
    assert done.stdout == "".join(f"[{i}] {answer.text}\n" for i, answer in enumerate(expected))
    assert " + 36 tokens, length, " in done.stderr


def test_cancel_takes_any_name(two_and_two: SpawnedCluster) -> None:
    address = ["--address", two_and_two.grpc_address]
    assert bifolio("cancel", "never/asked", *address).stdout == "never/asked: cancelled\n"
    assert "allowed: 1 to 128" in bifolio("cancel", "a#1", *address, status=1).stderr
    refused = bifolio("generate", PROMPT, "--request-id", "never/asked", *address, status=1)
    assert "request never/asked was cancelled" in refused.stderr


def test_generate_says_what_is_wrong(two_and_two: SpawnedCluster) -> None:
    address = ["--address", two_and_two.grpc_address]
    assert "max_tokens is 0" in bifolio("generate", PROMPT, *address, "--max-tokens", 0, status=1).stderr
    assert "'other' is not served" in bifolio("generate", PROMPT, *address, "--model", "other", status=1).stderr
    nobody = bifolio("generate", PROMPT, "--address", "127.0.0.1:1", status=1)
    assert nobody.stderr == "bifolio: nothing answers at 127.0.0.1:1; is `bifolio serve` running there?\n"
    bifolio("generate", status=2)


def test_status_shows_every_replica(two_and_two: SpawnedCluster) -> None:
    over_grpc(two_and_two, PROMPT, max_tokens=1)
    address = ["--address", f"127.0.0.1:{two_and_two.http_port}"]
    shown = json.loads(bifolio("status", *address, "--json").stdout)
    assert shown["model"] == "glassllm"
    assert sorted(r["role"] for r in shown["replicas"]) == ["decode", "decode", "prefill", "prefill"]
    table = bifolio("status", *address).stdout
    for replica in replicas(two_and_two):
        assert replica["id"] in table
    assert re.search(r"^cache: \d+ of \d+ tokens \(", table, re.MULTILINE), table
    assert re.search(r"^long: \d+ requests?, split: ", table, re.MULTILINE), table
    assert "does not answer" in bifolio("status", "--address", "127.0.0.1:1", status=1).stderr


def test_models_and_configuration() -> None:
    assert "smollm2-135m" in bifolio("models", "list").stdout
    assert "did you mean smollm2-135m?" in bifolio("models", "pull", "smolm2", status=1).stderr
    assert yaml.safe_load(bifolio("config", "show").stdout)["pools"]["prefill"]["replicas"] == 1
    schema = json.loads(bifolio("config", "schema").stdout)
    assert set(schema["properties"]) == {"model", "engine", "pools", "kv", "ingress", "redis", "http", "grpc"}


def test_config_check_names_the_nearest_field(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: {prefill: {replicas: 0}}\n")
    assert bifolio("config", "check", file).stdout == f"{file}: no mistake found\n"
    file.write_text("pools: {prefil: {replicas: 0}}\n")
    wrong = bifolio("config", "check", file, status=1)
    assert "pools.prefil: unknown name; did you mean pools.prefill?" in wrong.stderr
    assert "did you mean pools.prefill?" in bifolio("serve", file, status=1).stderr
