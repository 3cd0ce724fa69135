from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from transfer_kit import GEOMETRY, ids, start

from bifolio.kv_manager.wire import (
    COMPLETE,
    ENVELOPE,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    Ack,
    Complete,
    Frame,
    Kind,
    Malformed,
    block_count,
    cuts,
    pack,
    pack_frame,
    unpack,
)
from bifolio.protos import kv_pb2
from bifolio.protos.messages import Commit, Generation, Heads, TokenLogprobs

FRAME = Frame(Generation(2**64 - 1, 5), 3, Heads(2, 2**16 - 1), 2, 1024, memoryview(b"payload"))
WORD = Complete(Generation(2**64 - 1, 5), 2**32 - 1, 2, 9, Generation(1, 2**64 - 1))
COMMIT = Commit(
    Generation(1, 2), GEOMETRY, ("layers.0.self_attn",), (Heads(0, 1),), 10, 1, 2, 4, 64, b"\0" * 8, 0.25, 0.5
)


def packed_frame(*payload: bytes) -> bytes:
    frame = FRAME
    views = [memoryview(piece) for piece in payload or (b"pay", b"load")]
    return pack_frame(frame.generation, frame.index, frame.heads, frame.position, frame.offset, views)


def enveloped(kind: int, body: bytes) -> bytes:
    """Anything at all, with a checksum that is right."""
    return ENVELOPE.pack(kind, xxhash.xxh3_64_intdigest(body, seed=kind)) + body


@pytest.mark.parametrize(
    "message",
    [
        start(),
        replace(start(), prompt_logprobs=0),
        replace(start(), prompt_logprobs=20),
        replace(start(skip=1), cached_blocks=2, salt="tenant ü"),
        start(memory=b'["\xff\0", 600 bytes or so]'),
        replace(start(), secret=bytes(range(16))),
        replace(start(), geometry=replace(GEOMETRY, kv_heads=4), heads=(Heads(0, 3), Heads(3, 1))),
        WORD,
        replace(WORD, due=False),
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
    assert unpack(packed_frame()) == FRAME


def test_a_frame_says_whether_it_wants_an_ack():
    frame = FRAME
    quiet = pack_frame(frame.generation, 3, frame.heads, frame.position, frame.offset, [frame.payload], False)
    assert unpack(quiet) == replace(frame, due=False)


def test_packing_gives_plain_bytes_because_grpc_hangs_on_anything_else():
    assert type(packed_frame()) is bytes
    assert type(pack(Ack(1))) is bytes


MESSAGES = [packed_frame(), pack(WORD), pack(Ack(3)), pack(start()), pack(COMMIT)]


@pytest.mark.parametrize("packed", MESSAGES, ids=["frame", "complete", "ack", "start", "commit"])
def test_every_flipped_bit_is_noticed(packed):
    for bit in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Malformed, match="checksum"):
            unpack(bytes(damaged))


@pytest.mark.parametrize("packed", MESSAGES, ids=["frame", "complete", "ack", "start", "commit"])
def test_what_is_cut_anywhere_is_malformed(packed):
    for length in range(len(packed)):
        with pytest.raises(Malformed):
            unpack(packed[:length])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"\x7f garbage",
        enveloped(0, b""),
        enveloped(0x7F, b"garbage"),
        enveloped(Kind.START, b"\xff\xff"),
        enveloped(Kind.ACK, b"\x08"),
        enveloped(Kind.COMMIT, b"\x3a\x05"),
        enveloped(Kind.FRAME, b"short"),
        enveloped(Kind.FRAME, packed_frame()[ENVELOPE.size :] + b"more"),
        enveloped(Kind.COMPLETE, bytes(COMPLETE.size - 1)),
        enveloped(Kind.COMPLETE, bytes(COMPLETE.size + 1)),
        enveloped(Kind.FRAME, pack(WORD)[ENVELOPE.size :]),
        packed_frame(b""),
        packed_frame(bytes(MAX_PAYLOAD + 1)),
        pack(replace(start(), tokens=())),
        pack(replace(start(), blocks=ids(1, 2))),
        pack(start(skip=4)),
        pack(replace(start(), geometry=replace(start().geometry, block_size=0))),
        pack(replace(start(), heads=(Heads(0, 2),))),
        pack(replace(start(), heads=(Heads(0, 1), Heads(0, 1)))),
        pack(replace(start(memory=b"m"), geometry=replace(GEOMETRY, kv_heads=2), heads=(Heads(0, 1), Heads(1, 1)))),
    ],
)
def test_what_the_protocol_does_not_allow_is_malformed(message):
    with pytest.raises(Malformed):
        unpack(message)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (10, 3), (12, 3)])
def test_the_last_block_counts_when_partly_filled(tokens, blocks):
    assert block_count(start(tokens)) == blocks


def test_frames_are_full_whatever_a_block_takes():
    assert list(cuts(range(3, 5), 10, 64)) == [[(3, 0, 10), (4, 0, 10)]]
    assert list(cuts(range(3, 5), 10, 10)) == [[(3, 0, 10)], [(4, 0, 10)]]
    assert list(cuts(range(2), 10, 8)) == [[(0, 0, 8)], [(0, 8, 10), (1, 0, 6)], [(1, 6, 10)]]
    assert list(cuts(range(2, 2), 10, 8)) == []


def test_a_frame_names_the_bytes_of_each_of_its_blocks():
    frame = replace(FRAME, position=4, offset=6, payload=memoryview(b"abcdefghijkl"))
    assert [(p, o, bytes(data)) for p, o, data in frame.pieces(8)] == [
        (4, 6, b"ab"),
        (5, 0, b"cdefghij"),
        (6, 0, b"kl"),
    ]


def test_logprobs_of_uneven_lists_are_malformed():
    uneven = kv_pb2.Commit(prompt_logprobs=[kv_pb2.PromptLogprob(top_ids=[1, 2], top_logprobs=[-0.5])])
    with pytest.raises(Malformed, match="does not parse"):
        unpack(enveloped(Kind.COMMIT, uneven.SerializeToString()))
