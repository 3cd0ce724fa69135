"""Frozen messages to and from protobuf: the only file that knows both."""

from __future__ import annotations

from . import kv_pb2
from .messages import BlockId, Commit, Generation, Geometry, Heads, RequestId, Start, TokenLogprobs


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
        cached_blocks=start.cached_blocks,
        salt=start.salt,
        geometry=geometry_to_pb(start.geometry),
        arrival=start.arrival,
        prompt_logprobs=start.prompt_logprobs,
        memory=start.memory,
        secret=start.secret,
        heads=map(_heads_to_pb, start.heads),
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
        cached_blocks=pb.cached_blocks,
        salt=pb.salt,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
        memory=pb.memory,
        secret=pb.secret,
        heads=tuple(map(_heads_from_pb, pb.heads)),
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
        prompt_logprobs=map(_logprobs_to_pb, commit.prompt_logprobs),
        geometry=geometry_to_pb(commit.geometry),
        layers=commit.layers,
        heads=map(_heads_to_pb, commit.heads),
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
        prompt_logprobs=tuple(map(_logprobs_from_pb, pb.prompt_logprobs)),
        geometry=geometry_from_pb(pb.geometry),
        layers=tuple(pb.layers),
        heads=tuple(map(_heads_from_pb, pb.heads)),
    )


def _heads_to_pb(heads: Heads) -> kv_pb2.Heads:
    return kv_pb2.Heads(first=heads.first, count=heads.count)


def _heads_from_pb(pb: kv_pb2.Heads) -> Heads:
    return Heads(pb.first, pb.count)


def _logprobs_to_pb(one: TokenLogprobs) -> kv_pb2.PromptLogprob:
    ids, values = zip(*one.top, strict=True) if one.top else ((), ())
    return kv_pb2.PromptLogprob(token_id=one.token, logprob=one.logprob, top_ids=ids, top_logprobs=values)


def _logprobs_from_pb(pb: kv_pb2.PromptLogprob) -> TokenLogprobs:
    return TokenLogprobs(pb.token_id, pb.logprob, tuple(zip(pb.top_ids, pb.top_logprobs, strict=True)))
