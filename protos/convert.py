"""Frozen messages to and from protobuf: the only file that knows both."""

from __future__ import annotations

from . import kv_pb2
from .messages import BlockId, Commit, Generation, Geometry, RequestId, Start


def generation_to_pb(generation: Generation) -> kv_pb2.Generation:
    return kv_pb2.Generation(epoch=generation.epoch, counter=generation.counter)


def generation_from_pb(pb: kv_pb2.Generation) -> Generation:
    return Generation(pb.epoch, pb.counter)


def geometry_to_pb(geometry: Geometry) -> kv_pb2.Geometry:
    return kv_pb2.Geometry(**{name: getattr(geometry, name) for name in Geometry.__slots__})


def geometry_from_pb(pb: kv_pb2.Geometry) -> Geometry:
    return Geometry(**{name: getattr(pb, name) for name in Geometry.__slots__})


def start_to_pb(start: Start) -> kv_pb2.Start:
    return kv_pb2.Start(
        request_id=start.request,
        generation=generation_to_pb(start.generation),
        blocks=start.blocks,
        token_ids=start.tokens,
        skip_blocks=start.skip_blocks,
        geometry=geometry_to_pb(start.geometry),
        arrival=start.arrival,
    )


def start_from_pb(pb: kv_pb2.Start) -> Start:
    return Start(
        request=RequestId(pb.request_id),
        generation=generation_from_pb(pb.generation),
        blocks=tuple(BlockId(block) for block in pb.blocks),
        tokens=tuple(pb.token_ids),
        geometry=geometry_from_pb(pb.geometry),
        arrival=pb.arrival,
        skip_blocks=pb.skip_blocks,
    )


def commit_to_pb(commit: Commit) -> kv_pb2.Commit:
    return kv_pb2.Commit(
        generation=generation_to_pb(commit.generation),
        tokens=commit.tokens,
        first_block=commit.first_block,
        block_count=commit.block_count,
        frames=commit.frames,
        payload_bytes=commit.payload_bytes,
        logits=commit.logits,
        queue_seconds=commit.queue_seconds,
        prefill_seconds=commit.prefill_seconds,
    )


def commit_from_pb(pb: kv_pb2.Commit) -> Commit:
    return Commit(
        generation=generation_from_pb(pb.generation),
        tokens=pb.tokens,
        first_block=pb.first_block,
        block_count=pb.block_count,
        frames=pb.frames,
        payload_bytes=pb.payload_bytes,
        logits=pb.logits,
        queue_seconds=pb.queue_seconds,
        prefill_seconds=pb.prefill_seconds,
    )
