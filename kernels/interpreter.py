"""Two repairs of Triton's interpreter. Where TRITON_INTERPRET=1 is set, kernels run in numpy on the CPU: slowly, for
tests and for who has no GPU.

It keeps bfloat16 as 16-bit integers and computes on their bits (triton#11584): here that is done in float32 and rounded
to nearest even, as GPUs do. And it swaps `triton.language` for the time of a launch, so that two threads would pull it
from under each other: here one launch waits for the other.

Knows the interpreter's inside, so it looks at its own results and refuses a Triton in which they are wrong.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def repair() -> None:
    """To be called once a process. Raises RuntimeError where the interpreter still computes bfloat16 wrongly."""
    for name, wrap in _WRAPPERS.items():
        setattr(InterpreterBuilder, name, wrap(getattr(InterpreterBuilder, name)))
    GridExecutor.__call__ = _one_at_a_time(GridExecutor.__call__)
    if not _sums_are_right():
        raise RuntimeError(f"bfloat16 is wrong in the interpreter of triton {triton.__version__}; allowed is float32")


def _one_at_a_time(launch: Any) -> Any:
    lock = threading.RLock()

    def method(self: Any, *arguments: Any, **options: Any) -> None:
        with lock:
            launch(self, *arguments, **options)

    return method


def _sums_are_right() -> bool:
    """Products, sums and a dot of small integers, which bfloat16 holds exactly, and a rounding."""
    builder, small = interpreter.interpreter_builder, np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    a, b = (TensorHandle(narrow(x), tl.bfloat16) for x in (small, small + 2))
    zero, c = (TensorHandle(np.zeros((2, 2), np.float32), tl.float32), TensorHandle(narrow(small.T), tl.bfloat16))
    dot = builder.create_dot(b, c, zero, None, None).data
    thirds, odd = small / np.float32(3), np.array([1.00390625, 1.01171875, 3.4e38], np.float32)
    rounded = builder.cast_impl(TensorHandle(thirds, tl.float32), tl.bfloat16)
    return bool(
        np.array_equal(widen(builder.create_fadd(a, b).data), small * 2 + 2)
        and np.array_equal(widen(builder.create_fmul(a, b).data), small * (small + 2))
        and np.array_equal(dot, (small + 2) @ small.T)
        and np.array_equal(rounded.data, narrow(thirds))
        and np.array_equal(widen(narrow(odd)), [1.0, 1.015625, np.inf])
    )


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint16(0x7FC0), rounded.astype(np.uint16))


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _up(handle: Any) -> Any:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _down(handle: Any) -> Any:
    return TensorHandle(narrow(handle.data), tl.bfloat16)


def _arithmetic(operands: int) -> Any:
    """A wrapper for operations whose first `operands` arguments are numbers of one dtype, that of the result."""

    def wrap(original: Any) -> Any:
        def method(self: Any, *arguments: Any) -> Any:
            numbers, rest = arguments[:operands], arguments[operands:]
            if not _is_bfloat16(numbers[0]):
                return original(self, *arguments)
            result = original(self, *map(_up, numbers), *rest)
            return result if rest and rest[0] in _COMPARISONS else _down(result)

        return method

    return wrap


def _dot(original: Any) -> Any:
    def method(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _up(a), _up(b), *rest)

    return method


def _cast(original: Any) -> Any:
    def method(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        from_bfloat16, to_bfloat16 = _is_bfloat16(source), target.scalar == tl.bfloat16
        if from_bfloat16 == to_bfloat16:
            return original(self, source, target, *rest)
        if from_bfloat16:
            return _up(source) if target.scalar == tl.float32 else original(self, _up(source), target, *rest)
        exact = source if source.dtype.scalar == tl.float32 else original(self, source, tl.float32, *rest)
        return TensorHandle(narrow(exact.data), tl.bfloat16)

    return method


_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
_WRAPPERS = {
    "unary_op": _arithmetic(1),
    "binary_op": _arithmetic(2),
    "ternary_op": _arithmetic(3),
    "create_fma": _arithmetic(3),
    "create_dot": _dot,
    "cast_impl": _cast,
    "create_fp_to_fp": _cast,
}
