"""Sampling against a plain list-of-probabilities version, and against the distribution itself."""

from __future__ import annotations

import math

import pytest
import torch

from bifolio.kernels import sample


def draw(
    rows: torch.Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    uniform: float = 0.5,
) -> list[int]:
    n = len(rows)
    chosen: list[int] = sample(
        rows,
        torch.full((n,), temperature),
        torch.full((n,), top_p, dtype=torch.float64),
        torch.full((n,), top_k),
        torch.full((n,), min_p, dtype=torch.float64),
        torch.full((n,), uniform, dtype=torch.float64),
    ).tolist()
    return chosen


def plain(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, uniform: float) -> int:
    """The documented rule, word by word."""
    weights = {i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    order = order[:top_k] if top_k else order
    total, kept, so_far = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        so_far += weights[i]
        if so_far >= top_p * total:
            break
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    point, so_far = uniform * sum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        so_far += weights[i]
        if so_far > point:
            return i
    raise AssertionError


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (0.05, 0), (1.0, 3), (0.8, 40), (0.999, 500)])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_follows_the_rule(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    rows = torch.randn(4, 200, generator=torch.Generator().manual_seed(5)) * 2
    rows = (rows * 4).round() / 4  # so that there are ties
    for uniform in (0.0, 0.1, 0.37, 0.8, 0.999999):
        want = [plain(row.tolist(), temperature, top_p, top_k, min_p, uniform) for row in rows]
        assert draw(rows, temperature, top_p, top_k, min_p, uniform) == want


def test_a_flat_nucleus_larger_than_the_first_search() -> None:
    rows = torch.zeros(1, 5000)
    assert draw(rows, top_p=0.5, uniform=1 - 2**-53) == [2499]
    assert draw(rows, top_k=100, uniform=1 - 2**-53) == [99]


def test_temperature_zero_takes_the_lowest_id_among_the_largest() -> None:
    rows = torch.zeros(2, 50000)
    rows[0, [777, 40000]] = 3.0
    assert draw(rows, temperature=0.0, uniform=0.9) == [777, 0]


def test_frequencies_follow_the_probabilities() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    ones, zeros = torch.ones(4000), torch.zeros(4000)
    ids = sample(row.expand(4000, 4), ones, ones, zeros.long(), zeros, uniforms)
    shares = torch.bincount(ids, minlength=4) / 4000
    torch.testing.assert_close(shares, row[0].softmax(0), rtol=0, atol=1e-3)


def test_masked_tokens_and_extreme_settings_stay_in_the_possible() -> None:
    row = torch.tensor([[-math.inf, 5.0, 4.0, -math.inf]])
    for uniform in (0.0, 1 - 2**-53):
        assert draw(row, uniform=uniform)[0] in (1, 2)
    assert draw(row, temperature=1e-9, uniform=0.999) == [1]
    assert draw(row, top_p=0.0, uniform=0.999) == [1]
    assert draw(row, top_k=1, uniform=0.999) == [1]
    assert draw(row, min_p=1.0, uniform=0.999) == [1]


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(8, 1000, generator=torch.Generator().manual_seed(6))
    options = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "uniform": 0.6}
    together = draw(rows, **options)  # type: ignore[arg-type]
    assert together == [draw(row[None], **options)[0] for row in rows]  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_by_name() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="logits: dtype"):
        sample(torch.zeros(1, 4).bfloat16(), one, one, one, one, one.double())
    with pytest.raises(ValueError, match=r"logits: shape \[1, 0\].*at least 1"):
        sample(torch.zeros(1, 0), one, one, one, one, one.double())
    with pytest.raises(ValueError, match="uniforms: dtype"):
        sample(torch.zeros(1, 4), one, one, one, one, one)
    with pytest.raises(ValueError, match="top_p: shape"):
        sample(torch.zeros(1, 4), one, torch.ones(2), one, one, one.double())
    with pytest.raises(ValueError, match="min_p: shape"):
        sample(torch.zeros(1, 4), one, one, one, torch.ones(2), one.double())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_is_refused(broken: float, temperature: float) -> None:
    row = torch.tensor([[1.0, broken, 2.0]])
    with pytest.raises(ValueError, match="logits: a row"):
        draw(row, temperature=temperature)
    with pytest.raises(ValueError, match="logits: a row"):
        draw(torch.full((1, 3), -math.inf), temperature=temperature)


def test_min_p_looks_at_the_probabilities_at_the_temperature() -> None:
    """e^-1 of the largest at temperature 1, e^-0.5 at 2: kept from there on."""
    row = torch.tensor([[1.0, 0.0]])
    last = 1 - 2**-53
    assert [draw(row, temperature=t, min_p=0.5, uniform=last)[0] for t in (1.0, 2.0)] == [0, 1]
