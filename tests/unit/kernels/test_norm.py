"""RMS norm and SwiGLU against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from bifolio.kernels import rms_norm, silu_mul

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_the_residual_is_added_and_the_sum_normalised(dtype: torch.dtype, tolerance: float) -> None:
    x, residual = torch.randn(2, 5, 72, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.linspace(0.5, 2, 72).to(dtype)
    normed, total = rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    r = total.double()
    want = r / torch.sqrt((r * r).mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(normed.double(), want, rtol=0, atol=tolerance)


def test_without_a_residual_the_input_becomes_it() -> None:
    x = torch.randn(3, 8)
    assert rms_norm(x, None, torch.ones(8), 1e-5)[1] is x


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_silu_of_the_first_half_times_the_second(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(5, 14, generator=torch.Generator().manual_seed(2)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    before = gate_up.clone()
    torch.testing.assert_close(silu_mul(gate_up).double(), gate * torch.sigmoid(gate) * up, rtol=0, atol=tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
def test_any_size_and_nothing_is_changed(rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(width))
    before = x.clone(), residual.clone()
    normed, total = rms_norm(x, residual, torch.ones(width), 1e-5)
    r = (x + residual).double()
    want = r / torch.sqrt((r * r).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(normed.double(), want, rtol=0, atol=1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    activated = silu_mul(torch.cat((x, residual), dim=1)).double()
    torch.testing.assert_close(activated, x.double().sigmoid() * x * residual, rtol=0, atol=1e-5)


def test_inputs_with_gaps_give_the_same_bits() -> None:
    x, weight = torch.randn(2, 5, 24), torch.randn(24)
    wide = [torch.zeros(5, 30)[:, 3:27].copy_(part) for part in x]
    spread = weight.repeat_interleave(2)[::2]
    for got, want in zip(rms_norm(*wide, spread, 1e-5), rms_norm(*x, weight, 1e-5), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(silu_mul(wide[0]), silu_mul(x[0]))


@pytest.mark.parametrize("gate", [-1e30, -1000.0, -88.0, 88.0, 1000.0, 1e30])
def test_a_large_gate_is_open_or_shut(gate: float) -> None:
    got = silu_mul(torch.tensor([[gate, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[max(gate, 0.0)]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_what_is_no_table_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x: shape"):
        rms_norm(torch.zeros(shape), None, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="gate_up: shape"):
        silu_mul(torch.zeros(shape))


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(torch.zeros(2, 8), None, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="residual: dtype"):
        rms_norm(torch.zeros(2, 8), torch.zeros(2, 8).double(), torch.zeros(8), 1e-5)
    with pytest.raises(ValueError, match="gate_up: shape"):
        silu_mul(torch.zeros(2, 7))
