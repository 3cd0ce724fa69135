"""How fast are norm, activation, RoPE with the cache write, and sampling? The rows of the roofline table that are not
attention, then the sizes of decode steps, each against its torch twin.

Bytes are those of the inputs and outputs, each moved once; of sampling the logits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from gpu_device import Bench, Call
from gpu_rows import Case, Numbers
from torch import Tensor

from bifolio.kernels import rms_norm, rope_and_write, rope_tables, sample, silu_mul, using

WIDTHS = {"SmolLM2": (576, 1536), "8B": (4096, 14336)}  # hidden, inner
HEADS = {"SmolLM2": (9, 3, 64), "8B": (32, 8, 128)}
SETTINGS = {"greedy": (0.0, 1.0, 0), "top_p 0.9": (1.0, 0.9, 0), "top_k 50": (1.0, 1.0, 50)}
ROWS, VOCABULARIES = (1, 32, 256), (49152, 128256)
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Work:
    call: Call
    moved: float  # bytes
    others: Mapping[str, Call]


def roofline(bench: Bench) -> list[Case]:
    tokens, batch, sizes = (16, 2, (64, 96, 100)) if bench.tiny else (8192, 64, (4096, 14336, 49152))
    works: dict[str, Callable[[], Work]] = {
        "RoPE and write 8k, SmolLM2": partial(turn, bench, tokens, *HEADS["SmolLM2"]),
        "norm and residual, 8k x 4096": partial(norm, bench, tokens, sizes[0]),
        "SwiGLU, 8k x 14336": partial(gate, bench, tokens, sizes[1]),
        "top_k 50 and top_p 0.9, B64 V49152": partial(choose, bench, batch, sizes[2], 1.0, 0.9, 50),
    }
    return [
        Case("roofline", name, build, ways(bench, *(["torch.sort"] if name.startswith("top") else [])))
        for name, build in works.items()
    ]


def cases(bench: Bench) -> list[Case]:
    rows, vocabularies = (ROWS[:1], (100,)) if bench.tiny else (ROWS, VOCABULARIES)
    works: dict[str, Callable[[], Work]] = {}
    for name, (hidden, inner) in WIDTHS.items():
        hidden, inner = (64, 96) if bench.tiny else (hidden, inner)
        for t in rows:
            works[f"norm and residual, {t} x {hidden}, {name}"] = partial(norm, bench, t, hidden)
            works[f"SwiGLU, {t} x {inner}, {name}"] = partial(gate, bench, t, inner)
            works[f"RoPE and write, {t}, {name}"] = partial(turn, bench, t, *HEADS[name])
    for vocabulary in vocabularies:
        for setting, values in SETTINGS.items():
            for b in rows:
                works[f"sample {setting}, B{b} V{vocabulary}"] = partial(choose, bench, b, vocabulary, *values)
    return [Case("small", name, build, ways(bench)) for name, build in works.items()]


def ways(bench: Bench, *others: str) -> dict[str, Callable[[Work], Numbers]]:
    def ours(work: Work) -> Numbers:
        with using(bench.ours):
            return bench.timed(work.call, moved=work.moved, wall=True)

    def twin(work: Work) -> Numbers:
        with using("torch"):
            return bench.timed(work.call, moved=work.moved, wall=True)

    def other(name: str, work: Work) -> Numbers:
        return bench.timed(work.others[name], moved=work.moved, wall=True)

    return {"ours": ours, "twin": twin, **{name: partial(other, name) for name in others}}


def norm(bench: Bench, tokens: int, width: int) -> Work:
    x, residual, weight = bench.noise(tokens, width), bench.noise(tokens, width), bench.noise(width)
    return Work(lambda: rms_norm(x, residual, weight, 1e-5), 4.0 * x.nbytes, {})


def gate(bench: Bench, tokens: int, width: int) -> Work:
    x = bench.noise(tokens, 2 * width)
    return Work(lambda: silu_mul(x), 1.5 * x.nbytes, {})


def turn(bench: Bench, tokens: int, hq: int, hk: int, d: int) -> Work:
    qkv, device = bench.noise(tokens, hq + 2 * hk, d), bench.device
    q, k, v = qkv.split([hq, hk, hk], dim=1)
    cos, sin = rope_tables(1e4 ** -(torch.arange(0, d, 2, device=device) / d), tokens)
    blocks = -(-tokens // BLOCK_SIZE)
    kv = bench.noise(blocks, 2, hk, BLOCK_SIZE, d)
    positions = torch.arange(tokens, device=device)
    slots = torch.randperm(blocks, device=device)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Work(lambda: rope_and_write(q, k, v, cos, sin, positions, slots, kv), 2.0 * qkv.nbytes, {})


def choose(bench: Bench, batch: int, vocabulary: int, temperature: float, top_p: float, top_k: int) -> Work:
    logits = bench.noise(batch, vocabulary, dtype=torch.float32).mul_(2)

    def column(value: float) -> Tensor:
        return torch.full((batch,), value, device=bench.device)

    uniforms = torch.rand(batch, dtype=torch.float64, device=bench.device)
    columns = (column(temperature), column(top_p), column(top_k), column(0.0), uniforms)
    sort = partial(torch.sort, logits, descending=True)
    return Work(lambda: sample(logits, *columns), float(logits.nbytes), {"torch.sort": sort})
