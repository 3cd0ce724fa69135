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


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_lens: \[3, -1\]"):
        plan(i32(0, 1, 2), i32(3, -1), torch.zeros(2, 1, dtype=torch.int32))


def test_a_table_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="block_table: stride"):
        plan(i32(0, 1, 2), i32(1, 1), torch.zeros(2, 4, dtype=torch.int32)[:, :2])


def test_sequences_are_made_when_they_are_asked_for_and_once() -> None:
    built = plan(i32(0, 1), i32(1), i32(1)[None])
    assert "sequences" not in vars(built)
    assert built.sequences is built.sequences


def test_blocks_must_cover_the_keys() -> None:
    built = plan(i32(0, 1, 2), i32(17, 3), i32(1, 2, 3, 0).view(2, 2))
    built.check_blocks(4, 9)
    with pytest.raises(ValueError, match=r"block_table: 2 blocks of 8 positions .* 17 positions"):
        built.check_blocks(4, 8)


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_outside_the_cache_are_refused_where_they_are_used(block: int) -> None:
    used = plan(i32(0, 1, 2), i32(16, 9), i32(1, 2, 3, block).view(2, 2))
    with pytest.raises(ValueError, match=f"block_table: block {block} in sequence 1; allowed is 0 to 3"):
        used.check_blocks(4, 8)
    plan(i32(0, 1, 2), i32(16, 8), i32(1, 2, 3, block).view(2, 2)).check_blocks(4, 8)


def test_blocks_are_looked_at_once_for_all_layers() -> None:
    table = i32(1, 2)[None]
    built = plan(i32(0, 1), i32(16), table)
    built.check_blocks(3, 8)
    table[0, 1] = 9  # nobody may do this; it shows who looks
    built.check_blocks(3, 8)
    with pytest.raises(ValueError, match="block 9"):
        built.check_blocks(4, 8)


def test_a_plan_for_another_device_has_its_tensors_there_and_looks_at_the_blocks_here() -> None:
    built = plan(i32(0, 1), i32(9), i32(1, 7)[None], device=torch.device("meta"))
    assert {x.device.type for x in (built.cu_q, built.seq_lens, built.block_table)} == {"meta"}
    with pytest.raises(ValueError, match="block 7"):
        built.check_blocks(4, 8)


def test_tensors_of_different_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="block_table: on meta; allowed is cpu"):
        plan(i32(0, 1), i32(1), i32(1)[None].to("meta"))


def test_a_plan_keeps_whether_it_is_batch_invariant() -> None:
    assert plan(i32(0, 1), i32(1), i32(1)[None], batch_invariant=True).batch_invariant
