"""Sampling in Triton against the same rule in plain torch: the same id for every row."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import pytest
import torch

from bifolio.kernels import torch_sample, triton_sample

Setting = tuple[float, float, int, float, float]  # temperature, top_p, top_k, min_p, uniform
LAST = 1 - 2**-53  # the largest uniform
TRUNCATIONS = [(1.0, 0), (0.7, 0), (0.05, 0), (0.999, 0), (1.0, 1), (1.0, 3), (0.8, 40), (0.999, 500)]
GRID: list[Setting] = [
    (temperature, top_p, top_k, min_p, uniform)
    for temperature, (top_p, top_k), min_p, uniform in product(
        [0.3, 1.0, 2.5], TRUNCATIONS, [0.0, 0.02, 0.3, 1.0], [0.0, 0.1, 0.37, 0.8, LAST]
    )
]


def columns(settings: list[Setting]) -> list[torch.Tensor]:
    temperature, top_p, top_k, min_p, uniforms = torch.tensor(settings, dtype=torch.float64).unbind(1)
    return [temperature, top_p, top_k.long(), min_p, uniforms]


def draw(rows: torch.Tensor, *settings: Setting) -> list[int]:
    """One setting for each row, or one for all."""
    chosen: list[int] = triton_sample.sample(rows, *columns(_each(rows, settings))).tolist()
    return chosen


def expected(rows: torch.Tensor, *settings: Setting) -> list[int]:
    chosen: list[int] = torch_sample.sample(rows, *columns(_each(rows, settings))).tolist()
    return chosen


def _each(rows: torch.Tensor, settings: tuple[Setting, ...]) -> list[Setting]:
    return list(settings) * (len(rows) if len(settings) == 1 else 1)


def tied(rows: int, vocabulary: int, seed: int = 5) -> torch.Tensor:
    """Logits in steps of a quarter, so that there are ties at every border."""
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 8).round() / 4


@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 8), (3, 16), (1000, 32), (5000, 8), (49152, 6)])
def test_draws_what_torch_draws(vocabulary: int, rows: int) -> None:
    logits, settings = tied(rows, vocabulary), Random(vocabulary).sample(GRID, rows)
    assert draw(logits, *settings) == expected(logits, *settings)


def test_a_vocabulary_of_several_blocks_is_walked_over_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sample, "BLOCK", 256)
    logits, settings = tied(10, 1000), Random(1).sample(GRID, 10)
    assert draw(logits, *settings) == expected(logits, *settings)


def test_logits_without_ties_are_drawn_as_in_torch() -> None:
    logits, settings = torch.randn(12, 777, generator=torch.Generator().manual_seed(7)), Random(2).sample(GRID, 12)
    assert draw(logits, *settings) == expected(logits, *settings)


@pytest.mark.parametrize("block", [1024, 65536])
def test_of_equal_logits_the_lower_ids_are_kept(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(triton_sample, "BLOCK", block)
    flat = torch.zeros(3, 5000)
    settings = [(1.0, 0.5, 0, 0.0, LAST), (1.0, 1.0, 100, 0.0, LAST), (1.0, 0.5, 2001, 0.0, LAST)]
    assert draw(flat, *settings) == [2499, 99, 1000]


def test_the_smaller_of_two_cuts_through_the_same_ties_holds() -> None:
    """One token weighs 1, eight weigh 1/e: top_k keeps four of these, and top_p two of the four."""
    row = torch.tensor([[0.0] * 4 + [1.0] + [0.0] * 4])
    assert draw(row, (1.0, 1.0, 5, 0.0, LAST)) == [4]
    assert draw(row, (1.0, 1.0, 5, 0.0, 0.59)) == [3]
    assert draw(row, (1.0, 0.65, 5, 0.0, 0.4)) == [1]
    assert draw(row, (1.0, 0.65, 5, 0.0, 0.45)) == [4]


def test_temperature_zero_takes_the_lowest_id_among_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sample, "BLOCK", 16384)
    rows = torch.zeros(2, 49152)
    rows[0, [777, 40000]] = 3.0
    assert draw(rows, (0.0, 0.5, 3, 0.1, 0.9)) == [777, 0]


def test_masked_tokens_are_never_drawn() -> None:
    row = torch.tensor([[-math.inf, 5.0, 4.0, -math.inf]])
    settings = [(t, p, k, 0.0, u) for t, p, k, u in product([0.0, 1.0, 100.0], [1.0, 0.9999], [0, 3], [0.0, LAST])]
    assert set(draw(row.expand(len(settings), 4), *settings)) == {1, 2}


def test_a_top_k_among_masked_tokens_keeps_all_others() -> None:
    rows = torch.full((1, 1000), -math.inf)
    rows[0, [3, 500]] = 1.0
    assert [draw(rows, (1.0, p, 600, 0.0, LAST)) for p in (1.0, 0.9999)] == [[500], [500]]


@pytest.mark.parametrize(
    "setting",
    [(1e-9, 1.0, 0, 0.0, LAST), (1.0, 0.0, 0, 0.0, LAST), (1.0, 1.0, 1, 0.0, LAST), (1.0, 1.0, 0, 1.0, LAST)],
    ids=["temperature", "top_p", "top_k", "min_p"],
)
def test_the_narrowest_setting_leaves_the_most_probable_token(setting: Setting) -> None:
    assert draw(torch.tensor([[-math.inf, 4.0, 5.0, 4.75]]), setting) == [2]


@pytest.mark.parametrize("top_k", [4, 5, 100000])
def test_a_top_k_of_the_vocabulary_or_more_keeps_all(top_k: int) -> None:
    assert draw(torch.zeros(1, 4), (1.0, 1.0, top_k, 0.0, LAST)) == [3]


def test_the_last_uniform_draws_no_token_of_weight_zero() -> None:
    """exp(-1000) is 0 in float64."""
    row = torch.zeros(1, 3000)
    row[0, 2000:] = -1000.0
    assert draw(row, (1.0, 1.0, 0, 0.0, LAST)) == [1999]


def test_zeros_of_either_sign_are_equal() -> None:
    row = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    settings = [(0.0, 1.0, 0, 0.0, LAST), (1.0, 1.0, 2, 0.0, LAST), (1.0, 0.75, 0, 0.0, LAST)]
    assert draw(row.expand(3, 4), *settings) == [0, 1, 2]


def test_logits_of_either_sign_and_any_size_are_ordered() -> None:
    row = torch.tensor([[-3e38, -1.0, -1e-30, -1e-40, 0.0, 1e-40, 1e-30, 1.0, 3e38]])
    for seed in range(3):
        shuffled = row[:, torch.randperm(9, generator=torch.Generator().manual_seed(seed))]
        settings = [(1e38, 1.0, 1, 0.0, LAST), (1e38, 0.5, 0, 0.0, LAST), (0.0, 1.0, 0, 0.0, LAST)]
        assert draw(shuffled.expand(3, 9), *settings) == [int(shuffled.argmax())] * 3


def test_a_row_does_not_depend_on_the_others() -> None:
    rows, setting = torch.randn(6, 1000, generator=torch.Generator().manual_seed(6)), (1.0, 0.9, 50, 0.01, 0.6)
    assert draw(rows, setting) == [draw(row[None], setting)[0] for row in rows]


def test_rows_may_lie_apart_in_memory() -> None:
    wide, setting = tied(4, 2000), (1.0, 0.9, 40, 0.0, 0.7)
    for rows in (wide[:, 100:1100], wide[::2], wide[:, ::2], wide[:1].expand(3, 2000)):
        assert draw(rows, setting) == expected(rows.contiguous(), setting)


def test_frequencies_follow_the_probabilities() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    settings = [(1.0, 1.0, 0, 0.0, (i + 0.5) / 100) for i in range(100)]
    shares = torch.bincount(torch.tensor(draw(row.expand(100, 4), *settings)), minlength=4) / 100
    torch.testing.assert_close(shares, row[0].softmax(0), rtol=0, atol=1e-2)


def test_no_rows_have_no_ids() -> None:
    none = torch.empty(0, dtype=torch.float64)
    ids = triton_sample.sample(torch.empty(0, 5), none, none, none.long(), none, none)
    assert (ids.shape, ids.dtype, ids.device.type) == ((0,), torch.int64, "cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "broken",
    [[1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [-math.inf] * 3, [math.nan] * 3],
    ids=["nan", "infinity", "all masked", "all nan"],
)
def test_a_row_that_is_no_distribution_is_refused(broken: list[float], temperature: float) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], broken])
    with pytest.raises(ValueError) as ours:
        draw(rows, (temperature, 0.9, 2, 0.0, 0.5))
    with pytest.raises(ValueError) as torchs:
        expected(rows, (temperature, 0.9, 2, 0.0, 0.5))
    assert str(ours.value) == str(torchs.value)


def test_a_token_outside_the_top_k_is_not_drawn_for_its_low_id() -> None:
    assert draw(torch.tensor([[0.0, 1.0]]), (1.0, 1.0, 1, 0.0, 0.0)) == [1]


def test_a_top_p_whose_sums_round_up_keeps_no_more_than_top_k_does() -> None:
    row = torch.tensor([[0.0, -1.0] + [-2.0] * 40])
    assert draw(row, (1.0, 1 - 2**-53, 33, 0.0, LAST)) == expected(row, (1.0, 1 - 2**-53, 33, 0.0, LAST)) == [32]


def test_rows_may_lie_far_apart_in_memory() -> None:
    rows, setting = tied(3, 100), (1.0, 0.9, 40, 0.0, 0.7)
    far = torch.empty_strided((3, 100), (2**30, 1)).copy_(rows)
    assert draw(far, setting) == draw(rows, setting)
