"""The parts of a layer must fit together: what a native call would read or write past an end is refused first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_layer import HIDDEN, HQ, INNER, Case, D

from bifolio.kernels import LayerWeights, LinearWeights, decoder_layer, pack_linear

pytestmark = pytest.mark.usefixtures("backend")


def packed(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> LinearWeights:
    return pack_linear(torch.zeros(outputs, inputs, dtype=dtype))


def compute(case: Case, weights: LayerWeights) -> torch.Tensor:
    x = case.x.clone()
    decoder_layer(x, case.residual.clone(), weights, case.step, case.cache(), layout=case.layout)
    return x


@pytest.mark.parametrize(("part", "other"), [
    ("attention_norm", lambda: torch.ones(HIDDEN - 1)),
    ("mlp_norm", lambda: torch.ones(HIDDEN, dtype=torch.bfloat16)),
    ("q_norm", lambda: torch.ones(D - 1)),
    ("q_norm", lambda: None),
    ("k_norm", lambda: None),
    ("o", lambda: packed(HIDDEN + 1, HQ * D)),
    ("o", lambda: packed(HIDDEN, HQ * D, torch.bfloat16)),
    ("gate_up", lambda: packed(2 * INNER, HIDDEN + 1)),
    ("down", lambda: packed(HIDDEN, INNER + 1)),
    ("down", lambda: packed(HIDDEN + 1, INNER)),
    ("window", lambda: 0),
])  # fmt: skip
def test_a_part_that_does_not_fit_the_others_is_refused(part: str, other: Callable[[], object]) -> None:
    case = Case(norms=True)
    weights = case.weights()
    with pytest.raises(ValueError, match="allowed"):
        compute(case, replace(weights, **{part: other()}))  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [D - 2, D + 2])
def test_tables_of_another_head_are_refused(columns: int) -> None:
    case = Case()
    table = torch.ones(64, columns)
    case.step = replace(case.step, cos=table, sin=table)
    with pytest.raises(ValueError, match=r"cos: shape .* allowed"):
        compute(case, case.weights())


def test_tables_of_two_lengths_are_refused() -> None:
    case = Case()
    with pytest.raises(ValueError, match=r"sin: shape .* allowed"):
        compute(case, replace_step(case, torch.ones(8, D)))


def replace_step(case: Case, sin: torch.Tensor) -> LayerWeights:
    case.step = replace(case.step, sin=sin)
    return case.weights()


def test_query_heads_that_the_kv_heads_do_not_share_evenly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layer.HQ", 5)
    case = Case()
    with pytest.raises(ValueError, match=r"5 heads.* allowed is a multiple of the 2 KV heads"):
        compute(case, case.weights())


def test_an_odd_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layer.D", 33)
    monkeypatch.setattr("test_layer.rope_tables", lambda _, positions: (torch.ones(positions, 33),) * 2)
    case = Case(layout="plain")
    with pytest.raises(ValueError, match=r"head_dim 33.* allowed"):
        compute(case, case.weights())


def test_a_step_without_rows_changes_nothing() -> None:
    case = Case(lens=[(0, 5)])
    before = case.cache()
    after = case.cache()
    x, residual = case.x.clone(), case.residual.clone()
    decoder_layer(x, residual, case.weights(), case.step, after, layout=case.layout)
    assert x.shape == (0, HIDDEN)
    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))


def test_nothing_changes_but_x_the_residual_and_the_cache() -> None:
    case = Case(norms=True, biases=True, quantization="int8")
    weights, step = case.weights(), case.step
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    given = [t for w in linears for t in (w.weight, w.bias, w.scale) if t is not None]
    given += [t for t in case.tensors.values() if t is not None]
    given += [step.cos, step.sin, step.positions, step.slots, step.plan.cu_q, step.plan.seq_lens, step.plan.block_table]
    before = [t.clone() for t in given]
    compute(case, weights)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
