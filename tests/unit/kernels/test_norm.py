"""RMS norm and SwiGLU against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from bifolio.kernels import rms_norm, silu_mul

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


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(torch.zeros(2, 8), None, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="residual: dtype"):
        rms_norm(torch.zeros(2, 8), torch.zeros(2, 8).double(), torch.zeros(8), 1e-5)
    with pytest.raises(ValueError, match="gate_up: shape"):
        silu_mul(torch.zeros(2, 7))
