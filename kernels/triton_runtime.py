"""Where Triton kernels run in this process: on its GPUs or, with TRITON_INTERPRET=1, in numpy on the CPU.

Triton reads that variable when a kernel is defined, so it holds for the whole process.
"""

from __future__ import annotations

import contextlib
from functools import cache

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
if INTERPRETED:
    from .interpreter import repair

    repair()


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device, wherever their tensors are: this makes it theirs."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@cache
def architecture(device: torch.device) -> str:
    """As compilers name it: "sm_90", "gfx942"; "interpreter" in the interpreter."""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def processors(device: torch.device) -> int:
    """How many programs-holding units the device has: streaming multiprocessors, compute units."""
    return 16 if INTERPRETED else int(torch.cuda.get_device_properties(device).multi_processor_count)
