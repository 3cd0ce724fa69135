"""Linears: right in every backend and quantization, each row on its own, and refusals."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, NATIVE
from torch import Tensor

from bifolio.kernels import Backend, linear, pack_linear, using

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest output
ROWS = [0, 1, 7, 8, 9, 65]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> None:
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for backend in BACKENDS:
        with using(backend):
            got = linear(x, pack_linear(weight, bias), out_dtype=out_dtype)
        assert got.dtype == (out_dtype or x.dtype)
        atol = TOLERANCE[x.dtype] * float(want.abs().max().clamp(min=1)) if len(want) else 0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    check(noise(rows, 80, dtype=dtype), noise(97, 80, dtype=dtype), noise(97, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 47), (33, 48), (65, 49), (2 * 2048 + 3, 50), (5001, 5)])
def test_any_number_of_inputs_and_outputs(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    check(noise(9, inputs, dtype=dtype), noise(outputs, inputs, dtype=dtype))


def test_rows_may_lie_at_any_stride_and_results_may_be_float32() -> None:
    wide = noise(5, 200, dtype=torch.bfloat16)
    check(wide[:, 40:120], noise(50, 80, dtype=torch.bfloat16), out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("inputs", [1, 33, 4099])  # they end within a word
def test_what_stands_behind_a_row_in_memory_is_not_used(inputs: int, int8: bool, dtype: torch.dtype) -> None:
    wide, weight = torch.full((9, inputs + 20), torch.nan, dtype=dtype), noise(50, inputs, dtype=dtype)
    x = noise(9, inputs, dtype=dtype)
    wide[:, 3 : 3 + inputs] = x
    for backend in BACKENDS:
        with using(backend):
            weights = pack_linear(weight, quantization="int8" if int8 else None)
            assert torch.equal(linear(wide[:, 3 : 3 + inputs], weights), linear(x, weights)), backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_is_near_what_it_stands_for(backend: Backend) -> None:
    x, weight = noise(33, 576, dtype=torch.bfloat16), noise(100, 576, dtype=torch.bfloat16)
    with using(backend):
        got = linear(x, pack_linear(weight, quantization="int8")).double()
    want = x.double() @ weight.double().t()
    assert (got - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    backend: Backend, dtype: torch.dtype, int8: bool, threads: int
) -> None:
    x, weight = noise(67, 4100, dtype=dtype), noise(100, 4100, dtype=dtype)
    x[20] *= 1000  # a neighbour of another size
    with using(backend):
        packed = pack_linear(weight, quantization="int8" if int8 else None, exact=True)
        whole = linear(x, packed)
        for rows in (1, 2, 3, 5, 8, 9, 16, 31, 66):
            for first in (0, 19, 67 - rows):
                part = x[first : first + rows]
                assert torch.equal(linear(part, packed), whole[first : first + rows])


@pytest.mark.parametrize(("argument", "mistake"), [
    ("x", lambda w: linear(torch.zeros(2, 9), w)),
    ("x", lambda w: linear(torch.zeros(8), w)),
    ("x", lambda w: linear(torch.zeros(2, 8, dtype=torch.bfloat16), w)),
    ("x", lambda w: linear(torch.zeros(8, 2).t(), w)),
    ("out_dtype", lambda w: linear(torch.zeros(2, 8), w, out_dtype=torch.bfloat16)),
    ("weight", lambda w: pack_linear(torch.zeros(8))),
    ("weight", lambda w: pack_linear(torch.zeros(8, 8, dtype=torch.int8))),
    ("bias", lambda w: pack_linear(torch.zeros(8, 8), torch.zeros(7))),
    ("bias", lambda w: pack_linear(torch.zeros(8, 8), torch.zeros(8, dtype=torch.bfloat16))),
    ("quantization", lambda w: pack_linear(torch.zeros(8, 8), quantization="int4")),
])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_by_name(backend: Backend, argument: str, mistake: object) -> None:
    with using(backend):
        weights = pack_linear(torch.zeros(4, 8))
        with pytest.raises(ValueError, match=rf"^{argument}: .*(allowed|must)"):
            mistake(weights)  # type: ignore[operator]
