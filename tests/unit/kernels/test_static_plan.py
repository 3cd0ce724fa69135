"""Tensors that stay while steps come and go: what fills them, what is refused, and how much work they have room for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bifolio.kernels import StaticPlan, using
from bifolio.kernels.schedule import Schedule, decode_capacity, schedule
from bifolio.kernels.tiles import Tiles

CPU = torch.device("cpu")
PREFILL = Tiles(128, 64, 8, 3, 1)
Table = NDArray[np.int32]


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with using("triton"):
        yield


def cut(lengths: list[int], decode: Tiles, group: int, kv_heads: int, processors: int, window: int | None) -> Schedule:
    return schedule(
        range(len(lengths) + 1),
        lengths,
        group=group,
        kv_heads=kv_heads,
        decode=decode,
        prefill=PREFILL,
        processors=processors,
        window=window,
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40000) | st.sampled_from([255, 256, 511, 512, 1024]), min_size=1, max_size=20),
    padding=st.integers(0, 20),
    spare=st.integers(0, 600),
    keys=st.sampled_from([16, 32, 64, 128]),
    group=st.sampled_from([1, 4, 7, 16]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    processors=st.sampled_from([1, 16, 78, 132]),
    programs=st.integers(1, 4),
    window=st.none() | st.integers(1, 5000) | st.sampled_from([449, 450, 512, 513]),
)
@example([40000], 3, 0, 64, 4, 1, 132, 4, None)  # as many parts as run at once
@example([512, 512], 0, 0, 64, 4, 1, 132, 4, None)  # limited by the shortest part
@example([2000], 0, 0, 64, 4, 1, 132, 4, 450)  # a window over one tile more than it has keys
def test_padding_changes_no_work_and_all_has_room(
    lengths: list[int],
    padding: int,
    spare: int,
    keys: int,
    group: int,
    kv_heads: int,
    processors: int,
    programs: int,
    window: int | None,
) -> None:
    decode = Tiles(16, keys, 4, 4, programs)
    alone = cut(lengths, decode, group, kv_heads, processors, window)
    padded = cut(lengths + [0] * padding, decode, group, kv_heads, processors, window)
    assert np.array_equal(padded.decode[: len(alone.decode)], alone.decode)
    assert padded.decode[len(alone.decode) :].tolist() == [[len(lengths) + i, 0, 0, 0, -1] for i in range(padding)]
    assert np.array_equal(padded.merges, alone.merges)
    assert (len(padded.prefill), padded.part_rows) == (0, alone.part_rows)
    room = decode_capacity(
        len(lengths) + padding,
        max(lengths) + spare,
        kv_heads=kv_heads,
        decode=decode,
        processors=processors,
        window=window,
    )
    assert len(padded.decode) <= room.items
    assert len(padded.merges) <= room.merges
    assert padded.part_rows <= room.part_rows


def test_the_room_is_not_larger_than_it_must_be() -> None:
    decode = Tiles(16, 64, 4, 4, 4)
    most = cut([100_000], decode, 1, 1, 132, None)
    room = decode_capacity(1, 100_000, kv_heads=1, decode=decode, processors=132)
    assert (room.items - 1, room.merges, room.part_rows) == (len(most.decode), len(most.merges), most.part_rows)
    short = decode_capacity(64, 448, kv_heads=1, decode=decode, processors=132)
    assert (short.items, short.merges, short.part_rows) == (64, 0, 0)


def fill(
    static: StaticPlan, size: int, lengths: list[int], table: list[list[int]] | None = None, slots: int = 100
) -> None:
    n = len(lengths)
    numbers = np.arange(n, dtype=np.int64)
    given = np.array(table, np.int32) if table else np.ones((n, 1), np.int32)
    static.fill(size, 7 + numbers, 50 + numbers, slots + numbers, np.array(lengths, np.int32), given)


def test_before_it_is_filled_all_is_padding() -> None:
    static = StaticPlan(3, 2, CPU)
    assert static.slots.tolist() == [-1] * 3
    plan = static.plan(2)
    assert (plan.cu_q.tolist(), plan.seq_lens.tolist()) == ([0, 1, 2], [0, 0])
    assert plan.block_table.tolist() == [[0, 0], [0, 0]]
    assert plan.tokens == 2


def test_rows_past_the_sequences_are_padding_whatever_stood_there() -> None:
    static = StaticPlan(4, 2, CPU)
    fill(static, 4, [9, 8, 7, 6])
    fill(static, 4, [12, 3], [[5, 6], [4, 0]])
    assert static.tokens.tolist() == [7, 8, 0, 0]
    assert static.positions.tolist() == [50, 51, 0, 0]
    assert static.slots.tolist() == [100, 101, -1, -1]
    assert static.plan(4).seq_lens.tolist() == [12, 3, 0, 0]
    assert static.plan(4).block_table[:2].tolist() == [[5, 6], [4, 0]]


def test_a_small_step_is_the_first_rows_of_a_large_one_and_nothing_moves() -> None:
    static = StaticPlan(8, 4, CPU)
    small, large = static.plan(2), static.plan(8)
    places = [(x.data_ptr(), x.stride()) for x in (small.cu_q, small.seq_lens, small.block_table)]
    assert places == [(x.data_ptr(), x.stride()) for x in (large.cu_q, large.seq_lens, large.block_table)]
    fill(static, 2, [3, 4], [[1], [2]])
    assert static.plan(2) is small
    assert places == [(x.data_ptr(), x.stride()) for x in (small.cu_q, small.seq_lens, small.block_table)]


def test_no_length_is_known_on_the_host() -> None:
    static = StaticPlan(2, 1, CPU)
    fill(static, 2, [5, 6])
    with pytest.raises(ValueError):
        _ = static.plan(2).sequences


def test_other_kernels_are_refused() -> None:
    with using("torch"), pytest.raises(ValueError, match="static plan: on cpu, where other kernels than Triton's"):
        StaticPlan(2, 1, CPU)


@pytest.mark.parametrize("size", [0, 3])
def test_sizes_that_it_does_not_have_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size: {size}; allowed is 1 to 2"):
        StaticPlan(2, 1, CPU).plan(size)


@pytest.mark.parametrize(
    ("lengths", "table", "named"),
    [
        ([1, 1, 1], [[1], [1], [1]], r"table: shape \[3, 1\]; allowed is up to \[2, 2\]"),
        ([1], [[1, 2, 3]], r"table: shape \[1, 3\]"),
        ([1, -1], [[1], [1]], r"lengths: \[1, -1\]"),
        ([9], [[1]], "block_table: 1 blocks of 8 positions a sequence; one has 9"),
        ([4, 9], [[1, 9], [1, 4]], "block 4 in sequence 1; allowed is 0 to 3"),
        ([4, 9], [[-2, 0], [1, 3]], "block -2 in sequence 0"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    lengths: list[int], table: list[list[int]], named: str
) -> None:
    static = StaticPlan(2, 2, CPU)
    static.plan(2).check_blocks(4, 8)  # as a layer does when it is recorded
    fill(static, 2, [8, 7])
    before = [x.clone() for x in (static.tokens, static.slots, static.plan(2).seq_lens, static.plan(2).block_table)]
    with pytest.raises(ValueError, match=named):
        fill(static, 2, lengths, table, slots=0)
    after = (static.tokens, static.slots, static.plan(2).seq_lens, static.plan(2).block_table)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_blocks_that_no_position_needs_may_be_anything() -> None:
    static = StaticPlan(2, 2, CPU)
    static.plan(1).check_blocks(4, 8)
    fill(static, 1, [8], [[3, 99]])
    assert static.plan(1).seq_lens.tolist() == [8]


def lines(lengths: Table) -> tuple[Table, Table]:
    """Some work: a line for each sequence, and another table for those of more than 10 keys."""
    return np.stack((lengths, lengths * 2), axis=1), lengths[lengths > 10].reshape(-1, 1)


def test_tables_stay_are_cut_again_and_end_with_lines_of_no_work() -> None:
    static = StaticPlan(4, 1, CPU)
    fixed = static.plan(2).fixed
    assert fixed
    all_of, long = fixed.make(((3, 2), (2, 1)), lines)
    assert (all_of.tolist(), long.tolist()) == ([[0, 0], [0, 0], [-1, -1]], [[-1], [-1]])
    places = all_of.data_ptr(), long.data_ptr()
    for lengths, first, second in (
        ([11, 20], [[11, 22], [20, 40], [-1, -1]], [[11], [20]]),
        ([5], [[5, 10], [0, 0], [-1, -1]], [[-1], [-1]]),
    ):
        fill(static, 2, lengths)
        assert (all_of.tolist(), long.tolist()) == (first, second)
    assert places == (all_of.data_ptr(), long.data_ptr())


def test_tables_are_cut_for_their_own_size_alone() -> None:
    static = StaticPlan(4, 1, CPU)
    small, large = static.plan(2).fixed, static.plan(4).fixed
    assert small
    assert large
    (of_two, _), (of_four, _) = (it.make(((4, 2), (4, 1)), lines) for it in (small, large))
    fill(static, 2, [3, 4])
    assert of_two[:, 0].tolist() == [3, 4, -1, -1]
    assert of_four[:, 0].tolist() == [0, 0, 0, 0]
    fill(static, 4, [6, 7, 8])
    assert of_four[:, 0].tolist() == [6, 7, 8, 0]


def test_more_work_than_there_is_room_for_is_never_cut_off() -> None:
    static = StaticPlan(2, 1, CPU)
    fixed = static.plan(2).fixed
    assert fixed
    fixed.make(((2, 2), (1, 1)), lines)
    with pytest.raises(AssertionError, match="more work"):
        fill(static, 2, [11, 12])


def test_no_buffer_of_the_host_is_written_before_what_it_sent_has_arrived() -> None:
    events: list[str] = []
    seen: list[list[int]] = []  # what the host's buffer holds when a copy of it is said to have arrived

    class Arrival:
        def wait(self) -> None:
            events.append("arrived")
            seen.append(static._inputs.arrays[3].tolist())

    def mark(device: torch.device) -> Arrival:
        events.append("sent")
        return Arrival()

    static = StaticPlan(2, 1, CPU, mark=mark)
    fixed = static.plan(2).fixed
    assert fixed
    fixed.make(((2, 2), (2, 1)), lines)
    fill(static, 2, [3, 4])
    fill(static, 2, [5, 6])
    assert events == ["sent"] * 2 + ["arrived", "sent"] * 4  # inputs and tables, each before it is written
    assert seen == [[0, 0], [3, 4], [3, 4], [5, 6]]
