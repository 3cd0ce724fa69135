"""A case of attention on Triton's kernels, against the formula in float64."""

from __future__ import annotations

import torch
from attention_case import TOLERANCE, Case

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = DTYPES[1:]
MIXED = [(1, 40), (17, 50), (9, 9), (1, 1), (33, 64)]


def check(case: Case, **options: object) -> None:
    want, want_lse = case.expected(**options)  # type: ignore[arg-type]
    out, lse = torch.full_like(case.q, torch.nan), torch.full(case.q.shape[:2], torch.nan)
    assert case.run(out=out, lse=lse, **options) is out
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
