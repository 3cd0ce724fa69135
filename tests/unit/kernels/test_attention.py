"""Paged attention against the formula in float64, on caches whose unused slots hold NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from backends import BACKENDS
from layout_kit import WORD, packed
from torch import Tensor

from bifolio.kernels import Layout, paged_attention, plan, using

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Case:
    """Sequences of (rows, keys) in shuffled blocks; everything outside them is NaN, the null block too."""

    lens: list[tuple[int, int]]
    hq: int = 6
    hk: int = 2
    d: int = 64
    p: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        counts = [-(-keys // self.p) for _, keys in self.lens]
        ids = (torch.randperm(sum(counts), generator=g) + 1).split(counts)
        self.kv = torch.full((sum(counts) + 1, 3, 2, self.hk, self.p, self.d), torch.nan, dtype=self.dtype)[:, 1]
        self.table = torch.zeros(len(self.lens), max([*counts, 1]), dtype=torch.int32)
        self.keys, self.values = [], []
        for b, (_, n) in enumerate(self.lens):
            k, v = torch.randn(2, self.hk, n, self.d, generator=g).to(self.dtype)
            self.table[b, : counts[b]] = ids[b]
            for j in range(n):
                self.kv[ids[b][j // self.p], 0, :, j % self.p] = k[:, j]
                self.kv[ids[b][j // self.p], 1, :, j % self.p] = v[:, j]
            self.keys.append(k)
            self.values.append(v)
        rows = torch.tensor([0] + [r for r, _ in self.lens])
        self.cu_q = rows.cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor([n for _, n in self.lens], dtype=torch.int32)
        self.q = torch.randn(int(self.cu_q[-1]), self.hq, self.d, generator=g).to(self.dtype)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return ("plain", "packed") if self.dtype in WORD else ("plain",)

    def run(self, layout: Layout = "plain", **options: object) -> Tensor:
        built = plan(self.cu_q, self.seq_lens, self.table)
        kv = packed(self.kv) if layout == "packed" else self.kv
        return paged_attention(self.q, kv, built, layout=layout, **options)  # type: ignore[arg-type]

    def expected(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Row by row, head by head: attention output and the logarithm of the denominator, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64)
        for b, (rows, n) in enumerate(self.lens):
            for i in range(rows):
                last = n - rows + i if causal else n - 1
                first = 0 if window is None else max(0, last - window + 1)
                t = int(self.cu_q[b]) + i
                for h in range(self.hq):
                    seen = slice(first, last + 1) if last >= first else slice(0, 0)
                    k = self.keys[b][h // (self.hq // self.hk), seen].double()
                    v = self.values[b][h // (self.hq // self.hk), seen].double()
                    s = k @ self.q[t, h].double() * (self.d**-0.5 if scale is None else scale)
                    s = s if softcap is None else softcap * torch.tanh(s / softcap)
                    extra = [] if sinks is None else [sinks[h].double()[None]]
                    whole = torch.cat([*extra, s])
                    lse[t, h] = whole.logsumexp(0)
                    out[t, h] = torch.exp(s - lse[t, h]) @ v if len(s) else 0
        return out, lse

    def check(self, **options: object) -> None:
        """Every backend, in every layout, exact too where it can be."""
        want, _ = self.expected(**options)  # type: ignore[arg-type]
        for backend in BACKENDS:
            packable = self.dtype == torch.float32 if backend == "torch" else self.dtype in WORD
            exact = packable and not options.keys() & {"softcap", "sinks"}
            for layout in self.layouts:
                for how in ({}, {"exact": True}) if exact else ({},):
                    with using(backend):
                        got = self.run(layout, **options, **how)
                    assert torch.isfinite(got).all()
                    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[self.dtype])


PACKABLE = [torch.float32, torch.bfloat16]
MIXED = [(1, 40), (17, 50), (9, 9), (1, 1), (33, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prompt_chunks_and_single_tokens_in_one_batch(dtype: torch.dtype) -> None:
    Case(MIXED, dtype=dtype).check()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16, 24])
def test_any_number_of_query_heads_per_kv_head(group: int) -> None:
    Case([(1, 19), (5, 23)], hq=2 * group, hk=2, d=32).check()


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("d", [32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_size(d: int, dtype: torch.dtype) -> None:
    Case([(1, 19), (5, 23)], d=d, dtype=dtype).check()


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("p", [8, 16, 24, 48, 64, 128, 256])
def test_any_block_size(p: int, dtype: torch.dtype) -> None:
    Case([(1, 150), (5, 131)], d=32, p=p, dtype=dtype).check()


def test_an_odd_head_or_block_can_be_packed_at_float32() -> None:
    Case([(1, 19), (5, 23)], d=33, p=9).check()


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("keys", [32, 48, 64, 96, 33, 127])  # at an odd end, a word holds a key and an unused slot
def test_unused_slots_of_a_last_block_do_not_leak(keys: int, dtype: torch.dtype) -> None:
    Case([(1, keys)], p=128, dtype=dtype).check()


@pytest.mark.parametrize("window", [1, 2, 3, 15, 16, 17])
def test_slots_before_every_window_do_not_leak(window: int) -> None:
    for dtype in PACKABLE:
        case = Case([(1, 40), (3, 41)], dtype=dtype)
        for b, (rows, keys) in enumerate(case.lens):
            for j in range(keys - rows - window + 1):
                case.kv[case.table[b, j // 16].long(), :, :, j % 16] = torch.nan
        case.check(window=window)


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
    Case(MIXED, dtype=dtype).check(**options)


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
    Case([(0, 5), (1, 5), (0, 0)]).check()


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
    case.check()


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
