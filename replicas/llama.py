"""The Llama architecture (Touvron et al. 2023), for inference only, over a paged KV cache.

Knows nothing of requests, scheduling or where its weights came from. One forward pass serves prompt chunks
and decode tokens of any number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bifolio.kernels import linear, paged_attention, rms_norm, rope_and_write, rope_tables, silu_mul

from .batch import Batch
from .kv_cache import KvCache
from .model_config import LlamaConfig

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class Llama:
    """Weights and the forward pass. Holds no state between calls: that is all in the KV cache."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor], *, exact: bool = False) -> None:
        """`weights` are the tensors named by `config.tensors()`, of one dtype. EMPTIES the dictionary. `exact`, for
        float32: a row's bits depend on its sequence alone.

        Taken out one by one, because joining q, k, v and gate, up copies them: the whole is never there
        twice.
        """
        self.config = config
        self.exact = exact
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        self._output = self._embedding if config.tied else weights.pop("lm_head.weight")
        self._layers = tuple(_take_layer(weights, f"model.layers.{i}.") for i in range(config.layers))
        self._cos, self._sin = rope_tables(config.head_dim, config.max_positions, config.rope_theta)
        self.dtype = self._embedding.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KvCache) -> Tensor:
        """Hidden states [T, hidden] of the batch's tokens, after the last norm. Writes their K and V to the
        cache.

        Everything before each row's start must be in the cache already; rows of the same sequence go in
        order.
        """
        c, exact = self.config, self.exact
        x = F.embedding(batch.tokens, self._embedding)
        residual: Tensor | None = None
        for i, layer in enumerate(self._layers):
            kv = cache.layer(i)
            normed, residual = rms_norm(x, residual, layer.attention_norm, c.eps)
            heads = linear(normed, layer.qkv, exact=exact).view(len(x), -1, c.head_dim)
            q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
            q = rope_and_write(q, k, v, self._cos, self._sin, batch.positions, batch.slots, kv)
            mixed = paged_attention(q, kv, batch.block_table, batch.seq_lens, batch.cu_q, batch.plan, exact=exact)
            x = linear(mixed.flatten(1), layer.o, exact=exact)
            normed, residual = rms_norm(x, residual, layer.mlp_norm, c.eps)
            hidden = silu_mul(linear(normed, layer.gate_up, exact=exact), exact=exact)
            x = linear(hidden, layer.down, exact=exact)
        return rms_norm(x, residual, self._norm, c.eps)[0]

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 [n, vocabulary] of n rows of `forward`'s result: ask for those needed, they are large."""
        return linear(hidden_rows, self._output, exact=self.exact).float()


def _take_layer(weights: dict[str, Tensor], prefix: str) -> _Layer:
    def take(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}.weight")

    return _Layer(
        attention_norm=take("input_layernorm"),
        qkv=torch.cat([take(f"self_attn.{name}_proj") for name in "qkv"]),
        o=take("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")]),
        down=take("mlp.down_proj"),
    )
