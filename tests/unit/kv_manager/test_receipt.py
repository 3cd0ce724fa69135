"""A receipt against every way in which frames and commit can be wrong. `test_pull` does it to a stream."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from transfer_kit import GEOMETRY, start

from bifolio.kv_manager.receipt import Receipt
from bifolio.kv_manager.wire import Complete, Frame, Malformed
from bifolio.protos.messages import Commit, Generation, Heads, Start, TokenLogprobs

START = start(skip=1)  # block positions 1 and 2 of 8 bytes, in pieces of 4
FRAMES = [
    Frame(START.generation, i, Heads(0, 1), position, offset, memoryview(b"data"))
    for i, (position, offset) in enumerate([(1, 0), (1, 4), (2, 0), (2, 4)])
]
COMMIT = Commit(
    START.generation,
    GEOMETRY,
    GEOMETRY.layer_names,
    (Heads(0, 1),),
    tokens=10,
    first_block=1,
    block_count=2,
    frames=4,
    payload_bytes=16,
    logits=b"\0" * 4,
)


LOGPROBS = tuple(TokenLogprobs(token, -2.0, ((7, -0.5),)) for token in START.tokens[1:])


COPIED = replace(START, memory=b"there")
WORDS = [Complete(START.generation, i, position, 1, Generation(1, 1)) for i, position in enumerate((1, 2))]
COPIES = replace(COMMIT, frames=2)  # and the bytes are those of the blocks


def received(frames: list[Frame] | list[Complete], start: Start = START) -> Receipt:
    receipt = Receipt(start, block_bytes=8)
    for frame in frames:
        receipt.add(frame)
    return receipt


def test_a_whole_prefill_may_be_committed():
    receipt = received(FRAMES)
    receipt.check(COMMIT)
    assert (receipt.frames, receipt.bytes) == (4, 16)


def test_frames_run_on_over_the_ends_of_blocks():
    whole = replace(FRAMES[0], payload=memoryview(b"datadatadata"))
    received([whole, replace(FRAMES[3], index=1)]).check(replace(COMMIT, frames=2))


def test_blocks_come_in_their_order():
    receipt = received(FRAMES[:1])
    with pytest.raises(Malformed, match="due were at most 12 from 4 of block 1"):
        receipt.add(replace(FRAMES[2], index=1))


FOUR = replace(START, geometry=replace(GEOMETRY, kv_heads=4))  # of 2 bytes each
HALVES = (Heads(0, 2), Heads(2, 2))
DIVIDED = replace(COMMIT, geometry=FOUR.geometry, heads=HALVES)


def halves(*order: int) -> list[Frame]:
    """Each of one block's half of the heads."""
    return [Frame(START.generation, n, HALVES[i % 2], 1 + i // 2, 0, memoryview(b"data")) for n, i in enumerate(order)]


def test_parts_may_take_turns():
    received(halves(0, 1, 2, 3), FOUR).check(DIVIDED)
    received(halves(0, 2, 1, 3), FOUR).check(DIVIDED)


@pytest.mark.parametrize("heads", [Heads(1, 2), Heads(0, 4), Heads(0, 1), Heads(2, 3), Heads(4, 1), Heads(2, 0)])
def test_a_head_is_of_one_part(heads):
    receipt = received(halves(0), FOUR)
    with pytest.raises(Malformed, match="frame 1 is of heads"):
        receipt.add(replace(halves(0, 1)[1], heads=heads))


def test_a_part_that_is_missing_is_noticed_even_if_the_counts_agree():
    with pytest.raises(Malformed, match=r"0 of 8 bytes of heads 2\.\.3"):
        received(halves(0, 2), FOUR).check(replace(DIVIDED, frames=2, payload_bytes=8))


@pytest.mark.parametrize(
    "heads", [(), HALVES[:1], (*HALVES, Heads(1, 1)), (Heads(0, 4),), (Heads(0, 1), Heads(1, 1), Heads(2, 2))]
)
def test_a_head_map_that_is_not_what_came_is_refused(heads):
    with pytest.raises(Malformed, match="the commit is of heads"):
        received(halves(0, 1, 2, 3), FOUR).check(replace(DIVIDED, heads=heads))


def test_how_the_other_side_divides_its_heads_is_its_own_business():
    received(halves(0, 1, 2, 3), FOUR).check(replace(DIVIDED, geometry=replace(FOUR.geometry, tensor_parallel=2)))


def test_blocks_that_were_copied_count_with_all_their_bytes():
    receipt = received(WORDS, COPIED)
    receipt.check(COPIES)
    assert (receipt.frames, receipt.bytes) == (2, 16)
    received([replace(WORDS[0], count=2)], COPIED).check(replace(COPIES, frames=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": Generation(7, 8)},
        {"index": 0},
        {"index": 2},
        {"position": 0},
        {"position": 1},
        {"position": 3},
        {"count": 0},
        {"count": 2},
        {"count": 2**32 - 1},
    ],
)
def test_a_copy_that_is_not_due_is_refused(wrong):
    receipt = received(WORDS[:1], COPIED)
    with pytest.raises(Malformed):
        receipt.add(replace(WORDS[1], **wrong))
    assert (receipt.frames, receipt.bytes) == (1, 8)


@pytest.mark.parametrize("wrong", [{"frames": 4}, {"payload_bytes": 0}, {"block_count": 1}])
def test_a_commit_that_is_not_true_of_copies_is_refused(wrong):
    with pytest.raises(Malformed):
        received(WORDS, COPIED).check(replace(COPIES, **wrong))


def test_a_commit_before_the_last_copy_is_refused():
    with pytest.raises(Malformed, match="8 of 16 bytes"):
        received(WORDS[:1], COPIED).check(replace(COPIES, frames=1, payload_bytes=8))


def test_blocks_are_either_all_sent_or_all_copied():
    with pytest.raises(Malformed, match="a Frame came where blocks are copied"):
        received(FRAMES, COPIED)
    with pytest.raises(Malformed, match="a Complete came where blocks are sent"):
        received(WORDS)


def test_nothing_to_send_is_a_whole_prefill_too():
    receipt = Receipt(start(skip=3), block_bytes=8)
    receipt.check(replace(COMMIT, first_block=3, block_count=0, frames=0, payload_bytes=0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": Generation(7, 8)},
        {"index": 0},
        {"index": 2},
        {"position": 0},
        {"position": 2},
        {"position": 3},
        {"offset": 0},
        {"offset": 5},
        {"offset": 12, "position": 0},
        {"offset": 8},
        {"payload": memoryview(b"x" * 13)},
    ],
)
def test_a_frame_that_is_not_due_is_refused(wrong):
    receipt = received(FRAMES[:1])
    with pytest.raises(Malformed):
        receipt.add(replace(FRAMES[1], **wrong))
    assert receipt.frames == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": Generation(7, 10)},
        {"geometry": replace(GEOMETRY, dtype="bfloat16")},
        {"geometry": replace(GEOMETRY, layout="packed")},
        {"geometry": replace(GEOMETRY, block_size=8)},
        {"geometry": replace(GEOMETRY, fingerprint="other")},
        {"layers": ()},
        {"layers": ("layers.1.self_attn",)},
        {"layers": ("layers.0.cross_attn",)},
        {"layers": ("layers.0.self_attn", "layers.1.self_attn")},
        {"tokens": 9},
        {"first_block": 0},
        {"block_count": 1},
        {"frames": 3},
        {"payload_bytes": 15},
        {"logits": b""},
        {"logits": b"\0" * 6},
    ],
)
def test_a_commit_that_is_not_true_is_refused(wrong):
    with pytest.raises(Malformed):
        received(FRAMES).check(replace(COMMIT, **wrong))


@pytest.mark.parametrize(("row", "fits"), [(0, False), (3, False), (4, True), (5, False), (8, False)])
def test_logits_are_of_the_vocabulary(row, fits):
    receipt = Receipt(start(skip=3), 8, vocabulary=4)
    commit = replace(COMMIT, first_block=3, block_count=0, frames=0, payload_bytes=0, logits=bytes(4 * row))
    with contextlib.nullcontext() if fits else pytest.raises(Malformed, match="logits"):
        receipt.check(commit)


def test_the_prompts_logprobs_are_those_that_were_asked_for():
    received(FRAMES, replace(START, prompt_logprobs=1)).check(replace(COMMIT, prompt_logprobs=LOGPROBS))
    bare = tuple(one._replace(top=()) for one in LOGPROBS)
    received(FRAMES, replace(START, prompt_logprobs=0)).check(replace(COMMIT, prompt_logprobs=bare))
    # a vocabulary of one has no two most probable tokens
    received(FRAMES, replace(START, prompt_logprobs=2)).check(replace(COMMIT, prompt_logprobs=LOGPROBS))


@pytest.mark.parametrize(
    ("asked", "came"),
    [
        (None, LOGPROBS),
        (1, ()),
        (1, LOGPROBS[1:]),
        (1, LOGPROBS[::-1]),
        (1, (*LOGPROBS, LOGPROBS[0])),
        (0, LOGPROBS),
        (1, (*LOGPROBS[:-1], LOGPROBS[-1]._replace(top=()))),
    ],
)
def test_logprobs_of_anything_else_are_refused(asked, came):
    with pytest.raises(Malformed, match="logprobs"):
        received(FRAMES, replace(START, prompt_logprobs=asked)).check(replace(COMMIT, prompt_logprobs=came))


def test_a_commit_before_the_last_bytes_is_refused_even_if_its_counts_agree():
    with pytest.raises(Malformed, match="12 of 16 bytes"):
        received(FRAMES[:3]).check(replace(COMMIT, frames=3, payload_bytes=12))
