#!/usr/bin/env python3
"""How many of the KV slots that running sequences hold are empty? The real ledger, tags and scheduler, without a model.

    python -P benchmarks/waste.py mooncake_conversation.jsonl.gz [--limit 4000] [--sequences 32] [--blocks 4096]

Mooncake's conversation trace, lengths divided by 32, so that one of its hash ids is one block of 16 tokens. One decode
replica serves its requests in the file's order, so many sequences at a time; prompts are there at once, every step
gives each sequence a token, heartbeats come as a replica sends them. After each step

    slots   in the blocks of all sequences that run, a block that several share counted once
    stored  of them, with K and V of a token
    waste   those that are not, by slots

The reserve, free blocks that the replica has at hand for its growth, is told apart. Bar: waste of at most 4 %.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bifolio.kv_manager import keys
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.messages import (
    Ask,
    BlockId,
    Geometry,
    ReplicaId,
    ReplicaInfo,
    RequestId,
    Sampling,
)
from bifolio.replicas.scheduler import Outcome, Scheduler
from bifolio.replicas.sequence import Add, Closed

sys.path.append(os.path.dirname(__file__))
import measure

SIZE, DIVIDE = 16, 32
GEOMETRY = Geometry("model", layers=30, kv_heads=3, head_dim=64, block_size=SIZE, dtype="bfloat16")
CONFIG = KvConfig()
STEP_S = 0.03
MOST = 0.04


@dataclass
class Held:
    """Sums over all steps."""

    steps: int = 0
    sequences: int = 0
    slots: int = 0
    stored: int = 0
    reserve: int = 0  # slots

    @property
    def waste(self) -> float:
        return (self.slots - self.stored) / self.slots


class Replica:
    """What a decode replica does with its blocks, on a clock of its own."""

    def __init__(self, blocks: int, sequences: int) -> None:
        self.now = 0.0
        id = ReplicaId("d")
        self._tags = BlockTags(id, blocks, growth_s=CONFIG.growth_s)
        self._ledger = Ledger(1, CONFIG)
        self._ledger.register(ReplicaInfo(id, "decode", GEOMETRY, blocks), self._tags.report(0.0, complete=True), 0.0)
        self._scheduler = Scheduler(
            max_batched_tokens=256, max_sequences=sequences, block_size=SIZE, draw=self._tags.draw
        )
        self._beaten = 0.0
        self._beat()

    @property
    def running(self) -> int:
        return len(self._scheduler.sequences)

    def add(self, name: str, tokens: list[int], output: int) -> bool:
        """False while there is no room."""
        chain = keys.chain(keys.root(GEOMETRY), tokens, SIZE)
        most = len(tokens) + output
        ask = Ask(RequestId(name), len(tokens), most, self.now, keys={GEOMETRY.fingerprint: chain})
        if (placement := self._ledger.admit(ask, self.now)) is None:
            return False
        lease = placement.decode
        self._tags.open(lease, chain)
        self._tags.fill(lease.generation, chain[: len(tokens) // SIZE])
        sampling = Sampling(max_tokens=output)
        history = tuple(tokens)
        self._scheduler.add(
            Add(lease.generation, history, lease.blocks, self.now, len(tokens), sampling, logits=b"x"), self.now
        )
        return True

    def step(self, held: Held) -> None:
        self.now += STEP_S
        step = self._scheduler.schedule(self.now)
        sampled = {s.generation: (0, None) for s in (*(chunk.sequence for chunk in step.chunks), *step.handed)}
        events = [*step.closed, *self._scheduler.record(step, Outcome(sampled=sampled), self.now)]
        self._count(held)
        for event in events:
            if isinstance(event, Closed) and (release := self._tags.close(event.generation)):
                self._ledger.release(release)
        if self._tags.due or self.now - self._beaten >= CONFIG.heartbeat_s:
            self._beat()

    def _beat(self) -> None:
        self._beaten = self.now
        self._tags.apply(self._ledger.heartbeat(self._tags.report(self.now), self.now))

    def _count(self, held: Held) -> None:
        full: dict[BlockId, int] = {}
        for sequence in self._scheduler.sequences.values():
            for i, block in enumerate(sequence.blocks):
                full[block] = max(full.get(block, 0), min(SIZE, sequence.computed - i * SIZE))
        held.steps += 1
        held.sequences += self.running
        held.slots += SIZE * len(full)
        held.stored += sum(full.values())
        held.reserve += SIZE * (self._tags.held - len(full))


def requests(path: Path, limit: int) -> Iterator[tuple[str, list[int], int]]:
    drawn: dict[int, list[int]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in zip(range(limit), lines, strict=False):
            row = json.loads(line)
            for id in row["hash_ids"]:
                if id not in drawn:
                    drawn[id] = random.Random(id).choices(range(49152), k=SIZE)
            tokens = [token for id in row["hash_ids"] for token in drawn[id]]
            yield str(number), tokens[: max(1, row["input_length"] // DIVIDE)], max(1, row["output_length"] // DIVIDE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=4000, metavar="N", help="requests; default: %(default)s")
    parser.add_argument("--sequences", type=int, default=32, metavar="N", help="at a time; default: %(default)s")
    parser.add_argument("--blocks", type=int, default=4096, metavar="N", help="of the cache; default: %(default)s")
    args = parser.parse_args()
    replica, held, count = Replica(args.blocks, args.sequences), Held(), 0
    for name, tokens, output in requests(args.trace, args.limit):
        while replica.running >= args.sequences or not replica.add(name, tokens, output):
            replica.step(held)
        count += 1
    slots, met = held.slots / held.steps, held.waste <= MOST
    measure.show(
        f"{args.trace.name} / {DIVIDE}: {count} requests, {held.steps} steps of {held.sequences / held.steps:.1f} "
        f"sequences, {slots:.0f} slots in their blocks, {held.stored / held.steps:.0f} tokens stored",
        f"waste {held.waste:.2%}; {measure.verdict(met, f'<= {MOST:.0%}')}; the reserve, apart: "
        f"{held.reserve / held.steps:.0f} slots",
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
