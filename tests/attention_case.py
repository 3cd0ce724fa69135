"""Attention of some sequences over a paged cache, and its result by the formula: the oracle of every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from packed_layout import WORD, packed
from torch import Tensor

from bifolio.kernels import Layout, paged_attention, plan

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Case:
    """Sequences of (rows, keys) in shuffled blocks; everything outside them is NaN, the null block too."""

    lens: list[tuple[int, int]]
    hq: int = 6
    hk: int = 2
    d: int = 64
    p: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        counts = [-(-keys // self.p) for _, keys in self.lens]
        shuffle = torch.Generator().manual_seed(8)  # its own, so that the numbers do not depend on the blocks
        ids = (torch.randperm(sum(counts), generator=shuffle) + 1).split(counts)
        self.kv = torch.full((sum(counts) + 1, 3, 2, self.hk, self.p, self.d), torch.nan, dtype=self.dtype)[:, 1]
        self.table = torch.zeros(len(self.lens), max([*counts, 1]), dtype=torch.int32)
        self.keys, self.values = [], []
        for b, (_, n) in enumerate(self.lens):
            k, v = torch.randn(2, self.hk, n, self.d, generator=g).to(self.dtype)
            self.table[b, : counts[b]] = ids[b]
            for j in range(n):
                self.kv[ids[b][j // self.p], 0, :, j % self.p] = k[:, j]
                self.kv[ids[b][j // self.p], 1, :, j % self.p] = v[:, j]
            self.keys.append(k)
            self.values.append(v)
        rows = torch.tensor([0] + [r for r, _ in self.lens])
        self.cu_q = rows.cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor([n for _, n in self.lens], dtype=torch.int32)
        self.q = torch.randn(int(self.cu_q[-1]), self.hq, self.d, generator=g).to(self.dtype)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return ("plain", "packed") if self.dtype in WORD else ("plain",)

    def run(self, layout: Layout = "plain", **options: object) -> Tensor:
        built = plan(self.cu_q, self.seq_lens, self.table)
        kv = packed(self.kv) if layout == "packed" else self.kv
        return paged_attention(self.q, kv, built, layout=layout, **options)  # type: ignore[arg-type]

    def expected(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention output and the logarithm of the denominator by the formula, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64)
        for b, (rows, n) in enumerate(self.lens):
            k, v = (x.double().repeat_interleave(self.hq // self.hk, 0) for x in (self.keys[b], self.values[b]))
            mine = slice(int(self.cu_q[b]), int(self.cu_q[b]) + rows)
            s = torch.einsum("rhd,hkd->rhk", self.q[mine].double(), k) * (self.d**-0.5 if scale is None else scale)
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            position, key = torch.arange(n - rows, n)[:, None, None], torch.arange(n)
            if causal:
                s = s.masked_fill(key > position, -math.inf)
            if window is not None:
                s = s.masked_fill(key <= position - window, -math.inf)
            extra = [] if sinks is None else [sinks.double()[None, :, None].expand(rows, self.hq, 1)]
            lse[mine] = torch.cat([*extra, s], dim=-1).logsumexp(-1)
            weights = torch.exp(s - lse[mine][..., None]).nan_to_num(0)  # -inf - -inf: a row that sees nothing
            out[mine] = torch.einsum("rhk,hkd->rhd", weights, v)
        return out, lse
