"""The models that engines are measured with: SmolLM2 where `bifolio models` has it, and Llamas of random weights.

A step takes the same time whatever the weights are; what they would say is nobody's business here. They are written as
a Hugging Face directory, which is how a user's model comes, and read again by what reads a user's model.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_device import Bench
from gpu_rows import Numbers
from torch import Tensor


@dataclass(frozen=True)
class Llama:
    """A shape, all its parameters in bfloat16; embedding and head are one matrix."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    theta: float = 1e4

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, inner, kv = self.hidden, self.intermediate, self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocabulary, h)
        for i in range(self.layers):
            parts = {"q_proj": (h, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, h)}
            for name, shape in parts.items():
                yield f"model.layers.{i}.self_attn.{name}.weight", shape
            for name, shape in {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}.items():
                yield f"model.layers.{i}.mlp.{name}.weight", shape
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{name}.weight", (h,)
        yield "model.norm.weight", (h,)


SHAPES = {
    "Llama 1B": Llama(16, 2048, 8192, 32, 8, 128256, 131072, 5e5),  # that of Llama 3.2 1B
    "SmolLM2": Llama(30, 576, 1536, 9, 3, 49152, 8192, 1e5),  # that of SmolLM2-135M
    "tiny Llama": Llama(2, 64, 96, 2, 1, 256, 512),
}
RANDOM = "random weights"


def find(bench: Bench, name: str) -> tuple[Path, str]:
    """Where the model is, and whose weights it has; written now where nobody has it."""
    if name == "SmolLM2":
        try:
            from bifolio.cluster.models import resolve

            return resolve("smollm2-135m"), "SmolLM2-135M-Instruct from a Q4_1 file"
        except Exception as error:  # no package, no file: what there is not is not measured
            why = next(iter(str(error).splitlines()), "")
            return written(bench, name), f"{RANDOM} in its shape ({why})"
    return written(bench, name), RANDOM


def written(bench: Bench, name: str) -> Path:
    """A directory that is there as a whole or not at all; a process that goes on behind another finds what it left."""
    from safetensors.torch import save_file

    directory = bench.scratch / name.replace(" ", "-")
    if directory.exists():
        return directory
    parts = directory.with_suffix(".part")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    shape = SHAPES[name]
    torch.manual_seed(0)
    weights = {key: _drawn(bench, key, size) for key, size in shape.shapes()}
    save_file(weights, parts / "model.safetensors")
    (parts / "config.json").write_text(json.dumps(shape.config, indent=1), encoding="utf-8")
    parts.rename(directory)
    return directory


def _drawn(bench: Bench, name: str, shape: tuple[int, ...]) -> Tensor:
    """So that layers add more than the embedding has, and answers are not the last token again and again."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 0.02 if "embed" in name else 1 / math.sqrt(shape[1])
    return bench.noise(*shape).mul_(scale).cpu()


def writes(bench: Bench, name: str) -> Callable[[None], Numbers]:
    """A row of its own: it is no part of any start-up."""

    def write(_: None) -> Numbers:
        began = time.perf_counter()
        path, whose = find(bench, name)
        files = [path] if path.is_file() else list(path.iterdir())
        size = sum(file.stat().st_size for file in files)
        return {"weights": whose, "GB": size / 1e9, "s": time.perf_counter() - began}

    return write
