"""How the attention of a step is cut: every row sees every key once, and a GPU is neither empty nor flooded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bifolio.kernels.schedule import INVARIANT_PART, INVARIANT_PARTS, Schedule, schedule
from bifolio.kernels.tiles import Tiles

DECODE, PREFILL = Tiles(16, 64, 4, 4, 4), Tiles(128, 64, 8, 3, 1)
H200 = 132


def cut(
    lens: list[tuple[int, int]], group: int = 4, kv_heads: int = 8, processors: int = H200, **options: Any
) -> Schedule:
    starts = np.cumsum([0] + [rows for rows, _ in lens]).tolist()
    return schedule(
        starts,
        [keys for _, keys in lens],
        group=group,
        kv_heads=kv_heads,
        decode=DECODE,
        prefill=PREFILL,
        processors=processors,
        **options,
    )


def parts(made: Schedule, sequence: int) -> int:
    """Of its last tile of rows."""
    items = np.concatenate((made.decode, made.prefill))
    mine = items[items[:, 0] == sequence]
    return int((mine[:, 1] == mine[:, 1].max()).sum())


LENS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    LENS,
    st.sampled_from([1, 3, 7, 16]),
    st.sampled_from([1, 8]),
    st.booleans(),
    st.none() | st.integers(1, 900),
    st.booleans(),
)
@example([(1, 3000), (100, 3000)], 1, 1, True, None, False)  # parts of both kinds
def test_every_row_gets_every_key_it_sees_exactly_once(
    lens: list[tuple[int, int]], group: int, kv_heads: int, causal: bool, window: int | None, invariant: bool
) -> None:
    window = window if causal else None
    made = cut(lens, group, kv_heads, causal=causal, window=window, batch_invariant=invariant)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    written: dict[int, list[int]] = {}  # rows of partial results, and the rows of the output they are part of
    starts = np.cumsum([0] + [rows for rows, _ in lens])
    for items, tiles in ((made.decode, DECODE), (made.prefill, PREFILL)):
        assert items.dtype == np.int32
        for sequence, row, begin, end, part in items.tolist():
            held = min(tiles.rows // group, lens[sequence][0] - row)
            assert held > 0
            assert begin % tiles.keys == 0
            assert begin <= end <= lens[sequence][1]
            for r in range(row, row + held):
                found.setdefault((sequence, r), []).append((begin, end))
                if part >= 0:
                    written.setdefault(part + r - row, []).append(int(starts[sequence]) + r)
    for b, (rows, keys) in enumerate(lens):
        for r in range(rows):
            ranges = sorted(found[b, r])
            last = min(keys - rows + r, keys - 1) if causal else keys - 1
            first = max(0, keys - rows + r - window + 1) if window else 0
            assert ranges[0][0] <= max(first, 0) or last < first
            assert ranges[-1][1] > last or last < 0
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert sorted(written) == list(range(made.part_rows))
    assert all(len(rows) == 1 for rows in written.values())
    merged = {first + i * step: row for row, first, step, count in made.merges.tolist() for i in range(count)}
    assert merged == {part: row for part, (row,) in written.items()}


def test_nothing_to_do() -> None:
    for lens in ([], [(0, 5)], [(0, 0), (0, 7)]):
        made = cut(lens)
        assert (len(made.decode), len(made.prefill), len(made.merges), made.part_rows) == (0, 0, 0, 0)
    assert len(cut([(1, 0), (3, 0)]).decode) == 2  # rows without keys: their output is 0, and is written


@pytest.mark.parametrize("batch", [1, 7, 12, 200])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_a_sequence_that_grows_never_gets_fewer_parts(batch: int, kv_heads: int) -> None:
    counts = [parts(cut([(1, keys), *[(1, 700)] * (batch - 1)], kv_heads=kv_heads), 0) for keys in range(1, 60000, 331)]
    assert counts == sorted(counts)


def test_few_long_sequences_fill_the_device() -> None:
    made = cut([(1, 32768)] * 12, kv_heads=1)
    assert parts(made, 0) == H200 * DECODE.programs // 12
    assert len(cut([(1, 32768)], kv_heads=8).decode) == H200 * DECODE.programs // 8


def test_one_long_sequence_among_many_short_ones_is_cut_and_they_are_not() -> None:
    made = cut([(1, 32768), *[(1, 512)] * 31])
    assert parts(made, 0) > 8
    assert {parts(made, b) for b in range(1, 32)} == {1}
    sizes = made.decode[:, 3] - made.decode[:, 2]
    assert (np.diff(sizes) <= 0).all()


def test_a_part_is_long_enough_to_be_worth_its_merge() -> None:
    assert len(cut([(1, 448)], kv_heads=1).decode) == 1
    assert len(cut([(1, 512)], kv_heads=1).decode) == 2


def test_a_full_device_merges_nothing() -> None:
    assert len(cut([(1, 4096)] * 256).merges) == 0
    assert len(cut([(4096, 4096)]).merges) == 0


def test_a_short_chunk_behind_a_long_prefix_is_cut_too() -> None:
    assert parts(cut([(17, 16384)]), 0) > 8


def test_batch_invariant_parts_of_the_longest_are_limited() -> None:
    assert len(cut([(1, 10**6)], batch_invariant=True).decode) == INVARIANT_PARTS


@pytest.mark.parametrize("others", [0, 1, 31, 500])
def test_batch_invariant_parts_do_not_know_the_batch(others: int) -> None:
    made = cut([(1, 5000), (40, 5000), *[(1, 9000)] * others], batch_invariant=True)
    assert parts(made, 0) == 5000 // INVARIANT_PART
    assert parts(made, 1) == 1
    mine, alone = made.decode[made.decode[:, 0] == 0], cut([(1, 5000)], batch_invariant=True).decode
    assert sorted(map(tuple, mine[:, 1:4].tolist())) == sorted(map(tuple, alone[:, 1:4].tolist()))


def test_drafts_to_verify_are_decoded_together() -> None:
    assert len(cut([(4, 100)], group=4).decode) == 1
    assert len(cut([(5, 100)], group=4).decode) == 0
