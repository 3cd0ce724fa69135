"""A receipt against every way in which frames and commit can be wrong. `test_pull` does it to a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transfer_kit import start

from bifolio.kv_manager.receipt import Receipt
from bifolio.kv_manager.wire import Frame, Malformed
from bifolio.protos.messages import Commit, Generation, Start, TokenLogprobs

START = start(skip=1)  # block positions 1 and 2 of 8 bytes, in pieces of 4
FRAMES = [
    Frame(START.generation, i, position, offset, memoryview(b"data"))
    for i, (position, offset) in enumerate([(1, 0), (1, 4), (2, 0), (2, 4)])
]
COMMIT = Commit(START.generation, tokens=10, first_block=1, block_count=2, frames=4, payload_bytes=16, logits=b"\0" * 4)


LOGPROBS = tuple(TokenLogprobs(token, -2.0, ((7, -0.5),)) for token in START.tokens[1:])


def received(frames: list[Frame], start: Start = START) -> Receipt:
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
