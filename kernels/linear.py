"""The linear layers: weights made ready once, and multiplied in every step.

    quantization  weights          activations                          products
    None          as they come     as they come                         float32, one order of sums for each row
    int8          per output       per row, when they are multiplied    exact integers

Either way a row's result is its own: it does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, torch_exact
from .backend import native_for
from .bindings import LinearStruct, Native, linear_struct

Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """What `pack_linear` made. Whoever holds it need not know which backend reads it."""

    inputs: int
    outputs: int
    dtype: torch.dtype  # of what is multiplied, and of the result unless asked otherwise
    exact: bool
    weight: Tensor  # [N, K]; native: packed bytes
    bias: Tensor | None  # [N]; native: float32
    scale: Tensor | None  # int8: float32 [N], what a weight is multiplied by
    offset: Tensor | None  # int8, native: int32 [N]
    native: tuple[Native, LinearStruct] | None


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, quantization: Quantization | None = None, exact: bool = False
) -> LinearWeights:
    """Weights for `linear`, of the backend that is chosen now. Copies: `weight` may be let go.

    weight  [N, K] float32, bfloat16 or float16
    bias    [N] of the same dtype
    exact   promises that a row's bits are its own; torch keeps that for float32 without quantization, on CPUs

    int8: weight ~ scale * integer from -127 to 127, one scale for each output. Raises ValueError for a wrong shape or
    dtype, and where the promise of `exact` cannot be kept.
    """
    checks.shape("weight", weight, (None, None), "N, K")
    checks.dtype("weight", weight, checks.FLOATS)
    if quantization not in (None, "int8"):
        raise ValueError(f"quantization: {quantization!r}; allowed: None, 'int8'")
    if bias is not None:
        checks.shape("bias", bias, weight.shape[:1], "N")
        checks.dtype("bias", bias, (weight.dtype,))
    outputs, inputs = weight.shape
    native = native_for(weight)
    if exact and native is None:
        checks.exact("weight", weight)
        if quantization:
            raise ValueError("exact: with int8 weights in torch; allowed with native kernels, or without int8")
    dtype, scale, offset = weight.dtype, None, None
    if quantization:
        weight, scale = _quantize(weight)
    if native is None:
        return LinearWeights(inputs, outputs, dtype, exact, weight.contiguous(), bias, scale, None, None)
    if scale is not None:
        offset = 128 * weight.sum(dim=1, dtype=torch.int32)
    bias = None if bias is None else bias.float()
    packed = native.pack(weight.contiguous())
    struct = linear_struct(packed, weight, bias, scale, offset)
    return LinearWeights(inputs, outputs, dtype, exact, packed, bias, scale, offset, (native, struct))


def linear(x: Tensor, weights: LinearWeights, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x weight^T + bias: [T, N] of x [T, K], of the weights' dtype, with rows at any stride.

    out_dtype  float32 for more digits than the dtype has; None is the dtype

    Mutates nothing. Raises ValueError for a wrong shape or dtype.
    """
    checks.shape("x", x, (None, weights.inputs), "T, K")
    checks.dtype("x", x, (weights.dtype,))
    checks.rows_contiguous("x", x)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype: {out_dtype}; allowed: None, {x.dtype}, {torch.float32}")
    if weights.native is not None:
        native, struct = weights.native
        y = torch.empty(len(x), weights.outputs, dtype=out_dtype or x.dtype)
        native.linear(x, struct, y)
        return y
    if weights.scale is not None:
        y = _int8(x, weights.weight, weights.scale)
        y = y if weights.bias is None else y + weights.bias
        return y.to(out_dtype or x.dtype)
    y = (
        torch_exact.linear(x, weights.weight, weights.bias)
        if weights.exact
        else F.linear(x, weights.weight, weights.bias)
    )
    return y.to(out_dtype or x.dtype)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 [N]."""
    scale = weight.abs().amax(dim=1).float() / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (weight.float() * inverse[:, None]).round_().to(torch.int8), scale


def _int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [T, N]: each row of x rounded to 255 steps of its own, the products summed as integers."""
    x = x.float()
    step = x.abs().amax(dim=1, keepdim=True) / 127
    whole = (x * torch.where(step > 0, 1 / step, 0.0)).round_().to(torch.int8)
    return torch._int_mm(whole, weight.t()).float() * step * scale
