"""Which kernels compute in this process: the native ones, of one instruction set, or torch. Chosen once, at start.

The native kernels serve float32 and bfloat16 on the CPU. What they have no code for (float16, float8 caches, soft caps,
sinks, the log-sum-exp) is torch's business whatever was chosen; `ops.py` says so at each function.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from . import library
from .bindings import Native

Backend = Literal["auto", "avx512", "avx2", "generic", "torch"]
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

logger = logging.getLogger(__name__)
_native: Native | None = None
_chosen = False


def use(backend: Backend = "auto") -> str:
    """Choose for this process, log it, and return the name of what was chosen. "auto" is the best that this CPU runs,
    and torch with a warning where no library was built. Weights packed before keep their own backend.

    Raises ValueError for a name that is none, was not built, or that this CPU cannot run.
    """
    global _native, _chosen
    if backend not in get_args(Backend):
        raise ValueError(f"backend: {backend!r}; allowed: {', '.join(get_args(Backend))}")
    if backend == "torch":
        _native = None
        logger.info("kernels: torch")
    elif backend == "auto":
        try:
            _native = Native(library.best())
            logger.info("kernels: native, %s", _native.isa)
        except ValueError as error:
            _native = None
            logger.warning("kernels: torch, which is several times slower on CPUs: %s", error)
    else:
        _native = Native(backend)
        logger.info("kernels: native, %s, as asked", backend)
    _chosen = True
    return _native.isa if _native else "torch"


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[str]:
    """`use` for the time of the context."""
    global _native, _chosen
    before = _native, _chosen
    try:
        yield use(backend)
    finally:
        _native, _chosen = before


def native_for(x: Tensor) -> Native | None:
    """The native kernels, if they were chosen and have code for a tensor like this."""
    if not _chosen:
        use()
    return _native if _native and x.device.type == "cpu" and x.dtype in NATIVE_DTYPES else None
