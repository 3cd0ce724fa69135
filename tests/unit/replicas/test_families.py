"""Every family against transformers in float32, in the steps of an engine; and in exact arithmetic against itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import NATIVE
from families import FAMILIES, logits_in_steps, reference, tokens, write_gguf
from torch import Tensor

from bifolio.cluster.app import replica_environment
from bifolio.cluster.config import ClusterConfig
from bifolio.kernels import Backend, using
from bifolio.replicas.llama import Llama
from bifolio.replicas.model_files import model_config
from bifolio.replicas.rope_frequencies import rope_frequencies
from bifolio.replicas.weights import load

SEQUENCES = tokens(60, 47, 33)
STEPS = [
    [(0, 17)],
    [(1, 1), (0, 5), (2, 8)],
    [(2, 1), (1, 40), (0, 30)],
    *[[(2, 1), (0, 1), (1, 1)] for _ in range(6)],
    [(2, 18), (0, 2)],
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These products are small, and threads that wait for each other take the time of other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (directory, transformers model), each made once."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        path, model = tmp_path_factory.mktemp(name), reference(name)
        model.save_pretrained(path, max_shard_size="1GB" if "windows" in name else "100KB")  # one file, or several
        return path, model

    return make


def ours(path: Path) -> list[Tensor]:
    return logits_in_steps(Llama(*load(path, torch.float32)), SEQUENCES, STEPS)


def theirs(model: Any, sequence: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([sequence])).logits[0]
    return logits


@pytest.mark.parametrize("backend", [NATIVE[0], "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_at_every_position_are_those_of_transformers(made: Any, name: str, backend: Backend) -> None:
    path, model = made(name)
    with using(backend):
        logits = ours(path)
    for got, sequence in zip(logits, SEQUENCES, strict=True):
        torch.testing.assert_close(got, theirs(model, sequence), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_frequencies_are_those_of_transformers_to_the_bit(made: Any, name: str) -> None:
    path, model = made(name)
    config = model_config(path)
    frequencies, scale = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert scale == model.model.rotary_emb.attention_scaling


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_transformers_4_says_the_same(made: Any, name: str, tmp_path: Path) -> None:
    path, _ = made(name)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if name in ("qwen2", "qwen2-windows", "smollm3"):
        del config["layer_types"]
    if name == "smollm3":  # left out by transformers 4 where it is what the class has
        del config["no_rope_layers"], config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_config(tmp_path) == model_config(path)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama-biases", "llama"),
        ("llama-linear", "llama"),
        ("llama-yarn", "llama"),
        ("mistral-full", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_a_gguf_file_of_the_same_weights_gives_the_same_bits(
    made: Any, name: str, architecture: str, tmp_path: Path
) -> None:
    path, model = made(name)
    gguf = write_gguf(tmp_path / "model.gguf", model, architecture)
    assert model_config(gguf) == model_config(path)
    assert all(torch.equal(a, b) for a, b in zip(ours(gguf), ours(path), strict=True))


def test_the_divisors_of_a_gguf_file_are_its_llama3_scaling(made: Any, tmp_path: Path) -> None:
    _, model = made("llama-llama3")
    gguf = write_gguf(tmp_path / "model.gguf", model, "llama")
    torch.testing.assert_close(ours(gguf)[0], theirs(model, SEQUENCES[0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "smollm3-windows"])
def test_weights_load_and_compute_in_each_dtype(made: Any, name: str, dtype: torch.dtype) -> None:
    config, weights = load(made(name)[0], dtype)
    assert {w.dtype for w in weights.values()} == {dtype}
    got = logits_in_steps(Llama(config, weights), SEQUENCES, STEPS)[0]
    want = theirs(made(name)[1], SEQUENCES[0])
    assert got.dtype == torch.float32
    assert (got - want).norm() / want.norm() < {torch.bfloat16: 0.1, torch.float16: 0.01, torch.float32: 1e-5}[dtype]


@pytest.mark.parametrize(("models", "threads", "backend", "options"), [
    ("12", 1, NATIVE[0], ("float32",)),
    ("2", 2, NATIVE[0], ("bfloat16",)),
    ("12", 1, NATIVE[0], ("bfloat16", "int8")),
    ("2", 1, NATIVE[-1], ("bfloat16",)),
    ("4", 1, "torch", ("float32",)),
    ("1", 2, "torch", ("float32",)),
])  # fmt: skip
def test_exact_logits_have_the_same_bits_however_they_are_computed(
    models: str, threads: int, backend: str, options: tuple[str, ...]
) -> None:
    """In a process of its own, because MKL reads its environment when torch is loaded."""
    config = ClusterConfig.model_validate({"engine": {"exact": True, "threads": threads}})
    script = [sys.executable, str(Path(__file__).with_name("exact_families.py")), models, str(threads), backend]
    # threads that spin would starve each other beside other tests
    environment = os.environ | replica_environment(config) | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([*script, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{models} models, {backend}, torch.get_num_threads() = {threads}: equal to the bit\n"
