"""A known model's GGUF as a Hugging Face directory in bfloat16, for engines that read nothing else.

The same numbers that our engine computes with: dequantised to float32, then rounded to bfloat16. Knows nothing of who
reads the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bifolio.cluster.gguf_tokenizer import read_gguf as read_vocabulary
from bifolio.replicas.gguf_file import GgufFile
from bifolio.replicas.gguf_llama import read_gguf, read_tensor, tensor_shapes
from bifolio.replicas.model_config import LlamaConfig

LAST = "generation_config.json"  # written when all else is there


def hf_directory(gguf: Path, to: Path) -> Path:
    """`to`, with the model in it; what is there already is left as it is."""
    if (to / LAST).exists():
        return to
    file, vocabulary = GgufFile(gguf), read_vocabulary(gguf)
    model = read_gguf(file)
    if model.qkv_bias or model.o_bias or model.mlp_bias or model.qk_norm or model.rope_scaling is not None:
        raise ValueError(f"{gguf} is no plain Llama; other models are not converted here")
    to.mkdir(parents=True, exist_ok=True)
    names = [name for name in tensor_shapes(file) if name.startswith(("model.", "lm_head."))]
    weights = {name: torch.from_numpy(read_tensor(file, model, name)).bfloat16().contiguous() for name in names}
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    vocabulary.backend.save(str(to / "tokenizer.json"))
    ids = {
        f"{name}_token_id": file.get(f"tokenizer.ggml.{theirs}_token_id")
        for name, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    _write(to / "config.json", _config(model) | ids)
    _write(
        to / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": vocabulary.chat_template,
            **vocabulary.special_tokens,
        },
    )
    # Without an end: whoever cannot be asked to ignore it goes on all the same
    _write(to / LAST, {name: id for name, id in ids.items() if not name.startswith("eos")})
    return to


def _config(model: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
        "torch_dtype": "bfloat16",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
