"""int8 linears: whole numbers are summed as whole numbers, and rounding is where it is documented to be."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, NATIVE
from torch import Tensor

from bifolio.kernels import linear, pack_linear

DTYPES = [torch.float32, torch.bfloat16]
native = pytest.mark.parametrize("backend", NATIVE, indirect=True)


def by_definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64 [T, N]: in each 64 inputs sums in int64, times the step of these inputs; then an output's scale, and the
    bias."""
    scale = weight.float().abs().amax(1) / 127
    whole = (weight.float() * torch.where(scale > 0, 1 / scale, 0)[:, None]).round().long()
    y = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for part, w in zip(torch.split(x.float(), 64, 1), torch.split(whole, 64, 1), strict=True):
        step = part.abs().amax(1) / 127
        inverse = torch.where(step > 0, 1 / step, 0)
        rows = (part.double() * inverse.double()[:, None]).round().long()  # rounded once
        y += (rows @ w.t()).double() * step.double()[:, None]
    return y * scale.double() + (0 if bias is None else bias.double())


def near(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    atol = tolerance * float(want.abs().max()) if len(want) else 0.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@native
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 47), (33, 48), (66, 49), (2 * 8192 + 3, 50)])
def test_a_result_is_that_of_the_definition(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Inputs that fill no word, outputs that fill no panel, and panels that are read in three parts."""
    weight, bias = noise(outputs, inputs, dtype=dtype), noise(outputs, dtype=dtype)
    for b in (None, bias):
        packed = pack_linear(weight, b, quantization="int8")
        for rows in (0, 1, 8, 9):
            x = noise(rows, inputs, dtype=dtype)
            want = by_definition(x, weight, b)
            near(linear(x, packed, out_dtype=torch.float32), want)
            near(linear(x, packed), want, 1e-2 if dtype == torch.bfloat16 else 2e-6)


@native
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_numbers_everywhere_do_not_saturate(sign: float) -> None:
    x, weight = torch.full((3, 40_000), 2.0), torch.full((49, 40_000), sign)
    weight[1::2] *= -1
    packed = pack_linear(weight, quantization="int8")
    near(linear(x, packed), by_definition(x, weight, None))
    near(linear(-x, packed), by_definition(-x, weight, None))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_or_an_output_of_zeros_gives_the_bias(dtype: torch.dtype) -> None:
    x, weight, bias = noise(5, 33, dtype=dtype), noise(50, 33, dtype=dtype), noise(50, dtype=dtype)
    x[2], weight[49] = 0, 0
    y = linear(x, pack_linear(weight, bias, quantization="int8"))
    assert torch.equal(y[2], bias)
    assert torch.equal(y[:, 49], bias[49].expand(5))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e30])
def test_rows_near_the_ends_of_float32_stay_in_proportion(size: float) -> None:
    x, weight = noise(3, 33), noise(50, 33)
    y = linear(x * size, pack_linear(weight, quantization="int8"))
    want = (x.double() * size) @ weight.double().t()
    assert (y - want).abs().max() <= 0.03 * want.abs().max() + 1e-36  # steps of a 127th need normal numbers


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_large_neighbour_takes_no_precision_from_a_row(backend: str) -> None:
    x, weight = noise(2, 64), noise(50, 64)
    packed = pack_linear(weight, quantization="int8")
    alone = linear(x[:1], packed)
    x[1] *= 1e6
    assert torch.equal(linear(x, packed)[:1], alone)
