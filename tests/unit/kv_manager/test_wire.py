from __future__ import annotations

from dataclasses import replace

import pytest
from transfer_kit import ids, start

from bifolio.kv_manager.wire import (
    COMPLETE,
    HEADER,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    Ack,
    Complete,
    Frame,
    Kind,
    Malformed,
    block_count,
    pack,
    pack_frame,
    pieces,
    unpack,
)
from bifolio.protos import kv_pb2
from bifolio.protos.messages import Commit, Generation, TokenLogprobs

FRAME = Frame(Generation(2**64 - 1, 5), 3, 2, 1024, memoryview(b"payload"))
WORD = Complete(Generation(2**64 - 1, 5), 2**32 - 1, 2)
COMMIT = Commit(Generation(1, 2), 10, 1, 2, 4, 64, b"\0" * 8, 0.25, 0.5)


@pytest.mark.parametrize(
    "message",
    [
        start(),
        replace(start(), prompt_logprobs=0),
        replace(start(), prompt_logprobs=20),
        replace(start(skip=1), cached_blocks=2, salt="tenant ü"),
        start(memory=b'["\xff\0", 600 bytes or so]'),
        WORD,
        Ack(0),
        Ack(2**32 - 1),
        COMMIT,
        replace(
            COMMIT, prompt_logprobs=(TokenLogprobs(0, -0.1), TokenLogprobs(9, -1e-300, ((2**31, -0.0), (9, -30.5))))
        ),
    ],
)
def test_control_messages_come_back_as_they_were(message):
    assert unpack(pack(message)) == message


def test_the_logprobs_of_a_long_prompt_fit_a_message():
    top = tuple((2**17 - i, -i / 3) for i in range(20))
    long = replace(COMMIT, prompt_logprobs=tuple(TokenLogprobs(2**17, -9.0, top) for _ in range(8192)))
    packed = pack(long)
    assert unpack(packed) == long
    assert len(packed) * 25 < MAX_MESSAGE  # 200,000 positions


def test_a_frame_comes_back_as_it_was():
    assert unpack(pack_frame(FRAME)) == FRAME


def test_packing_gives_plain_bytes_because_grpc_hangs_on_anything_else():
    assert type(pack_frame(FRAME)) is bytes
    assert type(pack(Ack(1))) is bytes


def test_a_frame_is_its_header_and_its_payload():
    assert len(pack_frame(FRAME)) == HEADER.size + len(FRAME.payload)
    assert HEADER.size == 41


def test_the_word_that_a_block_is_complete_is_short_and_malformed_when_cut():
    packed = pack(WORD)
    assert len(packed) == COMPLETE.size == 25
    for length in range(1, len(packed)):
        with pytest.raises(Malformed, match="takes 25 bytes"):
            unpack(packed[:length])


def test_every_flipped_payload_bit_is_noticed():
    packed = pack_frame(FRAME)
    for bit in range(HEADER.size * 8, len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Malformed, match="checksum"):
            unpack(bytes(damaged))


def test_a_frame_cut_anywhere_is_malformed():
    packed = pack_frame(FRAME)
    for length in range(1, len(packed)):
        with pytest.raises(Malformed):
            unpack(packed[:length])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"\x7f garbage",
        bytes((Kind.START,)) + b"\xff\xff",
        bytes((Kind.ACK,)) + b"\x08",
        bytes((Kind.COMMIT,)) + b"\x3a\x05",
        pack_frame(FRAME) + b"more",
        bytes((Kind.FRAME,)) + pack(WORD)[1:],
        bytes((Kind.COMPLETE,)) + pack_frame(FRAME)[1:],
        pack(WORD) + b"m",
        pack_frame(replace(FRAME, payload=memoryview(b""))),
        pack_frame(replace(FRAME, payload=memoryview(bytes(MAX_PAYLOAD + 1)))),
        pack(replace(start(), tokens=())),
        pack(replace(start(), blocks=ids(1, 2))),
        pack(start(skip=4)),
        pack(replace(start(), geometry=replace(start().geometry, block_size=0))),
    ],
)
def test_what_the_protocol_does_not_allow_is_malformed(message):
    with pytest.raises(Malformed):
        unpack(message)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (10, 3), (12, 3)])
def test_the_last_block_counts_when_partly_filled(tokens, blocks):
    assert block_count(start(tokens)) == blocks


def test_a_block_travels_in_pieces_of_a_mebibyte():
    assert list(pieces(10)) == [(0, 10)]
    assert list(pieces(MAX_PAYLOAD)) == [(0, MAX_PAYLOAD)]
    assert list(pieces(MAX_PAYLOAD * 2 + 1)) == [
        (0, MAX_PAYLOAD),
        (MAX_PAYLOAD, 2 * MAX_PAYLOAD),
        (2 * MAX_PAYLOAD, 2 * MAX_PAYLOAD + 1),
    ]


def test_logprobs_of_uneven_lists_are_malformed():
    uneven = kv_pb2.Commit(prompt_logprobs=[kv_pb2.PromptLogprob(top_ids=[1, 2], top_logprobs=[-0.5])])
    with pytest.raises(Malformed, match="does not parse"):
        unpack(bytes((Kind.COMMIT,)) + uneven.SerializeToString())
