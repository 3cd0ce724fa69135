"""RoPE and the cache write, against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from packed_layout import packed
from torch import Tensor

from bifolio.kernels import Layout, rope_and_write, rope_tables

pytestmark = pytest.mark.usefixtures("backend")

HQ, HK, D, P = 6, 2, 40, 8
FREQUENCIES = 1e4 ** (-torch.arange(0, D, 2) / D)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Pair (i, i + D/2) as a complex number times exp(i * angle), in float64."""
    a, b = x.double().chunk(2, dim=-1)
    frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * frequency)[:, None]
    z = torch.complex(a, b) * turn
    return torch.cat((z.real, z.imag), dim=-1)


def run(slots: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    tokens = len(slots)
    fused = torch.randn(tokens, HQ + 2 * HK, D, generator=g).to(dtype)
    q, k, v = torch.split(fused, (HQ, HK, HK), dim=1)
    cos, sin = rope_tables(FREQUENCIES, 64)
    positions = torch.arange(tokens) * 7
    cache = torch.full((6, 3, 2, HK, P, D), torch.nan, dtype=dtype)
    before = fused.clone()
    result = rope_and_write(q, k, v, cos, sin, positions, torch.tensor(slots), cache[:, 1])
    assert torch.equal(fused, before)
    return result, q, k, v, positions, cache


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_queries_and_cached_keys_are_rotated_values_are_not(dtype: torch.dtype, tolerance: float) -> None:
    slots = [9, 40, 17, 8]
    got, q, k, v, positions, cache = run(slots, dtype)
    torch.testing.assert_close(got.double(), rotated(q, positions, 1e4), rtol=0, atol=tolerance)
    for t, slot in enumerate(slots):
        key = cache[slot // P, 1, 0, :, slot % P].double()
        torch.testing.assert_close(key, rotated(k, positions, 1e4)[t], rtol=0, atol=tolerance)
        assert torch.equal(cache[slot // P, 1, 1, :, slot % P], v[t])


def test_only_the_named_slots_of_the_layer_are_written() -> None:
    cache = run([-1, 9, -1])[-1]
    untouched = cache.clone()
    untouched[1, 1, :, :, 1] = torch.nan
    assert torch.isnan(untouched).all()
    assert torch.isfinite(cache[1, 1, :, :, 1]).all()


def test_nothing_is_written_where_every_slot_is_skipped() -> None:
    assert torch.isnan(run([-1, -1])[-1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [32, 64, 80, 96, 256])
@pytest.mark.parametrize("p", [8, 16, 24, 256])
def test_a_packed_cache_is_written_like_a_plain_one(p: int, d: int, dtype: torch.dtype) -> None:
    """The same slots, nothing beside them: of two that share a word, one alone, both at once, one after the other."""
    g = torch.Generator().manual_seed(p + d)
    tables = rope_tables(1e4 ** (-torch.arange(0, d, 2) / d), 64)
    caches = {"plain": torch.full((4, 3, 2, HK, p, d), torch.nan, dtype=dtype)[:, 1]}
    caches["packed"] = packed(caches["plain"])
    for slots in ([0, p + 3, -1, 2 * p + 4, 2 * p + 5, 4 * p - 1], [p + 2, -1, 3 * p + 1], [-1], []):
        heads = torch.randn(len(slots), HQ + 2 * HK, d, generator=g).to(dtype)
        where = torch.tensor(slots, dtype=torch.int64)
        results = []
        for layout, cache in caches.items():
            before = heads.clone()
            q, k, v = torch.split(heads, (HQ, HK, HK), dim=1)
            results.append(rope_and_write(q, k, v, *tables, where.abs() % 64, where, cache, layout=layout))  # type: ignore[arg-type]
            assert torch.equal(heads, before)
        assert torch.equal(*results)
        torch.testing.assert_close(caches["packed"], packed(caches["plain"]), rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(caches["plain"]).all(-1).sum() == 7 * 2 * HK  # and all else is NaN still


def test_the_scale_of_the_tables_scales_what_they_rotate() -> None:
    cos, sin = rope_tables(FREQUENCIES, 9, 1.5)
    assert (cos.shape, cos.dtype) == ((9, D), torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.full((9, D), 2.25))
    assert torch.equal(cos[0], torch.full((D,), 1.5))


def test_frequencies_of_zero_rotate_nothing() -> None:
    q, k = torch.randn(3, HQ, D), torch.randn(3, HK, D)
    cache, where = torch.zeros(2, 2, HK, P, D), torch.arange(3)
    still = rope_tables(torch.zeros(D // 2), 1)
    assert torch.equal(rope_and_write(q, k, k, *still, torch.zeros_like(where), where, cache), q)
    assert torch.equal(cache[0, 0, :, :3].transpose(0, 1), k)


def test_queries_and_keys_that_lie_apart_give_the_same_bits() -> None:
    """Heads that are not side by side, tables and slots with gaps."""
    x, where = torch.randn(3, HQ, D), torch.arange(3)
    cos, sin = rope_tables(FREQUENCIES, 9)
    caches = torch.zeros(2, 2, 2, HK, P, D)
    want = rope_and_write(x, x[:, :HK], x[:, HK : 2 * HK], cos, sin, where, where, caches[0])
    apart = torch.zeros(3, HQ, 2 * D)[..., :D].copy_(x)
    gaps = [torch.stack((t, t), dim=1).flatten(1)[:, :D] for t in (cos, sin)]
    spread = where.repeat_interleave(2)[::2]
    got = rope_and_write(apart, apart[:, :HK], apart[:, HK : 2 * HK], *gaps, spread, spread, caches[1])
    assert torch.equal(got, want)
    assert torch.equal(caches[0], caches[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k": torch.zeros(1, HK + 1, D)}, r"k: shape \[1, 3, 40\]; allowed is \[T, HK, D\] = \[1, 2, 40\]"),
        ({"v": torch.zeros(1, HK, D, dtype=torch.bfloat16)}, "v: dtype torch.bfloat16; allowed: torch.float32"),
        ({"cos": torch.zeros(4, D + 2)}, r"cos: shape \[4, 42\]"),
        ({"sin": torch.zeros(4, D).double()}, "sin: dtype torch.float64; allowed: torch.float32"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions: shape \[2\]; allowed is \[T\] = \[1\]"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, "slots: dtype torch.int32; allowed: torch.int64"),
        ({"kv": torch.zeros(2, 2, HK, D, P).transpose(3, 4)}, "kv: stride"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Tensor], named: str) -> None:
    cos, sin = rope_tables(FREQUENCIES, 4)
    zero, x = torch.zeros(1, dtype=torch.int64), torch.zeros(1, HK, D)
    given = {"q": x, "k": x, "v": x, "cos": cos, "sin": sin, "positions": zero, "slots": zero}
    with pytest.raises(ValueError, match=named):
        rope_and_write(**{**given, "kv": torch.zeros(2, 2, HK, P, D), **change})


def test_an_odd_head_is_refused() -> None:
    x, zero = torch.zeros(1, HK, 33), torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(4, 33)
    with pytest.raises(ValueError, match="q: head_dim 33; allowed is an even one"):
        rope_and_write(x, x, x, table, table, zero, zero, torch.zeros(2, 2, HK, P, 33))


def test_another_dtype_of_cache_is_refused() -> None:
    x = torch.zeros(1, HK, D)
    cos, sin = rope_tables(FREQUENCIES, 4)
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="kv: dtype"):
        rope_and_write(x, x, x, cos, sin, zero, zero, torch.zeros(2, 2, HK, P, D, dtype=torch.bfloat16))


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float16, "packed"), (torch.float32, "transposed")])
def test_a_layout_that_a_cache_cannot_have_is_refused(dtype: torch.dtype, layout: Layout) -> None:
    x = torch.zeros(1, HK, D, dtype=dtype)
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"layout: .?{layout}"):
        rope_and_write(
            x, x, x, *rope_tables(FREQUENCIES, 4), zero, zero, torch.zeros(2, 2, HK, P, D, dtype=dtype), layout=layout
        )
