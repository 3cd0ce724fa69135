"""Which kernels compute in this process: native ones of one instruction set, Triton's, or torch. Chosen once, at start.

    tensors   on a GPU   Triton's, unless torch was chosen
              on a CPU   the native ones for float32 and bfloat16, unless torch or triton was chosen

What a backend has no code for (the native ones: float16, float8 caches, soft caps, sinks, the log-sum-exp) is torch's
business whatever was chosen; `ops.py` says so at each function.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from . import library, torch_twins
from .bindings import Native

Backend = Literal["auto", "avx512", "avx2", "generic", "triton", "torch"]
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    native: Native | None  # for tensors on CPUs
    triton: ModuleType | None  # for tensors on GPUs, and in the interpreter for all
    interpreted: bool = False


_choice: _Choice | None = None


def use(backend: Backend = "auto") -> str:
    """Choose for this process, log it, and return the name of what was chosen for the CPU's tensors; for "triton"
    that. "auto" is the best that this CPU runs, and torch with a warning where no library was built; and Triton for
    the tensors of a GPU, if there is one. Weights packed before keep their own backend.

    "triton" needs a GPU or, for tests and for who has none, TRITON_INTERPRET=1 in the environment: then Triton's
    interpreter computes, many times slower.

    Raises ValueError for a name that is none, was not built or installed, or that cannot run on this machine.
    """
    global _choice
    if backend not in get_args(Backend):
        raise ValueError(f"backend: {backend!r}; allowed: {', '.join(get_args(Backend))}")
    if backend == "torch":
        _choice = _Choice(None, None)
        logger.info("kernels: torch")
        return "torch"
    if backend == "triton":
        twins = _triton_twins()
        if not (interpreted := _interpreted()) and not torch.cuda.is_available():
            raise ValueError(
                "triton: there is no GPU; allowed with one, or with TRITON_INTERPRET=1 in the environment, which is "
                "for tests: it is many times slower"
            )
        _choice = _Choice(None, twins, interpreted)
        logger.info("kernels: triton%s, as asked", ", interpreted" if interpreted else "")
        return "triton"
    native = _native(backend)
    _choice = _Choice(native, _triton_twins_for_a_gpu())
    return native.isa if native else "torch"


def _native(backend: Backend) -> Native | None:
    if backend != "auto":
        native = Native(backend)
        logger.info("kernels: native, %s, as asked", backend)
        return native
    try:
        native = Native(library.best())
    except ValueError as error:
        logger.warning("kernels: torch, which is several times slower on CPUs: %s", error)
        return None
    logger.info("kernels: native, %s", native.isa)
    return native


def _triton_twins_for_a_gpu() -> ModuleType | None:
    if not torch.cuda.is_available():
        return None
    try:
        twins = _triton_twins()
    except ValueError as error:
        logger.warning("kernels: torch on the GPU, which is slow: %s", error)
        return None
    logger.info("kernels: triton on the GPU")
    return twins


def _triton_twins() -> ModuleType:
    """Imported when it is needed: it takes a second, and triton is not installed everywhere."""
    try:
        return importlib.import_module(".triton_twins", __package__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("triton: not installed; install bifolio[gpu], or choose engine.kernels: torch") from error


def _interpreted() -> bool:
    interpreted: bool = importlib.import_module(".triton_runtime", __package__).INTERPRETED
    return interpreted


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[str]:
    """`use` for the time of the context."""
    global _choice
    before = _choice
    try:
        yield use(backend)
    finally:
        _choice = before


def _chosen() -> _Choice:
    if _choice is None:
        use()
    assert _choice is not None
    return _choice


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels compute on tensors of this device."""
    choice = _chosen()
    return choice.triton is not None and (choice.interpreted or device.type != "cpu")


def native_for(x: Tensor) -> Native | None:
    """The native kernels, if they were chosen and have code for a tensor like this."""
    return _chosen().native if x.device.type == "cpu" and x.dtype in NATIVE_DTYPES else None


def twins_for(x: Tensor) -> ModuleType:
    """The module of twins that computes on tensors like this where no native kernel does: torch's or Triton's."""
    triton = _chosen().triton
    return triton if triton and runs_triton(x.device) else torch_twins
