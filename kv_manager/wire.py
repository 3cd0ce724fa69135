"""The bytes of a Prefill stream. Pure: knows nothing about grpc, stores or leases.

    decode → prefill   START, then ACK …
    prefill → decode   FRAME …, or COMPLETE … if the start has a memory to copy from; then COMMIT

Every message is one kind byte, then a message of kv.proto or, for a frame, a fixed header and raw bytes: a
protobuf `bytes` field would cost four times as much. COMPLETE stands for a whole block, without its bytes. A message
that unpacks is sound in itself (a frame's checksum is right, a start's blocks hold its tokens); `Receipt` and the
server say whether it fits the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash
from google.protobuf.message import DecodeError

from bifolio.protos import kv_pb2
from bifolio.protos.convert import commit_from_pb, commit_to_pb, start_from_pb, start_to_pb
from bifolio.protos.messages import Commit, Generation, Start

SERVICE = "bifolio.v1.Kv"
METHOD = "Prefill"
ERROR_KEY = "bifolio-error"  # trailing metadata: the class name of the error that ended the stream

MAX_PAYLOAD = 1 << 20  # larger messages are slower over loopback, and hold up the acks
MAX_MESSAGE = 64 << 20  # a start of several million tokens

# kind, generation (epoch, counter), frame index, block position, byte offset, payload length, payload xxh3_64
HEADER = struct.Struct("<BQQIIIIQ")
# kind, generation (epoch, counter), frame index, block position
COMPLETE = struct.Struct("<BQQII")


class Kind(IntEnum):
    START = 1
    ACK = 2
    FRAME = 3
    COMMIT = 4
    COMPLETE = 5


class Malformed(ValueError):
    """The peer sent what the protocol does not allow. Never leaves the transfer under this name."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The frames up to this index are copied."""

    frame: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A byte range of one block. Blocks go by their position in the sequence: ids differ on the two sides."""

    generation: Generation
    index: int
    position: int
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Complete:
    """A frame without a payload: a whole block may be copied from the memory that the start names."""

    generation: Generation
    index: int
    position: int


def pack(message: Start | Ack | Complete | Commit) -> bytes:
    match message:
        case Start():
            return bytes((Kind.START,)) + start_to_pb(message).SerializeToString()
        case Ack():
            return bytes((Kind.ACK,)) + kv_pb2.Ack(frame=message.frame).SerializeToString()
        case Complete():
            return COMPLETE.pack(Kind.COMPLETE, *message.generation, message.index, message.position)
        case Commit():
            return bytes((Kind.COMMIT,)) + commit_to_pb(message).SerializeToString()


def pack_frame(frame: Frame) -> bytes:
    """One copy of the payload: the join."""
    header = HEADER.pack(
        Kind.FRAME,
        *frame.generation,
        frame.index,
        frame.position,
        frame.offset,
        len(frame.payload),
        xxhash.xxh3_64_intdigest(frame.payload),
    )
    return b"".join((header, frame.payload))


def unpack(message: bytes) -> Start | Ack | Frame | Complete | Commit:
    """Raises Malformed. A frame's payload is a view into `message`."""
    kind = message[0] if message else None
    try:
        match kind:
            case Kind.START:
                return _sound(start_from_pb(kv_pb2.Start.FromString(message[1:])))
            case Kind.ACK:
                return Ack(kv_pb2.Ack.FromString(message[1:]).frame)
            case Kind.FRAME:
                return _unpack_frame(message)
            case Kind.COMPLETE:
                return _unpack_complete(message)
            case Kind.COMMIT:
                return commit_from_pb(kv_pb2.Commit.FromString(message[1:]))
    except Malformed:
        raise
    except (DecodeError, ValueError) as error:  # or lists that belong together differ in length
        raise Malformed(f"a message of kind {kind} does not parse: {error}") from error
    raise Malformed(f"a message of unknown kind {kind}, {len(message)} bytes long")


def _unpack_frame(message: bytes) -> Frame:
    if len(message) < HEADER.size:
        raise Malformed(f"a frame of {len(message)} bytes is shorter than its header")
    _, epoch, counter, index, position, offset, length, checksum = HEADER.unpack_from(message)
    payload = memoryview(message)[HEADER.size :]
    if len(payload) != length or not 0 < length <= MAX_PAYLOAD:
        raise Malformed(f"frame {index} carries {len(payload)} bytes, its header says {length}")
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        raise Malformed(f"frame {index} was damaged on the way: its checksum does not match")
    return Frame(Generation(epoch, counter), index, position, offset, payload)


def _unpack_complete(message: bytes) -> Complete:
    if len(message) != COMPLETE.size:
        raise Malformed(f"the word that a block is complete takes {COMPLETE.size} bytes, not {len(message)}")
    _, epoch, counter, index, position = COMPLETE.unpack(message)
    return Complete(Generation(epoch, counter), index, position)


def _sound(start: Start) -> Start:
    if not start.tokens or not start.geometry.block_size:
        raise Malformed("a start without tokens or block size")
    if len(start.blocks) < block_count(start):
        raise Malformed(f"{len(start.tokens)} tokens do not fit in a lease of {len(start.blocks)} blocks")
    if start.skip_blocks > block_count(start):
        raise Malformed(f"a start that skips {start.skip_blocks} of {block_count(start)} blocks")
    return start


def block_count(start: Start) -> int:
    """Blocks that hold the tokens. The last may be partly filled, and travels whole: a block is one slab."""
    return -(-len(start.tokens) // start.geometry.block_size)


def pieces(block_bytes: int) -> Iterator[tuple[int, int]]:
    """The byte ranges in which a block travels."""
    for offset in range(0, block_bytes, MAX_PAYLOAD):
        yield offset, min(offset + MAX_PAYLOAD, block_bytes)


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
