"""A Llama, Qwen2 or Qwen3 in a GGUF file: its configuration, and its tensors under their Hugging Face names and row
order. What llama.cpp would compute and this engine does not is a ConfigError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bifolio.protos.errors import ConfigError

from .gguf_file import GgufFile
from .model_config import MOST, THETA, LlamaConfig
from .model_values import number, only, reader, whole
from .rope_scaling import RopeScaling, divided, linear, yarn

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_BACK, _BLOCK_BACK = ({theirs: ours for ours, theirs in names.items()} for names in (_TOP, _BLOCK))
_SIZES = {
    "embedding_length": "hidden",
    "attention.head_count": "heads",
    "feed_forward_length": "intermediate",
    "block_count": "layers",
    "context_length": "max_positions",
}
_DIVISORS = "rope_freqs.weight"
# Of the keys under the architecture's name: those that are read here, or have no part in the arithmetic.
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.causal", "rope.freq_base", "rope.dimension_count"),
    *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}


def read_gguf(file: GgufFile) -> LlamaConfig:
    """Raises ConfigError unless the file is of an architecture and has only features that are computed here."""
    arch = file.get("general.architecture", "unknown")
    only("architecture", arch, *_ARCHITECTURES)
    only("the number of files of this GGUF model (merge them)", file.get("split.count") or 1, 1)
    _refuse_the_unknown(file, arch)
    need = reader(file, "GGUF metadata", f"{arch}.")
    hidden, heads, intermediate, layers, context = (
        whole(f"{arch}.{key}", need(key), MOST[field]) for key, field in _SIZES.items()
    )
    head_dim = file.get(f"{arch}.attention.key_length", hidden // heads)
    only("the length of values", file.get(f"{arch}.attention.value_length", head_dim), head_dim)
    only("rope dimensions", file.get(f"{arch}.rope.dimension_count", head_dim), head_dim)
    only("attention.causal", file.get(f"{arch}.attention.causal", True), True)
    shapes = file.shapes
    return LlamaConfig(
        vocab_size=shapes.get("token_embd.weight", (1,))[0],
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=file.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        eps=_shortest(need("attention.layer_norm_rms_epsilon")),
        rope_theta=number("rope.freq_base", _shortest(file.get(f"{arch}.rope.freq_base", 10000.0)), *THETA),
        max_positions=context,
        tied="output.weight" not in shapes,
        rope_scaling=_rope_scaling(file, arch, context, head_dim),
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in shapes,  # elsewhere only the tensors tell
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch == "qwen3",
    )


def tensor_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under its Hugging Face name; one that has none keeps its own."""
    return {_hf_name(name): shape for name, shape in file.shapes.items()}


def read_tensor(file: GgufFile, config: LlamaConfig, name: str) -> npt.NDArray[np.float32]:
    """The tensor of this Hugging Face name, float32, linears as [out, in]."""
    values = file.tensor(_gguf_name(name))
    if file["general.architecture"] == "llama":
        if ".q_proj." in name:
            return _unpermute(values, config.heads)
        if ".k_proj." in name:
            return _unpermute(values, config.kv_heads)
    return values


def _refuse_the_unknown(file: GgufFile, arch: str) -> None:
    """Zero and the empty string say that a feature is not used."""
    prefix = f"{arch}."
    keys = [key for key in file if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN]
    if used := [key for key in keys if file[key]]:
        raise ConfigError(
            f"model: {', '.join(f'{key} = {file[key]!r}' for key in used)} in the GGUF metadata, which this engine "
            "does not compute; use a model without"
        )


def _rope_scaling(file: GgufFile, arch: str, context: int, head_dim: int) -> RopeScaling | None:
    """As llama.cpp reads it: a factor of 0 is none, and a factor without a type is linear."""
    key = f"{arch}.rope.scaling."
    factor = _shortest(file.get(f"{key}factor") or file.get(f"{arch}.rope.scale_linear") or 1.0)
    kind = file.get(f"{key}type", "linear")
    only("rope scaling", kind, "none", "linear", "yarn")
    scaling: RopeScaling | None = None
    if kind == "linear" and factor != 1.0:
        scaling = linear(factor)
    elif kind == "yarn":
        betas = (_shortest(file.get(f"{key}yarn_beta_{which}")) for which in ("fast", "slow"))
        scaling = yarn(factor, file.get(f"{key}original_context_length", context), *betas)
    if arch == "llama" and (shape := file.shapes.get(_DIVISORS)):
        only(f"rope scaling beside {_DIVISORS}", scaling, None)
        only(f"the shape of {_DIVISORS}", shape, (head_dim // 2,))
        return divided(file.tensor(_DIVISORS).tolist())
    return scaling


def _unpermute(w: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp stores each head's rows interleaved, for RoPE on adjacent pairs; put the halves back in
    sequence.

    Inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[part]}.{kind}"


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_BACK:
        return f"{_TOP_BACK[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_BACK:
        return f"model.layers.{parts[1]}.{_BLOCK_BACK[parts[2]]}.{kind}"
    return name


def _shortest(stored: Any) -> Any:
    """The decimal that was meant by a float32: GGUF stores 1e-5 as 9.999999747378752e-06. What is no float stays."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(stored))) if isinstance(stored, float) else stored
