"""Is the ledger fast enough for a cell, and does it find what is cached? Alone: no Ray, no model, one process.

    python -P benchmarks/ledger.py [--replicas 64] [--blocks 10000] [--trace mooncake_conversation.jsonl.gz]

A cell of prefill and decode replicas, half of each, all blocks of all caches full of distinct keys. Prompts of 2,048
tokens come at a steady rate; some begin with one of a few system prompts, some go on from a conversation. Each is
admitted, opened in the replicas' own tags, computed there at once as far as tags go, listed by heartbeats once a
second, and released after a while; so every admission forgets as many blocks as it writes. Only the ledger's own calls
are timed, in CPU time. Bars: 2,000 admissions a second, 99 of 100 within 1 ms; beside them, all calls together.

The trace (Mooncake's conversation, `hash_ids` of blocks of 512 tokens) is divided by 32, which keeps all its sharing:
a hash id is 16 tokens drawn from it, hence one block. One replica with a cache for all of it serves the requests in
the file's order, each to its end. Two shares of all blocks are printed. Seen: in a prefix that an earlier request had,
last and partly filled blocks included, as the trace's own statistics count. Served: those that leases brought; less by
the last block of each prompt that is cached to its end, whose last token is computed anyway. Bar: 36.6 % +- 0.3.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, TypeVar

from bifolio.kv_manager import keys
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.measures import Speeds
from bifolio.protos.messages import (
    Ask,
    BlockId,
    Generation,
    Geometry,
    Key,
    Lease,
    Placement,
    Release,
    ReplicaId,
    ReplicaInfo,
    Report,
    RequestId,
    Role,
)

sys.path.append(os.path.dirname(__file__))
import measure

SIZE = 16
TOKENS = 2048
VOCABULARY = 49152
GEOMETRY = Geometry("model", layers=30, kv_heads=3, head_dim=64, block_size=SIZE, dtype="bfloat16")
CONFIG = KvConfig()
RATE = 2000 / 64  # admissions for each replica in a second of the cell's own clock
PREFILL_S, DECODE_S = 0.2, 0.4  # how long leases are held
WARM_UP = 2000
ADMISSIONS_BAR, P99_BAR = 2000, 1e-3  # a second, seconds
HIT_BAR, HIT_MARGIN = 36.6, 0.3  # per cent

COLUMNS = ["calls", "median µs", "p99 µs", "most µs"]

T = TypeVar("T")


@dataclass
class Times:
    """Seconds of the ledger's calls, by name: of this thread's work, whatever else the machine does meanwhile."""

    calls: dict[str, list[float]] = field(default_factory=dict)

    def of(self, name: str, call: Callable[[], T]) -> T:
        began = time.thread_time()
        result = call()
        self.calls.setdefault(name, []).append(time.thread_time() - began)
        return result


# -- a cell under load


class Prompts:
    """A third begins with one of 20 system prompts, a third goes on from a conversation, a third shares nothing."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._root = keys.root(GEOMETRY)
        self._systems = [self._tokens(512) for _ in range(20)]
        self._conversations: deque[list[int]] = deque(maxlen=5000)

    def next_keys(self) -> tuple[Key, ...]:
        return keys.chain(self._root, self.next(), SIZE)

    def next(self) -> list[int]:
        kind, r = self._random.randrange(3), self._random
        if kind == 0:
            head = self._systems[min(r.randrange(20), r.randrange(20))]
        elif kind == 1 and self._conversations:
            head = r.choice(self._conversations)[: r.randrange(TOKENS // 2, TOKENS)]
        else:
            head = []
        tokens = head + self._tokens(TOKENS - len(head))
        self._conversations.append(tokens)
        return tokens

    def _tokens(self, n: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=n)


class Cell:
    """Replicas with full caches, and a clock that moves by each admission."""

    def __init__(self, replicas: int, blocks: int) -> None:
        self.now = 1000.0
        self.times = Times()
        self.ledger = Ledger(1, CONFIG)
        self.tags: dict[ReplicaId, BlockTags] = {}
        self.not_now = 0
        self._ends: list[tuple[float, Generation, Lease]] = []  # the first to end on top
        self._number = 0
        rng = random.Random(1)
        for i in range(replicas):
            role: Role = "prefill" if i % 2 else "decode"
            info = ReplicaInfo(ReplicaId(f"{role}{i:03}"), role, GEOMETRY, blocks, "host:1", max_sequences=512)
            tags = self.tags[info.id] = BlockTags(info.id, blocks, grows=role == "decode")
            every = Lease(info.id, Generation(0, 1), tuple(BlockId(b) for b in range(1, blocks + 1)))
            tags.open(every)
            tags.fill(every.generation, [Key(rng.randbytes(32)) for _ in every.blocks])
            tags.close(every.generation)
            self.ledger.register(info, tags.report(self.now, complete=True), self.now)
        self._beats = deque(sorted((self.now + i / replicas, id) for i, id in enumerate(self.tags)))

    def serve(self, keys: tuple[Key, ...]) -> None:
        self.now += 1 / RATE / len(self.tags)
        self._number += 1
        while self._beats[0][0] <= self.now:
            due, replica = self._beats.popleft()
            self._beats.append((due + 1, replica))
            self._beat(replica)
        while self._ends and self._ends[0][0] <= self.now:
            lease = heappop(self._ends)[2]
            if release := self.tags[lease.replica].close(lease.generation):
                self.times.of("release", partial(self.ledger.release, release))
        request = RequestId(f"request-{self._number}")
        ask = Ask(request, TOKENS, TOKENS + 256, self.now, keys={GEOMETRY.fingerprint: keys})
        placement = self.times.of("admit", lambda: self.ledger.admit(ask, self.now))
        if placement is None:
            self.not_now += 1
        else:
            self._open(placement, keys)

    def _open(self, placement: Placement, keys: tuple[Key, ...]) -> None:
        for lease in placement.leases:
            tags = self.tags[lease.replica]
            tags.open(lease, keys)
            tags.fill(lease.generation, keys)
            end = self.now + (PREFILL_S if lease is placement.prefill else DECODE_S)
            heappush(self._ends, (end, lease.generation, lease))

    def _beat(self, replica: ReplicaId) -> None:
        tags = self.tags[replica]
        report = replace(tags.report(self.now), speeds=Speeds(prefill=100_000.0, transfer=0.005))
        tags.apply(self.times.of("heartbeat", lambda: self.ledger.heartbeat(report, self.now)))


def load(replicas: int, blocks: int, admissions: int) -> dict[str, Any]:
    measure.progress(f"warming {replicas} caches of {blocks} blocks")
    cell = Cell(replicas, blocks)
    prompts = Prompts()
    for _ in range(WARM_UP):
        cell.serve(prompts.next_keys())
    cell.times.calls.clear()
    cell.not_now = 0
    asked, hit, evicted = cell.ledger.asked_tokens, cell.ledger.hit_tokens, cell.ledger.evicted
    for i in range(admissions):
        if i % 1000 == 0:
            measure.progress(f"{i} of {admissions} admissions")
        cell.serve(prompts.next_keys())
    cell.ledger.check_integrity()
    calls = cell.times.calls
    placed, spent = admissions - cell.not_now, sum(map(sum, calls.values()))
    return {
        "replicas": replicas,
        "blocks": blocks,
        "admissions": placed,
        "not_now": cell.not_now,
        "admits": placed / sum(calls["admit"]),
        "per_second": placed / spent,
        "hit": (cell.ledger.hit_tokens - hit) / (cell.ledger.asked_tokens - asked),
        "evicted": (cell.ledger.evicted - evicted) / placed,
        "splits": dict(cell.ledger.splits),
        "seconds": {name: {"n": len(each), **quantiles(each)} for name, each in calls.items()},
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100], "most": ordered[-1]}


# -- hashing, memory


def hashing(rounds: int = 200) -> float:
    """Seconds for the keys of a prompt."""
    prompts, times = Prompts(), Times()
    for _ in range(rounds):
        tokens = tuple(prompts.next())
        times.of("keys", partial(keys.chain, keys.root(GEOMETRY), tokens, SIZE))
    return statistics.median(times.calls["keys"])


def memory(replicas: int, blocks: int) -> dict[str, float]:
    """Bytes for each block whose key the ledger knows, all distinct: nothing needs more. The keys themselves, which
    come with the reports, are included; what the blocks need without keys is not."""
    rng = random.Random(2)
    sizes = []
    for filled in (False, True):
        gc.collect()
        tracemalloc.start()
        ledger = Ledger(1, CONFIG)
        for i in range(replicas):
            info = ReplicaInfo(ReplicaId(f"d{i}"), "decode", GEOMETRY, blocks)
            told = ((BlockId(b), Key(rng.randbytes(32))) for b in range(1, blocks * filled + 1))
            ledger.register(info, Report(info.id, 1, version=1, keys=tuple(told)), 0)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del ledger
    each = (sizes[1] - sizes[0]) / (replicas * blocks)
    return {"bytes_per_block": each, "bound_bytes": float(sizes[1]), "blocks": replicas * blocks}


# -- a trace


def replay(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    total = sum(map(len, requests))
    ledger = Ledger(1, CONFIG)
    info = ReplicaInfo(ReplicaId("d"), "decode", GEOMETRY, len({i for ids in requests for i in ids}) + 10_000)
    ledger.register(info, Report(info.id, 0), 0)
    drawn: dict[int, list[int]] = {}
    chains: set[Key] = set()
    seen = served = to_the_end = 0
    root, began = keys.root(GEOMETRY), time.perf_counter()
    for beat, ids in enumerate(requests, 1):
        for id in ids:
            if id not in drawn:
                drawn[id] = random.Random(id).choices(range(VOCABULARY), k=SIZE)
        chain = keys.chain(root, [token for id in ids for token in drawn[id]], SIZE)
        before = next((i for i, key in enumerate(chain) if key not in chains), len(chain))
        chains.update(chain)
        seen += before
        to_the_end += before == len(chain)
        tokens = len(chain) * SIZE
        ask = Ask(RequestId(str(beat)), tokens, tokens, 0.0, keys={GEOMETRY.fingerprint: chain})
        placement = ledger.admit(ask, 0)
        assert placement is not None, "the cache is smaller than the trace"
        served += placement.decode.cached
        told = tuple(zip(placement.decode.blocks, chain, strict=True))
        ledger.release(Release(info.id, placement.decode.generation, beat, told))
        if beat % 100 == 0:
            ledger.heartbeat(Report(info.id, beat, since=0, version=0), 0)
    seconds = time.perf_counter() - began
    ledger.check_integrity()
    return {
        "trace": path.name,
        "requests": len(requests),
        "blocks": total,
        "distinct": len(chains),
        "evicted": ledger.evicted,
        "seen": 100 * seen / total,
        "served": 100 * served / total,
        "cached_to_the_end": to_the_end,
        "seconds": seconds,
    }


# -- what is shown


def show(results: dict[str, Any]) -> None:
    cell, memory, p99 = results["cell"], results["memory"], results["cell"]["seconds"]["admit"]["p99"]
    table = measure.table(f"{cell['replicas']} replicas of {cell['blocks']} blocks", ["call"], COLUMNS)
    for name, seconds in sorted(cell["seconds"].items()):
        row = (f"{seconds[key] * 1e6:.0f}" for key in ("median", "p99", "most"))
        table.add_row(name, str(seconds["n"]), *row)
    measure.show(
        table,
        f"{cell['admissions']} admissions of {TOKENS} tokens in blocks of {SIZE}, {cell['not_now']} not now; hits "
        f"{cell['hit']:.1%} of tokens, {cell['evicted']:.0f} blocks forgotten for each",
        f"admissions a second: {cell['admits']:.0f}; "
        + measure.verdict(cell["admits"] >= ADMISSIONS_BAR, f"bar {ADMISSIONS_BAR}")
        + f"; with their releases and heartbeats: {cell['per_second']:.0f}",
        f"p99 of admit: {p99 * 1e3:.2f} ms; " + measure.verdict(p99 <= P99_BAR, f"bar {P99_BAR * 1e3:g} ms"),
        f"keys of a prompt of {TOKENS} tokens: {results['hashing'] * 1e6:.0f} µs",
        f"memory: {memory['bytes_per_block']:.0f} bytes for each indexed block, its key included; at most "
        f"{memory['bound_bytes'] / 2**20:.0f} MiB in all for {memory['blocks']:.0f} blocks",
    )
    if (trace := results["trace"]) is None:
        measure.show(
            "hit rate: skipped; --trace FILE names Mooncake's conversation trace (hash_ids, gzipped JSON lines)"
        )
        return
    met = all(abs(trace[share] - HIT_BAR) <= HIT_MARGIN for share in ("seen", "served"))
    measure.show(
        f"{trace['trace']} / 32: {trace['requests']} requests, {trace['blocks']} blocks, {trace['distinct']} distinct, "
        f"{trace['requests'] / trace['seconds']:.0f} requests a second with hashing",
        f"seen before {trace['seen']:.2f} % of blocks, served by leases {trace['served']:.2f} % "
        f"({trace['cached_to_the_end']} prompts were cached to the end); "
        + measure.verdict(met, f"bar {HIT_BAR} +- {HIT_MARGIN}"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=10_000, metavar="N", help="of each; default: %(default)s")
    parser.add_argument("--admissions", type=int, default=6000, metavar="N", help="timed; default: %(default)s")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="default: none, no hit rate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    args = parser.parse_args()
    if args.trace is not None and not args.trace.is_file():
        parser.error(f"--trace {args.trace}: there is no such file")
    results = {
        "hashing": hashing(),
        "cell": load(args.replicas, args.blocks, args.admissions),
        "memory": memory(args.replicas, args.blocks),
        "trace": replay(args.trace) if args.trace else None,
    }
    show(results)
    measure.write_json(args.json, results)


if __name__ == "__main__":
    main()
