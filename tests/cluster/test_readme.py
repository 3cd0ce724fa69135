"""The README's examples, run as they stand but for ports and the model's name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_kit import post

from bifolio.cluster.config import load
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

README = (Path(__file__).parents[2] / "README.md").read_text()


def examples(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} example"
    return found


def test_the_python_example_prints_an_answer(smollm2: SpawnedCluster):
    (code,) = examples("python")
    code = code.replace("127.0.0.1:9000", smollm2.grpc_address)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) > 5


def test_the_yaml_example_is_a_configuration(tmp_path: Path):
    (text,) = examples("yaml")
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert load(file).pools.decode.replicas == 2


def test_the_curl_example_asks_what_is_served(smollm2: SpawnedCluster):
    ((path, body),) = (
        found for shell in examples("sh") for found in re.findall(r"localhost:8000(\S+).*?-d '(.*?)'", shell, re.DOTALL)
    )
    asked = json.loads(body)
    status, answer = post(smollm2, {**asked, "model": "smollm2", "stream": False}, path)
    assert status == 200
    assert 0 < answer["usage"]["completion_tokens"] <= asked["max_tokens"]


def test_the_commands_exist(smollm2: SpawnedCluster):
    """Those that ask a cluster are run, the others parsed as far as --help."""
    lines = [line.split("#")[0] for shell in examples("sh") for line in shell.splitlines()]
    lines = [line for line in lines if line.startswith("bifolio ")]
    assert len(lines) >= 7
    for line in lines:
        _, *words = shlex.split(line)
        grpc = smollm2.grpc_address
        asks = {"generate": grpc, "cancel": grpc, "status": f"127.0.0.1:{smollm2.http_port}"}
        more = ["--address", asks[words[0]]] if words[0] in asks else ["--help"]
        command = [sys.executable, "-P", "-m", "bifolio.cluster.cli", *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
