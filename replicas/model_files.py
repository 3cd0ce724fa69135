"""A model's files, without its weights: what it is, whether it is whole, and a name for it.

Everything that can be wrong with a model is found here, before anything starts, as a ConfigError. Needs no torch, so
the command line and the ingress can ask. Text (tokenizer, chat template) is not this module's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bifolio.protos.errors import ConfigError

from .gguf_file import GgufFile
from .gguf_llama import read_gguf, tensor_shapes
from .hf_config import read_hf
from .model_config import LlamaConfig
from .rope_scaling import Divided

Shapes = Mapping[str, tuple[int, ...]]

_INDEX = "model.safetensors.index.json"
_SAMPLE = 1024
_SAMPLE_EVERY = 1 << 20
_MOST_SAMPLES = 4096
_LONGEST = 600  # characters of a message
_NONSENSE = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, RecursionError, OSError)


def model_config(source: Path) -> LlamaConfig:
    """What the model is, without its weights: some milliseconds. Raises ConfigError."""
    with refusing_nonsense(source):
        return _read_config(source)


@contextmanager
def refusing_nonsense(source: Path) -> Iterator[None]:
    """Whatever nonsense in a model's files leads to, wherever it is met, as a ConfigError of one line.

    The readers check what they can name; this is for the rest: a number where a list should be, a thousand brackets.
    """
    try:
        yield
    except ConfigError as error:
        if (line := _one_line(error.message)) == error.message:
            raise
        raise ConfigError(line) from error
    except _NONSENSE as error:
        line = f"model: {source} cannot be read ({type(error).__name__}: {error}); get it again"
        raise ConfigError(_one_line(line)) from error


def _one_line(message: str) -> str:
    """Without what no terminal shows, and without the middle, where the file's own words are, if those are long."""
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 4 :]}"
    if message.isprintable():
        return message
    return "".join(each if each.isprintable() else " " for each in message)


def _read_config(source: Path) -> LlamaConfig:
    if source.is_file():
        return read_gguf(GgufFile(source))
    if not source.is_dir():
        raise ConfigError(f"model: {source} does not exist; give a .gguf file or a directory with config.json")
    return read_hf(read_json(source / "config.json"))


def check_model(source: Path) -> LlamaConfig:
    """The configuration of a model whose tensors are all there, in the shapes it asks for.

    Raises ConfigError for another architecture, and for tensors that are missing, misshapen or not known.
    """
    config = model_config(source)
    with refusing_nonsense(source):
        shapes = tensor_shapes(GgufFile(source)) if source.is_file() else _safetensors_shapes(source)
        _compare(source, config.tensors(), {n: shape for n, shape in shapes.items() if not _redundant(n, config)})
    return config


def fingerprint(source: Path) -> str:
    """16 hexadecimal digits that name these weights and this configuration, equal in every process and
    machine.

    SHA-256 over the configuration and, for each weight file, its name, size and 1 KiB of every MiB (at most
    4096 samples). Training, merging an adapter or quantising anew changes nearly every number of the
    matrices, so another model is told apart without reading gigabytes at each start. It guards against
    mistakes, not against someone who forges a file.
    """
    digest = hashlib.sha256(json.dumps(asdict(model_config(source)), sort_keys=True).encode())
    for file in [source] if source.is_file() else safetensors_files(source):
        size = file.stat().st_size
        # a file's name is a path of this machine only when it is the model itself
        digest.update(f"\n{'' if file == source else file.name}:{size}\n".encode())
        step = max(_SAMPLE_EVERY, size // _MOST_SAMPLES)
        with file.open("rb") as stream:
            for at in range(0, size, step):
                stream.seek(at)
                digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]


def safetensors_files(source: Path) -> list[Path]:
    """The directory's weight files in one order for every process."""
    index = source / _INDEX
    with refusing_nonsense(source):
        names = _indexed(index) if index.exists() else ["model.safetensors"]
        files = [source / name for name in names]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"model: {file} does not exist; needed is every weight file, also of {_INDEX}")
        return files


def _indexed(index: Path) -> list[str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(f"model: {index} has no weight_map; needed is the name of a file for each tensor")
    return sorted(set(placed.values()))


def _safetensors_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in safetensors_files(source):
        try:
            with safe_open(path, framework="np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigError(f"model: {path} is damaged ({error}); get the file again") from error
    return shapes


def _redundant(name: str, config: LlamaConfig) -> bool:
    """Files may hold the embedding twice, older ones the RoPE frequencies; GGUF's divisors are in the configuration."""
    divided = name == "rope_freqs.weight" and isinstance(config.rope_scaling, Divided)
    return divided or (name == "lm_head.weight" and config.tied) or name.endswith("rotary_emb.inv_freq")


def _compare(source: Path, expected: Shapes, found: Shapes) -> None:
    """One ConfigError with everything that does not fit: whoever repairs a model wants the whole list."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of it" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ConfigError(f"model: the tensors of {source} do not fit its configuration: {shown}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model: {path} holds a {type(content).__name__}; an object is needed")
    return content
