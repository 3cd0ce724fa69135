from __future__ import annotations

import pytest
import torch

from bifolio.kernels import plan


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_and_keys_of_each_sequence() -> None:
    built = plan(i32(0, 3, 3, 4), i32(5, 0, 9), torch.zeros(3, 2, dtype=torch.int32))
    assert built.tokens == 4
    assert [(s.first_row, s.rows, s.keys) for s in built.sequences] == [(0, 3, 5), (3, 0, 0), (3, 1, 9)]


def test_the_causal_mask_ends_at_each_rows_own_position() -> None:
    mask = plan(i32(0, 2), i32(4), i32(1)[None]).sequences[0].causal_mask
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_block_numbers_are_64_bit() -> None:
    assert plan(i32(0, 1), i32(1), i32(70000)[None]).sequences[0].blocks.dtype == torch.int64


@pytest.mark.parametrize(
    ("cu_q", "named"),
    [(i32(1, 2), "cu_q"), (i32(0, -1), "cu_q"), (i32(0), "cu_q"), (i32(0, 1).long(), "cu_q: dtype")],
)
def test_row_numbers_that_make_no_sense_are_refused(cu_q: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan(cu_q, i32(1), i32(1)[None])
