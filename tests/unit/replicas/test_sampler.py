from __future__ import annotations

import pytest
import torch

from bifolio.protos.messages import Sampling
from bifolio.replicas.sampler import sample_tokens

LOGITS = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 2


def test_greedy_rows_take_the_largest_logit() -> None:
    greedy = Sampling(max_tokens=1, temperature=0.0, seed=3)
    assert sample_tokens(LOGITS, [(greedy, i) for i in range(6)]) == LOGITS.argmax(1).tolist()


def test_a_row_is_a_function_of_its_logits_parameters_and_position_alone() -> None:
    rows = [
        (Sampling(max_tokens=9, temperature=t, top_p=0.9, seed=i), 10 + i) for i, t in enumerate((0, 1, 2, 1, 0, 3))
    ]
    together = sample_tokens(LOGITS, rows)
    alone = [sample_tokens(LOGITS[i][None], [row])[0] for i, row in enumerate(rows)]
    backwards = sample_tokens(LOGITS.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_position_choose_the_number_drawn() -> None:
    flat = torch.zeros(1, 10000)
    drawn = {sample_tokens(flat, [(Sampling(max_tokens=9, seed=s), p)])[0] for s in range(8) for p in range(8)}
    assert len(drawn) > 60


def test_no_rows() -> None:
    assert sample_tokens(LOGITS[:0], []) == []


def test_logits_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="logits: 6 rows"):
        sample_tokens(LOGITS, [])
