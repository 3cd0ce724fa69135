"""Paged attention against the formula in float64, on caches whose unused slots hold NaN."""

from __future__ import annotations

import pytest
import torch
from attention_case import TOLERANCE, Case
from backends import BACKENDS
from packed_layout import WORD, packed

from bifolio.kernels import Layout, paged_attention, plan, using


def check(case: Case, **options: object) -> None:
    """Every backend, in every layout, exact too where it can be."""
    want, _ = case.expected(**options)  # type: ignore[arg-type]
    for backend in BACKENDS:
        packable = case.dtype == torch.float32 if backend == "torch" else case.dtype in WORD
        exact = packable and not options.keys() & {"softcap", "sinks"}
        for layout in case.layouts:
            for how in ({}, {"exact": True}) if exact else ({},):
                with using(backend):
                    got = case.run(layout, **options, **how)
                assert torch.isfinite(got).all()
                torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[case.dtype])


PACKABLE = [torch.float32, torch.bfloat16]
MIXED = [(1, 40), (17, 50), (9, 9), (1, 1), (33, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prompt_chunks_and_single_tokens_in_one_batch(dtype: torch.dtype) -> None:
    check(Case(MIXED, dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16, 24])
def test_any_number_of_query_heads_per_kv_head(group: int) -> None:
    check(Case([(1, 19), (5, 23)], hq=2 * group, hk=2, d=32))


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("d", [32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_size(d: int, dtype: torch.dtype) -> None:
    check(Case([(1, 19), (5, 23)], d=d, dtype=dtype))


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("p", [8, 16, 24, 48, 64, 128, 256])
def test_any_block_size(p: int, dtype: torch.dtype) -> None:
    check(Case([(1, 150), (5, 131)], d=32, p=p, dtype=dtype))


def test_an_odd_head_or_block_can_be_packed_at_float32() -> None:
    check(Case([(1, 19), (5, 23)], d=33, p=9))


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("keys", [32, 48, 64, 96, 33, 127])  # at an odd end, a word holds a key and an unused slot
def test_unused_slots_of_a_last_block_do_not_leak(keys: int, dtype: torch.dtype) -> None:
    check(Case([(1, keys)], p=128, dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 3, 15, 16, 17])
def test_slots_before_every_window_do_not_leak(window: int) -> None:
    for dtype in PACKABLE:
        case = Case([(1, 40), (3, 41)], dtype=dtype)
        for b, (rows, keys) in enumerate(case.lens):
            for j in range(keys - rows - window + 1):
                case.kv[case.table[b, j // 16].long(), :, :, j % 16] = torch.nan
        check(case, window=window)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"scale": 0.3},
        {"window": 4},
        {"window": 1000},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-2, 3, 6)},
        {"sinks": torch.linspace(-2, 3, 6), "window": 5, "softcap": 3.0},
    ],
)
def test_options(options: dict[str, object], dtype: torch.dtype) -> None:
    check(Case(MIXED, dtype=dtype), **options)


def test_lse_is_the_logarithm_of_the_denominator() -> None:
    case = Case(MIXED)
    for layout in case.layouts:
        lse = torch.full(case.q.shape[:2], torch.nan)
        case.run(layout, lse=lse)
        torch.testing.assert_close(lse.double(), case.expected()[1], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_a_row_that_sees_no_key_gives_zero(layout: Layout) -> None:
    case = Case([(1, 7), (1, 0), (9, 5), (1, 9)])  # a padding row; a chunk longer than its keys
    out = torch.full(case.q.shape, torch.nan)
    lse = torch.full(case.q.shape[:2], torch.nan)
    want, want_lse = case.expected()
    case.run(layout, out=out)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    assert (out[1:6] == 0).all()
    case.run(layout, out=out, lse=lse)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert (out[1:6] == 0).all()
    assert (case.run(layout, exact=True)[1:6] == 0).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_row_i_sees_the_keys_up_to_its_own_position(layout: Layout) -> None:
    case = Case([(17, 50)], hq=1, hk=1, d=64)
    for j in range(50):  # V of position j is one-hot: the output lists the weights
        case.kv[case.table[0, j // 16].long(), 1, 0, j % 16] = torch.eye(64)[j]
    for options in ({}, {"softcap": 1e3}, {"exact": True}):
        seen = (case.run(layout, **options)[:, 0] > 0).sum(dim=1)
        assert seen.tolist() == [33 + i + 1 for i in range(17)]


@pytest.mark.usefixtures("backend")
def test_no_sequences_and_no_rows() -> None:
    for layout in Case([]).layouts:
        assert Case([]).run(layout).shape == (0, 6, 64)
    check(Case([(0, 5), (1, 5), (0, 0)]))


def test_a_huge_score_under_a_softcap_stays_finite() -> None:
    case = Case([(2, 9)])
    case.q *= 1e6
    assert torch.isfinite(case.run(softcap=50.0)).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize(
    ("backend", "options"), [*((name, {}) for name in BACKENDS), ("torch", {"softcap": 3.0})], indirect=["backend"]
)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(options: dict[str, object], layout: Layout) -> None:
    case = Case(MIXED, dtype=torch.bfloat16)
    together = case.run(layout, **options)
    kv = packed(case.kv) if layout == "packed" else case.kv
    for b in range(len(MIXED)):
        rows = slice(int(case.cu_q[b]), int(case.cu_q[b + 1]))
        table, keys = case.table[b : b + 1], case.seq_lens[b : b + 1]
        cu_q = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        built = plan(cu_q, keys, table)
        alone = paged_attention(case.q[rows], kv, built, layout=layout, **options)  # type: ignore[arg-type]
        assert torch.equal(alone, together[rows])


def test_a_float8_cache_is_scaled_and_any_other_is_not() -> None:
    case = Case([(3, 20)])
    stored = case.kv.to(torch.float8_e4m3fn)
    case.keys = [k.to(torch.float8_e4m3fn).float() * 0.5 for k in case.keys]
    case.values = [v.to(torch.float8_e4m3fn).float() * 3.0 for v in case.values]
    plain, case.kv = case.kv, stored
    got = case.run(k_scale=0.5, v_scale=3.0)
    torch.testing.assert_close(got.double(), case.expected()[0], rtol=0, atol=1e-5)
    case.kv = plain
    assert torch.equal(case.run(k_scale=0.5, v_scale=3.0), case.run())


@pytest.mark.usefixtures("backend")
def test_queries_and_results_may_be_slices_of_something_wider() -> None:
    """In the native kernels: rows at any stride; heads that are not side by side are copied."""
    case = Case(MIXED)
    want = case.run()
    for wide in (torch.zeros(len(case.q), 9, 64), torch.zeros(len(case.q), 6, 80)):
        q, out = wide[:, :6, :64], torch.full_like(wide, 5.0)
        case.q = q.copy_(case.q)
        assert torch.equal(case.run(out=out[:, :6, :64]), want)
        assert torch.equal(out[:, :6, :64], want)
        assert (out[:, 6:] == 5).all()
        assert (out[..., 64:] == 5).all()


@pytest.mark.parametrize("dtype", PACKABLE)
def test_a_table_of_more_blocks_than_the_sequences_have(dtype: torch.dtype) -> None:
    """The entries past a sequence's last block mean nothing, and may be none of the cache's."""
    case = Case(MIXED, dtype=dtype)
    beyond = torch.full((len(MIXED), 3), -7, dtype=torch.int32)
    case.table = torch.cat((case.table, beyond), dim=1).contiguous()
    check(case)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(2, 3, 64)}, "q: 3 heads"),
        ({"q": torch.zeros(3, 6, 64)}, r"q: shape \[3, 6, 64\]"),
        ({"q": torch.zeros(2, 6, 64, dtype=torch.float64)}, "q: dtype"),
        ({"q": torch.zeros(2, 6, 32)}, "kv: shape"),
        ({"kv": torch.zeros(3, 2, 2, 16, 64, dtype=torch.bfloat16)}, "kv: dtype"),
        ({"kv": torch.zeros(3, 2, 2, 4, 64)}, "kv: block_size 4"),
        ({"kv": torch.zeros(3, 2, 16, 2, 64).transpose(2, 3)}, "kv: stride"),
        ({"window": 0}, "window: 0"),
        ({"window": 3, "causal": False}, "window: 3"),
        ({"softcap": 0.0}, "softcap: 0"),
        ({"sinks": torch.zeros(2)}, "sinks: shape"),
        ({"lse": torch.zeros(2, 5)}, "lse: shape"),
        ({"softcap": 1.0, "exact": True}, "exact: with softcap"),
        ({"lse": torch.zeros(2, 6), "exact": True}, "exact: with .*lse"),
        ({"out": torch.zeros(2, 6, 64, dtype=torch.bfloat16)}, "out: dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], named: str) -> None:
    case, options = Case([(2, 20)]), dict(change)
    case.q, case.kv = options.pop("q", case.q), options.pop("kv", case.kv)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=named):
        case.run(**options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("dtype", "p", "d", "layout", "named"),
    [
        (torch.float32, 16, 64, "vnni", "layout: 'vnni'; allowed: plain, packed"),
        (torch.float16, 16, 64, "packed", "layout: packed with dtype torch.float16"),
        (torch.float8_e4m3fn, 16, 64, "packed", "layout: packed with dtype torch.float8_e4m3fn"),
        (torch.bfloat16, 9, 64, "packed", "layout: packed with block_size 9"),
        (torch.bfloat16, 16, 65, "packed", "layout: packed with .*head_dim 65.* multiples of 2"),
    ],
)
def test_a_layout_that_a_cache_cannot_have_is_refused(
    dtype: torch.dtype, p: int, d: int, layout: Layout, named: str
) -> None:
    q = torch.zeros(1, 2, d, dtype=torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)
    one = torch.ones(1, dtype=torch.int32)
    built = plan(torch.tensor([0, 1], dtype=torch.int32), one, one[None])
    with pytest.raises(ValueError, match=named):
        paged_attention(q, torch.zeros(2, 2, 2, p, d).to(dtype), built, layout=layout)


@pytest.mark.usefixtures("backend")
def test_blocks_that_the_cache_does_not_have_are_refused() -> None:
    case = Case([(2, 20)])
    case.table[0, 1] = len(case.kv)
    with pytest.raises(ValueError, match="block_table: block 3 in sequence 0; allowed is 0 to 2"):
        case.run()
