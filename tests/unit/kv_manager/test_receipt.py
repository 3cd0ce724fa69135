"""A receipt against every way in which frames and commit can be wrong. `test_pull` does it to a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transfer_kit import start

from bifolio.kv_manager.receipt import Receipt
from bifolio.kv_manager.wire import Complete, Frame, Malformed
from bifolio.protos.messages import Commit, Generation, Start, TokenLogprobs

START = start(skip=1)  # block positions 1 and 2 of 8 bytes, in pieces of 4
FRAMES = [
    Frame(START.generation, i, position, offset, memoryview(b"data"))
    for i, (position, offset) in enumerate([(1, 0), (1, 4), (2, 0), (2, 4)])
]
COMMIT = Commit(START.generation, tokens=10, first_block=1, block_count=2, frames=4, payload_bytes=16, logits=b"\0" * 4)


LOGPROBS = tuple(TokenLogprobs(token, -2.0, ((7, -0.5),)) for token in START.tokens[1:])


COPIED = replace(START, memory=b"there")
WORDS = [Complete(START.generation, i, position) for i, position in enumerate((1, 2))]
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


def test_blocks_may_take_turns():
    turns = [replace(FRAMES[i], index=n) for n, i in enumerate((0, 2, 1, 3))]
    received(turns).check(COMMIT)


def test_blocks_that_were_copied_count_with_all_their_bytes():
    receipt = received(WORDS, COPIED)
    receipt.check(COPIES)
    assert (receipt.frames, receipt.bytes) == (2, 16)
    received([replace(WORDS[i], index=n) for n, i in enumerate((1, 0))], COPIED).check(COPIES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": Generation(7, 8)},
        {"index": 0},
        {"index": 2},
        {"position": 0},
        {"position": 1},
        {"position": 3},
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
    with pytest.raises(Malformed, match="0 of 8 bytes of block 2"):
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
        {"payload": memoryview(b"datum")},
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
    with pytest.raises(Malformed, match="4 of 8 bytes of block 2"):
        received(FRAMES[:3]).check(replace(COMMIT, frames=3, payload_bytes=12))
