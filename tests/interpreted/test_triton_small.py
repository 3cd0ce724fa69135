"""RoPE with the cache write, norm and activation: Triton's against torch's, through the public functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bifolio.kernels import Layout, rms_norm, rope_and_write, rope_tables, silu_mul, using

DTYPES = [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3.2e-2)]


def roped(
    backend: str, dtype: torch.dtype, slots: list[int], d: int, p: int, apart: bool = False
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(d)
    q, k, v = torch.split(torch.randn(len(slots), 13, d, generator=g).to(dtype), (9, 2, 2), dim=1)
    if apart:
        q, k, v = (torch.zeros(*x.shape[:2], 2 * d, dtype=dtype)[..., ::2].copy_(x) for x in (q, k, v))
    cos, sin = rope_tables(1e4 ** (-torch.arange(0, d, 2) / d), 50)
    kv = torch.full((9, 3, 2, 2, p, d), torch.nan, dtype=dtype)
    positions = torch.arange(len(slots)) * 7 % 50
    with using(backend):  # type: ignore[arg-type]
        return rope_and_write(q, k, v, cos, sin, positions, torch.tensor(slots, dtype=torch.int64), kv[:, 1]), kv


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in DTYPES])
@pytest.mark.parametrize(("d", "p"), [(32, 8), (64, 16), (80, 48), (96, 256), (256, 16)])
def test_rope_and_the_cache_write_are_those_of_torch(d: int, p: int, dtype: torch.dtype, apart: bool) -> None:
    for slots in ([p + 1, -1, 0, 9 * p - 1, 3 * p], [-1, 5], []):
        got, want = (roped(backend, dtype, slots, d, p, apart) for backend in ("triton", "torch"))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_more_tokens_than_one_program_takes() -> None:
    slots = torch.randperm(9 * 48, generator=torch.Generator().manual_seed(1))[:300].tolist()
    got, want = (roped(backend, torch.float32, slots, 40, 48) for backend in ("triton", "torch"))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_skipped_slot_touches_nothing_before_the_cache() -> None:
    """-1 // block_size is the block before the first: here it lies in the same memory."""
    memory = torch.full((4, 2, 1, 8, 32), 7.0)
    x, at = torch.ones(2, 1, 32), torch.tensor([-1, 5])
    cos, sin = rope_tables(torch.zeros(16), 1)
    rope_and_write(x, x, x, cos, sin, torch.zeros(2, dtype=torch.int64), at, memory[2:])
    written = memory[2, :, :, 5].clone()
    assert (written == 1).all()
    memory[2, :, :, 5] = 7.0
    assert (memory == 7).all()


def test_slots_of_a_cache_of_more_than_2_to_the_31_numbers() -> None:
    stride, last = 2**20, 3000
    huge = torch.empty(last * stride + 1024, dtype=torch.float16)
    kv = huge.as_strided((last + 1, 2, 1, 16, 32), (stride, 512, 512, 32, 1))
    x = torch.randn(1, 1, 32).half()
    cos, sin = rope_tables(torch.zeros(16), 1)
    rope_and_write(x, x, x, cos, sin, torch.zeros(1, dtype=torch.int64), torch.tensor([last * 16 + 3]), kv)
    assert torch.equal(kv[last, :, 0, 3], x[0].expand(2, 32))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (5, 72), (130, 576), (3, 4096)])
def test_norm_and_activation_are_those_of_torch(rows: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    g = torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, rows, 2 * size, generator=g).to(dtype)
    weight = torch.randn(size, generator=g).to(dtype)
    for a, b, other in ((x[:, :size], weight, residual[:, size:]), (x[:, ::2], weight, None)):
        before = x.clone(), residual.clone()
        got = *rms_norm(a, other, b, 1e-5), silu_mul(x), silu_mul(torch.cat((x, x), 1)[:, ::2])
        with using("torch"):
            want = *rms_norm(a, other, b, 1e-5), silu_mul(x), silu_mul(torch.cat((x, x), 1)[:, ::2])
        assert torch.equal(got[1], want[1])
        for mine, torchs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=tolerance, atol=tolerance)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


@pytest.mark.parametrize("gate", [-1e30, -1000.0, -88.0, 88.0, 1000.0, 1e30])
def test_a_large_gate_is_open_or_shut(gate: float) -> None:
    got = silu_mul(torch.tensor([[gate, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[max(gate, 0.0)]]), rtol=1e-6, atol=1e-6)


def test_what_is_shut_stays_shut_however_large_the_other_half() -> None:
    got = silu_mul(torch.tensor([[-200.0, -95.0, 1e37, 1e37]]))
    torch.testing.assert_close(got, torch.tensor([[0.0, -95.0 * math.exp(-95) * 1e37]]), rtol=1e-4, atol=1e-30)


def test_a_row_of_nan_is_no_business_of_the_others() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    want = rms_norm(x, None, torch.ones(16), 1e-5)[0], silu_mul(x)
    x[1] = math.nan
    got = rms_norm(x, None, torch.ones(16), 1e-5)[0], silu_mul(x)
    for mine, before in zip(got, want, strict=True):
        assert torch.equal(mine[[0, 2, 3]], before[[0, 2, 3]])


def test_a_packed_cache_is_refused() -> None:
    layout: Layout = "packed"
    x, zero = torch.zeros(1, 1, 32), torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(1, 32)
    with pytest.raises(ValueError, match="layout: packed with the triton kernels; allowed is plain"):
        rope_and_write(x, x, x, table, table, zero, zero, torch.zeros(1, 2, 1, 16, 32), layout=layout)
