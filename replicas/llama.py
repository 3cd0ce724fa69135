"""The Llama architecture (Touvron et al. 2023) and its near relatives, for inference only, over a paged KV cache.

Knows nothing of requests, scheduling or where its weights came from. One forward pass serves prompt chunks
and decode tokens of any number of sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bifolio.kernels import (
    DecoderLayers,
    LayerWeights,
    LinearWeights,
    Quantization,
    Step,
    decoder_layers,
    linear,
    pack_linear,
    rms_norm,
    rope_tables,
)

from .batch import Batch
from .kv_cache import KvCache
from .model_config import LlamaConfig
from .rope_frequencies import rope_frequencies

__all__ = ["Llama", "LlamaConfig"]


class Llama:
    """Weights and the forward pass. Holds no state between calls: that is all in the KV cache."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        *,
        quantization: Quantization | None = None,
        exact: bool = False,
    ) -> None:
        """`weights` are the tensors named by `config.tensors()`, of one dtype, on one device. EMPTIES the dictionary:
        they are taken out one by one, because packing copies them, and the whole is never there twice.

        Raises ValueError where `exact`, that a row's bits depend on its sequence alone, is not kept for them.
        """
        self.config = config
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        output = self._embedding if config.tied else weights.pop("lm_head.weight")
        self._output = pack_linear(output, quantization=quantization, exact=exact)
        self._layers = DecoderLayers(
            tuple(_take_layer(config, weights, i, quantization, exact) for i in range(config.layers))
        )
        frequencies, scale = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._turning = _on(self.device, rope_tables(frequencies, config.max_positions, scale))
        self._still = _on(self.device, rope_tables(torch.zeros(config.head_dim // 2), 1))
        self.dtype = self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KvCache) -> Tensor:
        """Hidden states [T, hidden] of the batch's tokens, after the last norm. Writes their K and V to the
        cache.

        Everything before each row's start must be in the cache already; rows of the same sequence go in
        order.
        """
        c = self.config
        x = F.embedding(batch.tokens, self._embedding)
        residual = torch.zeros_like(x)
        turning = Step(*self._turning, batch.positions, batch.slots, batch.plan)
        still = Step(*self._still, torch.zeros_like(batch.positions), batch.slots, batch.plan) if c.unrotated else None
        steps = [still if still and i in c.unrotated else turning for i in range(c.layers)]
        decoder_layers(x, residual, self._layers, steps, cache.tensor, layout=cache.layout)
        return rms_norm(x, residual, self._norm, c.eps)[0]

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 [n, vocabulary] of n rows of `forward`'s result: ask for those needed, they are large."""
        return linear(hidden_rows, self._output, out_dtype=torch.float32)

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """One of each shape there is: all layers have the same."""
        layer = self._layers.layers[0]
        return layer.qkv, layer.o, layer.gate_up, layer.down, self._output


def _on(device: torch.device, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tables[0].to(device), tables[1].to(device)


def _take_layer(
    config: LlamaConfig, weights: dict[str, Tensor], index: int, quantization: Quantization | None, exact: bool
) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def take(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}.weight")

    def joined(*names: str) -> LinearWeights:
        weight = torch.cat([take(name) for name in names])
        biases = [weights.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in weights]
        return pack_linear(weight, torch.cat(biases) if biases else None, quantization=quantization, exact=exact)

    return LayerWeights(
        attention_norm=take("input_layernorm"),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=take("self_attn.q_norm") if config.qk_norm else None,
        k_norm=take("self_attn.k_norm") if config.qk_norm else None,
        o=joined("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
        head_dim=config.head_dim,
        eps=config.eps,
        window=config.window(index),
    )
