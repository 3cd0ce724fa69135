"""A decoder layer in one call: what its parts do one by one, whatever computes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from backends import BACKENDS, NATIVE
from torch import Tensor

from bifolio.kernels import (
    Backend,
    LayerWeights,
    Layout,
    Quantization,
    Step,
    decoder_layer,
    pack_linear,
    plan,
    rope_tables,
    using,
)

HQ, HK, D, P, HIDDEN, INNER = 6, 2, 40, 8, 72, 88
LENS = [(1, 19), (12, 30), (1, 1), (7, 7)]  # (rows, keys)


@dataclass
class Case:
    """A layer with random weights and a cache that holds what came before; slots that were never written hold NaN."""

    dtype: torch.dtype = torch.float32
    norms: bool = False
    biases: bool = False
    window: int | None = None
    quantization: Quantization | None = None
    layout: Layout = "packed"
    lens: list[tuple[int, int]] = field(default_factory=lambda: LENS)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(5)

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=g) * scale).to(self.dtype)

        shapes = {"qkv": ((HQ + 2 * HK) * D, HIDDEN), "o": (HIDDEN, HQ * D), "gate_up": (2 * INNER, HIDDEN)}
        shapes["down"] = (HIDDEN, INNER)
        self.linears = {n: (noise(*s, scale=0.2), noise(s[0]) if self.biases else None) for n, s in shapes.items()}
        self.tensors = {
            "attention_norm": noise(HIDDEN) + 1,
            "mlp_norm": noise(HIDDEN) + 1,
            "q_norm": noise(D) + 1 if self.norms else None,
            "k_norm": noise(D) + 1 if self.norms else None,
        }
        rows = sum(n for n, _ in self.lens)
        self.x, self.residual = noise(rows, HIDDEN), noise(rows, HIDDEN)
        counts = [-(-keys // P) for _, keys in self.lens]
        ids = (torch.randperm(sum(counts), generator=g) + 1).split(counts)
        table = torch.zeros(len(self.lens), max(counts), dtype=torch.int32)
        places, positions, self.before = [], [], []
        for b, (n, keys) in enumerate(self.lens):
            table[b, : counts[b]] = ids[b]
            at = torch.arange(keys)
            slots = ids[b][at // P] * P + at % P
            places.append(slots[keys - n :])
            positions.append(at[keys - n :])
            self.before.append((slots[: keys - n], noise(keys - n, HK, D), noise(keys - n, HK, D)))
        self.blocks = sum(counts) + 1
        cu_q = torch.tensor([0] + [n for n, _ in self.lens]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([keys for _, keys in self.lens], dtype=torch.int32)
        self.slots, self.positions = torch.cat(places), torch.cat(positions)
        cos, sin = rope_tables(1e4 ** (-torch.arange(0, D, 2) / D), 64)
        self.step = Step(cos, sin, self.positions, self.slots, plan(cu_q, lengths, table))

    def weights(self) -> LayerWeights:
        """Packed for the backend in use."""
        packed = {n: pack_linear(w, b, quantization=self.quantization) for n, (w, b) in self.linears.items()}
        made: dict[str, Any] = {**self.tensors, **packed, "head_dim": D, "eps": 1e-5, "window": self.window}
        return LayerWeights(**made)

    def cache(self) -> Tensor:
        from bifolio.kernels.layout import write_slots

        kv = torch.full((self.blocks, 3, 2, HK, P, D), torch.nan, dtype=self.dtype)[:, 1]
        for slots, k, v in self.before:
            write_slots(kv, slots, k, v, self.layout)
        return kv

    def run(self, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
        """x, residual and the cache, after the layer."""
        x, residual, kv = self.x.clone(), self.residual.clone(), self.cache()
        with using(backend):
            decoder_layer(x, residual, self.weights(), self.step, kv, layout=self.layout)
        return x, residual, kv


KINDS: list[dict[str, Any]] = [
    {},
    {"norms": True},
    {"biases": True, "window": 5},
    {"layout": "plain"},
    {"norms": True, "quantization": "int8"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_the_native_layer_is_the_torch_one(backend: Backend, kind: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, **kind)
    tolerance = 2e-2 if "quantization" in kind else 2e-5 if dtype == torch.float32 else 3e-2
    for ours, twin in zip(case.run(backend), case.run("torch"), strict=True):
        assert torch.equal(ours.isnan(), twin.isnan())
        assert torch.isfinite(ours[~twin.isnan()]).all()
        difference = (ours.float() - twin.float()).nan_to_num()
        assert difference.norm() / twin.float().nan_to_num().norm() < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_rows_own_slots_are_written(backend: Backend) -> None:
    case = Case(layout="plain")
    before, after = case.cache(), case.run(backend)[2]
    mine = torch.zeros(case.blocks * P, dtype=torch.bool)
    mine[case.slots] = True
    here = mine.view(case.blocks, 1, 1, P, 1).expand(before.shape)
    assert torch.isfinite(after[here]).all()
    assert torch.equal(after[~here].nan_to_num(7.0), before[~here].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(
    backend: Backend, kind: dict[str, Any], dtype: torch.dtype
) -> None:
    together = Case(dtype=dtype, **kind)
    x, residual, _ = together.run(backend)
    row = 0
    for b, (rows, keys) in enumerate(LENS):
        alone = Case(dtype=dtype, lens=[(rows, keys)], **kind)
        alone.linears, alone.tensors = together.linears, together.tensors
        alone.x, alone.residual = together.x[row : row + rows], together.residual[row : row + rows]
        _, k, v = together.before[b]
        alone.before = [(alone.before[0][0], k, v)]
        got = alone.run(backend)
        assert torch.equal(got[0], x[row : row + rows])
        assert torch.equal(got[1], residual[row : row + rows])
        row += rows


def test_weights_keep_the_backend_they_were_packed_for() -> None:
    case = Case()
    with using(NATIVE[0]):
        weights = case.weights()
        want = case.run(NATIVE[0])
    x, residual, kv = case.x.clone(), case.residual.clone(), case.cache()
    with using("torch"):
        decoder_layer(x, residual, weights, case.step, kv, layout=case.layout)
    assert torch.equal(x, want[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "named"), [
    ({"x": torch.zeros(21, 71)}, "x: shape"),
    ({"x": torch.zeros(20, HIDDEN)}, "x: shape"),
    ({"x": torch.zeros(21, HIDDEN, dtype=torch.bfloat16)}, "x: dtype"),
    ({"x": torch.zeros(HIDDEN, 21).t()}, "x: stride"),
    ({"residual": torch.zeros(21, 2 * HIDDEN)[:, ::2]}, "residual: stride"),
    ({"kv": torch.zeros(20, 2, 3, P, D)}, "kv: 3 KV heads"),
    ({"kv": torch.zeros(20, 2, HK, P, 64)}, "kv: shape"),
    ({"kv": torch.zeros(20, 2, HK, P, D, dtype=torch.bfloat16)}, "kv: dtype"),
    ({"kv": torch.zeros(3, 2, HK, P, D)}, "slots: 8 to 72"),
    ({"layout": "upside down"}, "layout: 'upside down'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(backend: Backend, change: dict[str, Any], named: str) -> None:
    case = Case()
    given: dict[str, Any] = {"x": case.x, "residual": case.residual, "kv": case.cache(), "layout": "packed"} | change
    with using(backend), pytest.raises(ValueError, match=rf"^{named}.*(allowed|must)"):
        decoder_layer(weights=case.weights(), step=case.step, **given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "named"), [
    ({"positions": torch.full((21,), 64)}, "positions: 64 to 64"),
    ({"positions": torch.full((21,), -1)}, "positions: -1 to -1"),
    ({"slots": torch.full((21,), -2)}, "slots: -2 to -2"),
])  # fmt: skip
def test_places_out_of_range_are_refused_by_name(backend: Backend, change: dict[str, Tensor], named: str) -> None:
    case = Case()
    case.step = replace(case.step, **change)
    with pytest.raises(ValueError, match=rf"^{named}; allowed"):
        case.run(backend)


@pytest.mark.parametrize(("change", "named"), [
    ({"positions": torch.zeros(20, dtype=torch.int64)}, "positions: shape"),
    ({"slots": torch.zeros(21, dtype=torch.int32)}, "slots: dtype"),
    ({"slots": torch.zeros(42, dtype=torch.int64)[::2]}, "slots: stride"),
    ({"cos": torch.zeros(64, D, dtype=torch.bfloat16)}, "cos: dtype"),
    ({"sin": torch.zeros(D, 64).t()}, "sin: stride"),
])  # fmt: skip
def test_a_step_that_does_not_fit_is_refused_by_name(change: dict[str, Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}.*allowed"):
        replace(Case().step, **change)
