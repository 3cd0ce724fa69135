"""The native kernels under AddressSanitizer and UBSan: no read or write outside of what they are given, nothing
undefined. And a buffer that is too short is found, so the harness can fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from backends import NATIVE

ROOT = Path(__file__).parents[2]
FLAGS = {
    "avx512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni",
    "avx2": "-mavx2 -mfma",
    "generic": "",
}
SANITIZED = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -std=c++17 -fPIC -shared -ffp-contract=off"
ISAS = sorted({NATIVE[0], "generic"})
SCRIPT = Path(__file__).with_name("sanitized.py")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    source = str(ROOT / "kernels/native/kernels.cpp")
    compiles = [
        subprocess.Popen(
            ["g++", *SANITIZED.split(), "-Wno-psabi", *FLAGS[isa].split(), source, "-o", folder / f"native_{isa}.so"]
        )
        for isa in ISAS
    ]
    assert [compile.wait() for compile in compiles] == [0] * len(compiles)
    return folder


def run(libraries: Path, isa: str, what: str) -> subprocess.CompletedProcess[str]:
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter leaks, by design
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    environment["PYTHONPATH"] = f"{ROOT}/tests:{ROOT}/tests/unit/kernels"
    command = [sys.executable, str(SCRIPT), str(libraries), isa, what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("isa", ISAS)
def test_every_kernel_stays_within_what_it_is_given(libraries: Path, isa: str) -> None:
    done = run(libraries, isa, "all")
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout == f"{isa}: done\n"
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_a_buffer_that_is_too_short_is_found(libraries: Path, isa: str) -> None:
    done = run(libraries, isa, "short")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
