"""A Llama in a GGUF file: its configuration, and its tensors under their Hugging Face names and row order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .gguf_file import GgufFile
from .model_config import LlamaConfig

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_config(file: GgufFile) -> LlamaConfig:
    """Raises ConfigError unless the file is a llama, and one whose every feature is computed here."""
    embedding = file.shapes.get("token_embd.weight", (1,))
    return LlamaConfig.from_gguf(file, vocab_size=embedding[0], tied="output.weight" not in file.shapes)


def tensor_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under its Hugging Face name; one that has none keeps its own."""
    return {_hf_name(name): shape for name, shape in file.shapes.items()}


def read_tensor(file: GgufFile, config: LlamaConfig, name: str) -> npt.NDArray[np.float32]:
    """The tensor of this Hugging Face name, float32, linears as [out, in]."""
    values = file.tensor(_gguf_name(name))
    if ".q_proj." in name:
        return _unpermute(values, config.heads)
    if ".k_proj." in name:
        return _unpermute(values, config.kv_heads)
    return values


def _unpermute(w: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp stores each head's rows interleaved, for RoPE on adjacent pairs; put the halves back in
    sequence.

    Inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[part]}.weight"


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    for hf, gguf in _TOP.items():
        if stem == gguf:
            return f"{hf}.weight"
    for hf, gguf in _BLOCK.items():
        if stem.startswith("blk.") and stem.endswith(f".{gguf}"):
            return f"model.layers.{stem.split('.')[1]}.{hf}.weight"
    return name
