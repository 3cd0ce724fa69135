"""The native builds agree: float32 to the bit on every instruction set, and each row with itself in any company."""

from __future__ import annotations

import pytest
import torch
from backends import NATIVE
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import Case
from test_layer import KINDS
from test_layer import Case as LayerCase
from torch import Tensor

from bifolio.kernels import Backend, Layout, pack_linear, rms_norm, self_check, silu_mul, using


def everything(backend: Backend) -> list[Tensor]:
    """Float32 results of each kernel, over odd shapes."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(19, 333, generator=g) * 10
    with using(backend):
        results = [rms_norm(x, x.flip(0), x[0], 1e-5)[0], silu_mul(x[:, 1:])]
    for kind in KINDS:
        results += LayerCase(**kind).run(backend)
    for layout in ("plain", "packed"):
        case = Case([(1, 200), (30, 300), (3, 3), (0, 9)], hq=14, hk=2, d=72, p=24)
        with using(backend):
            results += [case.run(layout), case.run(layout, window=33), case.run(layout, causal=False)]
    return results


@pytest.mark.parametrize("backend", NATIVE[1:])
def test_float32_has_the_same_bits_on_every_instruction_set(backend: Backend) -> None:
    for ours, best in zip(everything(backend), everything(NATIVE[0]), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), best.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", NATIVE)
def test_the_self_check_passes_and_names_the_bits(backend: Backend, dtype: torch.dtype) -> None:
    names = {}
    for isa in (backend, NATIVE[0]):
        with using(isa):
            g = torch.Generator().manual_seed(1)
            linears = [pack_linear(torch.randn(s, generator=g).to(dtype), exact=True) for s in ((7, 33), (50, 96))]
            names[isa] = self_check(linears, 6, 2, 40, [None, 40])
    assert all(len(name) == 8 for name in names.values())
    if dtype == torch.float32:
        assert len(set(names.values())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", NATIVE)
def test_the_number_of_threads_changes_no_bits(backend: Backend, dtype: torch.dtype) -> None:
    """Of few sequences heads are shared out between threads, of many whole sequences."""
    few, many = [(1, 200), (30, 300)], [(1, 19 * i) for i in range(1, 9)]
    cases = [Case(lens, hq=14, hk=2, d=72, p=24, dtype=dtype) for lens in (few, many)]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results = [part for kind in KINDS for part in LayerCase(dtype=dtype, **kind).run(backend)]
        with using(backend):
            found.append(results + [case.run(layout) for case in cases for layout in case.layouts])
    for other in found[1:]:
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(other, found[0], strict=True))


@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=4),
    heads=st.sampled_from([(9, 3), (14, 2), (7, 1), (4, 4), (24, 2), (13, 1)]),
    d=st.sampled_from([32, 64, 80, 96]),
    p=st.sampled_from([8, 16, 24, 64]),
    window=st.none() | st.integers(1, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["plain", "packed"]),
    backend=st.sampled_from(NATIVE),
)
@settings(max_examples=60, deadline=None)
def test_a_query_has_the_same_bits_alone_in_a_chunk_and_in_a_batch(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    d: int,
    p: int,
    window: int | None,
    dtype: torch.dtype,
    layout: Layout,
    backend: Backend,
) -> None:
    case = Case([(rows, before + rows) for rows, before in lens], *heads, d, p, dtype)
    with using(backend):
        whole = case.run(layout, window=window)
        row = 0
        for b, (rows, keys) in enumerate(case.lens):
            for i in {0, rows // 2, rows - 1}:
                one = Case([(1, keys - rows + i + 1)], *heads, d, p, dtype)
                one.kv, one.table = case.kv, case.table[b : b + 1].contiguous()
                one.q = case.q[row + i : row + i + 1]
                assert torch.equal(one.run(layout, window=window)[0], whole[row + i])
            row += rows
