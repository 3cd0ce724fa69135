"""The bytes of a Prefill stream. Pure: knows nothing about grpc, stores or leases.

    decode → prefill   START, then ACK …
    prefill → decode   FRAME …, or COMPLETE … if the start has a memory to copy from; then COMMIT
                       WORKING between them, as long as the engine goes on and there is nothing to send

    message   kind (1 byte) │ xxh3_64 of what follows, seeded with the kind (8) │ body
    body      a message of kv.proto; of FRAME a fixed header and raw bytes, for which a protobuf field would cost four
              times as much; of COMPLETE a fixed header alone

A frame carries a run of bytes of one part of the blocks (`heads.py`): from one place of a block on, into the blocks
after it. COMPLETE stands for whole blocks, without their bytes. A message that unpacks is sound in itself (its checksum
is right, a start's blocks hold its tokens); `Receipt` and the server say whether it fits the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash
from google.protobuf.message import DecodeError

from bifolio.protos import kv_pb2
from bifolio.protos.convert import commit_from_pb, commit_to_pb, start_from_pb, start_to_pb
from bifolio.protos.messages import Commit, Generation, Heads, Start

from .heads import cover

SERVICE = "bifolio.v1.Kv"
METHOD = "Prefill"
ERROR_KEY = "bifolio-error"  # trailing metadata: the class name of the error that ended the stream

MAX_PAYLOAD = 1 << 20  # larger messages are slower over loopback, and hold up the acks
MAX_COPY = 8 << 20  # bytes of the blocks that one word stands for: a word costs as much as a copy of half a megabyte
MAX_MESSAGE = 64 << 20  # a start of several million tokens

ENVELOPE = struct.Struct("<BQ")  # kind, checksum
# generation (epoch, counter), frame index, whether an ack is due, heads (first, count), block position, byte offset,
# payload length
FRAME = struct.Struct("<QQI?HHIII")
# generation (epoch, counter), frame index, whether an ack is due, block position, blocks, their owner at the sender
COMPLETE = struct.Struct("<QQI?IIQQ")


class Kind(IntEnum):
    START = 1
    ACK = 2
    FRAME = 3
    COMMIT = 4
    COMPLETE = 5
    WORKING = 6


class Malformed(ValueError):
    """The peer sent what the protocol does not allow. Never leaves the transfer under this name."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The frames up to this index are copied."""

    frame: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes of some heads of a block, from `offset` on, and of the blocks after it. Blocks go by their position in the
    sequence: ids differ on the two sides."""

    generation: Generation
    index: int
    heads: Heads
    position: int
    offset: int
    payload: memoryview
    due: bool = True  # an ack: each costs both sides as much as a tenth of a frame

    def pieces(self, part_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
        """Block by block: its position, the first byte there, and the data; `part_bytes` of these heads in a block."""
        position, offset, rest = self.position, self.offset, self.payload
        while rest:
            size = min(part_bytes - offset, len(rest))
            yield position, offset, rest[:size]
            position, offset, rest = position + 1, 0, rest[size:]


@dataclass(frozen=True, slots=True)
class Complete:
    """A frame without a payload: so many whole blocks may be copied from the memory that the start names. They were
    last written there under `owner`."""

    generation: Generation
    index: int
    position: int
    count: int
    owner: Generation
    due: bool = True  # an ack


@dataclass(frozen=True, slots=True)
class Working:
    """The prefill is queued or computed, and its engine goes on: who hears nothing at all for long may give it up."""


def pack(message: Start | Ack | Complete | Commit | Working) -> bytes:
    match message:
        case Working():
            return _enveloped(Kind.WORKING, b"")
        case Start():
            return _enveloped(Kind.START, start_to_pb(message).SerializeToString())
        case Ack():
            return _enveloped(Kind.ACK, kv_pb2.Ack(frame=message.frame).SerializeToString())
        case Complete(generation, index, position, count, owner, due):
            return _enveloped(Kind.COMPLETE, COMPLETE.pack(*generation, index, due, position, count, *owner))
        case Commit():
            return _enveloped(Kind.COMMIT, commit_to_pb(message).SerializeToString())


def pack_frame(
    generation: Generation,
    index: int,
    heads: Heads,
    position: int,
    offset: int,
    payload: Sequence[memoryview],
    due: bool = True,
) -> bytes:
    """A `Frame` of views that follow each other. One copy of them: the join."""
    size = sum(map(len, payload))
    header = FRAME.pack(*generation, index, due, heads.first, heads.count, position, offset, size)
    checksum = xxhash.xxh3_64(header, seed=Kind.FRAME)
    for view in payload:
        checksum.update(view)
    return b"".join((ENVELOPE.pack(Kind.FRAME, checksum.intdigest()), header, *payload))


def unpack(message: bytes) -> Start | Ack | Frame | Complete | Commit | Working:
    """Raises Malformed. A frame's payload is a view into `message`."""
    if len(message) < ENVELOPE.size:
        raise Malformed(f"a message of {len(message)} bytes is shorter than what each begins with")
    kind, checksum = ENVELOPE.unpack_from(message)
    body = memoryview(message)[ENVELOPE.size :]
    if xxhash.xxh3_64_intdigest(body, seed=kind) != checksum:
        raise Malformed(
            f"a message of kind {kind}, {len(message)} bytes long, was damaged on the way: its checksum is off"
        )
    try:
        match kind:
            case Kind.START:
                return _sound(start_from_pb(kv_pb2.Start.FromString(bytes(body))))
            case Kind.ACK:
                return Ack(kv_pb2.Ack.FromString(bytes(body)).frame)
            case Kind.FRAME:
                return _unpack_frame(body)
            case Kind.COMPLETE:
                epoch, counter, index, due, position, count, *owner = COMPLETE.unpack(body)
                return Complete(Generation(epoch, counter), index, position, count, Generation(*owner), due)
            case Kind.WORKING if not body:
                return Working()
            case Kind.COMMIT:
                return commit_from_pb(kv_pb2.Commit.FromString(bytes(body)))
    except Malformed:
        raise
    except (DecodeError, ValueError, struct.error) as error:  # or lists that belong together differ in length
        raise Malformed(f"a message of kind {kind} does not parse: {error}") from error
    raise Malformed(f"a message of unknown kind {kind}, {len(message)} bytes long")


def _enveloped(kind: Kind, body: bytes) -> bytes:
    return ENVELOPE.pack(kind, xxhash.xxh3_64_intdigest(body, seed=kind)) + body


def _unpack_frame(body: memoryview) -> Frame:
    epoch, counter, index, due, first, count, position, offset, length = FRAME.unpack_from(body)
    payload = body[FRAME.size :]
    if len(payload) != length or not 0 < length <= MAX_PAYLOAD:
        raise Malformed(f"frame {index} carries {len(payload)} bytes, its header says {length}")
    return Frame(Generation(epoch, counter), index, Heads(first, count), position, offset, payload, due)


def _sound(start: Start) -> Start:
    if not start.tokens or not start.geometry.block_size:
        raise Malformed("a start without tokens or block size")
    if len(start.blocks) < block_count(start):
        raise Malformed(f"{len(start.tokens)} tokens do not fit in a lease of {len(start.blocks)} blocks")
    if start.skip_blocks > block_count(start):
        raise Malformed(f"a start that skips {start.skip_blocks} of {block_count(start)} blocks")
    if start.heads and not cover(start.heads, start.geometry.kv_heads):
        parts = ", ".join(map(str, start.heads))
        raise Malformed(f"a start whose caches hold the heads {parts}: not each of {start.geometry.kv_heads} once")
    if start.memory and len(start.heads) > 1:
        raise Malformed("a start whose caches divide the heads, and which would copy whole blocks")
    return start


def block_count(start: Start) -> int:
    """Blocks that hold the tokens. The last may be partly filled, and travels whole: a block is one slab."""
    return -(-len(start.tokens) // start.geometry.block_size)


def cuts(positions: range, part_bytes: int, max_frame: int) -> Iterator[list[tuple[int, int, int]]]:
    """How a run of blocks travels: for each frame the position, first byte and end of its pieces."""
    assert 0 < max_frame <= MAX_PAYLOAD
    cut: list[tuple[int, int, int]] = []
    room = max_frame
    for position in positions:
        begin = 0
        while begin < part_bytes:
            end = min(begin + room, part_bytes)
            cut.append((position, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield cut
                cut, room = [], max_frame
    if cut:
        yield cut


def channel_options(keepalive_s: float) -> list[tuple[str, int]]:
    """For both ends, so that a cut link or a frozen peer is noticed even while nothing is sent."""
    milliseconds = int(keepalive_s * 1000)
    return [
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),  # else a ping gets 60 s, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),  # no limit: a long chunk is silence, not a fault
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_receive_message_length", MAX_MESSAGE),
    ]
