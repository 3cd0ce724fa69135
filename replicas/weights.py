"""A model's weights, from a GGUF file or from a Hugging Face directory with safetensors, to where they are used.

CPU      one tensor at a time; those stored in the dtype asked for stay mapped, until the model packs them
others   from the mapped file to the device as they are stored, several at once, and converted there
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bifolio.protos.errors import ConfigError

from .gguf_file import GgufFile
from .gguf_llama import read_tensor
from .model_config import LlamaConfig
from .model_files import check_model, refusing_nonsense, safetensors_files

logger = logging.getLogger(__name__)

# Tensors on their way to a device at once. Each keeps a core busy (page faults, the driver's copy into memory that the
# device reaches), so one alone leaves disk and bus idle. More would take memory: a tensor under way may be there twice.
AT_ONCE = 4
REPORT_S = 5.0

CPU = torch.device("cpu")
Stored = Mapping[str, tuple[Path, Callable[[str], Tensor]]]  # a tensor's name -> its file, and what reads it there


class Progress:
    """When a load says how far it is, and what. A load shorter than REPORT_S says nothing."""

    def __init__(self, total: int, now: float) -> None:
        self._total = total
        self._done = 0
        self._began = self._said = now

    def add(self, size: int, now: float) -> str | None:
        """The line to log, `size` bytes later; None while the last one is fresh, and at the end."""
        self._done += size
        if now - self._said < REPORT_S or self._done >= self._total:
            return None
        self._said = now
        return f"weights: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB in {now - self._began:.0f} s"


def load(
    source: Path, dtype: torch.dtype, device: torch.device = CPU, *, at_once: int | None = None
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The configuration and every tensor of `config.tensors()`, under that name and in that order, as `dtype` on
    `device`. `at_once`: how many are under way together; None is one on a CPU, AT_ONCE elsewhere.

    From a quantised file float32 is what its numbers mean, never rounded on the way. Raises what `check_model` raises,
    and ConfigError with the names of the tensor and its file for one that cannot be read or finds no room.
    """
    config = check_model(source)
    shapes = config.tensors()
    stored = _gguf(source, config) if source.is_file() else _safetensors(source)
    at_once = at_once or (1 if device.type == "cpu" else AT_ONCE)

    def one(name: str) -> Tensor:
        file, read = stored[name]
        with refusing_nonsense(file):  # torch's own words may be many lines
            try:
                return read(name).to(device).to(dtype)
            except (SafetensorError, RuntimeError, ValueError, OSError, MemoryError) as error:
                full = isinstance(error, torch.OutOfMemoryError | MemoryError)
                raise ConfigError(
                    f"model: {name} of {file} cannot be brought to {device} as {dtype} ({error}); "
                    + ("use a smaller model or dtype, or more memory" if full else "get the file again")
                ) from error

    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    progress = Progress(sum(sizes.values()), time.monotonic())
    weights: dict[str, Tensor] = {}
    with ThreadPoolExecutor(at_once, "weights") as pool:
        # Both in the order of the names. That of the pool, when one fails, cancels those that have not begun
        tensors = map(one, shapes) if at_once == 1 else pool.map(one, shapes)
        for name, tensor in zip(shapes, tensors, strict=True):
            weights[name] = tensor
            if line := progress.add(sizes[name], time.monotonic()):
                logger.info(line)
    return config, weights


def _gguf(source: Path, config: LlamaConfig) -> Stored:
    file = GgufFile(source)

    def read(name: str) -> Tensor:
        return torch.from_numpy(read_tensor(file, config, name))

    return dict.fromkeys(config.tensors(), (source, read))


def _safetensors(source: Path) -> Stored:
    stored: dict[str, tuple[Path, Callable[[str], Tensor]]] = {}
    for path in safetensors_files(source):
        file: Any = safe_open(path, framework="pt")  # maps it
        stored |= dict.fromkeys(file.keys(), (path, file.get_tensor))
    return stored
