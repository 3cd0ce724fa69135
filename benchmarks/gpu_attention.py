"""How fast is attention on this device? Every attention row of the roofline table beside what others offer; a cache
whose layers lie side by side in each block against one whose layers lie apart; and a step's attention in a CUDA graph.

Bytes are those of the keys and values, read once, with queries and outputs; operations 4 * HQ * D for each pair of a
query and a key that it sees. Rates are shares of the ceilings that were measured before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from gpu_device import Bench, Call
from gpu_peers import PEERS
from gpu_rows import Case, Numbers, WrongError
from torch import Tensor

from bifolio.kernels import AttentionPlan, paged_attention, plan, using

BLOCK_SIZE, LAYERS = 64, 30
APART = 0.02  # of the twin's norm: bfloat16, two orders of sums


@dataclass(frozen=True)
class Shape:
    """`sequences` of `rows` queries that are the last of `keys` positions."""

    hq: int
    hk: int
    d: int
    sequences: int
    rows: int
    keys: int

    @property
    def tiny(self) -> Shape:
        rows, keys = (1, 64) if self.rows == 1 else (16, 16 if self.rows == self.keys else 64)
        return replace(self, sequences=min(2, self.sequences), rows=rows, keys=keys)

    @property
    def flops(self) -> float:
        pairs = self.rows * (self.keys - self.rows) + self.rows * (self.rows + 1) / 2
        return 4.0 * self.sequences * self.hq * self.d * pairs

    @property
    def moved(self) -> float:
        """Bytes, of bfloat16."""
        return 2.0 * self.sequences * self.d * (2 * self.hk * self.keys + 2 * self.hq * self.rows)


ROOFLINE = {
    "prefill 8k, 32/8/128": Shape(32, 8, 128, 1, 8192, 8192),
    "prefill 8k, 9/3/64": Shape(9, 3, 64, 1, 8192, 8192),
    "chunk of 2k over 14k, 32/8/128": Shape(32, 8, 128, 1, 2048, 16384),
    "decode B32 4k, 32/8/128": Shape(32, 8, 128, 32, 1, 4096),
    "decode B1 32k, 32/8/128": Shape(32, 8, 128, 1, 1, 32768),
    "decode B64 2k, 9/3/64": Shape(9, 3, 64, 64, 1, 2048),
    "decode B1 2k, 9/3/64": Shape(9, 3, 64, 1, 1, 2048),
}
LAID_OUT = [name for name in ROOFLINE if name.startswith("decode")]
STEPS = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128)}
BATCHES = (1, 8, 32, 128)


class Paged:
    """A shape's sequences in blocks at random places of a cache of bfloat16 with so many layers, all different."""

    def __init__(
        self, bench: Bench, shape: Shape, block_size: int = BLOCK_SIZE, layers: int = 1, layers_apart: bool = False
    ) -> None:
        self.device, self.shape = bench.device, shape
        each = -(-shape.keys // block_size)
        blocks, block = shape.sequences * each + 1, (2, shape.hk, block_size, shape.d)
        slab = bench.noise(*((layers, blocks) if layers_apart else (blocks, layers)), *block)
        self.layers = slab.unbind(0 if layers_apart else 1)
        self.q = bench.noise(shape.sequences * shape.rows, shape.hq, shape.d)
        self.table = (torch.randperm(blocks - 1) + 1).int().view(shape.sequences, each)

    @property
    def kv(self) -> Tensor:
        return self.layers[0]

    @cached_property
    def plan(self) -> AttentionPlan:
        return self.planned()

    def planned(self) -> AttentionPlan:
        s = self.shape
        cu_q = torch.arange(s.sequences + 1, dtype=torch.int32) * s.rows
        lens = torch.full((s.sequences,), s.keys, dtype=torch.int32)
        return plan(cu_q, lens, self.table, device=self.device)

    def ours(self, layer: int = 0) -> Tensor:
        return paged_attention(self.q, self.layers[layer], self.plan)

    @cached_property
    def expected(self) -> Tensor:
        with using("torch"):
            return self.ours()

    def queries(self) -> Tensor:
        """[B, HQ, rows, D]"""
        s = self.shape
        return self.q.view(s.sequences, s.rows, s.hq, s.d).transpose(1, 2)

    @cached_property
    def _places(self) -> Tensor:
        return self.table.long().to(self.device)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """K and V [B, HK, keys, D], copied from where the blocks are."""
        pages = self.kv[self._places]  # [B, blocks, 2, HK, P, D]
        k, v = (pages[:, :, half].transpose(1, 2).flatten(2, 3)[:, :, : self.shape.keys] for half in range(2))
        return k, v

    def rows_of(self, out: Tensor) -> Tensor:
        """Outputs [T, HQ, D], [B, rows, HQ, D] or, as torch has them, [B, HQ, rows, D]."""
        s = self.shape
        torchs = out.dim() == 4 and out.shape[1:3] == (s.hq, s.rows)
        return (out.transpose(1, 2) if torchs else out).reshape(self.q.shape)

    def check(self, out: Tensor) -> float:
        """How far it is from the twin's, by norm."""
        want = self.expected.float()
        apart = ((self.rows_of(out).float() - want).norm() / want.norm()).item()
        if not apart <= APART:
            raise WrongError(f"{apart:.2g} from the twin; allowed {APART:g}", apart=apart)
        return apart


def roofline(bench: Bench) -> list[Case]:
    """Prefill by operations, decode by bytes."""

    def measured(way: Callable[[Paged], Call], paged: Paged) -> Numbers:
        s = paged.shape
        with using(bench.ours):
            call = way(paged)
            apart = paged.check(call())
            flops = 0 if s.rows == 1 else s.flops
            return {**bench.timed(call, moved=s.moved, flops=flops), "apart": apart}

    def small_blocks(paged: Paged) -> Numbers:
        return measured(_ours, Paged(bench, paged.shape, 16))

    def graph(paged: Paged) -> Numbers:
        layers = 2 if bench.tiny else LAYERS
        return in_graph(bench, Paged(bench, paged.shape, layers=layers), layers)

    def ways_of(shape: Shape) -> dict[str, Callable[[Paged], Numbers]]:
        ways: dict[str, Callable[[Paged], Numbers]] = {"ours": partial(measured, _ours)}
        if shape.rows == 1:
            ways |= {"ours, blocks of 16": small_blocks}
        if shape.rows == shape.sequences == 1 and shape.d == 64:
            ways |= {f"ours, one of {LAYERS} in a graph": graph}
        return ways | {name: partial(measured, peer) for name, peer in PEERS.items()}

    return [Case("roofline", name, partial(_paged, bench, shape), ways_of(shape)) for name, shape in ROOFLINE.items()]


def layouts(bench: Bench) -> list[Case]:
    """Each call is of another layer."""

    def turns(block_size: int, layers_apart: bool, shape: Shape) -> Numbers:
        layers = 2 if bench.tiny else LAYERS
        paged = Paged(bench, shape, block_size, layers, layers_apart)
        turn = iter(range(1 << 30))
        with using(bench.ours):
            apart = paged.check(paged.ours())
            return {**bench.timed(lambda: paged.ours(next(turn) % layers), moved=shape.moved), "apart": apart}

    ways = {
        f"{name}, blocks of {size}": partial(turns, size, layers_apart)
        for size in (BLOCK_SIZE, 16)
        for name, layers_apart in (("block-major", False), ("layer-major", True))
    }
    return [Case("layouts", name, partial(_sized, bench, ROOFLINE[name]), ways) for name in LAID_OUT]


def graphs(bench: Bench) -> list[Case]:
    """A step: the attention of so many layers, of single tokens at 2k."""
    layers, batches = (2, BATCHES[:2]) if bench.tiny else (LAYERS, BATCHES)

    def step(paged: Paged) -> None:
        for layer in range(layers):
            paged.ours(layer)

    def eager(paged: Paged) -> Numbers:
        with using(bench.ours):
            return bench.timed(partial(step, paged), moved=paged.shape.moved * layers, wall=True)

    def planned_anew(paged: Paged) -> Numbers:
        def call() -> None:
            paged.plan = paged.planned()
            step(paged)

        with using(bench.ours):
            return bench.timed(call, moved=paged.shape.moved * layers, wall=True)

    def build(shape: Shape) -> Paged:
        return Paged(bench, _sized(bench, shape), layers=layers)

    ways = {"eager": eager, "eager, planned anew": planned_anew, "graph": lambda paged: in_graph(bench, paged, 1)}
    return [
        Case("graphs", f"{layers} layers B{batch} 2k, {name}", partial(build, Shape(*heads, batch, 1, 2048)), ways)
        for name, heads in STEPS.items()
        for batch in batches
    ]


def in_graph(bench: Bench, paged: Paged, calls: int) -> Numbers:
    """All layers in one graph, by so many calls. The outputs of a replay have the bits of an eager call's."""
    outs = [torch.full_like(paged.q, torch.nan) for _ in paged.layers]

    def step() -> None:
        for kv, out in zip(paged.layers, outs, strict=True):
            paged_attention(paged.q, kv, paged.plan, out=out)

    with using(bench.ours):
        replay = bench.captured(step)
        for out in outs:
            out.fill_(torch.nan)
        replay()
        for layer in (0, len(outs) - 1):
            if not torch.equal(outs[layer], paged.ours(layer)):
                raise WrongError(f"layer {layer} of a replay differs from an eager call")
        moved = paged.shape.moved * len(outs)
        return bench.timed(replay, moved=moved, calls=calls, wall=True)


def _ours(paged: Paged) -> Call:
    return paged.ours


def _sized(bench: Bench, shape: Shape) -> Shape:
    return shape.tiny if bench.tiny else shape


def _paged(bench: Bench, shape: Shape) -> Paged:
    return Paged(bench, _sized(bench, shape))
