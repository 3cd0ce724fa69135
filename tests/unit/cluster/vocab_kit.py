"""Small vocabularies of the kinds real models have, trained here on real prompts, as GGUF metadata."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
DATA = Path(__file__).parents[2] / "data"
SCRIPTS = [
    "Once upon a time, there was a model that said:\nUser: it's 12345, they'LL see!\n\n\t  return x  # ok\r\n",
    "서울은 대한민국의 수도이다. 안녕하세요! 각 강",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 family 1️⃣",
    "e\u0301a\u0308\u0323 n\u0303 combining ẹ́",
    "שלום עולם، مرحبا بالعالم ١٢٣ \u200f",
    "日本語の文章、漢字とかな。中文字符",
    "\ufffd\ufffd really there \ufffd 𝕏𐍈\U0010ffff \x00",
]


@cache
def corpus() -> list[str]:
    texts = []
    for name in ("mt_bench", "vicuna_bench"):
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts += [turn for line in lines for turn in json.loads(line)["turns"]]
    return texts


def write_gguf(path: Path, pairs: dict[str, Any]) -> Path:
    """A GGUF of metadata only. A key without a dot is one of `tokenizer.ggml.`; None leaves it out."""
    writer = gguf.GGUFWriter(path, pairs.get("general.architecture", "llama"))
    for key, value in pairs.items():
        if key == "general.architecture":
            continue
        name = key if "." in key else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@cache
def byte_level() -> dict[str, Any]:
    """GPT-2's kind: 700 tokens, 3 of them control tokens, 1 that is matched whole and is text."""
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=696, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus() + SCRIPTS, trainer)
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "model": "gpt2",
        "tokens": [*tokens, "<|begin|>", "<|end|>", "<|turn|>", "<tool>"],
        "token_type": [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED],
        "merges": [" ".join(merge) for merge in state["merges"]],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        "eot_token_id": len(tokens) + 2,
        "add_bos_token": True,
    }


@cache
def sentencepiece() -> dict[str, Any]:
    """Llama 2's kind: 256 byte tokens, 600 learned ones with scores, of an alphabet that is English alone."""
    backend: Any = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=600, limit_alphabet=70, show_progress=False))
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    learned = [token for token in sorted(vocab, key=vocab.get) if len(token) > 1]
    letters = [token for token in sorted(vocab, key=vocab.get) if len(token) == 1 and token != "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *letters]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
