"""What must be known of a Llama to compute with it, read from a `config.json` or from GGUF metadata.

Only what this engine computes exactly is accepted; everything else is a ConfigError that names what was
found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of the RMS norms
    rope_theta: float
    max_positions: int
    tied: bool  # the output matrix is the embedding
    bos_id: int | None
    eos_ids: tuple[int, ...]  # any of them ends an answer

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model: {name} is {getattr(self, name)}; allowed is 1 or more")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model: {self.heads} heads; allowed is a multiple of {self.kv_heads}, its KV heads")
        if not 32 <= self.head_dim <= 256 or self.head_dim % 2:
            raise ConfigError(f"model: head_dim is {self.head_dim}; allowed is an even number from 32 to 256")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
        """From `config.json` and, for the ids that end an answer, `generation_config.json`."""
        _only("architecture", (config.get("architectures") or ["unknown"])[0], "LlamaForCausalLM")
        _only("hidden_act", config.get("hidden_act", "silu"), "silu")
        _only("attention_bias", bool(config.get("attention_bias")), False)
        _only("mlp_bias", bool(config.get("mlp_bias")), False)
        # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling held the rest
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _only("rope type", rope.get("rope_type", rope.get("type", "default")), "default")
        need = _reader(config, "config.json")
        heads = int(need("num_attention_heads"))
        hidden = int(need("hidden_size"))
        eos = [*_ids(config.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id"))]
        return cls(
            vocab_size=int(need("vocab_size")),
            hidden=hidden,
            intermediate=int(need("intermediate_size")),
            layers=int(need("num_hidden_layers")),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            eps=float(need("rms_norm_eps")),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            max_positions=int(need("max_position_embeddings")),
            tied=bool(config.get("tie_word_embeddings", False)),
            bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
            eos_ids=tuple(dict.fromkeys(eos)),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> LlamaConfig:
        """From GGUF metadata; what `vocab_size` and `tied` say is read off the tensors there."""
        _only("architecture", metadata.get("general.architecture", "unknown"), "llama")
        _only("rope scaling", metadata.get("llama.rope.scaling.type", "none"), "none")
        _only("experts", metadata.get("llama.expert_count", 0), 0)
        need = _reader(metadata, "GGUF metadata")
        hidden, heads = int(need("llama.embedding_length")), int(need("llama.attention.head_count"))
        head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
        _only("rope dimensions", metadata.get("llama.rope.dimension_count", head_dim), head_dim)
        eos = (metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id"))
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            intermediate=int(need("llama.feed_forward_length")),
            layers=int(need("llama.block_count")),
            heads=heads,
            kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            eps=_shortest(need("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(metadata.get("llama.rope.freq_base", 10000.0)),
            max_positions=int(need("llama.context_length")),
            tied=tied,
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name (as Hugging Face has it) and shape of every weight, linears as [out, in]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        names = {f"model.layers.{i}.{name}.weight": s for i in range(self.layers) for name, s in layer.items()}
        names["model.embed_tokens.weight"] = (self.vocab_size, self.hidden)
        names["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            names["lm_head.weight"] = (self.vocab_size, self.hidden)
        return names


def _only(what: str, got: object, allowed: object) -> None:
    if got != allowed:
        raise ConfigError(f"model: {what} is {got!r}; allowed is {allowed!r}")


def _reader(source: Mapping[str, Any], where: str) -> Callable[[str], Any]:
    def need(key: str) -> Any:
        if source.get(key) is None:
            raise ConfigError(f"model: {where} has no {key!r}, which a Llama needs")
        return source[key]

    return need


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _shortest(stored: float) -> float:
    """The decimal that was meant by a float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(stored)))
