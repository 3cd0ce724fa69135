"""The model families as random weights in odd shapes, and their logits at every position in whatever steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.kernels import Quantization, kv_layout
from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama, LlamaConfig

BLOCK = 8
VOCAB = 211
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [3, 7],
    "pad_token_id": None,
}
_7_1_OF_80 = {"hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80}
_14_2 = {"hidden_size": 70, "num_attention_heads": 14, "num_key_value_heads": 2}


def _rope(kind: str, theta: float = 5000.0, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# name -> (what transformers calls the family, what differs from _SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _14_2),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": (
        "Llama",
        _14_2
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-linear": ("Llama", _7_1_OF_80 | _rope("linear", factor=4.0)),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-all": (
        "Llama",
        _7_1_OF_80
        | _rope("yarn", factor=8.0, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False),
    ),
    "llama-yarn-attention": ("Llama", _rope("yarn", factor=4.0, attention_factor=1.3)),
    "mistral": ("Mistral", _7_1_OF_80 | {"sliding_window": 13}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", _14_2),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 80}),
    "qwen3-windows": (
        "Qwen3",
        _14_2
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 11}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-windows": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True}
        | {"use_sliding_window": True, "sliding_window": 10}
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
}


def reference(name: str) -> Any:
    """The family as transformers has it, in float32, with random numbers in every tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing a third party
        import transformers
    family, changes = FAMILIES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{family}Config")(**(_SHAPE | _rope("default") | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in key else 0.0, 0.2)
    return model


def random_model(
    config: LlamaConfig, seed: int, dtype: torch.dtype = torch.float32, quantization: Quantization | None = None
) -> Llama:
    """An exact one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(dtype)
        for name, shape in config.tensors().items()
    }
    return Llama(config, weights, quantization=quantization, exact=True)


def tokens(*lengths: int, vocabulary: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def logits_in_steps(
    model: Llama, sequences: Sequence[Sequence[int]], steps: Iterable[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """For each sequence the logits at every position, computed as `steps` say: each is a batch of (sequence, how many
    of its next tokens)."""
    c = model.config
    needed = [-(-len(sequence) // BLOCK) for sequence in sequences]
    layout = kv_layout(model.dtype, c.head_dim, BLOCK)  # as in a replica
    cache = KvCache(sum(needed), c.layers, c.kv_heads, BLOCK, c.head_dim, model.dtype, layout)
    for i in range(c.layers):
        cache.layer(i).fill_(torch.nan)  # what is not written may not be read
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(9)) + 1).tolist()
    blocks = [order[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(sequences))]
    done = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        rows = [Row(sequences[s][done[s] : done[s] + n], done[s], blocks[s]) for s, n in step]
        logits = model.logits(model.forward(build_batch(rows, BLOCK), cache))
        for (s, n), part in zip(step, torch.split(logits, [n for _, n in step]), strict=True):
            found[s].append(part)
            done[s] += n
    return [torch.cat(parts) for parts in found]


def write_gguf(path: Path, model: Any, architecture: str) -> Path:
    """The weights and configuration of a transformers model, as llama.cpp's convert_hf_to_gguf.py writes them."""
    from gguf import GGUFWriter, RopeScalingType

    c, writer = model.config, GGUFWriter(path, architecture)
    rope = c.rope_parameters
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(c.bos_token_id)
    writer.add_eos_token_id(c.eos_token_id[0])
    writer.add_eot_token_id(c.eos_token_id[1])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).numpy())
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if architecture == "llama" and part in name:
                halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in _GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_NAMES = {
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.": "ffn_",
    "_proj": "",
}
