"""Triton's attention against the formula in float64: every shape, and the faults that other servers' users reported."""

from __future__ import annotations

import sys

import pytest
import torch
from attention_case import TOLERANCE, Case
from interpreted_kit import DTYPES, HALVES, MIXED, check
from pairs import all_pairs

from bifolio.kernels import paged_attention, plan, triton_attention, using
from bifolio.kernels.triton_runtime import processors

PARAMETERS = {
    "group": [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24],
    "d": [32, 64, 72, 80, 96, 112, 128, 160, 192, 256],
    "p": [8, 16, 32, 48, 64, 128, 256],
    "dtype": DTYPES,
    "lens": [[(1, 70), (1, 129)], [(1, 33), (9, 40), (5, 5)], [(20, 100)]],
    "options": [{}, {"window": 20}, {"causal": False}],
}


@pytest.mark.parametrize("values", all_pairs(PARAMETERS), ids=lambda v: "-".join(map(str, v.values())))
def test_any_two_sizes_together(values: dict[str, object]) -> None:
    options, group = values.pop("options"), values.pop("group")
    check(Case(hq=group, hk=1, **values), **options)  # type: ignore[arg-type,operator]


@pytest.mark.parametrize("p", [8, 16, 48, 64, 256])
def test_the_block_size_changes_no_bit(p: int) -> None:
    assert torch.equal(Case([(1, 300), (5, 300)], d=32, p=p).run(), Case([(1, 300), (5, 300)], d=32, p=128).run())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_float8_cache_is_scaled_and_any_other_is_not(dtype: torch.dtype) -> None:
    case = Case([(3, 20), (1, 100), (40, 40)], dtype=dtype)
    plain = case.kv
    case.kv = plain.to(torch.float8_e4m3fn)
    case.keys = [k.to(torch.float8_e4m3fn).float() * 0.06 for k in case.keys]
    case.values = [v.to(torch.float8_e4m3fn).float() * 3.0 for v in case.values]
    got = case.run(k_scale=0.06, v_scale=3.0)
    torch.testing.assert_close(got.double(), case.expected()[0], rtol=0, atol=3 * TOLERANCE[dtype])
    case.kv = plain
    assert torch.equal(case.run(k_scale=0.06, v_scale=3.0), case.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"window": 1},
        {"window": 1000},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-2, 3, 6), "window": 5, "softcap": 3.0},
    ],
)
def test_options(options: dict[str, object], dtype: torch.dtype) -> None:
    check(Case(MIXED, dtype=dtype), **options)


@pytest.mark.parametrize("cap_of_scores", [1e4, -1e4])
def test_scores_far_beyond_a_softcap_become_the_cap(cap_of_scores: float) -> None:
    case = Case([(1, 2)], hq=1, hk=1, d=32)
    case.q.fill_(cap_of_scores)
    case.kv[case.table[0, 0].long(), 0, 0, :2] = 1.0
    lse = torch.zeros(1, 1)
    assert torch.isfinite(case.run(softcap=50.0, lse=lse)).all()
    want = torch.tensor(50.0 if cap_of_scores > 0 else -50.0) + torch.tensor(2.0).log()
    torch.testing.assert_close(lse[0, 0], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [32, 48, 64, 96])
def test_unused_slots_of_a_last_block_do_not_leak(keys: int, dtype: torch.dtype) -> None:
    check(Case([(1, keys)], p=128, dtype=dtype))


@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 100])
def test_slots_before_every_window_do_not_leak(window: int) -> None:
    case = Case([(1, 200), (3, 141)])
    for b, (rows, keys) in enumerate(case.lens):
        for j in range(keys - rows - window + 1):
            case.kv[case.table[b, j // 16].long(), :, :, j % 16] = torch.nan
    check(case, window=window)


def test_a_table_of_more_blocks_than_the_sequences_have() -> None:
    case = Case(MIXED)
    case.table = torch.cat((case.table, torch.full((5, 3), -7, dtype=torch.int32)), dim=1).contiguous()
    check(case)


def test_a_row_that_sees_no_key_gives_zero() -> None:
    check(Case([(1, 7), (1, 0), (9, 5), (1, 9)]))
    check(Case([(1, 7), (1, 0), (30, 5), (1, 9)]), window=2)
    check(Case([(3, 0), (20, 0), (5, 11)]), causal=False)


def test_padding_rows_change_no_bit_of_the_others() -> None:
    alone, padded = Case([(1, 7), (1, 9)]), Case([(1, 7), (1, 0), (1, 9)])
    padded.kv, padded.table = alone.kv, torch.stack((alone.table[0], alone.table[0] * 0, alone.table[1]))
    padded.q = torch.stack((alone.q[0], torch.full_like(alone.q[0], torch.nan), alone.q[1]))
    got, want = padded.run(), alone.run()
    assert torch.equal(got[[0, 2]], want)
    assert (got[1] == 0).all()


def test_a_row_of_nan_stays_alone_in_its_tile() -> None:
    case = Case([(6, 30)])
    want = case.run()
    case.q[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    assert torch.equal(case.run()[others], want[others])


def test_row_i_sees_the_keys_up_to_its_own_position() -> None:
    case = Case([(17, 50)], hq=1, hk=1, d=64)
    for j in range(50):  # V of position j is one-hot: the output lists the weights
        case.kv[case.table[0, j // 16].long(), 1, 0, j % 16] = torch.eye(64)[j]
    assert (case.run()[:, 0] > 0).sum(dim=1).tolist() == [33 + i + 1 for i in range(17)]


def test_no_sequences_and_no_rows() -> None:
    assert Case([]).run().shape == (0, 6, 64)
    check(Case([(0, 5), (1, 5), (0, 0)]))


def test_a_chunk_behind_no_prefix_and_one_behind_a_long_one() -> None:
    check(Case([(128, 128), (128, 428)], hq=2, hk=1, d=32))


@pytest.mark.parametrize("stride", [2**20, 276480])
@pytest.mark.parametrize("p", [16, 64])
def test_a_cache_of_more_than_2_to_the_31_numbers(p: int, stride: int) -> None:
    """Only what is touched of its gigabytes is ever given to the process."""
    case = Case([(1, 150), (5, 140)], hq=2, hk=1, d=32, p=p, dtype=torch.float16)
    last = 2**31 // stride + 900
    huge = torch.empty(2**31 + last * stride + 2 * p * 32, dtype=torch.float16)
    kv = huge.as_strided((last + 1, 2, 1, p, 32), (stride, p * 32, p * 32, 32, 1), storage_offset=2**31)
    for b in range(2):
        for j, block in enumerate(case.table[b].tolist()):
            if block:
                kv[last - block] = case.kv[block]
                case.table[b, j] = last - block
    case.kv = kv
    check(case)


def test_block_numbers_of_more_than_16_bits() -> None:
    case = Case([(1, 140)], hq=1, hk=1, d=32, p=16, dtype=torch.float16)
    kv = torch.empty(70001, 2, 1, 16, 32, dtype=torch.float16)
    for j, block in enumerate((65535, 65536, 70000, *range(66000, 66006))):
        kv[block] = case.kv[case.table[0, j].long()]
        case.table[0, j] = block
    case.kv = kv
    check(case)


def test_queries_and_results_may_be_slices_of_something_wider() -> None:
    case = Case(MIXED)
    want = case.run()
    for wide in (torch.full((len(case.q), 9, 64), torch.nan), torch.full((len(case.q), 6, 80), torch.nan)):
        q, out = wide[:, :6, :64], torch.full_like(wide, 5.0)
        case.q = q.copy_(case.q)
        assert torch.equal(case.run(out=out[:, :6, :64]), want)
        assert (out[:, 6:] == 5).all()
        assert (out[..., 64:] == 5).all()
    apart, lse = torch.zeros(len(case.q), 6, 128)[..., ::2], torch.zeros(len(case.q), 12)[:, ::2]
    assert torch.equal(case.run(out=apart, lse=lse), want)
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=0, atol=1e-5)


def test_what_lies_beside_a_head_has_no_influence() -> None:
    """A head of 72 is computed as one of 128."""
    case = Case(MIXED, d=72)
    want = case.run()
    case.q = torch.full((len(case.q), 6, 128), torch.nan)[..., :72].copy_(case.q)
    assert torch.equal(case.run(), want)


@pytest.mark.parametrize(
    "sinks", [torch.linspace(-2, 3, 8)[::2], torch.tensor([1.5]).expand(4), torch.randn(4, 3)[:, 1]]
)
def test_sinks_may_have_gaps_between_them(sinks: torch.Tensor) -> None:
    check(Case([(1, 20), (9, 70)], hq=4, hk=2), sinks=sinks)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, sys.maxsize])
def test_a_window_may_be_longer_than_positions_can_be(window: int) -> None:
    case = Case([(9, 5), (3, 200)], hq=2, hk=1, d=32)
    assert torch.equal(case.run(window=window), case.run(window=10_000))


@pytest.mark.parametrize("softcap", [50.0, 1e3, 1e5])
def test_a_softcap_that_is_far_away_changes_little(softcap: float) -> None:
    check(Case([(1, 20), (9, 150)], hq=2, hk=1), softcap=softcap)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at unused rows of the tile
def test_scores_of_minus_infinity_count_as_unseen() -> None:
    case = Case([(1, 130)], hq=1, hk=1, d=32)
    case.q.fill_(1.0)
    case.kv[:, 0] = -torch.inf
    assert (case.run() == 0).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layout": "packed"}, "layout: packed with the triton kernels; allowed is plain"),
        ({"exact": True}, "q: on the triton kernels; exact is for the CPU"),
        ({"window": 0}, "window: 0"),
        ({"sinks": torch.zeros(2)}, "sinks: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Case([(2, 20)]).run(**options)


def test_query_heads_must_be_a_multiple_of_the_kv_heads() -> None:
    with pytest.raises(ValueError, match="q: 3 heads; allowed is a multiple of the 2 KV heads"):
        Case([(2, 20)], hq=3, hk=2).run()


def test_torch_can_be_forced() -> None:
    case = Case(MIXED)
    with using("torch"):
        want = case.run(lse=torch.zeros(case.q.shape[:2]))
    torch.testing.assert_close(case.run(), want, rtol=0, atol=1e-5)
    assert processors(torch.device("cpu")) == 16


def test_tiles_of_keys_end_where_the_first_row_and_the_last_window_do() -> None:
    """Tiles have 64 keys: past the edge of one lies a key that a row must not see."""
    check(Case([(5, keys) for keys in range(65, 70)], hq=1, hk=1, d=32))
    check(Case([(1, keys) for keys in range(197, 202)], hq=16, hk=1, d=32), window=135)


def test_layers_of_different_shapes_share_a_plan() -> None:
    shapes = [(3, 3, 32), (3, 1, 32), (6, 1, 32), (6, 1, 64)]
    cases = [Case([(1, 600), (20, 130)], hq=hq, hk=hk, d=d) for hq, hk, d in shapes]
    built = plan(cases[0].cu_q, cases[0].seq_lens, cases[0].table)
    for case in (*cases, Case(cases[0].lens, hq=6, hk=1, d=64, dtype=torch.float16)):
        for causal in (True, False):
            assert torch.equal(paged_attention(case.q, case.kv, built, causal=causal), case.run(causal=causal))
    assert len(built._made) == 10


def test_a_float8_cache_is_refused_where_the_gpu_cannot_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "architecture", lambda device: "sm_80")
    case = Case([(1, 20)], dtype=torch.float16)
    case.run()
    case.kv = case.kv.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv: dtype torch.float8_e4m3fn on sm_80; .* from sm_89 on"):
        case.run()
    monkeypatch.setattr(triton_attention, "architecture", lambda device: "sm_89")
    case.run()
