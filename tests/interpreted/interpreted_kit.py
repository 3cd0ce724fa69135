"""A case of attention on Triton's kernels, against the formula in float64."""

from __future__ import annotations

import torch
from attention_case import TOLERANCE, Case


def check(case: Case, **options: object) -> None:
    want, want_lse = case.expected(**options)  # type: ignore[arg-type]
    out, lse = torch.full_like(case.q, torch.nan), torch.full(case.q.shape[:2], torch.nan)
    assert case.run(out=out, lse=lse, **options) is out
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
