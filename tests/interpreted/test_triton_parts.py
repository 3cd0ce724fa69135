"""Attention in parts, chunks and batches: what the schedule of a step may change, and what it may not."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from attention_case import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted_kit import DTYPES, HALVES, MIXED, check

from bifolio.kernels import paged_attention, plan, triton_attention


def parts_of(case: Case, **options: object) -> int:
    """In how many parts the sequences are computed, all together, beyond one for each."""
    built = plan(case.cu_q, case.seq_lens, case.table)
    paged_attention(case.q, case.kv, built, **options)  # type: ignore[arg-type]
    (work,) = built._made.values()
    return len(work.parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_chunks_and_single_tokens_in_one_batch(dtype: torch.dtype) -> None:
    check(Case(MIXED, dtype=dtype))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 150),
    prefix=st.integers(0, 1200),
    cuts=st.sets(st.integers(1, 149), max_size=4),
    p=st.sampled_from([8, 16, 48, 64, 256]),
    processors=st.sampled_from([1, 4, 64]),
    window=st.none() | st.integers(1, 1300),
)
def test_rows_are_the_same_in_any_chunks_parts_and_blocks(
    rows: int, prefix: int, cuts: set[int], p: int, processors: int, window: int | None
) -> None:
    lens = [(rows, prefix + rows)]
    whole = Case(lens, hq=3, hk=1, d=32, p=128).run(window=window)
    case = Case(lens, hq=3, hk=1, d=32, p=p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "processors", lambda device: processors)
        for begin, end in pairwise(sorted({0, rows} | {cut for cut in cuts if cut < rows})):
            seen = torch.tensor([prefix + end], dtype=torch.int32)
            built = plan(torch.tensor([0, end - begin], dtype=torch.int32), seen, case.table)
            part = paged_attention(case.q[begin:end], case.kv, built, window=window)
            torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=3e-6)


@pytest.mark.parametrize("processors", [1, 5, 64])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"sinks": torch.linspace(-2, 20, 3)}, {"causal": False}])
def test_parts_are_merged_into_the_same_result(
    monkeypatch: pytest.MonkeyPatch, processors: int, options: dict[str, object]
) -> None:
    monkeypatch.setattr(triton_attention, "processors", lambda device: processors)
    case = Case([(1, 1100), (2, 530), (1, 3), (9, 2100)], hq=3, hk=1, d=32)
    assert (parts_of(case, **options) > 0) == (processors > 1)
    check(case, **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_parts_of_half_precision_are_as_near(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(triton_attention, "processors", lambda device: 64)
    case = Case([(1, 2100), (3, 2101)], hq=3, hk=1, d=32, dtype=dtype)
    assert parts_of(case) > 0
    check(case)


def test_partial_results_that_nobody_wrote_have_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory may hold NaN."""
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> torch.Tensor:
        return empty(*shape, **options).fill_(torch.nan)  # type: ignore[call-overload,no-any-return]

    case = Case([(5, 1500), (3, 2), (1, 0)], hq=3, hk=1, d=32)
    assert parts_of(case) > 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        got = case.run(window=3), case.run()
    for result, options in zip(got, ({"window": 3}, {}), strict=True):
        torch.testing.assert_close(result.double(), case.expected(**options)[0], rtol=0, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_that_is_batch_invariant_gives_a_sequence_the_same_bits_in_any_batch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(triton_attention, "processors", lambda device: 2)  # too few for all of them
    case = Case([(1, 2100), *[(1, 40)] * 31, (40, 1500)], hq=3, hk=1, d=32, dtype=dtype)
    together = paged_attention(case.q, case.kv, plan(case.cu_q, case.seq_lens, case.table, batch_invariant=True))
    for b in (0, 5, 32):
        rows = slice(int(case.cu_q[b]), int(case.cu_q[b + 1]))
        cu_q = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        built = plan(cu_q, case.seq_lens[b : b + 1], case.table[b : b + 1], batch_invariant=True)
        assert torch.equal(paged_attention(case.q[rows], case.kv, built), together[rows])


def test_items_without_work_are_skipped() -> None:
    """The padding of a CUDA graph: what is not there is not computed and not written."""
    case = Case([(1, 20), (1, 700)])
    built = plan(case.cu_q, case.seq_lens, case.table)
    paged_attention(case.q, case.kv, built)
    ((key, work),) = built._made.items()
    (tiles, items), *none = work.launches
    assert not none
    padding = torch.full((3, items.shape[1]), -1, dtype=torch.int32)
    merges = torch.cat((work.merges, torch.full((2, 4), -1, dtype=torch.int32)))
    launches = ((tiles, torch.cat((items, padding))),)
    built._made[key] = type(work)(launches, merges, work.parts, work.part_lse)
    torch.testing.assert_close(paged_attention(case.q, case.kv, built).double(), case.expected()[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", [40, 700])
@pytest.mark.parametrize("stride", [(2**30, 32, 1), (32, 2**30, 1)], ids=["rows", "heads"])
def test_rows_and_heads_that_lie_far_apart(stride: tuple[int, int, int], keys: int) -> None:
    case = Case([(3, keys)], hq=3, hk=1, d=32, dtype=torch.float16)
    assert (parts_of(case) > 0) == (keys > 512)
    want, case.q = case.run(), torch.empty_strided((3, 3, 32), stride, dtype=torch.float16).copy_(case.q)
    assert torch.equal(case.run(), want)
    assert torch.equal(case.run(out=torch.empty_strided((3, 3, 32), stride, dtype=torch.float16)), want)


def test_kv_heads_that_lie_far_apart() -> None:
    case = Case([(3, 40)], hq=3, hk=3, d=32, dtype=torch.float16)
    want, shape = case.run(), case.kv.shape
    far = torch.empty_strided(shape, (1024, 512, 2**30, 32, 1), dtype=torch.float16)
    case.kv = far.copy_(case.kv)
    assert torch.equal(case.run(), want)


def test_more_than_2_to_the_31_numbers_of_partial_results() -> None:
    case, skipped = Case([(2, 700)], hq=1, hk=1, d=256, dtype=torch.float16), 2**23
    built = plan(case.cu_q, case.seq_lens, case.table)
    want = paged_attention(case.q, case.kv, built)
    ((key, work),) = built._made.items()
    ((tiles, items),) = work.launches
    assert len(work.merges)
    items[:, 4] += skipped
    work.merges[:, 1] += skipped
    parts = torch.empty(skipped + len(work.parts), 1, 256, dtype=torch.float16)
    built._made[key] = type(work)(((tiles, items),), work.merges, parts, torch.empty(parts.shape[:2]))
    torch.testing.assert_close(paged_attention(case.q, case.kv, built), want, rtol=0, atol=2e-3)


def test_more_parts_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "PARTS_AT_ONCE", 2)
    monkeypatch.setattr(triton_attention, "processors", lambda device: 64)
    case = Case([(1, 1400), (1, 700)], hq=3, hk=1, d=32)
    assert parts_of(case) == 5 + 2
    check(case)


def test_parts_in_which_nothing_was_seen_weigh_nothing() -> None:
    """No schedule of today makes one; a merge must not depend on that."""
    lse = torch.tensor([-torch.inf, -torch.inf, 2.0, -torch.inf, 3.0, -torch.inf, -torch.inf])[:, None]
    parts = torch.arange(7.0)[:, None, None].expand(7, 1, 32).contiguous()
    out, out_lse = torch.full((2, 1, 32), torch.nan), torch.zeros(2, 1)
    merges = torch.tensor([[0, 0, 1, 5], [1, 5, 1, 2]], dtype=torch.int32)
    triton_attention.combine[(2, 1)](
        *(out, out_lse, parts, lse, out, merges, 32, 32),
        HEADS=1, D=32, D_PADDED=32, PARTS=2, SINKS=False, LSE=True,
    )  # fmt: skip
    torch.testing.assert_close(out[0], torch.full((1, 32), (4 * 2 + 8 * 4) / 12))
    assert (out[1] == 0).all()
    torch.testing.assert_close(out_lse[:, 0], torch.tensor([math.log(12), -math.inf]))


def test_the_work_is_cut_once_for_all_layers() -> None:
    case = Case(MIXED)
    built = plan(case.cu_q, case.seq_lens, case.table)
    for _ in range(3):
        paged_attention(case.q, case.kv, built)
    paged_attention(case.q, case.kv, built, window=5)
    assert len(built._made) == 2


def test_parts_are_merged_into_a_slice_of_something_wider() -> None:
    case = Case([(2, 1100)], hq=3, hk=1, d=32)
    assert parts_of(case) > 0
    wide = torch.full((2, 4, 40), 5.0)
    assert torch.equal(case.run(out=wide[:, :3, :32]), case.run())
    assert (wide[:, 3] == 5).all()
    assert (wide[..., 32:] == 5).all()
