"""A script for `test_older_cpus.py`, also in an emulator: which native build this CPU takes, why not a better one, and
a digest of its float32 results. Its numbers come from integers: torch draws other random ones on other CPUs.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from bifolio.kernels import (
    LayerWeights,
    Step,
    decoder_layer,
    library,
    linear,
    pack_linear,
    paged_attention,
    plan,
    using,
)

ROWS, HQ, HK, D, P, HIDDEN, INNER = 11, 6, 2, 40, 8, 72, 88
LENS = [(1, 19), (9, 30), (1, 1)]  # (rows, keys)


def noise(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 48_271 % 65_537 / 32_768 - 1).view(shape)


def results() -> list[Tensor]:
    counts = [-(-keys // P) for _, keys in LENS]
    table, used = torch.zeros(len(LENS), max(counts), dtype=torch.int32), 0
    for b, count in enumerate(counts):
        table[b, :count], used = torch.arange(used, used + count), used + count
    cu_q = torch.tensor([0] + [rows for rows, _ in LENS]).cumsum(0).to(torch.int32)
    built = plan(cu_q, torch.tensor([keys for _, keys in LENS], dtype=torch.int32), table)
    kv = noise(used, 2, HK, P, D)
    found = [paged_attention(noise(ROWS, HQ, D), kv, built, window=w, layout="packed") for w in (None, 5)]
    found.append(linear(noise(ROWS, 333), pack_linear(noise(100, 333), noise(100))))

    def packed(outputs: int, inputs: int) -> object:
        return pack_linear(noise(outputs, inputs), noise(outputs), quantization="int8" if inputs == INNER else None)

    weights = LayerWeights(
        noise(HIDDEN), packed((HQ + 2 * HK) * D, HIDDEN), noise(D), noise(D), packed(HIDDEN, HQ * D), noise(HIDDEN),
        packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER), D, 1e-5,
    )  # type: ignore[arg-type]  # fmt: skip
    positions = torch.cat([torch.arange(keys - rows, keys) for rows, keys in LENS])
    at = torch.cat([table[b, torch.arange(keys - rows, keys) // P] for b, (rows, keys) in enumerate(LENS)])
    step = Step(noise(64, D), noise(64, D).flip(0), positions, at * P + positions % P, built)
    x, residual = noise(ROWS, HIDDEN), noise(ROWS, HIDDEN).flip(0)
    decoder_layer(x, residual, weights, step, kv, layout="packed")
    return [*found, x, residual, kv]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with using("auto") as isa:
        digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in results()))
    print(isa, digest.hexdigest())
    for better in library.ISAS[: library.ISAS.index(isa)]:
        try:
            library.load(better)
        except ValueError as refusal:
            print(refusal)
