"""A model's weights, from a GGUF file or from a Hugging Face directory with safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .gguf_file import GgufFile
from .gguf_llama import read_tensor
from .model_config import LlamaConfig
from .model_files import check_model, safetensors_files


def load(source: Path, dtype: torch.dtype) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The configuration and every tensor of `config.tensors()`, under that name, as `dtype` on the CPU.

    Tensors are converted one at a time. From a quantised file float32 is what its numbers mean, never rounded on the
    way. Raises what `check_model` raises.
    """
    config = check_model(source)
    read = _gguf_reader(source, config) if source.is_file() else _safetensors_reader(source)
    return config, {name: read(name).to(dtype) for name in config.tensors()}


def _gguf_reader(source: Path, config: LlamaConfig) -> Callable[[str], Tensor]:
    file = GgufFile(source)
    return lambda name: torch.from_numpy(read_tensor(file, config, name))


def _safetensors_reader(source: Path) -> Callable[[str], Tensor]:
    files: list[Any] = [safe_open(path, framework="pt") for path in safetensors_files(source)]
    owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        tensor: Tensor = owner[name].get_tensor(name)
        return tensor

    return read
