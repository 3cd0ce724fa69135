"""The Llama architecture (Touvron et al. 2023) and its near relatives, for inference only, over a paged KV cache.

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
from .rope_frequencies import rope_frequencies

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor, exact: bool) -> Tensor:
        return linear(x, self.weight, self.bias, exact=exact)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: _Linear  # to (heads + 2 * kv_heads) * head_dim
    qk_norm: tuple[Tensor, Tensor] | None  # [head_dim] each
    o: _Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: _Linear  # to 2 * intermediate
    down: _Linear


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
        frequencies, scale = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._turning = rope_tables(frequencies, config.max_positions, scale)
        self._still = rope_tables(torch.zeros(config.head_dim // 2), 1)
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
        turning = (*self._turning, batch.positions)
        still = (*self._still, torch.zeros_like(batch.positions))
        for i, layer in enumerate(self._layers):
            kv = cache.layer(i)
            normed, residual = rms_norm(x, residual, layer.attention_norm, c.eps)
            heads = layer.qkv(normed, exact).view(len(x), -1, c.head_dim)
            q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
            if layer.qk_norm is not None:
                q, k = (_norm_heads(heads, weight, c.eps) for heads, weight in zip((q, k), layer.qk_norm, strict=True))
            q = rope_and_write(q, k, v, *(still if i in c.unrotated else turning), batch.slots, kv)
            mixed = paged_attention(
                q, kv, batch.block_table, batch.seq_lens, batch.cu_q, batch.plan, window=c.window(i), exact=exact
            )
            x = layer.o(mixed.flatten(1), exact)
            normed, residual = rms_norm(x, residual, layer.mlp_norm, c.eps)
            x = layer.down(silu_mul(layer.gate_up(normed, exact), exact=exact), exact)
        return rms_norm(x, residual, self._norm, c.eps)[0]

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 [n, vocabulary] of n rows of `forward`'s result: ask for those needed, they are large."""
        return linear(hidden_rows, self._output, exact=self.exact).float()

    @property
    def linears(self) -> tuple[Tensor, ...]:
        """One weight of each linear there is, [out, in]: all layers have the same shapes."""
        layer = self._layers[0]
        return layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight, self._output


def _norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, n, head_dim] normed head by head."""
    return rms_norm(heads.reshape(-1, heads.shape[-1]), None, weight, eps)[0].view(heads.shape)


def _take_layer(weights: dict[str, Tensor], prefix: str) -> _Layer:
    def take(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}.weight")

    def joined(*names: str) -> _Linear:
        biases = [weights.pop(bias) for name in names if (bias := f"{prefix}{name}.bias") in weights]
        return _Linear(_cat([take(name) for name in names]), _cat(biases) if biases else None)

    normed = f"{prefix}self_attn.q_norm.weight" in weights
    return _Layer(
        attention_norm=take("input_layernorm"),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=(take("self_attn.q_norm"), take("self_attn.k_norm")) if normed else None,
        o=joined("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )


def _cat(parts: list[Tensor]) -> Tensor:
    """One tensor stays where it is: it may be a file's pages, which all replicas of a machine share."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
