"""Faults in Prefill streams, by a schedule: what a client of ours sends and receives is changed on its way.

    client ─▶ requests ─▶ faults ─▶ grpc ═ loopback ═ grpc ─▶ server
           ◀─ faults ◀───────────── grpc ═══════════ grpc ◀─

On real streams: an interceptor of the client's channel takes the place of a broken network. It knows the messages of
the wire, and nothing of stores, jobs or models.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from bifolio.kv_manager.channels import Channels
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.wire import Ack, Complete, Frame, Kind, Malformed, pack, pack_frame, unpack
from bifolio.protos.messages import Commit, Generation, Heads, Start, TokenLogprobs

DELAY_S = 0.003


@dataclass(frozen=True)
class Fault:
    """What happens to the message with this number among those of its kind, in its direction."""

    kind: Kind
    number: int
    how: str


def _skips(start: Start, by: int) -> Start:
    return replace(start, skip_blocks=max(0, start.skip_blocks + by))


def _geometry(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda message: replace(message, geometry=replace(message.geometry, **{name: value}))


def _later(generation: Generation) -> Generation:
    return generation._replace(counter=generation.counter + 1000)


def _earlier(generation: Generation) -> Generation:
    return generation._replace(epoch=generation.epoch - 1)


# Changes of content whose checksum is right again: those of a peer that is wrong, not of a wire
STARTS: dict[str, Callable[[Start], Start]] = {
    "of an earlier lease": lambda m: replace(m, generation=_earlier(m.generation)),
    "of a later lease": lambda m: replace(m, generation=_later(m.generation)),
    "of other blocks": lambda m: replace(m, blocks=tuple(block + 1 for block in m.blocks)),
    "with one block more": lambda m: replace(m, blocks=(*m.blocks, max(m.blocks) + 1)),
    "with a wrong secret": lambda m: replace(m, secret=bytes([m.secret[0] ^ 1]) + m.secret[1:]),
    "without a secret": lambda m: replace(m, secret=b""),
    "skips one more": lambda m: _skips(m, 1),
    "one more is cached": lambda m: replace(m, cached_blocks=m.cached_blocks + 1),
    "with a token less": lambda m: replace(m, tokens=m.tokens[:-1]),
    "with a token more": lambda m: replace(m, tokens=(*m.tokens, 1)),
    "of another dtype": _geometry("dtype", "int8"),
    "of other layers": _geometry("layers", 99),
    "of another block size": _geometry("block_size", 1),
    "of other KV heads": _geometry("kv_heads", 99),
    "of another layout": _geometry("layout", "odd"),
    "of another model": _geometry("fingerprint", "another"),
    "for divided heads": lambda m: replace(m, heads=tuple(Heads(i, 1) for i in range(m.geometry.kv_heads))),
    "for too few heads": lambda m: replace(m, heads=(Heads(0, m.geometry.kv_heads - 1),)),
    "of another memory": lambda m: replace(m, memory=b"another"),
}
ACKS: dict[str, Callable[[Ack], Ack]] = {
    "of a later frame": lambda m: Ack(m.frame + 1),
    "of no frame": lambda m: Ack(m.frame + 1000),
}
FRAMES: dict[str, Callable[[Frame], Frame]] = {
    "of an earlier lease": lambda m: replace(m, generation=_earlier(m.generation)),
    "of a later lease": lambda m: replace(m, generation=_later(m.generation)),
    "a later index": lambda m: replace(m, index=m.index + 1),
    "a later position": lambda m: replace(m, position=m.position + 1),
    "a position that is not there": lambda m: replace(m, position=1000),
    "a later offset": lambda m: replace(m, offset=m.offset + 4),
    "fewer heads": lambda m: replace(m, heads=Heads(m.heads.first, m.heads.count - 1)),
    "other heads": lambda m: replace(m, heads=Heads(m.heads.first + 1, m.heads.count)),
    "less payload": lambda m: replace(m, payload=m.payload[: -1 if len(m.payload) > 1 else None]),
    "more payload": lambda m: replace(m, payload=memoryview(bytes(m.payload) + b"\1")),
}
COMPLETES: dict[str, Callable[[Complete], Complete]] = {
    "of an earlier lease": lambda m: replace(m, generation=_earlier(m.generation)),
    "of a later lease": lambda m: replace(m, generation=_later(m.generation)),
    "a later index": lambda m: replace(m, index=m.index + 1),
    "a later position": lambda m: replace(m, position=m.position + 1),
    "of a block more": lambda m: replace(m, count=m.count + 1),
    "of no block": lambda m: replace(m, count=0),
    "of another owner": lambda m: replace(m, owner=_later(m.owner)),
    "of an earlier owner": lambda m: replace(m, owner=Generation(0, 0)),
}
COMMITS: dict[str, Callable[[Commit], Commit]] = {
    "of an earlier lease": lambda m: replace(m, generation=_earlier(m.generation)),
    "of a later lease": lambda m: replace(m, generation=_later(m.generation)),
    "of another dtype": _geometry("dtype", "int8"),
    "of another model": _geometry("fingerprint", "another"),
    "of fewer layers": lambda m: replace(m, layers=m.layers[:-1]),
    "of fewer heads": lambda m: replace(m, heads=m.heads[:-1]),
    "of heads twice": lambda m: replace(m, heads=m.heads * 2),
    "of a token less": lambda m: replace(m, tokens=m.tokens - 1),
    "from another block": lambda m: replace(m, first_block=m.first_block + 1),
    "of a block more": lambda m: replace(m, block_count=m.block_count + 1),
    "of a frame more": lambda m: replace(m, frames=m.frames + 1),
    "of more bytes": lambda m: replace(m, payload_bytes=m.payload_bytes + 1),
    "without logits": lambda m: replace(m, logits=b""),
    "with part of a logit": lambda m: replace(m, logits=m.logits[:-1]),
    "with unasked logprobs": lambda m: replace(m, prompt_logprobs=(*m.prompt_logprobs, TokenLogprobs(1, -1.0))),
}
# What only a replica with a model knows to be wrong
OF_A_MODEL: dict[str, Callable[[Commit], Commit]] = {
    "with half of the logits": lambda m: replace(m, logits=m.logits[: len(m.logits) // 8 * 4]),
    "with twice the logits": lambda m: replace(m, logits=m.logits * 2),
}
CONTENT: dict[Kind, dict[str, Callable[[Any], Any]]] = {
    Kind.START: STARTS,
    Kind.ACK: ACKS,
    Kind.FRAME: FRAMES,
    Kind.COMPLETE: COMPLETES,
    Kind.COMMIT: COMMITS,
}
CARRIAGE = ("drop", "double", "swap", "flip", "cut", "delay")  # what a network, or a bug at its door, may do


def every_fault(kind: Kind) -> tuple[str, ...]:
    return (*CARRIAGE, *CONTENT[kind])


def random_faults(rng: random.Random, comes: Kind, messages: int) -> list[Fault]:
    """One to four, in a stream whose blocks come by messages of that kind, about so many."""
    kinds = rng.choices([Kind.START, Kind.ACK, comes, Kind.COMMIT], [1, 4, 4, 2], k=rng.randint(1, 4))
    return [
        Fault(
            kind,
            0 if kind in (Kind.START, Kind.COMMIT) else rng.randrange(messages),
            rng.choice(rng.choice([CARRIAGE, tuple(CONTENT[kind])])),
        )
        for kind in kinds
    ]


@dataclass
class Plan:
    """The faults of one stream. The same seed gives the same bits."""

    faults: Sequence[Fault] = ()
    seed: int = 0
    cancel: Callable[[], object] | None = None  # called by the fault "cancel", which leaves its message as it is

    def __post_init__(self) -> None:
        self.happened: list[Fault] = []
        self.rng = random.Random(self.seed)

    def line(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """One direction: what leaves of what comes. Held back is at most one message, until the next or the end."""
        seen: Counter[int] = Counter()
        held: list[bytes] = []
        for message in messages:
            kind = message[0] if message else 0
            leave, keep = [message], False
            for fault in self.faults:
                if (fault.kind, fault.number) == (kind, seen[kind]):
                    self.happened.append(fault)
                    keep = keep or fault.how == "swap"
                    leave = [one for message in leave for one in self._changed(message, fault)]
            seen[kind] += 1
            if keep and not held:
                held = leave
                continue
            yield from leave
            yield from held
            held = []
        yield from held

    def _changed(self, message: bytes, fault: Fault) -> list[bytes]:
        match fault.how:
            case "drop":
                return []
            case "double":
                return [message, message]
            case "swap":
                return [message]
            case "flip" if message:
                at = self.rng.randrange(len(message))
                return [message[:at] + bytes([message[at] ^ 1 << self.rng.randrange(8)]) + message[at + 1 :]]
            case "cut" if message:
                return [message[: self.rng.randrange(len(message))]]
            case "delay":
                threading.Event().wait(DELAY_S)
                return [message]
            case "cancel":
                assert self.cancel is not None
                self.cancel()
                return [message]
        return [_recast(message, fault)]


def _recast(message: bytes, fault: Fault) -> bytes:
    try:
        found = (CONTENT[fault.kind] | OF_A_MODEL)[fault.how](unpack(message))
        if isinstance(found, Frame):
            payload = [found.payload]
            return pack_frame(found.generation, found.index, found.heads, found.position, found.offset, payload)
        return pack(found)
    except (KeyError, Malformed):  # a second fault of a message that has been damaged already
        return message


class Faults(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """The plans of all streams of a client, by the lease that their start names."""

    def __init__(self) -> None:
        self.plans: dict[Generation, Plan] = {}

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Iterator[bytes]) -> Any:
        first = next(requests)
        started = unpack(first)
        assert isinstance(started, Start)
        plan = self.plans.get(started.generation, Plan())
        return _Call(continuation(details, plan.line(_chained(first, requests))), plan)


class _Call:
    """As much of grpc's call as a pull uses."""

    def __init__(self, call: Any, plan: Plan) -> None:
        self._responses = plan.line(call)
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[bytes]:
        return self._responses

    def __next__(self) -> bytes:
        return next(self._responses)


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


class FaultyChannels(Channels):
    def __init__(self, keepalive_s: float, faults: Faults) -> None:
        super().__init__(keepalive_s)
        self._faults = faults

    def _connect(self, address: str) -> grpc.Channel:
        return grpc.intercept_channel(super()._connect(address), self._faults)


def break_streams(client: PrefillClient, keepalive_s: float = 5.0) -> Faults:
    """From now on the client's streams go through this."""
    client._channels.close()
    faults = Faults()
    client._channels = FaultyChannels(keepalive_s, faults)
    return faults
