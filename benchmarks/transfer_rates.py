"""How fast a cache goes from one process to another, and what that takes of both: our ways beside what they are made
of.

All ways in turn in each round: memcpy in this process, TCP into one buffer, raw gRPC whose messages are dropped, ours
in frames, ours copied out of the other process's memory. Knows nothing of windows, or of the frames' sizes.
"""

from __future__ import annotations

import ctypes
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median

import grpc
import measure
import numpy as np
import torch
from rich.table import Table
from transfer_partner import Partner
from transfer_source import LARGE, PIECE, RAW, SMALL, Offer, Sender, Serving, Shape, cache_of, noise, start_of

from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.wire import channel_options
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas.block_stores import HostBlocks

MEMCPY, TCP, GRPC, FRAMES, COPIES = "memcpy", "TCP, recv_into", "raw gRPC", "ours, frames", "ours, copies"
WAYS = (MEMCPY, TCP, GRPC, FRAMES, COPIES)
GRPC_BAR, MEMCPY_BAR = 0.8, 0.5
GB = 1e9
generations = (Generation(1, n) for n in count(1))


@dataclass(frozen=True, slots=True)
class Sample:
    """One way in one round."""

    seconds: float
    receiver: float  # seconds of CPU
    sender: float


Samples = Mapping[str, Sequence[Sample]]  # by way, round by round


def sampled(ways: Mapping[str, measure.Way], sender: Partner, rounds: int) -> Samples:
    """A first round, which warms up, is not counted."""
    each_round = []
    for number in range(rounds + 1):
        measure.progress(f"round {number} of {rounds}")
        each_round.append({name: _sample(way, sender) for name, way in ways.items()})
    return {name: [samples[name] for samples in each_round[1:]] for name in ways}


def _sample(way: measure.Way, sender: Partner) -> Sample:
    theirs, ours, began = sender.cpu(), time.process_time(), time.perf_counter()
    way()
    seconds, ours = time.perf_counter() - began, time.process_time() - ours
    return Sample(seconds, ours, sender.cpu() - theirs)


class Receiver:
    """The receiving side of one shape, all ways. Its blocks, as the sender's, are in the order of a cache that has been
    in use for long: in none."""

    def __init__(self, shape: Shape, blocks: int, offer: Offer) -> None:
        self.shape, self.blocks, self.offer = shape, blocks, offer
        self.size = blocks * shape.block_bytes
        self._cache = cache_of(shape, blocks)
        self._cache.bytes.fill_(1)  # touched
        self._store = HostBlocks(self._cache)
        self._meters = {copies: TrafficMeter() for copies in (False, True)}
        self._clients = {copies: self._client(copies) for copies in (False, True)}
        shuffle = random.Random(blocks)
        self._theirs, self._ours = (
            tuple(BlockId(block) for block in shuffle.sample(range(1, blocks + 1), blocks)) for _ in range(2)
        )
        self._tcp = socket.create_connection(("127.0.0.1", offer.tcp))
        self._raw = grpc.insecure_channel(f"127.0.0.1:{offer.raw}", channel_options(5.0))
        self._piece = bytearray(PIECE)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._tcp.close()
        self._raw.close()

    def ways(self) -> dict[str, measure.Way]:
        source = np.ones(self.size, np.uint8)
        return {
            MEMCPY: partial(self.memcpy, source, np.ones(self.size, np.uint8)),
            TCP: self.tcp,
            GRPC: self.raw,
            FRAMES: self.frames,
            COPIES: self.copies,
        }

    def memcpy(self, source: np.ndarray, to: np.ndarray) -> None:
        a, b, step = source.ctypes.data, to.ctypes.data, self.shape.block_bytes
        for begin in range(0, self.size, step):
            ctypes.memmove(b + begin, a + begin, step)

    def tcp(self) -> None:
        self._tcp.sendall(b"g")
        left, into = self.size, memoryview(self._piece)
        while left:
            left -= self._tcp.recv_into(into[: min(left, PIECE)])

    def raw(self, piece: int = PIECE) -> None:
        send: grpc.StreamStreamMultiCallable[bytes, bytes] = self._raw.stream_stream(RAW)
        got = sum(len(message) for message in send(iter([str(piece).encode()])))
        assert got == self.size, "raw gRPC has lost something"

    def frames(self, server: int = 0) -> None:
        self._pull(server, copies=False)

    def copies(self) -> None:
        self._pull(0, copies=True)

    def check(self, way: str) -> None:
        """RuntimeError unless `way`, which frames or copies, brings what was sent, and that way."""
        self._cache.bytes.fill_(1)
        ways = [self.frames, self.copies]
        ways[way == COPIES]()
        expected = noise(self.shape, self.blocks)
        for theirs, ours in zip(self._theirs, self._ours, strict=True):
            if not np.array_equal(self._cache.bytes[ours].numpy(), expected[theirs - 1]):
                raise RuntimeError(f"{way}: other bytes came than were sent")

    def _client(self, copies: bool) -> PrefillClient:
        return PrefillClient(whole(self._store, self.shape.geometry), self._meters[copies], copies=copies)

    def _pull(self, server: int, copies: bool) -> None:
        start = start_of(self.shape, "r", next(generations), self._theirs, self.offer.memory)
        commit = self._clients[copies].pull(self.offer.servers[server], start).run(self._ours)
        assert commit.block_count == self.blocks, "the receipt has let a short one pass"
        if copies and self._meters[copies].read().ways.keys() != {"copied"}:
            raise RuntimeError(f"blocks were to be copied, they came {dict(self._meters[copies].read().ways)}")


@contextmanager
def pair(shapes: Sequence[Shape], mib: int, serving: Sequence[Serving]) -> Iterator[tuple[Partner, list[Receiver]]]:
    """A sender in a process of its own, and a receiver here for each shape, of caches of at least so much."""
    torch.set_num_threads(1)
    blocks = tuple(shape.blocks_of(mib << 20) for shape in shapes)
    with Partner(Sender, tuple(shapes), blocks, tuple(serving)) as sender:
        each = zip(shapes, blocks, sender.call("offers"), strict=True)
        receivers = [Receiver(*one) for one in each]
        try:
            yield sender, receivers
        finally:
            for receiver in receivers:
                receiver.close()


def rates(mib: int, rounds: int) -> dict[str, Samples]:
    """By shape; all shapes and ways in the same rounds."""
    with pair((SMALL, LARGE), mib, [Serving()]) as (sender, receivers):
        for receiver in receivers:
            receiver.check(FRAMES)
            receiver.check(COPIES)
        ways = {(r.shape.name, name): way for r in receivers for name, way in r.ways().items()}
        named: dict[str, Callable[[], object]] = {f"{shape}\n{name}": way for (shape, name), way in ways.items()}
        found = sampled(named, sender, rounds)
        sizes = {r.shape.name: r.size for r in receivers}
    return {
        shape: {way: [_per_gb(s, sizes[shape]) for s in found[f"{shape}\n{way}"]] for way in WAYS} for shape in sizes
    }


def _per_gb(sample: Sample, size: int) -> Sample:
    gb = size / GB
    return Sample(sample.seconds / gb, sample.receiver / gb, sample.sender / gb)


def figures(samples: Samples) -> dict[str, dict[str, float]]:
    """By way: GB/s, how many times as fast as memcpy and as raw gRPC, and seconds of CPU for a GB of each side."""
    seconds = {way: [sample.seconds for sample in each] for way, each in samples.items()}
    return {
        way: {
            "gb_s": 1 / median(seconds[way]),
            "of_memcpy": measure.ratio(seconds[MEMCPY], seconds[way]),
            "of_grpc": measure.ratio(seconds[GRPC], seconds[way]),
            "send": median(sample.sender for sample in each),
            "receive": median(sample.receiver for sample in each),
        }
        for way, each in samples.items()
    }


def shown(shape: Shape, mib: int, of: Mapping[str, Mapping[str, float]]) -> list[Table | str]:
    heading = f"{shape.name}: blocks of {shape.block_bytes:,} bytes, {shape.blocks_of(mib << 20)} at a time"
    table = measure.table(heading, ["way"], ["GB/s", "x memcpy", "x raw gRPC", "CPU s/GB: send", "receive"])
    for way, row in of.items():
        send = "-" if way == MEMCPY else f"{row['send']:.2f}"
        ratios = (f"{row[name]:.2f}" for name in ("of_memcpy", "of_grpc"))
        table.add_row(way, f"{row['gb_s']:.2f}", *ratios, send, f"{row['receive']:.2f}")
    return [table, *verdicts(of)]


def verdicts(of: Mapping[str, Mapping[str, float]]) -> list[str]:
    frames, copies = of[FRAMES]["of_grpc"], of[COPIES]["of_memcpy"]
    return [
        f"frames / raw gRPC: {frames:.2f}; " + measure.verdict(frames >= GRPC_BAR, f"bar {GRPC_BAR}"),
        f"copies / memcpy: {copies:.2f}; " + measure.verdict(copies >= MEMCPY_BAR, f"bar {MEMCPY_BAR}"),
    ]
