"""The linear layers: weights made ready once, and multiplied in every step.

    quantization  weights          activations                          products
    None          as they come     as they come                         float32, one order of sums for each row
    int8          per output       by 64 inputs, when multiplied        integers, and float32 for each 64

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
SCALED = 64  # inputs of a row whose activations share a scale


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
    native: tuple[Native, LinearStruct] | None


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, quantization: Quantization | None = None, exact: bool = False
) -> LinearWeights:
    """Weights for `linear`, of the backend that is chosen now. Copies: `weight` may be let go.

    weight  [N, K] float32, bfloat16 or float16
    bias    [N] of the same dtype
    exact   promises that a row's bits are its own; torch keeps that for float32 without quantization, on CPUs

    int8: weight ~ scale * integer from -127 to 127, one scale for each output (LLM.int8(), Dettmers et al. 2022, calls
    these vector-wise; the activations' are finer, because there single values stand out).

    Raises ValueError for a wrong shape or dtype, and where the promise of `exact` cannot be kept.
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
    dtype, scale = weight.dtype, None
    if quantization:
        weight, scale = _quantize(weight)
    if native is None:
        return LinearWeights(inputs, outputs, dtype, exact, weight.contiguous(), bias, scale, None)
    if scale is not None:
        weight = (weight.short() + 128).to(torch.uint8)
    bias = None if bias is None else bias.float()
    packed = native.pack(weight.contiguous())
    struct = linear_struct(packed, weight, bias, scale)
    return LinearWeights(inputs, outputs, dtype, exact, packed, bias, scale, (native, struct))


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
    if weights.exact:
        return torch_exact.linear(x, weights.weight, weights.bias).to(out_dtype or x.dtype)
    if out_dtype in (None, x.dtype) or x.device.type == "cpu":
        return F.linear(x, weights.weight, weights.bias).to(out_dtype or x.dtype)
    # bfloat16 has a digit fewer than logits need to tell two tokens apart: the sums are float32 anyway, keep them
    y = torch.mm(x, weights.weight.t(), out_dtype=out_dtype)
    return y if weights.bias is None else y + weights.bias


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 [N]."""
    scale = weight.abs().amax(dim=1).float() / 127
    return (weight.float() * _inverse(scale)[:, None]).round_().to(torch.int8), scale


def _inverse(step: Tensor) -> Tensor:
    """1 / step; 0 where that is no number."""
    return torch.where(step >= torch.finfo(torch.float32).tiny, 1 / step, 0.0)


def _int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [T, N]: each 64 inputs of each row rounded to 255 steps of their own. A product of 64 has no more digits
    than float32, so each is exact."""
    y = torch.zeros(len(x), len(weight), device=x.device)
    for part, w in zip(torch.split(x.float(), SCALED, 1), torch.split(weight, SCALED, 1), strict=True):
        step = part.abs().amax(dim=1, keepdim=True) / 127
        whole = (part * _inverse(step)).round_()
        y += (whole @ w.float().t()) * step
    return y * scale
