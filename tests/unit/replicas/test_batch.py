from __future__ import annotations

import pytest

from bifolio.replicas.batch import Row, build_batch


def test_rows_become_tokens_positions_and_slots() -> None:
    batch = build_batch(
        [Row([5, 6, 7], 7, [4, 9], want_logits=False), Row((8,), 0, [2, 3]), Row([9, 1], 16, [1, 7, 5])], 8
    )
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert batch.positions.tolist() == [7, 8, 9, 0, 16, 17]
    assert batch.slots.tolist() == [39, 72, 73, 16, 40, 41]
    assert batch.plan.block_table.tolist() == [[4, 9, 0], [2, 0, 0], [1, 7, 5]]
    assert batch.plan.seq_lens.tolist() == [10, 1, 18]
    assert batch.plan.cu_q.tolist() == [0, 3, 4, 6]
    assert batch.logit_rows.tolist() == [3, 5]
    assert [(s.first_row, s.rows, s.keys) for s in batch.plan.sequences] == [
        (0, 3, 10),
        (3, 1, 1),
        (4, 2, 18),
    ]


def test_targets_name_the_rows_that_are_scored() -> None:
    rows = [
        Row([5, 6, 7], 7, [4, 9], False, targets=[6, 7, 8], top=2),
        Row([8], 0, [2, 3]),
        Row([9, 1], 16, [1, 7, 5], targets=[1]),
        Row([3], 8, [6, 8], targets=[], top=20),
    ]
    batch = build_batch(rows, 8)
    assert batch.scored_rows.tolist() == [0, 1, 2, 4]
    assert batch.targets == (6, 7, 8, 1)
    assert batch.tops == (2, 2, 2, 0)
    assert batch.logit_rows.tolist() == [3, 5, 6]


def test_of_a_draft_all_logits_are_wanted_and_of_the_token_before_it() -> None:
    rows = [Row([5, 6, 7], 7, [4, 9], drafted=2), Row([8, 1], 0, [2]), Row([1, 2, 3], 0, [6], drafted=1)]
    assert build_batch(rows, 8).logit_rows.tolist() == [0, 1, 2, 4, 6, 7]


def test_slots_of_a_large_cache_pass_32_bits() -> None:
    assert build_batch([Row([1], 0, [2**30])], 16).slots.tolist() == [2**34]


def test_no_rows() -> None:
    batch = build_batch([], 8)
    assert batch.tokens.shape == batch.slots.shape == batch.logit_rows.shape == batch.scored_rows.shape == (0,)


def test_rows_that_cannot_be_computed_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="without tokens"):
        build_batch([Row([], 0, [1])], 8)
    with pytest.raises(AssertionError, match="blocks end"):
        build_batch([Row([1, 2], 7, [1])], 8)
    with pytest.raises(AssertionError, match="targets go past"):
        build_batch([Row([1, 2], 0, [1], targets=[2, 3, 4])], 8)
    with pytest.raises(AssertionError, match="draft of nothing"):
        build_batch([Row([1, 2], 0, [1], drafted=2)], 8)
