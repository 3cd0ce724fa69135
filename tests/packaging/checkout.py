"""A copy of the source tree to build from: setuptools leaves its traces beside the sources."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ["cluster", "kernels", "kv_manager", "protos", "replicas"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
ISAS = ("avx512", "avx2", "generic") if X86 else ("generic",)


def copy_sources(place: Path) -> Path:
    """Without what a build has made: what a test finds there, it has built."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, place)
    return place


def attempt(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "BIFOLIO_REQUIRE_NATIVE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = attempt(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
