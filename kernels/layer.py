"""A decoder layer of the Llama family over a paged cache: what a step does `layers` times, and nothing else.

The torch version says in `ops.py`'s functions what happens; the native one is a single call, for all layers of a model:
Python's part of thirty calls is as long as a tenth of a small model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from . import checks
from .bindings import LayerStruct, StepStruct, step_struct
from .layout import Layout
from .linear import LinearWeights, linear
from .ops import paged_attention, rms_norm, rope_and_write, silu_mul
from .plan import AttentionPlan


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """attention_norm, mlp_norm [hidden]; q_norm and k_norm [head_dim], or both None; window as in `paged_attention`.

    All of one dtype, norms contiguous. Raises ValueError for parts that do not fit each other.
    """

    attention_norm: Tensor
    qkv: LinearWeights  # to (heads + 2 * kv_heads) * head_dim
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights  # to 2 * intermediate
    down: LinearWeights
    head_dim: int
    eps: float
    window: int | None = None

    def __post_init__(self) -> None:
        hidden, inner, dtype = self.qkv.inputs, self.down.inputs, self.qkv.dtype
        sizes = {"attention_norm": hidden, "mlp_norm": hidden, "q_norm": self.head_dim, "k_norm": self.head_dim}
        for name, size in sizes.items():
            norm: Tensor | None = getattr(self, name)
            if norm is not None:
                checks.shape(name, norm, (size,), "size")
                checks.dtype(name, norm, (dtype,))
                checks.contiguous(name, norm)
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm, k_norm: one of them is None; allowed is both or neither")
        linears = {"o": (self.o.inputs, hidden), "gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
        for name, want in linears.items():
            linear: LinearWeights = getattr(self, name)
            if (linear.inputs, linear.outputs, linear.dtype) != (*want, dtype):
                raise ValueError(
                    f"{name}: {linear.inputs} to {linear.outputs} in {linear.dtype}; allowed is {want[0]} to {want[1]} "
                    f"in {dtype}"
                )
        if self.head_dim % 2 or self.o.inputs % self.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim}; allowed is an even one that divides o's {self.o.inputs} inputs"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: {self.window}; allowed is at least 1, or None")

    @cached_property
    def native(self) -> LayerStruct | None:
        linears = [w.native for w in (self.qkv, self.o, self.gate_up, self.down)]
        if any(native is None for native in linears):
            return None
        norms = (self.attention_norm, self.mlp_norm, self.q_norm, self.k_norm)
        structs = [native[1] for native in linears if native]
        pointers = [None if x is None else x.data_ptr() for x in norms]
        return LayerStruct(*pointers, *structs, self.window or 0, self.eps)


@dataclass(frozen=True, eq=False)
class Step:
    """Where the T rows of one engine step stand, for all its layers: made once a step.

    cos, sin          float32 [max_positions, D], from `rope_tables`
    positions, slots  int64 [T]  as in `rope_and_write`
    plan              of the same T rows

    Raises ValueError for a wrong shape, dtype or layout.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    plan: AttentionPlan
    _checked: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, x in (("cos", self.cos), ("sin", self.sin)):
            checks.shape(name, x, (len(self.cos), None), "max_positions, D")
            checks.dtype(name, x, (torch.float32,))
            checks.contiguous(name, x)
        for name, x in (("positions", self.positions), ("slots", self.slots)):
            checks.shape(name, x, (self.plan.tokens,), "T")
            checks.dtype(name, x, (torch.int64,))
            checks.contiguous(name, x)

    def check_places(self, num_blocks: int, block_size: int, head_dim: int) -> None:
        """That the tables are for such heads, and positions, slots and blocks those of the tables and of such a cache.
        Looks once, however many layers ask. Raises ValueError."""
        if (num_blocks * block_size, head_dim) not in self._checked:
            checks.shape("cos", self.cos, (None, head_dim), "max_positions, D")
            checks.shape("sin", self.sin, (None, head_dim), "max_positions, D")
            checks.places(self.positions, len(self.cos), self.slots, num_blocks * block_size)
            self._checked.add((num_blocks * block_size, head_dim))
        self.plan.check_blocks(num_blocks, block_size)

    @cached_property
    def native(self) -> StepStruct:
        return step_struct(self.cos, self.sin, self.positions, self.slots, self.plan)


@dataclass(frozen=True, eq=False)
class DecoderLayers:
    """The layers of a model, at least one, in the order in which they are computed.

    Raises ValueError where one differs from the first in its sizes or its dtype.
    """

    layers: tuple[LayerWeights, ...]

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if _sizes(layer) != (first := _sizes(self.layers[0])):
                raise ValueError(f"layers: sizes {_sizes(layer)} in layer {i}; allowed are the first one's, {first}")

    @cached_property
    def native(self) -> Array[LayerStruct] | None:
        structs = [struct for layer in self.layers if (struct := layer.native)]
        return (LayerStruct * len(structs))(*structs) if len(structs) == len(self.layers) else None


def _sizes(layer: LayerWeights) -> tuple[object, ...]:
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return *((w.inputs, w.outputs) for w in linears), layer.qkv.dtype, layer.head_dim


def decoder_layer(
    x: Tensor, residual: Tensor, weights: LayerWeights, step: Step, kv: Tensor, *, layout: Layout = "plain"
) -> None:
    """`decoder_layers` of one layer, whose cache is kv [num_blocks, 2, HK, P, D]."""
    decoder_layers(x, residual, DecoderLayers((weights,)), (step,), kv.unsqueeze(1), layout=layout)


def decoder_layers(
    x: Tensor,
    residual: Tensor,
    weights: DecoderLayers,
    steps: Sequence[Step],
    kv: Tensor,
    *,
    layout: Layout = "plain",
) -> None:
    """Attention and MLP, each after its norm, layer by layer. MUTATES all three tensors: residual grows by x and by
    each layer's attention output, x becomes the last MLP's, K and V of the rows go to the cache at the steps' slots.

    x, residual  [T, hidden], contiguous, of the weights' dtype
    steps        one for each layer; they may be one and the same
    kv           [num_blocks, layers, 2, HK, P, D] of the same dtype, each layer as in `paged_attention`; so is `layout`

    Raises ValueError for a wrong shape, dtype or layout.
    """
    first, count = weights.layers[0], len(weights.layers)
    if len(steps) != count:
        raise ValueError(f"steps: {len(steps)} of them; allowed is one for each of the {count} layers")
    _check(x, residual, first, steps, kv, count, layout)
    if weights.native is not None and first.qkv.native is not None:
        first.qkv.native[0].layers(x, residual, weights.native, [step.native for step in steps], kv, layout)
        return
    for i, (layer, step) in enumerate(zip(weights.layers, steps, strict=True)):
        _compute(x, residual, layer, step, kv[:, i], layout)


def _check(
    x: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    steps: Sequence[Step],
    kv: Tensor,
    count: int,
    layout: Layout,
) -> None:
    """That all is for such layers."""
    for step in dict.fromkeys(steps):
        for name, tensor in (("x", x), ("residual", residual)):
            checks.shape(name, tensor, (step.plan.tokens, weights.qkv.inputs), "T, hidden")
    for name, tensor in (("x", x), ("residual", residual)):
        checks.dtype(name, tensor, (weights.qkv.dtype,))
        checks.contiguous(name, tensor)
    if kv.ndim != 6 or kv.shape[1] != count:
        raise ValueError(
            f"kv: shape {tuple(kv.shape)}; allowed is num_blocks, {count} layers, 2, kv_heads, block_size, D"
        )
    layer = kv[:, 0]
    checks.kv_layer(layer, weights.head_dim)
    checks.dtype("kv", kv, (x.dtype,))
    checks.layout(layout, layer)
    heads, kv_heads = weights.o.inputs // weights.head_dim, layer.shape[2]
    if (heads + 2 * kv_heads) * weights.head_dim != weights.qkv.outputs:
        allowed = (weights.qkv.outputs // weights.head_dim - heads) // 2
        raise ValueError(f"kv: {kv_heads} KV heads; allowed is {allowed}, those of the layer's projection")
    checks.heads(heads, kv_heads)
    for step in dict.fromkeys(steps):
        step.check_places(len(layer), layer.shape[3], weights.head_dim)


def _compute(x: Tensor, residual: Tensor, weights: LayerWeights, step: Step, kv: Tensor, layout: Layout) -> None:
    """One layer, operation by operation."""
    rows, heads, kv_heads = step.plan.tokens, weights.o.inputs // weights.head_dim, kv.shape[2]
    exact = weights.qkv.exact
    normed, grown = rms_norm(x, residual, weights.attention_norm, weights.eps)
    states = linear(normed, weights.qkv).view(rows, heads + 2 * kv_heads, weights.head_dim)
    q, k, v = torch.split(states, [heads, kv_heads, kv_heads], dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = _norm_heads(q, weights.q_norm, weights.eps), _norm_heads(k, weights.k_norm, weights.eps)
    q = rope_and_write(q, k, v, step.cos, step.sin, step.positions, step.slots, kv, layout=layout)
    mixed = paged_attention(q, kv, step.plan, window=weights.window, layout=layout, exact=exact)
    normed, grown = rms_norm(linear(mixed.flatten(1), weights.o), grown, weights.mlp_norm, weights.eps)
    residual.copy_(grown)
    x.copy_(linear(silu_mul(linear(normed, weights.gate_up), exact=exact), weights.down))


def _norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, n, head_dim] normed head by head."""
    return rms_norm(heads.reshape(-1, heads.shape[-1]), None, weight, eps)[0].view(heads.shape)
