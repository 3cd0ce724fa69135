"""The native kernels' libraries: which were built, which one this CPU runs, and torch's threads for them.

setup.py compiles the same sources once per instruction set (ISA), to native_<isa>.so beside this file. Knows nothing
of what is in them but `bifolio_best_isa`, which each has.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

ISAS = ("avx512", "avx2", "generic")  # Best first: a CPU that has one has all after it

_FOLDER = Path(__file__).parent
_ADVICE = "install g++ and Bifolio again (in a checkout: make native), or choose engine.kernels: torch"


def built() -> tuple[str, ...]:
    """The ISAS there is a library of, best first; none where Bifolio was installed without a compiler."""
    return tuple(isa for isa in ISAS if _path(isa).exists())


def best() -> str:
    """The best that is built and that this CPU has. Raises ValueError where no library is of use."""
    there = built()
    if "generic" not in there:
        raise ValueError(f"native kernels: {_listed(there)} built, generic is needed on every CPU; {_ADVICE}")
    # generic is for every CPU, so there is one
    return next(isa for isa in _of_this_cpu() if isa in there)


def load(isa: str) -> ctypes.CDLL:
    """The library of one of ISAS. Raises ValueError for one that is not built, or that this CPU cannot run: its first
    instruction would end the process."""
    if isa not in ISAS:
        raise ValueError(f"native kernels: {isa!r}; allowed are {', '.join(ISAS)}")
    there = built()
    if not {isa, "generic"} <= set(there):
        raise ValueError(f"native kernels: {isa!r}, with {_listed(there)} built; {_ADVICE}")
    allowed = _of_this_cpu()
    if isa not in allowed:
        usable = [name for name in allowed if name in there]
        raise ValueError(
            f"native kernels: {isa!r}, which this CPU does not have; built are {_listed(there)}, "
            f"this CPU has {_listed(allowed)}; choose engine.kernels: auto, or one of {', '.join(usable)}"
        )
    return _open(isa)


def parallel() -> int | None:
    """The address of GOMP_parallel in torch's own OpenMP runtime, so that one pool of threads and one limit serve both.
    None where it is not: the kernels run on the caller's thread alone."""
    try:
        runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    # A symbol is looked up in the library and in those it needs, libgomp among them
    region = getattr(runtime, "GOMP_parallel", None)
    return ctypes.cast(region, ctypes.c_void_p).value if region else None


def _of_this_cpu() -> tuple[str, ...]:
    question = _open("generic").bifolio_best_isa
    question.restype = ctypes.c_char_p
    return ISAS[ISAS.index(question().decode()) :]


def _open(isa: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_path(isa)))
    except OSError as e:
        raise ValueError(f"native kernels: {isa!r} does not load here ({e}); {_ADVICE}") from e


def _path(isa: str) -> Path:
    return _FOLDER / f"native_{isa}.so"


def _listed(isas: tuple[str, ...]) -> str:
    return ", ".join(isas) or "none"
