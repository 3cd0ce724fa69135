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


def scattered(x: Tensor, *order: int) -> Tensor:
    """The same numbers with the axes in another order in memory, and with gaps."""
    backwards = sorted(range(x.ndim), key=lambda i: order[i])
    moved = x.permute(order)
    wide = torch.zeros(*moved.shape[:-1], moved.shape[-1] + 8, dtype=x.dtype)
    return wide[..., : moved.shape[-1]].copy_(moved).permute(backwards)


def test_each_argument_of_rope_may_lie_in_memory_as_it_likes() -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(6, heads, 32, generator=g) for heads in (4, 2, 2))
    cos, sin = rope_tables(1e4 ** (-torch.arange(0, 32, 2) / 32), 50)
    positions, slots = torch.arange(6) * 7, torch.tensor([3, 40, -1, 17, 31, 0])
    kv = torch.zeros(3, 2, 2, 16, 32)
    want = rope_and_write(q, k, v, cos, sin, positions, slots, kv)
    for order in ((2, 1, 0, 3, 4), (0, 2, 1, 3, 4)):
        memory = torch.zeros([kv.shape[i] for i in order])
        apart = memory.permute(sorted(range(5), key=lambda i: order[i]))
        got = rope_and_write(
            *(scattered(q, 0, 1, 2), k, scattered(v, 1, 0, 2)),
            *(cos, scattered(sin, 0, 1), positions.repeat_interleave(2)[::2], slots.repeat_interleave(2)[::2]),
            apart,
        )
        assert torch.equal(got, want)
        assert torch.equal(apart, kv)


@pytest.mark.parametrize("stride", [(2**30, 32, 1), (32, 2**30, 1)], ids=["rows", "heads"])
def test_rope_of_rows_and_heads_that_lie_far_apart(stride: tuple[int, int, int]) -> None:
    x = torch.randn(3, 3, 32, generator=torch.Generator().manual_seed(5)).half()
    far = torch.empty_strided((3, 3, 32), stride, dtype=torch.float16).copy_(x)
    cos, sin = rope_tables(1e4 ** (-torch.arange(0, 32, 2) / 32), 9)
    at = torch.arange(3)
    results = []
    for each in (x, far):
        kv = torch.zeros(1, 2, 3, 16, 32, dtype=torch.float16)
        results.append((rope_and_write(each, each, each, cos, sin, at, at, kv), kv))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_norm_and_activation_of_rows_that_lie_far_apart() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(5)).half()
    far = torch.empty_strided((3, 32), (2**30, 1), dtype=torch.float16).copy_(x)
    weight = torch.ones(32, dtype=torch.float16)
    assert torch.equal(silu_mul(far), silu_mul(x))
    torch.testing.assert_close(rms_norm(far, far, weight, 1e-5), rms_norm(x, x, weight, 1e-5), rtol=0, atol=0)


def test_a_residual_and_a_weight_may_have_gaps_of_their_own() -> None:
    x, residual, weight = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(5)).unbind()
    want = rms_norm(x, residual, weight[0], 1e-5)
    gaps = torch.zeros(5, 64)[:, ::2].copy_(residual)
    for other in (scattered(residual, 0, 1), gaps):
        got = rms_norm(x, other, torch.zeros(64)[::2].copy_(weight[0]), 1e-5)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_normed_is_the_residual_as_it_was_rounded(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight = torch.ones(64, dtype=dtype)
    normed, grown = rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(normed, rms_norm(grown, None, weight, 1e-5)[0])


def test_epsilon_is_added_to_the_mean_square() -> None:
    x = torch.full((1, 64), 0.03)
    torch.testing.assert_close(rms_norm(x, None, torch.ones(64), 0.0016)[0], torch.full((1, 64), 0.6))
