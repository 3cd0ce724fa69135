"""Compiles the native CPU kernels; everything else about the package is in pyproject.toml.

kernels/native/kernels.cpp becomes bifolio/kernels/native_<isa>.so, once for each instruction set: plain libraries with
a C interface that depend on no version of Python. Without a compiler (g++, or $CXX) the package is complete too, torch
computes then. BIFOLIO_REQUIRE_NATIVE=1 makes a missing library an error.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "bifolio.kernels"
SOURCE = "kernels/native/kernels.cpp"
HEADERS = sorted(path.as_posix() for path in Path("kernels/native").glob("*.h"))
# Without contraction the compiler fuses no multiply-add that the source doesn't: every ISA rounds alike
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
# Never -march=native: a library is built on one machine and runs on another
ISAS = {
    "avx512": [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni"))],
    "avx2": AVX2,
    "generic": [],
}
if platform.machine().lower() not in ("x86_64", "amd64"):
    ISAS = {"generic": []}


class BuildKernels(build_ext):
    """Each extension is one call of the compiler, in place of Python's own flags, headers and file names."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        if self.inplace:
            folder = Path(self.get_finalized_command("build_py").get_package_dir(PACKAGE))
        else:
            folder = Path(self.build_lib, *PACKAGE.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        newest = max(os.path.getmtime(path) for path in ("setup.py", SOURCE, *HEADERS) if os.path.exists(path))

        def build(isa: str) -> str | None:
            library = folder / f"native_{isa}.so"
            # Only an in-place library is known to be made by this file, for this machine
            if self.inplace and not self.force and library.exists() and library.stat().st_mtime > newest:
                return None
            return compile_library(isa, library)

        with ThreadPoolExecutor() as pool:
            results = dict(zip(ISAS, pool.map(build, ISAS), strict=True))
        failures = {isa: failure for isa, failure in results.items() if failure}
        # What is not there must not be looked for when the wheel is put together
        self.extensions = [extension for extension in self.extensions if extension.name.split("_")[-1] not in failures]
        if failures:
            text = explain(failures)
            if os.environ.get("BIFOLIO_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise CompileError(text)
            print(f"\nWARNING: {text}\n", file=sys.stderr, flush=True)


class PlatformWheel(bdist_wheel):
    """Any Python, no Python ABI, this platform: the libraries are C."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def compile_library(isa: str, library: Path) -> str | None:
    """None, or why it failed. The library appears in one move, so a running process keeps the one it has loaded;
    after a failure there is none, rather than one of older sources."""
    made = library.with_suffix(".tmp")
    command = [*shlex.split(os.environ.get("CXX") or "g++"), *FLAGS, *ISAS[isa], "-o", str(made), SOURCE]
    print(f"{shlex.join(command)}\n", end="", flush=True)  # in one piece: others print theirs meanwhile
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as e:
        failure = f"{command[0]}: {e.strerror}"
    else:
        if done.returncode == 0:
            made.replace(library)
            return None
        failure = f"{shlex.join(command)}\n{done.stdout.strip()}"
    made.unlink(missing_ok=True)
    library.unlink(missing_ok=True)
    return failure


def explain(failures: dict[str, str]) -> str:
    # One cause is told once, and the compiler's first errors say enough
    causes = "\n".join(dict.fromkeys("\n".join(failure.splitlines()[:20]) for failure in failures.values()))
    rest = [isa for isa in ISAS if isa not in failures]
    if "generic" in rest:
        meaning = f"CPUs that would use them get the next best of {', '.join(rest)}, which is slower."
    else:
        meaning = "Bifolio works on CPUs without them, but torch computes then, which is slower."
    return (
        f"the native CPU kernels {', '.join(failures)} were not built:\n{causes}\n{meaning}\n"
        "To get them, install a recent g++ (Debian, Ubuntu: apt-get install g++), or name a compiler in CXX, then "
        "install Bifolio again (in a checkout: make native)."
    )


setup(
    ext_modules=[Extension(f"{PACKAGE}.native_{isa}", [SOURCE], depends=HEADERS) for isa in ISAS],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
