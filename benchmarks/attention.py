"""The attention cases of kernels.py: decode and prefill over paged caches, against torch's own ways to do the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import measure
import torch
from measure import PUBLIC, Case, Seconds
from native_calls import Tape
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close

from bifolio.kernels import AttentionPlan, kv_layout, paged_attention, plan, using
from bifolio.kernels.bindings import Native
from bifolio.kernels.layout import read_blocks
from bifolio.replicas.kv_cache import KvCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
POSITIONS = 16384  # of a cache
PROMPT, CHUNK = 1600, 256

Part = Callable[[int], object]  # computes on one part of the cache
READS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "sum by rows": lambda x: x.view(-1, 1024).sum(1),
    "max": lambda x: x.amax(),
}


class Caches:
    """The same numbers in a packed cache, for the kernels and their twins, and in a plain one, for torch's own ways.
    All of them have been written: memory that was not is one page of zeros, which no CPU reads twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.layout = kv_layout(dtype, HEAD_DIM, BLOCK_SIZE)
        sizes = (POSITIONS // BLOCK_SIZE, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        packed, plain = KvCache(*sizes, dtype, self.layout), KvCache(*sizes, dtype)
        self.packed = [packed.layer(i) for i in range(LAYERS)]
        self.plain = [plain.layer(i) for i in range(LAYERS)]
        every = torch.arange(len(self.packed[0]))
        for ours, theirs in zip(self.packed, self.plain, strict=True):
            ours.normal_()
            for half, read in enumerate(read_blocks(ours, every, self.layout)):
                theirs[:, half] = read.view(KV_HEADS, -1, BLOCK_SIZE, HEAD_DIM).transpose(0, 1)
        self._order = torch.randperm(packed.blocks).int() + 1
        self.dtype, self.bytes_per_position = dtype, packed.block_bytes // BLOCK_SIZE

    def table(self, sequences: int, positions: int, part: int = 0) -> Tensor:
        """int32 [sequences, blocks], at random places: the part-th group of blocks, which no other part has."""
        blocks = positions // BLOCK_SIZE
        return self._order[part * sequences * blocks :][: sequences * blocks].view(sequences, blocks)


def plan_of(rows: int, table: Tensor, positions: int) -> AttentionPlan:
    """Of `rows` rows for each sequence of a table, the last ones of so many positions."""
    cu_q = torch.arange(len(table) + 1, dtype=torch.int32) * rows
    return plan(cu_q, torch.full((len(table),), positions, dtype=torch.int32), table)


def decode(native: Native, caches: Caches, batch: int, context: int, rounds: int) -> Case:
    parts = POSITIONS // (batch * context)
    tables = [caches.table(batch, context, part) for part in range(parts)]
    plans, indices = [plan_of(1, table, context) for table in tables], [table.long() for table in tables]
    queries = [torch.randn(batch, HEADS, HEAD_DIM, dtype=caches.dtype) for _ in range(LAYERS)]

    def paged(part: int) -> list[Tensor]:
        step, layout = plans[part], caches.layout
        return [paged_attention(q, kv, step, layout=layout) for q, kv in zip(queries, caches.packed, strict=True)]

    def twin(part: int) -> list[Tensor]:
        with using("torch"):
            return paged(part)

    def written(gather: Callable[..., tuple[Tensor, Tensor]], attend: Callable[..., Tensor], part: int) -> list[Tensor]:
        index = indices[part]
        return [attend(q, *gather(kv, index)) for q, kv in zip(queries, caches.plain, strict=True)]

    gathers: dict[str, Part] = {
        f"{gather.__name__}, {attend.__name__}": partial(written, gather, attend)
        for gather in (by_block, by_head)
        for attend in (packed_heads, grouped_heads)
    }
    for way in (twin, *gathers.values()):
        assert_close(way(0), paged(0), rtol=0.05, atol=0.01)
    flat = torch.randint(2**40, (parts, batch * context * caches.bytes_per_position // 8))
    reads: dict[str, Part] = {name: partial(lambda read, part: read(flat[part]), read) for name, read in READS.items()}
    tapes = [Tape(native, partial(paged, part)) for part in range(parts)]

    # Of all ways together: what a call reads was last touched as long ago as can be
    turn = itertools.cycle(range(parts))

    def timed(ways: Mapping[str, Part], rounds: int) -> dict[str, Seconds]:
        return measure.in_rounds(
            {name: partial(lambda way: way(next(turn)), way) for name, way in ways.items()}, rounds
        )

    gather, read = measure.fastest(timed(gathers, 3)), measure.fastest(timed(reads, 9))
    seconds = timed(
        {
            "native": lambda part: tapes[part](),
            PUBLIC: paged,
            "twin": twin,
            "gather + SDPA": gathers[gather],
            "stream read": reads[read],
        },
        rounds,
    )
    speed = flat[0].nbytes / median(seconds["stream read"]) / 1e9
    notes = {"gather + SDPA": gather, "stream read": f"int64 {read}, {speed:.1f} GB/s"}
    return Case(f"decode, {batch} x {context}", seconds, notes=notes)


def by_block(kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [B, HK, keys, D] of one layer: whole blocks are gathered, then joined."""
    pages = kv[table]  # [B, n, 2, HK, P, D]
    k, v = (pages[:, :, half].transpose(1, 2).flatten(2, 3) for half in range(2))
    return k, v


def by_head(kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The same, but the gather puts the blocks of one head side by side: one copy in place of two."""
    heads_first = kv.permute(1, 2, 0, 3, 4).index_select(2, table.flatten())
    k, v = heads_first.view(2, KV_HEADS, len(table), -1, HEAD_DIM).transpose(1, 2)
    return k, v


def packed_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query heads that share a KV head are the rows of one problem: K and V are read once."""
    return sdpa(q.view(len(q), KV_HEADS, -1, HEAD_DIM), k, v).view(q.shape)


def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def prefill(native: Native, caches: Caches, rounds: int) -> Case:
    """Of one layer. "SDPA" is the fastest of torch's ways, which stand below it one by one."""
    kv, table = caches.packed[0], caches.table(1, PROMPT)
    q = torch.randn(PROMPT, HEADS, HEAD_DIM, dtype=kv.dtype)
    chunks = [slice(begin, min(begin + CHUNK, PROMPT)) for begin in range(0, PROMPT, CHUNK)]
    plans = [plan_of(chunk.stop - chunk.start, table, chunk.stop) for chunk in chunks]

    def paged() -> list[Tensor]:
        return [paged_attention(q[c], kv, step, layout=caches.layout) for c, step in zip(chunks, plans, strict=True)]

    def twin() -> list[Tensor]:
        with using("torch"):
            return paged()

    heads_first = q.transpose(0, 1)[None].contiguous()
    k, v = (x[None].contiguous() for x in read_blocks(kv, table[0].long(), caches.layout))
    seen = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    added = torch.zeros(PROMPT, PROMPT, dtype=kv.dtype).masked_fill_(~seen, -torch.inf)

    def whole(k: Tensor, v: Tensor) -> list[Tensor]:
        return [sdpa(heads_first, k, v, is_causal=True, enable_gqa=k.shape[1] != HEADS)]

    def cut(mask: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        grouped = k.shape[1] != HEADS
        parts = [(heads_first[:, :, c], k[:, :, : c.stop], v[:, :, : c.stop], mask[c, : c.stop]) for c in chunks]
        return [sdpa(*part, enable_gqa=grouped) for part in parts]

    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v)]
    ways: dict[str, Callable[[], list[Tensor]]] = {}
    for heads, (keys, values) in (("", (k, v)), (", heads repeated", repeated)):
        ways[f"whole{heads}"] = partial(whole, keys, values)
        ways[f"chunks, bool masks{heads}"] = partial(cut, seen, keys, values)
        ways[f"chunks, added masks{heads}"] = partial(cut, added, keys, values)
    for way in ways.values():
        assert_close(torch.cat(way(), dim=2)[0].transpose(0, 1), torch.cat(paged()), rtol=0.05, atol=0.02)
    assert_close(twin(), paged(), rtol=0.05, atol=0.02)
    seconds = measure.in_rounds({"native": Tape(native, paged), PUBLIC: paged, "twin": twin, **ways}, rounds)
    best = measure.fastest({name: seconds[name] for name in ways})
    ours = {name: seconds.pop(name) for name in ("native", PUBLIC, "twin")}
    return Case(f"prefill, {PROMPT} in chunks of {CHUNK}", {**ours, "SDPA": seconds[best], **seconds}, {"SDPA": best})
